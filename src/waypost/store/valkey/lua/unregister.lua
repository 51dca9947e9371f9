-- unregister: remove a worker that stops from the list of workers, before its entry expires.
--
-- KEYS: as in heartbeat.
-- Arguments: name.
-- Touches: workers, records, requests.
-- Invariant: the keys name the same workers.
-- Reply: 1 if it was known, otherwise 0.

-- include register

local name = ARGV[FIRST_ARGUMENT]

must_be('zset', REGISTER)
must_be('hash', RECORDS)
call('HDEL', RECORDS, name)
redis.pcall('HDEL', REQUESTS, name)
return call('ZREM', REGISTER, name)
