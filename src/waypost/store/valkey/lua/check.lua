-- check: find damaged records, a bounded number in each call, and repair them on request.
--
-- Arguments: '1' to repair, cursor or ''.
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, journal, sleepers, outgoing, the
-- keys of chains, the keys of groups.
-- Invariant: each message is checked in one step, so no queue in use is reported as damaged. A message that can be
-- handed out again becomes the first of its priority, a message without a body is dropped, all of it counted and
-- journalled.
-- Reply: number of records checked, cursor or '', then kind, id, what was found and what was done or '' for each
-- damaged record.

-- include moves
-- include drafts

local mend = ARGV[FIRST_ARGUMENT] == '1'
local phase, cursor = string.match(ARGV[FIRST_ARGUMENT + 1], '^(%a+) (%d+)$')
phase, cursor = phase or 'messages', cursor or '0'
local EXAMINED_MAX, BYTES_MAX = 200, 262144

local opened, why = pcall(open_queue)
local reply, examined, changed = {0, ''}, 0, false

local function report(kind, id, found, done)
  local at = #reply
  reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = kind, id, found, mend and done or ''
  if mend and done then
    changed = true
    note_text('configured', nil, 0, 'mended ' .. kind .. ' ' .. string.gsub(sub(id, 1, 64), '[^%w_:/.-]', '?') .. ': ' .. done)
  end
end

if not opened then
  if type(why) == 'table' then why = why.err end
  if not string.find(why, 'WP-DAMAGED', 1, true) then error(why) end
  -- Counters or policy cannot be read. Count the stored records again, and number the journal after its last entry.
  local fields = call('HMGET', QUEUE, 'policy', 'counts')
  policy = unpacked(fields[1]) or DEFAULT_POLICY
  counts = unpacked(fields[2]) or {}
  for i = #counts + 1, COUNTERS do counts[i] = 0 end
  if not unpacked(fields[2]) then
    local oldest, newest = call('XRANGE', JOURNAL, '-', '+', 'COUNT', 1)[1], call('XREVRANGE', JOURNAL, '+', '-', 'COUNT', 1)[1]
    if newest then
      counts[COUNT.journal_last] = tonumber(string.match(newest[1], '^%d+'))
      counts[COUNT.journal_first] = max(0, tonumber(string.match(oldest[1], '^%d+')) - 1)
    end
    counts[COUNT.sequence], counts[COUNT.minute] = now, floor(now / 60000)
  end
  report('unreadable', 'queue', 'the counters or the policy of the queue cannot be read', 'counted anew')
  if not mend then return reply end
  if fields[1] and not unpacked(fields[1]) then call('HDEL', QUEUE, 'policy') end
end
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('hash', HOLDERS)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('hash', ERRORS)
must_be('hash', OUTGOING)
must_be('zset', BASE .. 'damaged')
-- include grouping as check

local SETS = {{'R', READY, 'ready'}, {'D', DUE, 'due'}, {'L', LEASES, 'leases'}, {'W', WAITING, 'waiting'}, {'X', DEAD, 'dead'}}

local function balance()
  local live = call('ZCARD', READY) + call('ZCARD', DUE) + call('ZCARD', LEASES) + call('ZCARD', WAITING)
  return counts[COUNT.published] + counts[COUNT.redriven] - live - counts[COUNT.done] - counts[COUNT.dead] - counts[COUNT.dropped]
    - counts[COUNT.cancelled] - counts[COUNT.replaced]
end

-- The places of a message: the letters of its statuses, and their names for the reply.
local function places_of(id)
  local letters, names = '', ''
  for i = 1, #SETS do
    if call('ZSCORE', SETS[i][2], id) then
      letters, names = letters .. SETS[i][1], names .. (names == '' and '' or ' and ') .. SETS[i][3]
    end
  end
  return letters, names
end

-- Remove a message from all places except the one with this letter, if a letter is given.
local function leave_places(s, but)
  for i = 1, #SETS do
    local letter, key = SETS[i][1], SETS[i][2]
    if letter ~= but and call('ZSCORE', key, s.id) then
      if grouping then grouping.leave({status = letter, id = s.id, group = s.group, claimed = s.claimed}) end
      call('ZREM', key, s.id)
    end
  end
end

