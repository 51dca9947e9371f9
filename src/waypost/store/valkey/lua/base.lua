-- base: the beginning of every script of a queue. It is short, because it runs at every call, and to create a function
-- costs the server about as much as a command: functions that few scripts need are in shared.lua, and functions that
-- only longer code paths need are in moves.lua, which a script includes after its fast path.
-- Names in capitals that are not defined here (limits, COUNT.x, EVENT.x, DEFAULT_POLICY …) are constants of policy.py,
-- message.py and scripts.py: the loader replaces them by their values, so that each is defined once.
--
-- KEYS, the same list for every script, all in one slot:
--   1 queue      hash    version (of the layout that a client must know to use the queue), policy, paused, counts (at their end
--                        those of the current minute),
--                        over_cap: messages accepted although `max_pending` was reached, changes: the last changes of settings,
--                        m<slot>: counters of one of the 1,440 minutes before the current one; removed: when a queue of this
--                        name was removed (8) and the mark of the operation that did it; gone: the name is no queue (any more),
--                        and the key expires; groups, groups_at, group_turn: see grouping.lua; expiring: expires may have members
--   2 messages   hash    id -> published_ms (8 bytes) priority (1) envelope; never rewritten, so a body is stored once
--   3 state      hash    id -> packed state (below); a plain ready message that was never claimed has none
--   4 ready      zset    id by (9 - priority) * 2^49 + position
--   5 due        zset    id by due time
--   6 leases     zset    id by lease end
--   7 keys       hash    key -> owner id, then the id of the parked next generation if there is one
--   8 waiting    zset    ids of messages that wait for their key, or for chains
--   9 dead       zset    id by time of death
--  10 errors     hash    id -> {reason, error type, error} of a dead letter or of the last failed attempt
--  11 journal    stream  entry id = number of its last event; field e = the events of one step
--  12 readers    hash    name -> number read to
--  13 sleepers   zset    name by the end of its registration; '' ends last: while it exists, the list is complete;
--                        ~<worker>: until when it polls again at the latest; !<name>: is in a blocking wait
--  14 rate       list    "at:count" of the claims inside the rate's window
--  15 completed  list    finished messages, newest first
--  16 outgoing   hash    id -> continuation or notice that has not been confirmed by its queue
--  17 arrivals   zset    continuations and notices that arrived, by the time until which they are remembered
--  18 operations hash    number -> mark (8) and first result, of one session; newest -> newest number and when the hash
--                        expires
--  19 never              on a Cluster only: never written, so that no script begins in a slot that is moving
-- and, derived in the same slot: damaged, a zset of the ids that were set aside because their record cannot be used, by the
-- time of that (`doctor` lists and repairs them); expires, a zset of messages by their expiry, plus EXPIRY_ASIDE while they are
-- leased, so that these are after all others; window:<key>, result:<id>, both with a TTL (except the window of a dead letter
-- whose key is in use); unblock:<sleeper>, a list with a TTL that ends a blocking wait;
-- schedules, a hash (see save_schedule.lua); those of chains.lua; and those of grouping.lua. If an earlier queue of the same
-- name was removed, the names of keys with a TTL contain the time of that removal, so that the keys of the earlier queue are
-- not found.
--
-- State, 65 bytes and up to four texts: status (1: R D W L X) token (4) nonce (12) claimed_ms (8) lease_ms (4) deliveries (4)
-- attempts (4) flags (1: 1 cancel requested, 2 awaited, 4 of a chain, 8 waits for chains, 16 lapses,
-- 32 its key is free once it is claimed, 64 its key is in use while it is dead, 128 has an extension) cause (1)
-- published_ms (8) priority (1) ready_ms (8) size (4) key, group and worker lengths (2, 2, 1), key, group, worker; then of a chain
-- its length (1) and id; last the extension, length (2) and bytes: data of a later release, kept unread.
--
-- ARGV begins with: 1 the clock of a test or '', 2 operation number or '', 3 the operation: session (8) number (4) mark
-- (8) stamp (8), or '', 4 for how many milliseconds after its stamp an operation may be repeated.
-- Invariant of every script: everything that can fail is done before the first write. Records are checked before they
-- are used: a damaged one is skipped or set aside, and never ends a step half-way.

