-- workers: list the workers whose registration has not expired. Writes nothing.
--
-- KEYS: as in heartbeat.
-- Arguments: how many to show at most.
-- Touches: workers, records.
-- Reply: names, the times at which their entries expire, their records, and what was requested of them, side by side.

-- include register

must_be('zset', REGISTER)
must_be('hash', RECORDS)
local found = call('ZRANGEBYSCORE', REGISTER, '(' .. format('%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[FIRST_ARGUMENT])
local who, ends, records, requests = {}, {}, {}, {}
for i = 1, #found, 2 do
  who[#who + 1], ends[#ends + 1] = found[i], found[i + 1]
end
for i = 1, #who, 1000 do
  local part = call('HMGET', RECORDS, unpack(who, i, min(i + 999, #who)))
  for j = 1, #part do records[#records + 1] = part[j] end
end
for i = 1, #who do requests[i] = requested(who[i]) end
return {who, ends, records, requests}