-- How many chains a message still waits for.
local function chains_awaited(id)
  local number = redis.pcall('SCARD', OWN .. 'blockers:' .. id)
  return type(number) == 'number' and number or 0
end

-- End a message without a body: it cannot be handed out any more.
local function give_up(id, raw, letters)
  local s = raw and is_sound(raw) and read_state(id, raw) or blank_state(id)
  local was_dead = letters == 'X' or (letters == '' and raw and s.status == 'X')
  if letters == '' and not raw then was_dead = balance() <= 0 end
  leave_places(s)
  if letters == '' and raw and grouping then grouping.leave(s) end
  call('ZREM', BASE .. 'damaged', id)
  if was_dead then
    trim_dead({id}, 'damaged')
    return 'removed from the dead letters'
  end
  s.popped = true
  end_message(s, 'dropped', 'damaged')
  call('HDEL', ERRORS, id)
  if chains_awaited(id) > 0 then call('DEL', OWN .. 'blockers:' .. id) end
  return 'dropped'
end

-- Whether a message has released its key: another one may have it, or none.
local function gave_key_up(s) return has_key_until_claimed(s) and s.token > 0 end

local function take_key(s)
  if s.key == '' or s.status == 'X' or gave_key_up(s) then return end
  local holder = call('HGET', HOLDERS, s.key)
  if not holder then
    call('HSET', HOLDERS, s.key, s.id)
  elseif sub(holder, 1, 24) ~= s.id and sub(holder, 25) ~= s.id then
    s.key = '' -- another message has it by now
  end
end

local function to_front(s)
  s.status, s.ready = 'R', now
  if s.token > 0 and (s.cause < 1 or s.cause > REDELIVERY_CAUSES) then s.cause = CAUSE_NUMBER.expired end
  if grouping then
    grouping.make_ready(s, now - HEAD_OFFSET)
  else
    freshly_ready = freshly_ready + 1
    call('ZADD', READY, score_of(s.priority, now - HEAD_OFFSET), s.id)
  end
  call('HSET', STATE, s.id, pack_state(s))
  note_state('promoted', 'mended', s.id, s.raw)
  return 'ready at the head of its priority'
end

local function waits_for_key(s)
  local holder = s.key ~= '' and call('HGET', HOLDERS, s.key)
  return holder and sub(holder, 25) == s.id and call('HEXISTS', MESSAGES, sub(holder, 1, 24)) == 1
end

-- Put a message with a body back to the place of its state, or make it the first of its priority.
local function put_back(id, value, raw, letters)
  local s
  if raw and is_sound(raw) then
    s = read_state(id, raw)
    if #letters > 1 and string.find(letters, s.status, 1, true) then
      leave_places(s, s.status)
      return 'left in the place that its state names'
    end
  else
    s = fresh_state(id, value)
    -- How often it was claimed is unknown: at most as often as all messages of the queue together.
    if raw or (letters ~= '' and letters ~= 'R') then s.token, s.cause = counts[COUNT.claims], CAUSE_NUMBER.expired end
    if chains_awaited(id) > 0 then s.status, s.flags, s.token, s.cause = 'W', 8, 0, 0 end
    if letters == 'X' then s.status = 'X' else call('HDEL', ERRORS, id) end
  end
  leave_places(s)
  -- Its group counts it in the place from which it was lost.
  if letters == '' and raw and grouping then grouping.leave(s) end
  call('ZREM', BASE .. 'damaged', id)
  take_key(s)
  if s.status == 'X' then
    call('ZADD', DEAD, now, id)
    call('HSET', STATE, id, pack_state(s))
    if not unpacked(call('HGET', ERRORS, id)) then call('HSET', ERRORS, id, cmsgpack.pack({'unknown', '', ''})) end
    return 'a dead letter again'
  elseif s.status == 'D' and s.ready > now then
    make_claimable(s, s.ready)
    return 'a timer again'
  elseif s.status == 'W' and (waits_for_key(s) or (waits_for_chains(s) and chains_awaited(id) > 0)) then
    call('ZADD', WAITING, 0, id)
    call('HSET', STATE, id, pack_state(s))
    if grouping then grouping.enter(s) end
    if waits_for_chains(s) then redis.pcall('ZADD', BASE .. 'blocked', now, id) end
    return 'waiting again'
  elseif s.status == 'L' then
    if cancel_requested(s) then
      s.popped = true
      end_message(s, 'cancelled', 'expired')
      return 'cancelled, as was asked'
    end
    count_up(COUNT.expired, MINUTE.expired, 1)
    note_state('expired', nil, id, s.raw)
    s.cause = CAUSE_NUMBER.expired
  end
  if waits_for_chains(s) then s.flags = s.flags - 8 end
  return to_front(s)
