-- accept: drafts become messages, unless their key is in use or they have arrived before: the part that publishes and
-- fires of schedules share.
--
-- Included after moves; the including script includes chains at its end. Keys and layouts: see base.lua; the format of
-- a draft: see drafts.lua.
-- Invariant: everything is decided before anything is written: what happens to each draft, and whether there is room
-- for all.

-- include drafts

must_be('hash', MESSAGES)

local function pending() return call('ZCARD', READY) + call('ZCARD', DUE) + call('ZCARD', WAITING) end

local function refuse(waiting) error(format('WP-FULL %.0f %.0f', waiting, policy.max_pending)) end

-- The ids that are dropped first when the queue is full: the lowest priority first, in it the oldest, and no message
-- that this call concerns.
local function droppable(number, concerned)
  local chosen = {}
  for priority = 0, 9 do
    local from, skipped = score_of(priority, -HEAD_OFFSET), 0
    while #chosen < number do
      local ids = call('ZRANGEBYSCORE', READY, format('%.0f', from), format('(%.0f', from + BAND), 'LIMIT', skipped, 500)
      for i = 1, #ids do
        if not concerned[ids[i]] and #chosen < number then chosen[#chosen + 1] = ids[i] end
      end
      if #ids < 500 then break end
      skipped = skipped + 500
    end
  end
  return chosen
end

