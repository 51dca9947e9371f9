-- common: what every script of a queue begins with. The loader puts the limits, event codes and the default policy
-- of policy.py and message.py before it, so that each has one home.
--
-- KEYS, the same list for every script, all in one slot:
--   1 queue      hash    version, policy, paused, counts, m<slot>: counters of one of the last 1,440 minutes
--   2 messages   hash    id -> published_ms (8 bytes) priority (1) envelope; never rewritten, so a body is stored once
--   3 state      hash    id -> packed state (below); a plain ready message that was never claimed has none
--   4 ready      zset    id by (9 - priority) * 2^49 + position
--   5 due        zset    id by due time
--   6 leases     zset    id by lease end
--   7 keys       hash    key -> owner id, then the id of the parked next generation if there is one
--   8 waiting    zset    parked ids
--   9 dead       zset    id by time of death
--  10 errors     hash    id -> {reason, error type, error} of a dead letter or of the last failed attempt
--  11 journal    stream  entry id = number of its last event; field e = the events of one step
--  12 readers    hash    name -> number read to
--  13 sleepers   zset    name by the end of its registration; '' ends last: while it is there, the memory is whole
--  14 rate       list    "at:count" of the claims inside the rate's window
--  15 completed  list    finished messages, newest first
--  16 outgoing   hash    id -> continuation that has not been confirmed by its queue
--  17 arrivals   zset    continuations that arrived, by the time until which they are remembered
--  18 operations hash    number -> first result, of one session; newest
-- and, derived in the same slot: window:<key>, result:<id>, both with a TTL.
--
-- State, 65 bytes and three texts: status (1: R D W L X) token (4) nonce (12) claimed_ms (8) lease_ms (4) deliveries (4)
-- attempts (4) flags (1: 1 cancel requested) cause (1) published_ms (8) priority (1) ready_ms (8) size (4) key, group and worker
-- lengths (2, 2, 1), key, group, worker.
--
-- ARGV begins with: 1 the clock of a test or '', 2 operation number or '', 3 nonce, 4 replay TTL in milliseconds.
-- Invariant of every script: all reads and checks come before the first write; a failure after it cannot happen.

local call = redis.call
local sub, byte, char, format, floor = string.sub, string.byte, string.char, string.format, math.floor
local min, max, concat = math.min, math.max, table.concat
local struct_pack, struct_unpack = struct.pack, struct.unpack

local QUEUE, MESSAGES, STATE, READY, DUE, LEASES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local HOLDERS, WAITING, DEAD, ERRORS, JOURNAL, READERS = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local SLEEPERS, RATE, COMPLETED, OUTGOING, ARRIVALS, OPERATIONS = KEYS[13], KEYS[14], KEYS[15], KEYS[16], KEYS[17], KEYS[18]
local BASE = sub(QUEUE, 1, -6)

local STATE_FORMAT = '>c1I4c12I8I4I4I4BBI8BI8I4HHB'
local BAND = 562949953421312 -- 2^49: the room of one priority in the score of ready

local NUMBER, NONCE, REPLAY_TTL = ARGV[2], ARGV[3], ARGV[4]
local FIRST_ARGUMENT = 5

local now
if ARGV[1] ~= '' then
  now = tonumber(ARGV[1])
else
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end
local now8 = struct_pack('>I8', now)

local policy, paused, counts, minute, minute_field
local counted_minute = false
local items, item_count, last_tail = {}, 0, nil
local event_count = 0

-- ---- checks that come before any write -----------------------------------------------------------------------

local PROBES = {hash = 'HLEN', zset = 'ZCARD', stream = 'XLEN', list = 'LLEN'}

local function must_be(kind, key)
  local reply = redis.pcall(PROBES[kind], key)
  if type(reply) == 'table' and reply.err then error('WP-FOREIGN ' .. kind .. ' ' .. key) end
  return reply
end

