-- workers: list the workers whose registration has not expired. Writes nothing.
--
-- KEYS: as in heartbeat.
-- Arguments: how many to show at most.
-- Touches: workers, records.
-- Reply: names, the ends of their times, and their records, side by side.

local REGISTER, RECORDS = KEYS[1], KEYS[2]

must_be('zset', REGISTER)
must_be('hash', RECORDS)
local found = call('ZRANGEBYSCORE', REGISTER, '(' .. format('%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[FIRST_ARGUMENT])
local who, ends, records = {}, {}, {}
for i = 1, #found, 2 do
  who[#who + 1], ends[#ends + 1] = found[i], found[i + 1]
end
for i = 1, #who, 1000 do
  local part = call('HMGET', RECORDS, unpack(who, i, min(i + 999, #who)))
  for j = 1, #part do records[#records + 1] = part[j] end
end
return {who, ends, records}