-- What must be dropped so that `added` messages fit: a list of ids, or an error before anything is written. `dropped`:
-- the ids that are dropped anyway, because their group is full. `lapsed`: how many messages end by their expiry.
local function room_for(added, concerned, dropped, lapsed)
  if not policy.max_pending or added == 0 then return dropped end
  local waiting = pending() - lapsed
  local over = min(waiting - #dropped + added - policy.max_pending, added + BURY_MAX)
  if over <= 0 then return dropped end
  if policy.overload ~= 'drop_oldest' then refuse(waiting) end
  local chosen = grouping and grouping.serves and grouping.longest_first(over, concerned) or droppable(over, concerned)
  if #chosen < over then refuse(waiting) end
  for i = 1, #chosen do dropped[#dropped + 1] = chosen[i] end
  return dropped
end

local function drop(ids)
  for i = 1, #ids do
    local s = state_of(ids[i], 'R')
    if s then end_message(s, 'dropped', 'overload') else set_aside(ids[i], READY) end
  end
end

-- The first write: a server whose memory is full refuses it, with nothing written yet.
local function begin_adding() call('HSET', QUEUE, 'version', layout) end

-- The general case: decide about every draft first, then write.
must_be('hash', STATE)
must_be('zset', DUE)
must_be('hash', HOLDERS)
must_be('zset', WAITING)
must_be('hash', ERRORS)
must_be('zset', ARRIVALS)

-- The dead letter that the draft replaces, if there is one.
local edited_letter

-- The window of a key, or false. The window may be written later, so its type is checked.
local function window_of(key)
  local window = redis.pcall('GET', OWN .. 'window:' .. key)
  if type(window) == 'table' then refuse_key(window, 'string', OWN .. 'window:' .. key) end
  return window
end

-- Decide what to do with a draft, and which message it concerns. Reads only.
local function plan(draft)
  if draft.forwarded then
    local known = call('ZSCORE', ARRIVALS, draft.id)
    if (known and tonumber(known) > now) or call('HEXISTS', MESSAGES, draft.id) == 1 then return 'arrived', draft.id end
  end
  if draft.key == '' then return 'new', draft.id end
  local holder = call('HGET', HOLDERS, draft.key)
  -- A message whose record is missing or damaged does not hold a key.
  if holder and #holder > 24 and not state_of(sub(holder, 25)) then holder = sub(holder, 1, 24) end
  if holder and #holder <= 24 and not state_of(holder) then holder = nil end
  if holder and expiring then
    -- A message that has lapsed must not block its key for the next message.
    if has_lapsed(sub(holder, 1, 24)) then
      draft.lapsed = sub(holder, 1, 24)
      return 'new', draft.id
    elseif #holder > 24 and has_lapsed(sub(holder, 25)) then
      draft.lapsed, holder = sub(holder, 25), sub(holder, 1, 24)
    end
  end
  if not holder then
    local window = window_of(draft.key)
    local window_end = kept_until(window, 25)
    if window_end <= now then return 'new', draft.id end
    if window_end == NO_END_MS then
      -- A dead letter has the key, unless this draft replaces it, or its record is missing or damaged.
      local letter = sub(window, 1, 24)
      if letter == edited_letter or not call('ZSCORE', DEAD, letter) then return 'new', draft.id end
    end
    return draft.rule == 'error' and 'conflict' or 'duplicate', sub(window, 1, 24)
  end
  local owner, parked = sub(holder, 1, 24), sub(holder, 25)
  local standing = parked ~= '' and parked or owner
  if draft.rule == 'keep' then return 'duplicate', standing end
  if draft.rule == 'error' then return 'conflict', standing end
  if draft.window > 0 then window_of(draft.key) end
  if parked == '' then
    local state = call('HGET', STATE, owner)
    if state and sub(state, 1, 1) == 'L' then return 'park', owner end
  end
  return draft.rule, standing
end

-- Decide about the drafts from argument `first` on; an error if there is no room for them. Reads only.
local function plan_drafts(first)
  local drafts, added, passing, concerned, added_to, lapsed = {}, 0, 0, {}, {}, {}
  local ends_others = false
  for i = first, #ARGV do
    local draft = parse_draft(ARGV[i])
    draft.action, draft.holder = plan(draft)
    if (draft.action == 'new' or draft.action == 'park' or draft.action == 'replace')
      and draft.id ~= draft.lapsed and call('HEXISTS', MESSAGES, draft.id) == 1 then error('WP-KNOWN ' .. draft.id) end
    concerned[draft.holder] = true
    if draft.chain ~= '' or draft.after then
      -- Check the types of the keys that are written because of chains. Inline: a function would be created in every
      -- publish.
      local own = string.match(QUEUE, QUEUE_PATTERN) .. '/'
      ends_others = true
      draft.begins_chain = draft.chain == own .. draft.id
      if draft.begins_chain then
        must_be('hash', OWN .. 'chain:' .. draft.id)
        must_be('set', BASE .. 'chains')
      end
      if draft.after then
        must_be('set', OWN .. 'blockers:' .. draft.id)
        must_be('zset', BASE .. 'blocked')
      end
      for j = 1, draft.after and #draft.after or 0 do
        local first_id = sub(draft.after[j], -24)
        if draft.after[j] == own .. first_id then
          must_be('hash', OWN .. 'chain:' .. first_id)
          must_be('set', OWN .. 'watchers:' .. first_id)
        end
      end
    elseif draft.action == 'replace' or draft.lapsed then
      ends_others = true
    end
    if draft.lapsed then
      concerned[draft.lapsed] = true
      lapsed[#lapsed + 1] = state_of(draft.lapsed)
    end
    if draft.expires then must_be('zset', BASE .. 'expires') end
    if draft.action == 'new' or draft.action == 'park' then
      if draft.forwarded and not draft.capped then
        passing = passing + 1
      else
        added = added + 1
        if grouping and grouping.capped then added_to[draft.group] = (added_to[draft.group] or 0) + 1 end
      end
    elseif draft.action == 'replace' and grouping and grouping.capped and (draft.capped or not draft.forwarded) then
      -- One that replaces a message of another group is one more in its own.
      if state_of(draft.holder).group ~= draft.group then added_to[draft.group] = (added_to[draft.group] or 0) + 1 end
    end
    drafts[#drafts + 1] = draft
  end
  if grouping then
    for i = 1, #lapsed do
      if added_to[lapsed[i].group] then added_to[lapsed[i].group] = added_to[lapsed[i].group] - 1 end
    end
  end
  drafts.dropped = room_for(added, concerned, grouping and grouping.capped and grouping.over_caps(added_to, concerned) or {}, #lapsed)
  drafts.lapsed = lapsed
  drafts.passing = passing
  if ends_others or #drafts.dropped > 0 then
    must_be('zset', DEAD)
    must_be('hash', OUTGOING)
  end
  return drafts
end

-- The key of the schedule that publishes the drafts, if one does.
local fired_by

local function note_published(draft, s, cause)
  if not noted('published') then return end
  event_count = event_count + 1
  local body = '\0\0\0\0'
  if policy.journal == 'full' then
    body = draft.copy or draft.envelope
    body = struct_pack('>I4', #body + 1) .. body -- 0 means that there is none: a redacted copy may be empty
  end
  local packed_event = (cause and codes().cause[cause] or '\0') .. s.id .. s.raw .. body
  add_item(fired_by and 'F' .. packed_event .. struct_pack('>H', #fired_by) .. fired_by or 'P' .. packed_event)
end

local function extend_due(draft, ready)
  local s = state_of(draft.holder)
  if s.status == 'W' then
    s.ready = ready
    note_state('postponed', nil, s.id, pack_state(s))
    if ready <= now then s.ready = s.published end
    call('HSET', STATE, s.id, pack_state(s))
  else
    if grouping then grouping.keep_place(s) end
    leave_place(s)
    make_claimable(s, ready)
    note_state('postponed', nil, s.id, s.raw)
  end
  return 'e' .. s.id
end

local function store(draft, ready, status)
  local s = {id = draft.id, status = 'R', token = 0, nonce = NO_NONCE, claimed = 0, lease = 0, deliveries = 0, attempts = 0,
    flags = (draft.chain ~= '' and 4 or 0) + (draft.unique or 0) * 32, cause = 0, published = now, priority = draft.priority, ready = ready,
    size = #draft.envelope, key = draft.key, group = draft.group, worker = '', chain = draft.chain}
  local cause = draft.forwarded and 'forwarded' or nil
  if draft.expires then
    s.flags = s.flags + 16
    call('ZADD', BASE .. 'expires', draft.expires, draft.id)
    if not expiring then call('HSET', QUEUE, 'expiring', '1') end
    expiring = '1'
  end
  if draft.action == 'park' then
    s.status, cause = 'W', 'parked'
    call('HSET', HOLDERS, draft.key, draft.holder .. draft.id)
    status = draft.rule == 'replace' and 'r' or 'E'
  elseif draft.action == 'replace' then
    cause, status = 'replace', 'r'
    local old = state_of(draft.holder)
    if old.status == 'W' then
      s.status = 'W'
      call('HSET', HOLDERS, draft.key, sub(call('HGET', HOLDERS, draft.key), 1, 24) .. draft.id)
    else
      call('HSET', HOLDERS, draft.key, draft.id)
    end
    end_message(old, 'replaced', 'publish')
  elseif draft.key ~= '' then
    call('HSET', HOLDERS, draft.key, draft.id)
  elseif draft.after then
    s.status, s.flags, cause = 'W', s.flags + 8, 'blocked'
    bulk('SADD', OWN .. 'blockers:' .. draft.id, draft.after, #draft.after)
    call('ZADD', BASE .. 'blocked', now + BLOCKER_CHECK_MS, draft.id)
    for i = 1, #draft.after do
      news[#news + 1] = {kind = 'watching', id = draft.id, chain = draft.after[i]}
    end
  end
  if draft.begins_chain then
    local key = OWN .. 'chain:' .. draft.id
    call('HSET', key, 'until', NO_END_MS, 'open', 1, draft.chain, 1)
    call('SADD', BASE .. 'chains', draft.id)
  end
  if draft.key ~= '' and draft.window > 0 then
    call('SET', OWN .. 'window:' .. draft.key, draft.id .. struct_pack('>I8', now + draft.window), 'PX', draft.window)
  end
  call('HSET', MESSAGES, draft.id, now8 .. char(draft.priority) .. draft.envelope)
  if s.status == 'W' then
    call('ZADD', WAITING, 0, s.id)
    call('HSET', STATE, s.id, pack_state(s))
    if grouping then grouping.enter(s) end
  else
    make_claimable(s, ready)
  end
  count_up(COUNT.published, MINUTE.published, 1)
  note_published(draft, s, cause)
  return status
end

-- Store drafts as planned, after the first write; a letter for each, with an id where the result is another message.
local function store_drafts(drafts)
  if #drafts.lapsed > 1 then
    for i = 1, #drafts.lapsed do drafts.lapsed[i].expiry = tonumber(call('ZSCORE', BASE .. 'expires', drafts.lapsed[i].id)) end
    table.sort(drafts.lapsed, function(a, b) return a.expiry < b.expiry or a.expiry == b.expiry and a.id < b.id end)
  end
  for i = 1, #drafts.lapsed do end_message(drafts.lapsed[i], 'dropped', 'lapsed') end
  drop(drafts.dropped)
  local statuses, arrivals = {}, {}
  for i = 1, #drafts do
    local draft = drafts[i]
    local due = draft.absolute and draft.due or now + draft.due
    local ready = max(due, now)
    if draft.forwarded and draft.action ~= 'arrived' then
      -- Also if its key is in use: that reply is final, and must not change when the message is sent again.
      arrivals[#arrivals + 1], arrivals[#arrivals + 2] = now + ARRIVAL_TTL_MS, draft.id
    end
    if draft.action == 'duplicate' or draft.action == 'conflict' or draft.action == 'arrived' then
      note_duplicate(draft.holder, draft.key)
      if draft.forwarded and draft.chain ~= '' and draft.action ~= 'arrived' then
        -- The message that has the key is not of this chain: the branch of the draft ends here.
        news[#news + 1] = {kind = 'end', id = draft.id, token = 0, flags = 4, chain = draft.chain, how = 'duplicate'}
      end
      statuses[i] = (draft.action == 'conflict' and 'c' or 'u') .. draft.holder
    elseif draft.action == 'extend' then
      statuses[i] = extend_due(draft, ready)
    else
      statuses[i] = store(draft, ready, due > now and 'd' or 'q')
    end
  end
  if drafts.passing > 0 and policy.max_pending then
    if grouping then grouping.write_ready() end
    -- Count the messages that exceed `max_pending`, by the depth after they were stored.
    local over = min(drafts.passing, pending() - policy.max_pending)
    if over > 0 then call('HINCRBY', QUEUE, 'over_cap', over) end
  end
  if #arrivals > 0 then remember_arrivals(arrivals, #arrivals) end
  return concat(statuses)
end