local function open_queue()
  local this_minute = floor(now / 60000)
  minute_field = 'm' .. (this_minute % MINUTES_KEPT)
  local fields = redis.pcall('HMGET', QUEUE, 'version', 'policy', 'paused', 'counts', minute_field)
  if fields.err then error('WP-FOREIGN hash ' .. QUEUE) end
  if fields[1] and tonumber(fields[1]) > VERSION then error('WP-NEWER ' .. fields[1]) end
  policy = fields[2] and cmsgpack.unpack(fields[2]) or DEFAULT_POLICY
  paused = fields[3] == '1'
  counts = fields[4] and cmsgpack.unpack(fields[4]) or {}
  for i = #counts + 1, COUNTERS do counts[i] = 0 end
  minute = fields[5] and cmsgpack.unpack(fields[5])
  if not minute or minute[1] ~= this_minute then
    minute = {this_minute}
    for i = 1, MINUTE_COUNTERS do minute[i + 1] = 0 end
  end
  must_be('stream', JOURNAL)
end

-- The first result of this operation, or nil: then it is new. One that is too old to know does not run.
local function first_result()
  local known = redis.pcall('HMGET', OPERATIONS, NUMBER, 'newest')
  if known.err then error('WP-FOREIGN hash ' .. OPERATIONS) end
  if known[1] then return known[1] end
  if known[2] and tonumber(NUMBER) <= tonumber(known[2]) - REPLAY_MAX then error('WP-OLD') end
  return nil, known[2]
end

local function forget_oldest()
  call('HDEL', OPERATIONS, format('%.0f', max(0, tonumber(NUMBER) - REPLAY_MAX)))
end

-- A removing write first: after it the server lets the script go on even if its memory is full.
local begin_removing = forget_oldest

-- ---- counting and journal ------------------------------------------------------------------------------------

local function count_up(name, by)
  local index = COUNT[name]
  counts[index] = counts[index] + by
  local in_minute = MINUTE[name]
  if in_minute then
    minute[in_minute + 1] = minute[in_minute + 1] + by
    counted_minute = true
  end
end

local function noted(event)
  local level = policy.journal
  return level == 'all' or level == 'full' or (level == 'failures' and FAILURE[event])
end

local function add_item(text)
  item_count = item_count + 1
  items[item_count] = text
end