end

-- Check a message with a key that is missing in the list of keys, or for which the list names another message.
local function check_holder(s)
  local holder = call('HGET', HOLDERS, s.key)
  if gave_key_up(s) then return end
  if holder and (sub(holder, 1, 24) == s.id or sub(holder, 25) == s.id) then return end
  local key = s.key
  if mend then
    take_key(s)
    call('HSET', STATE, s.id, pack_state(s))
    if s.key ~= '' and s.status == 'W' and not waits_for_chains(s) then
      leave_place(s)
      make_claimable(s, ready_after_wait(s))
      note_state('promoted', 'mended', s.id, s.raw)
    end
  end
  report('key', key, 'message ' .. s.id .. ' has this key, and the list of keys does not say so',
    s.key == '' and 'the message goes on without it' or 'the message has it')
end

local function examine(id, value)
  examined = examined + 1
  local raw = call('HGET', STATE, id)
  local letters, names = places_of(id)
  local where = names == '' and 'in no place' or 'in ' .. names
  if not is_whole(id, value) then
    local found = value and 'its body is cut or of another message, ' or 'it has no body, '
    return report(value and 'unreadable' or 'missing', id, found .. where, mend and give_up(id, raw, letters) or 'x')
  end
  local status = 'R'
  if raw then status = is_sound(raw) and sub(raw, 1, 1) or '?' end
  if status == letters then
    if raw and status ~= 'X' and byte(raw, 61) + byte(raw, 62) > 0 then check_holder(read_state(id, raw)) end
    if grouping and status == 'R' then
      local s = raw and read_state(id, raw) or fresh_state(id, value)
      if call('ZSCORE', READY, id) and grouping.misses(s, mend) then
        report('stranded', id, 'it is ready, and not in the line of its group', 'put in line')
      end
    end
    return
  end
  local kind, found = 'misplaced', 'its state says ' .. status .. ', it is ' .. where
  if status == '?' then
    kind, found = 'unreadable', 'its state cannot be read, it is ' .. where
  elseif letters == '' then
    kind, found = 'stranded', 'it is in no place, its state says ' .. status
  elseif not raw then
    found = 'it has no state, and is ' .. where
  end
  report(kind, id, found, mend and put_back(id, value, raw, letters) or 'x')
end

local function check_key(key, holder)
  examined = examined + 1
  local owner, parked = sub(holder, 1, 24), sub(holder, 25)
  local heir = parked ~= '' and state_of(parked, 'W')
  local holds = state_of(owner)
  if holds and holds.status ~= 'X' and holds.key == '' then
    -- Its state was lost and has been created again: the list of keys still has its key.
    holds.key = key
    if mend then call('HSET', STATE, owner, pack_state(holds)) end
    report('key', key, 'the state of message ' .. owner .. ' does not say that it has this key', 'it says so again')
  end
  if holds and (holds.status == 'X' or holds.key ~= key) then holds = nil end
  if holds and (parked == '' or heir) then return end
  if holds then
    if mend then call('HSET', HOLDERS, key, owner) end
    return report('key', key, 'the next message of this key is not there', 'forgotten')
  end
  if call('HEXISTS', MESSAGES, owner) == 1 and not mend then return end -- its record is reported by itself
  if not heir then
    if mend then call('HDEL', HOLDERS, key) end
    return report('key', key, 'the message that holds this key is not there', 'the key is free')
  end
  if mend then
    call('HSET', HOLDERS, key, parked)
    leave_place(heir)
    make_claimable(heir, ready_after_wait(heir))
    note_state('promoted', 'unparked', heir.id, heir.raw)
  end
  report('key', key, 'the message that holds this key is not there', 'the next one takes over')
end

