-- request_worker: store a request for a worker, which reads it with its next heartbeat.
--
-- KEYS: as in register.
-- Arguments: name, request.
-- Touches: workers, requests.
-- Invariant: only a worker that is registered has a request. The first write removes.
-- Reply: 1 if there is such a worker, otherwise 0.

-- include register

must_be('zset', REGISTER)
must_be('hash', REQUESTS)
local name = ARGV[FIRST_ARGUMENT]
if (tonumber(call('ZSCORE', REGISTER, name) or '') or 0) <= now then return 0 end
call('HDEL', REQUESTS, name)
call('HSET', REQUESTS, name, now8 .. ARGV[FIRST_ARGUMENT + 1])
-- It expires with the workers: see register.
call('PEXPIRE', REQUESTS, max(call('PTTL', REGISTER), 1))
return 1
