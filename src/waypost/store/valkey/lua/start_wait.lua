-- start_wait: register a sleeper as blocked. The next step that has work for it pushes to its list `unblock`.
--
-- KEYS: sleepers, unblock.
-- Arguments: sleeper.
-- Touches: sleepers, unblock:<sleeper>.
-- Invariant: a sleeper that is registered under its own name has not been notified since its last claim, so an element
-- of the list is from an earlier wait, and is deleted. If it is not registered, it was notified meanwhile: its blocking
-- read ends at once.
-- Reply: 1 if it waits, otherwise 0.

local registered_until = redis.call('ZSCORE', KEYS[1], ARGV[1])
if registered_until then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('ZADD', KEYS[1], registered_until, BLOCKED_MARK .. ARGV[1])
  return 1
end
redis.call('RPUSH', KEYS[2], '')
redis.call('PEXPIRE', KEYS[2], UNBLOCK_TTL_MS)
return 0
