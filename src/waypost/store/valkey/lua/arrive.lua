-- arrive: apply notices of chains that other queues, or this one, have sent.
--
-- Arguments: one packed notice each: id, kind (ended, watch, completed), chain, member, how it failed or false, and the
-- messages that were forwarded, separated by NUL.
-- Touches: queue, messages, state, ready, due, waiting, dead, errors, journal, sleepers, outgoing, arrivals, the keys
-- of chains, the keys of groups.
-- Invariant: an end is counted once however often it arrives; the other kinds change nothing when they are repeated.
-- The first write removes.
-- Reply: the sleepers and waiters to wake and, after a byte 1, the side effects.

-- include moves

open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('hash', ERRORS)
must_be('hash', OUTGOING)
must_be('zset', ARRIVALS)
-- include grouping

local arrived = {}
for i = FIRST_ARGUMENT, #ARGV do
  local notice = cmsgpack.unpack(ARGV[i])
  local id, kind, chain, member = notice[1], notice[2], notice[3], notice[4]
  if kind == 'completed' then
    must_be('set', OWN .. 'blockers:' .. sub(member, -24))
  else
    must_be('hash', OWN .. 'chain:' .. sub(chain, -24))
    must_be('set', OWN .. 'watchers:' .. sub(chain, -24))
  end
  local begun = {}
  for one in string.gmatch(notice[6], '%Z+') do begun[#begun + 1] = one end
  local known = kind == 'ended' and (arrived[id] or tonumber(call('ZSCORE', ARRIVALS, id) or 0) > now)
  if not known then
    if kind == 'ended' then arrived[id] = true end
    news[#news + 1] = {kind = kind, id = id, chain = chain, member = member, failed = notice[5] or nil, begun = begun}
  end
end
local due_before = until_first(DUE)

local arrivals = {}
for i = 1, #news do
  if news[i].kind == 'ended' then
    arrivals[#arrivals + 1], arrivals[#arrivals + 2] = now + ARRIVAL_TTL_MS, news[i].id
  end
end
remember_arrivals(arrivals, #arrivals)
if gone then call('PEXPIRE', ARRIVALS, ARRIVAL_TTL_MS) end
local worth_telling = #news > 0

-- include chains

local names = wake(worth(due_before))
for i = 1, #expectant do names[#names + 1] = expectant[i] end
if worth_telling then write_book() end
if side_effects then names[#names + 1] = '\1' .. concat(side_effects) end
return names
