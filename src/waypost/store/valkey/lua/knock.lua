-- knock: call a sleeper away from its door. It learns that it was called, and not that there is work.
--
-- KEYS: door.
-- Arguments: the word by which it knows the call.
-- Touches: door:<sleeper>.
-- Invariant: a knock that comes too late is forgotten when the sleeper goes to its door again.
-- Reply: nothing.

redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], DOOR_TTL_MS)
