-- register: how a worker is remembered for a while.
--
-- KEYS, in a slot of their own: 1 workers zset, name by the end of its time; 2 records hash, name -> when it came
-- (8 bytes) and its record.
-- Invariant: both keys name the same workers, a bounded number, and end with the last of them. The first write removes.

local REGISTER, RECORDS = KEYS[1], KEYS[2]

local function forget(gone)
  if #gone == 0 then return end
  call('ZREM', REGISTER, unpack(gone))
  call('HDEL', RECORDS, unpack(gone))
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
  end
end
