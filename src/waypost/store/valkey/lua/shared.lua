-- shared: functions that most scripts need in addition to base, but not the fast path of publish, which includes them
-- after it. Every other script has them directly after base.
-- Invariant: a record that cannot be used is set aside once, and arrivals are deleted in bounded numbers.

local damaged = {} -- ids that this step set aside

-- Whether a packed state can be read and is complete: its texts are as long as it declares.
local function is_sound(raw, status)
  if #raw < 65 or (status and sub(raw, 1, 1) ~= status) or byte(raw, 48) > 9 then return false end
  local ends, flags = 65 + byte(raw, 61) * 256 + byte(raw, 62) + byte(raw, 63) * 256 + byte(raw, 64) + byte(raw, 65), byte(raw, 38)
  if flags % 8 >= 4 then
    if #raw < ends + 27 then return false end
    ends = ends + 1 + byte(raw, ends + 1)
  end
  if flags >= 128 then
    if #raw < ends + 2 then return false end
    ends = ends + 2 + byte(raw, ends + 1) * 256 + byte(raw, ends + 2)
  end
  return #raw == ends
end

-- Remove a message whose record cannot be used from its index, so that it blocks no other. Nil: it was removed before.
local function set_aside(id, place)
  if place then call('ZREM', place, id) end
  redis.pcall('ZADD', BASE .. 'damaged', now, id)
  damaged[#damaged + 1] = id
end

local function bulk(command, key, list, length)
  for i = 1, length, 1000 do call(command, key, unpack(list, i, min(i + 999, length))) end
end

-- Store arrivals, alternately times and ids, and delete arrivals that have expired: a bounded number, more than one
-- step can add. The set expires with the last of them. The first write removes.
local function remember_arrivals(arrivals, length)
  local old = call('ZRANGEBYSCORE', ARRIVALS, '-inf', now, 'LIMIT', 0, ARRIVALS_FORGOTTEN_MAX)
  call('ZREM', ARRIVALS, '', unpack(old))
  if length == 0 then return end
  bulk('ZADD', ARRIVALS, arrivals, length)
  call('PEXPIRE', ARRIVALS, ARRIVAL_TTL_MS)
end

-- Milliseconds until the first member of a sorted set of times, or nil.
local function until_first(key)
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first[2] then return max(0, tonumber(first[2]) - now) end
end
