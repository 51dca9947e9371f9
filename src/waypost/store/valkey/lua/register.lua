-- register: the list of workers, whose entries expire.
--
-- KEYS, in a slot of their own: 1 workers zset, name by the time at which its entry expires; 2 records hash, name ->
-- time of the record (8 bytes) and the record; and derived from the first, requests hash, name -> when (8 bytes) and
-- what was requested of it.
-- Invariant: all of them name the same workers, a bounded number, and expire with the last of them. The first write
-- removes.

local REGISTER, RECORDS = KEYS[1], KEYS[2]
local REQUESTS = sub(KEYS[1], 1, -8) .. 'requests'

local function forget(gone)
  if #gone == 0 then return end
  call('ZREM', REGISTER, unpack(gone))
  call('HDEL', RECORDS, unpack(gone))
  redis.pcall('HDEL', REQUESTS, unpack(gone))
end

-- What was requested of a worker: when (8 bytes) and what, '' for nothing.
local function requested(name)
  local found = redis.pcall('HGET', REQUESTS, name)
  return type(found) == 'string' and #found > 8 and found or ''
end

local function register(name, record, ttl, most)
  call('ZREM', REGISTER, name)
  forget(call('ZRANGEBYSCORE', REGISTER, '-inf', now, 'LIMIT', 0, WORKERS_SWEPT_MAX))
  local surplus = call('ZCARD', REGISTER) + 1 - most
  if surplus > 0 then forget(call('ZRANGE', REGISTER, 0, min(surplus, WORKERS_SWEPT_MAX) - 1)) end
  call('ZADD', REGISTER, format('%.0f', now + ttl), name)
  call('HSET', RECORDS, name, now8 .. record)
  if call('PTTL', REGISTER) < 2 * ttl then
    call('PEXPIRE', REGISTER, 2 * ttl)
    call('PEXPIRE', RECORDS, 2 * ttl)
    redis.pcall('PEXPIRE', REQUESTS, 2 * ttl)
  end
end
