-- wait: a sleeper that has nothing left to do goes to its door, where the next step that has work for it knocks.
--
-- KEYS: sleepers, door.
-- Arguments: sleeper.
-- Touches: sleepers, door:<sleeper>.
-- Invariant: who is registered under its own name has not been told since its last claim: a knock from before that is
-- no news. Who is not was told meanwhile: its door is open.
-- Reply: 1 if it waits, otherwise 0.

local registered_until = redis.call('ZSCORE', KEYS[1], ARGV[1])
if registered_until then
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[1], ARGV[1])
  redis.call('ZADD', KEYS[1], registered_until, AT_DOOR .. ARGV[1])
  return 1
end
redis.call('RPUSH', KEYS[2], '')
redis.call('PEXPIRE', KEYS[2], DOOR_TTL_MS)
return 0
