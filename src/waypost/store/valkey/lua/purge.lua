-- purge: remove up to n messages of one state. Waiting ones end `cancelled`; dead letters and kept history are deleted.
--
-- Arguments: state (ready, delayed, waiting, dead, done), limit, then ids of dead letters if only these are meant.
-- Touches: queue, messages, state, ready, due, waiting, keys, dead, errors, completed, journal, outgoing, operations,
-- window:<key>, the keys of chains, the keys of groups.
-- Invariant: leased messages are never purged. The first write removes.
-- Reply: number removed and, after a space, 1 if more are left; then the clients to wake and, after a byte 1, the side
-- effects.

-- include moves

local first = first_result()
if first then
-- include known_answer
end
open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('hash', HOLDERS)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('hash', ERRORS)
must_be('hash', OUTGOING)
-- include grouping

local state, limit = ARGV[FIRST_ARGUMENT], tonumber(ARGV[FIRST_ARGUMENT + 1])
local reply
if state == 'done' then
  local length = must_be('list', COMPLETED)
  begin_removing()
  local removed = min(limit, length)
  if removed > 0 then call('LTRIM', COMPLETED, 0, -removed - 1) end
  reply = {removed, length > removed and 1 or 0}
else
  local places = {ready = READY, delayed = DUE, waiting = WAITING, dead = DEAD}
  local letters = {ready = 'R', delayed = 'D', waiting = 'W'}
  local place = places[state]
  local length, ids = call('ZCARD', place), {}
  if #ARGV > FIRST_ARGUMENT + 1 then
    local named = {}
    for i = FIRST_ARGUMENT + 2, #ARGV do
      if #ids < limit and not named[ARGV[i]] and call('ZSCORE', place, ARGV[i]) then ids[#ids + 1] = ARGV[i] end
      named[ARGV[i]] = true
    end
    length = #ids
  else
    ids = call('ZRANGE', place, 0, limit - 1)
  end
  begin_removing()
  if state == 'dead' then
    trim_dead(ids, 'purge')
  else
    for i = 1, #ids do
      local s = state_of(ids[i], letters[state])
      if s then end_message(s, 'cancelled', 'purge') else set_aside(ids[i], place) end
    end
  end
  reply = {#ids - #damaged, length > #ids and 1 or 0}
end

-- include chains

local names = expectant
if grouping then
  names = wake(grouping.worth())
  for i = 1, #expectant do names[#names + 1] = expectant[i] end
end
if state ~= 'done' then write_book() end
return remember_answer(format('%.0f %d', reply[1], reply[2]), names)
