-- watch: the state of a message or a chain; a client that waits is registered and woken when it ends.
--
-- Arguments: 'watch' or 'watch_chain', id, name of the waiter or ''; or 'result' or 'links' and an id.
-- Touches: queue, messages, state, errors, result:<id>, the keys of chains.
-- Invariant: the end of a message finds its waiters: its state has the flag that it is awaited. The first write
-- removes.
-- Reply to watch: status or '', then of a dead letter its failure; how it ended if that is known, its result if it has
-- one.
-- Reply to result: the kept result, or nothing.
-- Reply to watch_chain: nothing if it is unknown, or the number of open members, '' or member NUL reason of its
-- failure, last member.
-- Reply to links: its chain or '', the reply to watch_chain, then open members of that chain, watchers and blockers,
-- each a list.

-- include moves

open_queue()
if ARGV[FIRST_ARGUMENT] == 'result' then
  local key = OWN .. 'result:' .. ARGV[FIRST_ARGUMENT + 1]
  local kept = redis.pcall('GET', key)
  if type(kept) == 'table' then refuse_key(kept, 'string', key) end
  return kept_until(kept, 1) > now and sub(kept, 9)
end
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('hash', ERRORS)
local verb, id, waiter = ARGV[FIRST_ARGUMENT], ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2]

-- Register a waiter; expired waiters are removed at the same time.
local function register(key)
  call('ZREMRANGEBYSCORE', key, '-inf', now)
  call('ZADD', key, now + WAITER_TTL_MS, waiter)
  call('PEXPIRE', key, WAITER_TTL_MS)
end

-- Nothing if there is no such chain, or the number of its open members, its failure and its last member. The result of a
-- chain that is complete is that of a member that sent nothing on.
local function chain_state(key)
  must_be('hash', key)
  local fields = call('HMGET', key, 'until', 'open', 'failed', 'last', 'last_leaf')
  local open = tonumber(fields[2] or '')
  if not open or (tonumber(fields[1] or 0) or 0) <= now then return {} end
  return {open, fields[3] or '', open == 0 and fields[5] or fields[4] or ''}
end

if verb == 'watch_chain' then
  local waiters = OWN .. 'waiters:chain:' .. id
  must_be('zset', waiters)
  local state = chain_state(OWN .. 'chain:' .. id)
  if waiter ~= '' and state[1] and state[1] > 0 and state[2] == '' then register(waiters) end
  return state
end

if verb == 'links' then
  local key, watchers, blockers = OWN .. 'chain:' .. id, OWN .. 'watchers:' .. id, OWN .. 'blockers:' .. id
  must_be('set', watchers)
  must_be('set', blockers)
  local s, state, members = state_of(id), chain_state(key), {}
  if state[1] then
    -- A part of a large hash is enough: at most LINKS_MAX members are listed. A member's name has a slash.
    local fields = call('HSCAN', key, '0', 'COUNT', LINKS_MAX * 2)[2]
    for i = 1, #fields, 2 do
      if string.find(fields[i], '/', 1, true) and (tonumber(fields[i + 1]) or 0) > 0 and #members < LINKS_MAX then
        members[#members + 1] = fields[i]
      end
    end
  end
  return {s and s.chain or '', state, members, state[1] and call('SRANDMEMBER', watchers, LINKS_MAX) or {},
    s and call('SRANDMEMBER', blockers, LINKS_MAX) or {}}
end

local waiters = OWN .. 'waiters:' .. id
must_be('zset', waiters)

local function kept_at(key)
  local kept = text_at(key)
  if kept_until(kept, 1) > now then return sub(kept, 9) end
end

local s = state_of(id)
if s then
  if s.status == 'X' then return {'X', unpacked(call('HGET', ERRORS, id)) and call('HGET', ERRORS, id) or ''} end
  if waiter ~= '' then
    register(waiters)
    if floor(s.flags / 2) % 2 == 0 then
      s.flags = s.flags + 2
      call('HSET', STATE, id, pack_state(s))
    end
  end
  return {s.status}
end
local result = kept_at(OWN .. 'result:' .. id)
if result then return {'', 'done', result} end
return {'', kept_at(OWN .. 'end:' .. id) or nil}
