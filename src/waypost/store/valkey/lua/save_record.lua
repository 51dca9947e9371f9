-- save_record: save or remove a shared record, if it has the expected version.
--
-- KEYS, in a slot of their own: 1 names of this kind by creation (zset); 2 data hash, name -> version (8) creation (8) expiry
-- or 0 (8) and the data.
-- Arguments: name, the expected version (0: none) or '', time to live in milliseconds or 0, how many of the kind are kept, and
-- the data unless the record is to be removed.
-- Touches: shared, shared data.
-- Invariant: both keys name the same records, a bounded number. The version of a record grows with each save, and is no
-- smaller than the store's time: so a record that was removed and created again has a greater version.
-- Reply: the store's time, 1 if the record is as wanted now, and the packed record or ''.

local SHARED, SHARED_DATA = KEYS[1], KEYS[2]

must_be('zset', SHARED)
must_be('hash', SHARED_DATA)
local name, expected = ARGV[FIRST_ARGUMENT], ARGV[FIRST_ARGUMENT + 1]
local ttl, keep = tonumber(ARGV[FIRST_ARGUMENT + 2]), tonumber(ARGV[FIRST_ARGUMENT + 3])
local data = ARGV[FIRST_ARGUMENT + 4]

local function is_over(packed)
  local ends = struct_unpack('>I8', packed, 17)
  return ends > 0 and ends <= now
end

local found = call('HGET', SHARED_DATA, name)
if found and is_over(found) then found = false end
if found and data and sub(found, 25) == data then return {now, 1, found} end
local version, created = 0, now
if found then version, created = struct_unpack('>I8I8', found) end
if expected ~= '' and tonumber(expected) ~= version then return {now, 0, found or ''} end
if not data then
  call('ZREM', SHARED, name)
  call('HDEL', SHARED_DATA, name)
  return {now, found and 1 or 0, ''}
end
local packed = struct_pack('>I8I8I8', max(version + 1, now), created, ttl > 0 and now + ttl or 0) .. data
call('HSET', SHARED_DATA, name, packed)
call('ZADD', SHARED, format('%.0f', created), name)
if not found then
  local surplus = call('ZCARD', SHARED) - keep
  local oldest = call('ZRANGE', SHARED, 0, RECORDS_SWEPT_MAX - 1)
  for i = 1, #oldest do
    local one = call('HGET', SHARED_DATA, oldest[i])
    if i <= surplus or not one or is_over(one) then
      call('ZREM', SHARED, oldest[i])
      call('HDEL', SHARED_DATA, oldest[i])
    end
  end
end
return {now, 1, packed}