-- One event of a message whose packed state is `state`. Most events of a step share the texts at its end.
local function note_state(event, cause, id, state, reason, error_type)
  if not noted(event) then return end
  event_count = event_count + 1
  local head = EVENT[event] .. (cause and CAUSE[cause] or '\0') .. id
  if reason or error_type then
    local text = (reason or '') .. '\0' .. (error_type or '')
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
  add_item('T' .. EVENT[event] .. (cause and CAUSE[cause] or '\0') .. struct_pack('>I4H', size, #text) .. text)
end

local function note_duplicate(id, key)
  count_up('duplicates', 1)
  if not noted('duplicate') then return end
  event_count = event_count + 1
  add_item('D' .. id .. struct_pack('>H', #key) .. key)
end

local function write_entry()
  local last = counts[COUNT.journal_last] + event_count
  counts[COUNT.journal_last] = last
  local nonce = NUMBER ~= '' and NONCE or NO_NONCE
  call('XADD', JOURNAL, format('%.0f-0', last), 'e', now8 .. nonce .. struct_pack('>H', event_count) .. concat(items, '', 1, item_count))
  items, item_count, event_count, last_tail = {}, 0, 0, nil
end

-- Cut the journal at its cap, and say so if a reader had not come so far.
local function trim_journal(first, hard)
  local unread_from = first
  local positions = call('HVALS', READERS)
  for i = 1, #positions do unread_from = min(unread_from, tonumber(positions[i]) + 1) end
  local before = counts[COUNT.journal_first] + 1
  call('XTRIM', JOURNAL, 'MINID', '~', format('%.0f', first), 'LIMIT', 0)
  counts[COUNT.journal_first] = first - 1
  if hard and unread_from < first then
    local cut = max(before, unread_from)
    note_text('trimmed', 'hard_cap', first - cut, format('%.0f-%.0f', cut, first - 1))
    if item_count > 0 then write_entry() end
  end
end

local function write_book()
  if item_count > 0 then
    write_entry()
    local kept = counts[COUNT.journal_last] - counts[COUNT.journal_first]
    if kept >= policy.journal_max + max(CHUNK_MESSAGES_MAX, floor(policy.journal_max / 64)) then
      trim_journal(counts[COUNT.journal_last] - policy.journal_max + 1, true)
    end
  end
  if counted_minute then
    call('HSET', QUEUE, 'version', VERSION, 'counts', cmsgpack.pack(counts), minute_field, cmsgpack.pack(minute))
  else
    call('HSET', QUEUE, 'version', VERSION, 'counts', cmsgpack.pack(counts))
  end
end

-- Keep the first result for a repeat of this operation, until no repeat can come any more.
local function remember(result, newest)
  local number = tonumber(NUMBER)
  if newest and tonumber(newest) > number then number = tonumber(newest) end
  call('HSET', OPERATIONS, NUMBER, result, 'newest', format('%.0f', number))
  call('PEXPIRE', OPERATIONS, REPLAY_TTL)
end

local function bulk(command, key, list, length)
  for i = 1, length, 1000 do call(command, key, unpack(list, i, min(i + 999, length))) end
end

-- ---- state ---------------------------------------------------------------------------------------------------

local function read_state(id, raw)
  local s = {id = id, raw = raw}
  local key_length, group_length, worker_length, at
  s.status, s.token, s.nonce, s.claimed, s.lease, s.deliveries, s.attempts, s.flags, s.cause, s.published, s.priority, s.ready,
    s.size, key_length, group_length, worker_length, at = struct_unpack(STATE_FORMAT, raw)
  s.key = sub(raw, at, at + key_length - 1)
  s.group = sub(raw, at + key_length, at + key_length + group_length - 1)
  s.worker = sub(raw, at + key_length + group_length)
  return s
end

local function pack_state(s)
  s.raw = struct_pack(STATE_FORMAT, s.status, s.token, s.nonce, s.claimed, s.lease, s.deliveries, s.attempts, s.flags, s.cause,
    s.published, s.priority, s.ready, s.size, #s.key, #s.group, #s.worker) .. s.key .. s.group .. s.worker
  return s.raw
end

-- A plain message that was never claimed: its state follows from its value.
local function fresh_state(id, value)
  local published = struct_unpack('>I8', value)
  local s = {id = id, status = 'R', token = 0, nonce = NO_NONCE, claimed = 0, lease = 0, deliveries = 0, attempts = 0, flags = 0,
    cause = 0, published = published, priority = byte(value, 9), ready = published, size = #value - 9, key = '',
    group = '', worker = ''}
  pack_state(s)
  return s
end

-- The state of a message, or nil if there is no such message.
local function state_of(id)
  local raw = call('HGET', STATE, id)
  if raw then return read_state(id, raw) end
  local value = call('HGET', MESSAGES, id)
  if value then return fresh_state(id, value) end
end

local function cancel_requested(s) return s.flags % 2 == 1 end

local function next_position()
  local position = counts[COUNT.sequence] + 1
  counts[COUNT.sequence] = position
  return position
end

local function score_of(priority, position) return (9 - priority) * BAND + position end

-- ---- how a message moves ---------------------------------------------------------------------------------------

local freshly_ready = 0

-- To the end of its priority, or to the timers if its time has not come. The caller has taken it from where it was.
local function make_claimable(s, ready)
  s.ready = ready
  if ready > now then
    s.status = 'D'
    call('ZADD', DUE, ready, s.id)
  else
    s.status = 'R'
    freshly_ready = freshly_ready + 1
    call('ZADD', READY, score_of(s.priority, next_position()), s.id)
  end
  call('HSET', STATE, s.id, pack_state(s))
end

-- Before all others of its priority, in the order of `ready`.
local function to_head(s, ready, cause)
  s.status, s.ready, s.cause = 'R', ready, CAUSE_NUMBER[cause]
  freshly_ready = freshly_ready + 1
  call('ZADD', READY, score_of(s.priority, ready - HEAD_OFFSET), s.id)
  call('HSET', STATE, s.id, pack_state(s))
end

local PLACES = {R = READY, D = DUE, W = WAITING, L = LEASES, X = DEAD}

local FREES_WINDOW = {dead = true, cancelled = true, dropped = true, replaced = true}

local function release_key(s, how)
  if FREES_WINDOW[how] then
    local window = call('GET', BASE .. 'window:' .. s.key)
    if window and sub(window, 1, 24) == s.id then call('DEL', BASE .. 'window:' .. s.key) end
  end
  local holder = call('HGET', HOLDERS, s.key)
  if not holder then return end
  local owner, parked = sub(holder, 1, 24), sub(holder, 25)
  if parked == s.id then
    call('HSET', HOLDERS, s.key, owner)
  elseif owner == s.id then
    if parked == '' then
      call('HDEL', HOLDERS, s.key)
    else
      call('HSET', HOLDERS, s.key, parked)
      call('ZREM', WAITING, parked)
      local heir = state_of(parked)
      make_claimable(heir, max(heir.ready, now))
      note_state('promoted', 'unparked', heir.id, heir.raw)
    end
  end
end

local function trim_dead(ids, cause)
  for i = 1, #ids do
    note_state('dead_trimmed', cause, ids[i], call('HGET', STATE, ids[i]))
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

-- The end of a message: counted, journalled, its key free or handed to the next generation.
-- `details` of a dead letter: {reason, error type or '', error or ''}.
local function end_message(s, how, cause, details)
  count_up(how, 1)
  note_state(how, cause, s.id, s.raw, details and details[1], details and details[2] ~= '' and details[2] or nil)
  if not s.popped then call('ZREM', PLACES[s.status], s.id) end
  if how == 'dead' then
    s.status = 'X'
    call('HSET', STATE, s.id, pack_state(s))
    call('ZADD', DEAD, now, s.id)
    call('HSET', ERRORS, s.id, cmsgpack.pack(details))
  else
    if how == 'done' and policy.completed_max > 0 then
      local value = call('HGET', MESSAGES, s.id)
      call('LPUSH', COMPLETED, now8 .. struct_pack('>H', #s.raw) .. s.raw .. value)
      call('LTRIM', COMPLETED, 0, policy.completed_max - 1)
    end
    call('HDEL', MESSAGES, s.id)
    call('HDEL', STATE, s.id)
    if s.attempts > 0 then call('HDEL', ERRORS, s.id) end
  end
  if s.key ~= '' then release_key(s, how) end
  if how == 'dead' then enforce_dead_limits() end
end

-- A delivery that would go back ends here instead if it was cancelled, or its key's next generation waits.
local function ends_otherwise(s, cause)
  if cancel_requested(s) then
    end_message(s, 'cancelled', cause)
    return true
  end
  if s.key ~= '' then
    local holder = call('HGET', HOLDERS, s.key)
    if holder and #holder > 24 then
      end_message(s, 'replaced', cause)
      return true
    end
  end
  return false
end

-- ---- whom to wake --------------------------------------------------------------------------------------------

-- Milliseconds until the first member of a sorted set of times, or nil.
local function until_first(key)
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first[2] then return max(0, tonumber(first[2]) - now) end
end

-- Take up to `number` sleepers out of the memory, longest asleep first; '*' if the memory is gone.
local function wake(number)
  if number == 0 or paused then return {} end
  local found = call('ZRANGEBYSCORE', SLEEPERS, '(' .. format('%.0f', now), '+inf', 'LIMIT', 0, number + 1)
  if #found == 0 then
    call('DEL', SLEEPERS)
    call('ZADD', SLEEPERS, now + SLEEPER_TTL_MS, '')
    call('PEXPIRE', SLEEPERS, SLEEPER_TTL_MS * 2)
    return {'*'}
  end
  local names = {}
  for i = 1, #found do
    if found[i] ~= '' and #names < number then names[#names + 1] = found[i] end
  end
  if #names > 0 then call('ZREM', SLEEPERS, unpack(names)) end
  return names
end

-- How many sleepers a step is worth: what it made claimable, and one for a timer that is now the first.
local function worth(due_before)
  local due_after = until_first(DUE)
  if due_after and (not due_before or due_after < due_before) then return freshly_ready + 1 end
  return freshly_ready
end
