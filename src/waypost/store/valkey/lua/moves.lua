-- moves: the state of a message, how it moves from one place to another, and how that is journalled.
--
-- Included by every script after its fast path. Keys and layouts: see base.lua.
-- Invariant: a message is in exactly one of ready, due, waiting, leases and dead, as its status says.

-- Codes by name, created on first use: the faster paths of a script do not need them.
local tables
local function codes()
  if not tables then
    tables = {event = EVENT_TABLE, cause = CAUSE_TABLE, cause_number = CAUSE_NUMBER_TABLE,
      cause_name = CAUSE_NAME_TABLE, count = COUNT_TABLE, minute = MINUTE_TABLE, failure = FAILURE_TABLE}
  end
  return tables
end

-- ---- counting and events --------------------------------------------------------------------------------------

local function tally(name, by) count_up(codes().count[name], codes().minute[name], by) end

-- Count a delivery that ended by its outcome; see MINUTE_COUNTERS in values.py.
local function count_run(s)
  local ran = max(0, now - s.claimed)
  counts[MINUTE.runs] = counts[MINUTE.runs] + 1
  counts[MINUTE.run_ms] = counts[MINUTE.run_ms] + ran
  counts[MINUTE.run_ms_max] = max(counts[MINUTE.run_ms_max], ran)
end

local function noted(event)
  local level = policy.journal
  return level == 'all' or level == 'full' or (level == 'failures' and codes().failure[event])
end

local function add_item(text)
  item_count = item_count + 1
  items[item_count] = text
end

-- The text of an error without its traceback.
local function without_traceback(text)
  local at = string.find(text, '\30', 1, true)
  return at and sub(text, 1, at - 1) or text
end

-- The part of an error's text that the journal stores: a number of characters, none of them cut.
local function cut_error(text)
  text = without_traceback(text)
  if #text <= JOURNAL_ERROR_CHARACTERS_MAX then return text end
  local characters = 0
  for i = 1, #text do
    local first = byte(text, i)
    if first < 128 or first > 191 then
      characters = characters + 1
      if characters > JOURNAL_ERROR_CHARACTERS_MAX then return sub(text, 1, i - 1) end
    end
  end
  return text
end

