-- heartbeat: register a worker, or renew its registration.
--
-- KEYS: as in register.
-- Arguments: name, record, time to live in milliseconds, how many workers are remembered at most.
-- Touches: workers, records.
-- Invariant: both keys name the same workers, a bounded number, and expire with the last of them. The first write
-- removes: so workers are registered in a full store, too.
-- Reply: the store's time, and what was requested of the worker: when (8 bytes) and what, or ''.

-- include register

must_be('zset', REGISTER)
must_be('hash', RECORDS)
register(ARGV[FIRST_ARGUMENT], ARGV[FIRST_ARGUMENT + 1], tonumber(ARGV[FIRST_ARGUMENT + 2]), tonumber(ARGV[FIRST_ARGUMENT + 3]))
return {now, requested(ARGV[FIRST_ARGUMENT])}
