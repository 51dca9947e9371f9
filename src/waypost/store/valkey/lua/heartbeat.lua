-- heartbeat: a worker tells of itself, and is remembered for a while.
--
-- KEYS: as in register.
-- Arguments: name, record, time to live in milliseconds, how many workers are remembered at most.
-- Touches: workers, records.
-- Invariant: both keys name the same workers, at most so many, and end with the last of them. It begins with a removing
-- write: who works can be seen in a full store too.
-- Reply: the store's time.

-- include register

must_be('zset', REGISTER)
must_be('hash', RECORDS)
register(ARGV[FIRST_ARGUMENT], ARGV[FIRST_ARGUMENT + 1], tonumber(ARGV[FIRST_ARGUMENT + 2]), tonumber(ARGV[FIRST_ARGUMENT + 3]))
return now