-- Journal one event of a message whose packed state is `state`. Most events of a step have the same texts at the end of
-- their states.
local function note_state(event, cause, id, state, reason, error_type, error_text)
  if not noted(event) then return end
  event_count = event_count + 1
  local head = codes().event[event] .. (cause and codes().cause[cause] or '\0') .. id
  if reason or error_type or error_text then
    local text = (reason or '') .. '\0' .. (error_type or '')
    if error_text then text = text .. '\0' .. cut_error(error_text) end
    last_tail = sub(state, 66)
    add_item('X' .. head .. state .. struct_pack('>H', #text) .. text)
    return
  end
  local tail = sub(state, 66)
  if tail == last_tail then
    add_item('s' .. head .. sub(state, 1, 65))
  else
    last_tail = tail
    add_item('S' .. head .. state)
  end
end

local function note_text(event, cause, size, text)
  if not noted(event) then return end
  event_count = event_count + 1
  add_item('T' .. codes().event[event] .. (cause and codes().cause[cause] or '\0') .. struct_pack('>I4H', size, #text) .. text)
end

local function note_duplicate(id, key)
  count_up(COUNT.duplicates, MINUTE.duplicates, 1)
  if not noted('duplicate') then return end
  event_count = event_count + 1
  add_item('D' .. id .. struct_pack('>H', #key) .. key)
end

-- Add a side effect of the step (see `SideEffect` in values.py): event (1), reason (1), token (4), id (24). Each event
-- names at most SIDE_EFFECTS_MAX messages; then an item without an id has the number of the others in place of the
-- token.
local side_effects_named, side_effects_rest
local function add_side_effect(event, reason, id, raw)
  if not side_effects then side_effects, side_effects_named, side_effects_rest = {}, {}, {} end
  local kind = codes().event[event] .. (codes().cause[reason] or '\0')
  local named = (side_effects_named[event] or 0) + 1
  side_effects_named[event] = named
  if named <= SIDE_EFFECTS_MAX then
    side_effects[#side_effects + 1] = kind .. sub(raw, 2, 5) .. id
    return
  end
  local rest = side_effects_rest[kind]
  if not rest then
    rest = {place = #side_effects + 1, count = 0}
    side_effects_rest[kind] = rest
  end
  rest.count = rest.count + 1
  side_effects[rest.place] = kind .. struct_pack('>I4', rest.count) .. NO_NONCE .. NO_NONCE
end

-- ---- state ---------------------------------------------------------------------------------------------------

local function read_state(id, raw)
  local s = {id = id, raw = raw}
  local key_length, group_length, worker_length, at
  s.status, s.token, s.nonce, s.claimed, s.lease, s.deliveries, s.attempts, s.flags, s.cause, s.published, s.priority, s.ready,
    s.size, key_length, group_length, worker_length, at = struct_unpack(STATE_FORMAT, raw)
  s.key = sub(raw, at, at + key_length - 1)
  s.group = sub(raw, at + key_length, at + key_length + group_length - 1)
  at = at + key_length + group_length
  s.worker = sub(raw, at, at + worker_length - 1)
  at = at + worker_length
  if s.flags < 128 then
    s.chain = sub(raw, at + 1)
  else
    local length = s.flags % 8 >= 4 and 1 + byte(raw, at) or 0
    s.chain, s.extension = sub(raw, at + 1, at + length - 1), sub(raw, at + length)
  end
  return s
end

local function pack_state(s)
  s.raw = struct_pack(STATE_FORMAT, s.status, s.token, s.nonce, s.claimed, s.lease, s.deliveries, s.attempts, s.flags, s.cause,
    s.published, s.priority, s.ready, s.size, #s.key, #s.group, #s.worker) .. s.key .. s.group .. s.worker
  if s.chain ~= '' then s.raw = s.raw .. char(#s.chain) .. s.chain end
  if s.flags >= 128 then s.raw = s.raw .. s.extension end
  return s.raw
end

-- The state of a message of which only the id is known.
local function blank_state(id)
  local s = {id = id, status = 'R', token = 0, nonce = NO_NONCE, claimed = 0, lease = 0, deliveries = 0, attempts = 0, flags = 0,
    cause = 0, published = now, priority = DEFAULT_PRIORITY, ready = now, size = 0, key = '', group = '', worker = '', chain = ''}
  pack_state(s)
  return s
end

-- The state of a plain message that was never claimed, from its value.
local function fresh_state(id, value)
  local published = struct_unpack('>I8', value)
  local s = {id = id, status = 'R', token = 0, nonce = NO_NONCE, claimed = 0, lease = 0, deliveries = 0, attempts = 0, flags = 0,
    cause = 0, published = published, priority = byte(value, 9), ready = published, size = #value - 9, key = '',
    group = '', worker = '', chain = ''}
  pack_state(s)
  return s
end

-- Whether a value is complete and of the message with this id.
local function is_whole(id, value) return value and sub(value, 11, 34) == id and byte(value, 9) <= 9 end

-- The state of a message, with this status if one is given; nil if there is no such message, or its record is damaged.
local function state_of(id, status)
  local raw = call('HGET', STATE, id)
  if raw then
    if is_sound(raw, status) and call('HEXISTS', MESSAGES, id) == 1 then return read_state(id, raw) end
    return
  end
  if status and status ~= 'R' then return end
  local value = call('HGET', MESSAGES, id)
  if is_whole(id, value) then return fresh_state(id, value) end
end

-- Why a message failed: reason, error type and error, each a text.
local function failure_of(id)
  local failure = unpacked(call('HGET', ERRORS, id)) or {}
  for i = 1, 3 do
    if type(failure[i]) ~= 'string' then failure[i] = '' end
  end
  return failure
end

-- The text at a derived key, or nil. A key of another type is treated as absent.
local function text_at(key)
  local text = redis.pcall('GET', key)
  return type(text) == 'string' and text or nil
end

-- Until when a key's window or a kept result lasts: the time at this position of its text, 0 if there is none.
local function kept_until(text, at)
  if not text or #text < at + 7 then return 0 end
  return (struct_unpack('>I8', text, at))
end

local function cancel_requested(s) return s.flags % 2 == 1 end
local function waits_for_chains(s) return s.flags % 16 >= 8 end
local function may_lapse(s) return s.flags % 32 >= 16 end
local function has_key_until_claimed(s) return s.flags % 64 >= 32 end
local function has_key_while_dead(s) return s.flags % 128 >= 64 end

-- Whether a message that is not leased has lapsed.
local function has_lapsed(id)
  local expiry = call('ZSCORE', BASE .. 'expires', id)
  return expiry and tonumber(expiry) <= now
end

-- The expiry of a message does not count while it is leased.
local function put_expiry_aside(id)
  local expiry = tonumber(call('ZSCORE', BASE .. 'expires', id) or EXPIRY_ASIDE)
  if expiry < EXPIRY_ASIDE then call('ZADD', BASE .. 'expires', expiry + EXPIRY_ASIDE, id) end
end

-- The expiry of a message counts again after its lease.
local function restore_expiry(id)
  local expiry = tonumber(call('ZSCORE', BASE .. 'expires', id) or 0)
  if expiry >= EXPIRY_ASIDE then call('ZADD', BASE .. 'expires', expiry - EXPIRY_ASIDE, id) end
end

-- Milliseconds until the first of the messages that are not leased lapses, or nil.
local function until_lapse()
  local first = call('ZRANGE', BASE .. 'expires', 0, 0, 'WITHSCORES')
  if first[2] and tonumber(first[2]) < EXPIRY_ASIDE then return max(0, tonumber(first[2]) - now) end
end

local function next_position()
  local position = counts[COUNT.sequence] + 1
  counts[COUNT.sequence] = position
  return position
end

local function score_of(priority, position) return (9 - priority) * BAND + position end

-- ---- how a message moves ---------------------------------------------------------------------------------------

local freshly_ready = 0

-- To the end of its priority, or to the timers if its due time is in the future. The caller has removed it from its old
-- place.
local function make_claimable(s, ready)
  s.ready = ready
  if may_lapse(s) then restore_expiry(s.id) end
  if ready > now then
    s.status = 'D'
    call('ZADD', DUE, ready, s.id)
    if grouping then grouping.enter(s) end
  else
    s.status = 'R'
    if grouping then
      if grouping.make_ready(s) then return end
    else
      freshly_ready = freshly_ready + 1
      call('ZADD', READY, score_of(s.priority, next_position()), s.id)
    end
  end
  call('HSET', STATE, s.id, pack_state(s))
end

-- When a message becomes claimable that no longer has to wait: now, unless it was published with a delay. Without a
-- delay its `ready` is the time of the publish, which may be in the future of a clock that was set back since.
local function ready_after_wait(s)
  return s.ready == s.published and now or max(s.ready, now)
end

-- Before all others of its priority, in the order of `ready`.
local function to_head(s, ready, cause)
  s.status, s.ready, s.cause = 'R', ready, codes().cause_number[cause]
  if may_lapse(s) then restore_expiry(s.id) end
  if grouping then
    grouping.make_ready(s, ready - HEAD_OFFSET)
  else
    freshly_ready = freshly_ready + 1
    call('ZADD', READY, score_of(s.priority, ready - HEAD_OFFSET), s.id)
  end
  call('HSET', STATE, s.id, pack_state(s))
end

local PLACES = {R = READY, D = DUE, W = WAITING, L = LEASES, X = DEAD}

-- Remove it from the place that its status names.
local function leave_place(s)
  if grouping then grouping.leave(s) end
  call('ZREM', PLACES[s.status], s.id)
end

local FREES_WINDOW = {dead = true, cancelled = true, dropped = true, replaced = true}

-- End the window of a message: the one of its publish, or of a dead letter.
local function forget_window(s)
  local window = text_at(OWN .. 'window:' .. s.key)
  if window and sub(window, 1, 24) == s.id then call('DEL', OWN .. 'window:' .. s.key) end
end

local function release_key(s, how)
  if FREES_WINDOW[how] then forget_window(s) end
  local holder = call('HGET', HOLDERS, s.key)
  if not holder then return end
  local owner, parked = sub(holder, 1, 24), sub(holder, 25)
  if parked == s.id then
    call('HSET', HOLDERS, s.key, owner)
  elseif owner == s.id then
    if parked == '' then
      call('HDEL', HOLDERS, s.key)
      if how == 'dead' and has_key_while_dead(s) then
        -- As for the window of a finished message: there is nothing to replace or to extend.
        call('SET', OWN .. 'window:' .. s.key, s.id .. struct_pack('>I8', NO_END_MS))
      end
    else
      local heir = state_of(parked, 'W')
      if not heir then
        call('HDEL', HOLDERS, s.key)
        return set_aside(parked, WAITING)
      end
      call('HSET', HOLDERS, s.key, parked)
      leave_place(heir)
      make_claimable(heir, ready_after_wait(heir))
      note_state('promoted', 'unparked', heir.id, heir.raw)
      add_side_effect('promoted', 'unparked', heir.id, heir.raw)
    end
  end
end

local function trim_dead(ids, cause)
  for i = 1, #ids do
    local raw = call('HGET', STATE, ids[i])
    if not raw or not is_sound(raw) then raw = blank_state(ids[i]).raw end
    note_state('dead_trimmed', cause, ids[i], raw)
    if cause ~= 'purge' and cause ~= 'edited' then add_side_effect('dead_trimmed', cause, ids[i], raw) end
    if byte(raw, 38) % 128 >= 64 then forget_window(read_state(ids[i], raw)) end
    call('ZREM', DEAD, ids[i])
    call('HDEL', MESSAGES, ids[i])
    call('HDEL', STATE, ids[i])
    call('HDEL', ERRORS, ids[i])
  end
end

local function enforce_dead_limits()
  if not policy.dead_max and not policy.dead_keep_ms then return end
  local surplus = policy.dead_max and max(0, call('ZCARD', DEAD) - policy.dead_max) or 0
  local old = policy.dead_keep_ms and call('ZCOUNT', DEAD, '-inf', now - policy.dead_keep_ms) or 0
  local number = min(RECLAIM_MAX, max(surplus, old))
  if number > 0 then
    trim_dead(call('ZRANGE', DEAD, 0, number - 1), surplus > 0 and 'dead_max' or 'dead_keep')
  end
end

-- End a message: count and journal the end, and release its key or pass it to the next generation. `details` of a dead
-- letter: {reason, error type or '', error or ''}. `begun`: the messages that it forwarded, as queue/id.
local function end_message(s, how, cause, details, begun)
  tally(how, 1)
  if s.status == 'L' and cause ~= 'expired' and cause ~= 'release' then count_run(s) end
  if details then
    note_state(how, cause, s.id, s.raw, details[1], details[2] ~= '' and details[2] or nil, details[3] ~= '' and details[3] or nil)
  else
    note_state(how, cause, s.id, s.raw)
  end
  -- The same rule as `is_side_effect` in values.py.
  if how == 'dead' and s.status ~= 'L' or cause == 'overload' or cause == 'expired' or cause == 'publish'
    or cause == 'parked' or cause == 'lapsed' then
    add_side_effect(how, details and details[1] or cause, s.id, s.raw)
  end
  if not s.popped then leave_place(s) end
  if grouping then grouping.ended(s) end
  if may_lapse(s) then
    call('ZREM', BASE .. 'expires', s.id)
    s.flags = s.flags - 16
  end
  if s.flags % 32 > 1 then
    news[#news + 1] = {kind = 'end', id = s.id, token = s.token, flags = s.flags, chain = s.chain, how = how, begun = begun,
      reason = details and details[1]}
    -- A dead letter waits for no chain, and its waiters have been notified.
    s.flags = s.flags % 2 + floor(s.flags / 4) % 2 * 4 + floor(s.flags / 32) * 32
  end
  if how == 'dead' then
    s.status = 'X'
    call('HSET', STATE, s.id, pack_state(s))
    call('ZADD', DEAD, now, s.id)
    call('HSET', ERRORS, s.id, cmsgpack.pack(details))
  else
    if how == 'done' and policy.completed_max > 0 then
      local value = call('HGET', MESSAGES, s.id)
      if value then
        local length = call('LPUSH', COMPLETED, now8 .. struct_pack('>H', #s.raw) .. s.raw .. value)
        -- A bounded number: the limit may have been lowered by a million.
        if length > policy.completed_max then
          call('LTRIM', COMPLETED, 0, max(policy.completed_max, length - CHUNK_MESSAGES_MAX) - 1)
        end
      end
    end
    call('HDEL', MESSAGES, s.id)
    call('HDEL', STATE, s.id)
    if s.attempts > 0 then call('HDEL', ERRORS, s.id) end
  end
  if s.key ~= '' then release_key(s, how) end
  if how == 'dead' then enforce_dead_limits() end
end

-- End messages that have lapsed, the earliest first; returns how many. The including script includes chains at its end.
local function lapse()
  local ids = call('ZRANGEBYSCORE', BASE .. 'expires', '-inf', now, 'LIMIT', 0, LAPSE_MAX)
  for i = 1, #ids do
    local s = state_of(ids[i])
    if s and PLACES[s.status] ~= LEASES and PLACES[s.status] ~= DEAD then
      end_message(s, 'dropped', 'lapsed')
    else
      -- An earlier release ended it, or its record is damaged, which the next step that reads it finds.
      call('ZREM', BASE .. 'expires', ids[i])
    end
  end
  if #ids == 0 and call('EXISTS', BASE .. 'expires') == 0 then call('HDEL', QUEUE, 'expiring') end
  return #ids
end

-- End a delivery whose message would return to the queue if a cancel was requested or its key's next generation waits.
local function ends_otherwise(s, cause)
  if cancel_requested(s) then
    end_message(s, 'cancelled', cause)
    return true
  end
  if s.key ~= '' then
    local holder = call('HGET', HOLDERS, s.key)
    if holder and #holder > 24 and sub(holder, 1, 24) == s.id then
      end_message(s, 'replaced', cause)
      return true
    end
  end
  return false
end

-- How many sleepers to wake for a step: for messages that became claimable, for groups that can continue, and one for a
-- timer that is now the first; and whether (1 or 0) one of them is for the timer.
local function worth(due_before)
  local number = freshly_ready + (grouping and grouping.worth() or 0)
  local due_after = until_first(DUE)
  if due_after and (not due_before or due_after < due_before) then return number + 1, 1 end
  return number, 0
end
