-- remove: remove a queue that is empty, with all its keys.
--
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, journal, readers, sleepers, rate,
-- completed, outgoing, arrivals, schedules, expires, the keys of groups. Also chains, damaged and blocked. What
-- remains: queue, with the last number of the journal, when it was removed and by which operation; and arrivals. Both
-- expire. Operations, windows, results, ends and finished chains have a time to live of their own, and a next queue of
-- this name uses other key names (OWN), so it finds none of them.
-- Invariant: nothing is removed while anything is left in the queue. The first write removes.
-- Reply: 1 if there was a queue, 2 if it was removed by this operation before and there is a new one, then how many are
-- left of each: ready, delayed, waiting, leased, dead, schedules, outgoing, chains, readers, damaged; nothing more if
-- it was removed, or there was none.

local past = redis.pcall('HMGET', QUEUE, 'removed', 'gone')
if past[1] and sub(past[1], 9) == sub(OPERATION, 13, 20) then return {past[2] and 1 or 2} end
if struct_unpack('>I8', OPERATION, 21) < now - tonumber(REPLAY_TTL) then error(format('WP-OLD %.0f', now)) end
open_queue()
local left = {
  1, must_be('zset', READY), must_be('zset', DUE), must_be('zset', WAITING), must_be('zset', LEASES), must_be('zset', DEAD),
  must_be('hash', BASE .. 'schedules'), must_be('hash', OUTGOING), must_be('set', BASE .. 'chains'), must_be('hash', READERS),
}
local stored, set_apart = must_be('hash', MESSAGES), must_be('zset', BASE .. 'damaged')
must_be('hash', STATE)
must_be('hash', HOLDERS)
must_be('hash', ERRORS)
must_be('zset', SLEEPERS)
must_be('list', RATE)
must_be('list', COMPLETED)
must_be('zset', ARRIVALS)
must_be('zset', BASE .. 'blocked')
must_be('zset', BASE .. 'expires')
for _, name in pairs({'groups', 'group_rates', 'group_settings', 'positions'}) do must_be('hash', BASE .. name) end
for _, name in pairs({'names', 'line', 'depths', 'turns', 'limited', 'rate_ends', 'held'}) do must_be('zset', BASE .. 'group_' .. name) end
must_be('set', BASE .. 'group_counted')

left[11] = max(set_apart, stored - left[2] - left[3] - left[4] - left[5] - left[6])
for i = 2, #left do
  if left[i] > 0 then
    left[1] = gone and 0 or 1
    return left
  end
end
if gone then return {0} end

call('UNLINK', MESSAGES, STATE, READY, DUE, LEASES, HOLDERS, WAITING, DEAD, ERRORS, JOURNAL, READERS, SLEEPERS, RATE, COMPLETED,
  OUTGOING, BASE .. 'schedules', BASE .. 'chains', BASE .. 'damaged', BASE .. 'blocked', BASE .. 'expires',
  BASE .. 'groups', BASE .. 'group_names', BASE .. 'group_line', BASE .. 'group_depths', BASE .. 'group_turns', BASE .. 'group_limited',
  BASE .. 'group_rates', BASE .. 'group_rate_ends', BASE .. 'group_settings', BASE .. 'positions', BASE .. 'group_held',
  BASE .. 'group_counted')
local last = counts[COUNT.journal_last]
for i = 1, COUNTERS do counts[i] = 0 end
counts[COUNT.journal_last], counts[COUNT.journal_first], counts[COUNT.minute] = last, last, floor(now / 60000)
call('DEL', QUEUE)
call('HSET', QUEUE, 'version', VERSION_WRITTEN, 'counts', cmsgpack.pack(counts), 'removed', now8 .. sub(OPERATION, 13, 20), 'gone', '1')
call('PEXPIRE', QUEUE, REMOVED_TTL_MS)
call('PEXPIRE', ARRIVALS, ARRIVAL_TTL_MS)
return {1}