local call = redis.call
local sub, byte, char, format, floor = string.sub, string.byte, string.char, string.format, math.floor
local min, max, concat = math.min, math.max, table.concat
local struct_pack, struct_unpack = struct.pack, struct.unpack

local QUEUE, MESSAGES, STATE, READY, DUE, LEASES = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local HOLDERS, WAITING, DEAD, ERRORS, JOURNAL, READERS = KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local SLEEPERS, RATE, COMPLETED, OUTGOING, ARRIVALS, OPERATIONS = KEYS[13], KEYS[14], KEYS[15], KEYS[16], KEYS[17], KEYS[18]
local BASE = sub(QUEUE, 1, -6)
local OWN = BASE -- where window, result, end and the keys of chains lie: open_queue decides

local STATE_FORMAT = '>c1I4c12I8I4I4I4BBI8BI8I4HHB'
local BAND = 562949953421312 -- 2^49: the room of one priority in the score of ready

local NUMBER, OPERATION, REPLAY_TTL = ARGV[2], ARGV[3], ARGV[4]
local FIRST_ARGUMENT = 5

local now
if ARGV[1] ~= '' then
  now = tonumber(ARGV[1])
else
  local time = call('TIME')
  now = time[1] * 1000 + floor(time[2] / 1000)
end
local now8 = struct_pack('>I8', now)

local policy, paused, counts
local layout -- the one that this queue needs: no older than what this release writes
local expiring -- it may have messages that lapse
local gone -- it is no queue: nothing was added yet, or it was removed
local makes = false -- this step adds something: from now on it is a queue
-- The fields of a grouped queue about its groups, and the functions that maintain them: see grouping.lua. Nil in other
-- queues.
local grouped, grouping
local uneven -- the number of states and leases does not show the ready messages: see claim.lua
local past_field, past_minute -- a minute that ended: written with the counters
local items, item_count, last_tail = {}, 0, nil
local event_count = 0
-- The effects of a step on chains and waiters, which chains.lua applies at the end; and the results of that: the names
-- to wake, and the ids and entries written to outgoing.
local news, expectant, sent_on = {}, {}, {}
-- The side effects of a step, for its reply: nil, or a list of items, see `add_side_effect` in moves.lua.
local side_effects

-- ---- checks that come before any write -----------------------------------------------------------------------

-- A key that cannot be read: it is of another program, or this user may not run a command.
local function refuse_key(reply, kind, key)
  if string.find(reply.err, 'WRONGTYPE', 1, true) then error('WP-FOREIGN ' .. kind .. ' ' .. key) end
  error('WP-DENIED ' .. (string.match(reply.err, 'script: (.*)') or reply.err))
end

local function must_be(kind, key)
  -- No table, which would be created in every call.
  local probe = kind == 'zset' and 'ZCARD' or kind == 'hash' and 'HLEN' or kind == 'stream' and 'XLEN' or kind == 'list' and 'LLEN' or 'SCARD'
  local reply = redis.pcall(probe, key)
  if type(reply) == 'table' and reply.err then refuse_key(reply, kind, key) end
  return reply
end

-- The unpacked value, or nil if it cannot be unpacked.
local function unpacked(text)
  if not text then return end
  local readable, value = pcall(cmsgpack.unpack, text)
  if readable and type(value) == 'table' then return value end
end

-- An operation that was first sent before the removal of the queue must not run in a new queue of that name: see
-- repeats.py.
local function check_removal(removed)
  local at = struct_unpack('>I8', removed)
  if struct_unpack('>I8', OPERATION, 21) <= at and at <= now + STAMP_AHEAD_MS then
    error(format('WP-GONE %.0f', max(now, at + 1)))
  end
end

