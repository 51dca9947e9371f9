-- unregister: a worker that stops is forgotten at once.
--
-- KEYS: as in heartbeat.
-- Arguments: name.
-- Touches: workers, records.
-- Invariant: both keys name the same workers.
-- Reply: 1 if it was known, otherwise 0.

local REGISTER, RECORDS = KEYS[1], KEYS[2]
local name = ARGV[FIRST_ARGUMENT]

must_be('zset', REGISTER)
must_be('hash', RECORDS)
call('HDEL', RECORDS, name)
return call('ZREM', REGISTER, name)
