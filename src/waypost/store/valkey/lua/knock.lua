-- knock: call a sleeper away from its door, whoever wants that.
--
-- KEYS: door.
-- Touches: door:<sleeper>.
-- Invariant: a knock that comes too late is forgotten when the sleeper goes to its door again.
-- Reply: nothing.

redis.call('RPUSH', KEYS[1], '')
redis.call('PEXPIRE', KEYS[1], DOOR_TTL_MS)
