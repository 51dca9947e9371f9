-- unblock: end the blocking wait of a sleeper of our own. The value marks that it was unblocked, not that there is work.
--
-- KEYS: unblock.
-- Arguments: the value by which the waiter recognises this unblock.
-- Touches: unblock:<sleeper>.
-- Invariant: an unblock that arrives after its wait has ended is deleted when the sleeper starts its next wait.
-- Reply: nothing.

redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], UNBLOCK_TTL_MS)