local function check_outgoing(id, packed)
  examined = examined + 1
  local function read()
    local queue_length = struct_unpack('>H', packed, 33)
    local text = sub(packed, 35 + queue_length)
    if byte(text) == 78 then return cmsgpack.unpack(sub(text, 2))[4] .. '' end
    return parse_draft(text).id .. ''
  end
  if pcall(read) then return end
  if mend then call('HDEL', OUTGOING, id) end
  report('outgoing', id, 'what is to be sent on cannot be read', 'removed')
end

-- One page of a phase: what is checked, and where a member or field is read from.
local function without_body(id)
  if call('HEXISTS', MESSAGES, id) == 0 then examine(id, false) else examined = examined + 1 end
end
local function without_record(id)
  if call('HEXISTS', STATE, id) == 0 then without_body(id) else examined = examined + 1 end
end
local function failure_alone(id)
  examined = examined + 1
  local s = state_of(id)
  if s and (s.attempts > 0 or s.status == 'X') then return end
  if s then
    -- It failed, so it was claimed: its state was lost, and its token must not begin with 1 again.
    s.attempts, s.token, s.cause = 1, max(s.token, counts[COUNT.claims]), CAUSE_NUMBER.expired
    if mend then call('HSET', STATE, id, pack_state(s)) end
    return report('unreadable', id, 'it has failed before, and its state does not say so', 'it counts as claimed and failed')
  end
  if call('HEXISTS', MESSAGES, id) == 1 or call('HEXISTS', STATE, id) == 1 then return end
  if mend then call('HDEL', ERRORS, id) end
  report('missing', id, 'a failure is kept of a message that is not there', 'forgotten')
end

local function check_group(name)
  examined = examined + 1
  -- A lost message is still counted by its group: it is reported separately.
  local found, done = grouping.check(name, mend, mend or #reply == 2)
  if not found then return end
  local at = #reply
  reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = 'group', name, found, mend and done or ''
  if mend then
    changed = true
    note_text('configured', 'group', 0, name .. '\0mended group: ' .. done)
  end
end
local function check_line(member)
  examined = examined + 1
  if mend then grouping.prune(member) end
end

local PHASES = {'messages', 'state', 'ready', 'due', 'leases', 'waiting', 'dead', 'damaged', 'errors', 'keys', 'outgoing', 'line', 'groups', 'counters'}
local STEPS = {
  messages = {'hash', MESSAGES, examine}, state = {'hash', STATE, without_body}, ready = {'zset', READY, without_record},
  due = {'zset', DUE, without_record}, leases = {'zset', LEASES, without_record}, waiting = {'zset', WAITING, without_record},
  dead = {'zset', DEAD, without_record}, damaged = {'zset', BASE .. 'damaged', without_record},
  errors = {'hash', ERRORS, failure_alone}, keys = {'hash', HOLDERS, check_key}, outgoing = {'hash', OUTGOING, check_outgoing},
}
if grouping then
  STEPS.line, STEPS.groups = {'zset', BASE .. 'group_line', check_line}, {'zset', BASE .. 'group_names', check_group}
end

local due_before = until_first(DUE)
if mend then call('HDEL', QUEUE, 'uneven') end

local function follows(name)
  for i = 1, #PHASES do
    if PHASES[i] == name then return PHASES[i + 1] end
  end
end

local bytes = 0
while phase and examined < EXAMINED_MAX and bytes < BYTES_MAX do
  local step = STEPS[phase]
  if step then
    local hashed = step[1] == 'hash'
    local page = hashed and call('HSCAN', step[2], cursor, 'COUNT', 20) or call('ZSCAN', step[2], cursor, 'COUNT', 20)
    for i = 1, #page[2], 2 do
      bytes = bytes + #page[2][i + 1]
      step[3](page[2][i], page[2][i + 1])
    end
    cursor = page[1]
  elseif phase == 'counters' then
    local difference = balance()
    if difference ~= 0 then
      if mend then tally(difference > 0 and 'dropped' or 'published', math.abs(difference)) end
      report('counters', '', format('the ledger is off by %.0f', difference),
        difference > 0 and 'counted as dropped' or 'counted as published')
    end
  end
  if cursor == '0' or not step then phase, cursor = follows(phase), '0' end
end

-- include chains

if changed then
  wake(worth(due_before))
  write_book()
elseif grouping and mend then
  grouping.write()
end
reply[1], reply[2] = examined, phase and phase .. ' ' .. cursor or ''
return reply