local function open_queue()
  local fields = redis.pcall('HMGET', QUEUE, 'version', 'policy', 'paused', 'counts', 'uneven', 'removed', 'gone', 'groups', 'expiring')
  if fields.err then refuse_key(fields, 'hash', QUEUE) end
  layout = max(tonumber(fields[1] or 0), VERSION_WRITTEN)
  if layout > VERSION then error('WP-NEWER ' .. fields[1]) end
  if fields[2] then policy = unpacked(fields[2]) else policy = DEFAULT_POLICY end
  paused, uneven, grouped, expiring = fields[3] == '1', fields[5], fields[8], fields[9]
  gone = not fields[1] or fields[7]
  if fields[6] then
    if OPERATION ~= '' then check_removal(fields[6]) end
    OWN = BASE .. format('@%.0f:', struct_unpack('>I8', fields[6]))
  end
  if fields[4] then counts = unpacked(fields[4]) else counts = {} end
  if not policy or not counts then error('WP-DAMAGED ' .. QUEUE) end
  for i = #counts + 1, COUNTERS do counts[i] = 0 end
  local this_minute = floor(now / 60000)
  if counts[COUNT.minute] ~= this_minute then
    -- A new minute has begun: save the counters of the last one, and continue with the stored ones of this one (a clock
    -- may be set back).
    local past, counted = {counts[COUNT.minute]}, 0
    for i = COUNT.minute + 1, COUNTERS do
      past[#past + 1] = counts[i]
      counted = counted + counts[i]
    end
    if counted > 0 then past_field, past_minute = 'm' .. (past[1] % MINUTES_KEPT), cmsgpack.pack(past) end
    local packed = call('HGET', QUEUE, 'm' .. (this_minute % MINUTES_KEPT))
    local known = unpacked(packed)
    if not known or known[1] ~= this_minute then known = {this_minute} end
    for i = 0, COUNTERS - COUNT.minute do counts[COUNT.minute + i] = known[i + 1] or 0 end
  end
  -- A journal without its counters: the numbers would begin with 1 again, and a stream refuses numbers below its last
  -- one.
  if must_be('stream', JOURNAL) > 0 and not fields[4] then error('WP-FOREIGN stream ' .. JOURNAL) end
end

-- The first result of this operation; nil if the operation is new. An operation whose result may have been deleted is
-- refused: see repeats.py.
local newest, operations_until = 0, 0
local operation_number, replay_ttl -- of this operation, as numbers
local function first_result()
  local stamp = struct_unpack('>I8', OPERATION, 21)
  operation_number, replay_ttl = tonumber(NUMBER), tonumber(REPLAY_TTL)
  if stamp < now - replay_ttl then error(format('WP-OLD %.0f', now)) end
  local last = redis.pcall('HGET', OPERATIONS, 'newest')
  if type(last) == 'table' then refuse_key(last, 'hash', OPERATIONS) end
  if last then newest, operations_until = struct_unpack('>I8I8', last) end
  -- Results have numbers up to the newest: an operation with a higher number, as most have, needs no search.
  local known = operation_number <= newest and call('HGET', OPERATIONS, NUMBER)
  if known or operation_number <= newest - REPLAY_MAX or stamp > now + STAMP_AHEAD_MS then
    -- Not the usual case: first check whether the queue was removed after the operation was first sent.
    local removed = redis.pcall('HGET', QUEUE, 'removed')
    if type(removed) == 'string' then check_removal(removed) end
  end
  if known and sub(known, 1, 8) == sub(OPERATION, 13, 20) then return sub(known, 9) end
  if operation_number <= newest - REPLAY_MAX then error('WP-OLD') end
  if stamp > now + STAMP_AHEAD_MS then error(format('WP-OLD %.0f', now)) end
  if known then error('WP-SESSION') end
end

-- A removing write: after it the server lets a script continue even if its memory is full.
-- It deletes results that are too old to be repeated: one in each call, and in every 32nd call the 32 before it.
local function begin_removing()
  local last = operation_number - REPLAY_MAX
  local old = {}
  for i = last % 32 == 0 and last - 31 or last, last do old[#old + 1] = format('%.0f', i) end
  call('HDEL', OPERATIONS, unpack(old))
end

-- Store the result for a repeat of this operation, for as long as the operation may be repeated.
local function remember(result)
  local ttl = replay_ttl + STAMP_AHEAD_MS
  local expires = operations_until
  if expires - now < ttl then expires = now + 2 * ttl end
  newest = max(newest, operation_number)
  local last = struct_pack('>I8I8', newest, expires)
  -- The server searches a small hash from its beginning for each new result, unless the hash once had a long value. A
  -- session of more than 1,024 operations is worth the 4 KB of memory that such a hash takes.
  if operation_number % 1024 == 0 then last = last .. string.rep('\0', 64) end
  call('HSET', OPERATIONS, NUMBER, sub(OPERATION, 13, 20) .. result, 'newest', last)
  if expires ~= operations_until then call('PEXPIRE', OPERATIONS, format('%.0f', expires - now)) end
end

-- A reply of letters, the sleepers to wake and, after a byte 1, the side effects. It is stored as one text: letters and
-- names contain no NUL, and two NULs precede the side effects.
local function remember_answer(letters, names)
  local kept, reply = #names == 0 and letters or letters .. '\0' .. concat(names, '\0'), {letters, unpack(names)}
  if side_effects then
    reply[#reply + 1] = '\1' .. concat(side_effects)
    kept = kept .. '\0\0' .. reply[#reply]
  end
  remember(kept)
  return reply
end

-- ---- counting and journal ------------------------------------------------------------------------------------

local function count_up(index, in_minute, by)
  counts[index] = counts[index] + by
  if in_minute then counts[in_minute] = counts[in_minute] + by end
end

local function write_entry()
  local last = counts[COUNT.journal_last] + event_count
  counts[COUNT.journal_last] = last
  local operation = NUMBER ~= '' and sub(OPERATION, 1, 12) or NO_NONCE
  local text = now8 .. operation .. struct_pack('>H', event_count) .. concat(items, '', 1, item_count)
  local refused = redis.pcall('XADD', JOURNAL, format('%.0f-0', last), 'e', text)
  if type(refused) == 'table' then
    -- The stream has a greater number, so the counters are older than the stream: continue after its last entry.
    local newest = call('XREVRANGE', JOURNAL, '+', '-', 'COUNT', 1)[1]
    last = (newest and tonumber(string.match(newest[1], '^%d+')) or last) + event_count
    counts[COUNT.journal_last] = last
    redis.pcall('XADD', JOURNAL, format('%.0f-0', last), 'e', text)
  end
  items, item_count, event_count, last_tail = {}, 0, 0, nil
end

-- Write the events of this step and the counters, and trim the journal: on request up to the number `keep_from`; at the
-- limit of the journal its oldest events, which is journalled if a reader had not read them.
local function write_book(keep_from)
  local at_cap = false
  if item_count > 0 then
    write_entry()
    local kept = counts[COUNT.journal_last] - counts[COUNT.journal_first]
    if kept >= policy.journal_max + max(CHUNK_MESSAGES_MAX, floor(policy.journal_max / JOURNAL_SLACK_PART)) then
      keep_from, at_cap = counts[COUNT.journal_last] - policy.journal_max + 1, true
    end
  end
  if keep_from then
    local unread_from = keep_from
    local positions = redis.pcall('HVALS', READERS) -- what is no hash there has no readers of ours
    for i = 1, #positions do unread_from = min(unread_from, (tonumber(positions[i]) or keep_from - 1) + 1) end
    local before = counts[COUNT.journal_first] + 1
    call('XTRIM', JOURNAL, 'MINID', '~', format('%.0f', keep_from), 'LIMIT', 0)
    counts[COUNT.journal_first] = keep_from - 1
    if at_cap and unread_from < keep_from then
      local cut = max(before, unread_from)
      local text = format('%.0f-%.0f', cut, keep_from - 1)
      items[1] = 'T' .. EVENT.trimmed .. CAUSE.hard_cap .. struct_pack('>I4H', keep_from - cut, #text) .. text
      item_count, event_count = 1, 1
      write_entry()
    end
  end
  if past_field then
    call('HSET', QUEUE, 'version', layout, 'counts', cmsgpack.pack(counts), past_field, past_minute)
  else
    call('HSET', QUEUE, 'version', layout, 'counts', cmsgpack.pack(counts))
  end
  if gone and (makes or call('EXISTS', MESSAGES) == 1) then
    -- From now on it is a queue, and does not expire.
    call('HDEL', QUEUE, 'gone')
    call('PERSIST', QUEUE)
    call('PERSIST', ARRIVALS)
    gone = nil
  elseif gone and gone ~= '1' then
    call('HSET', QUEUE, 'gone', '1')
    call('PEXPIRE', QUEUE, ARRIVAL_TTL_MS)
  end
end

-- include wake
