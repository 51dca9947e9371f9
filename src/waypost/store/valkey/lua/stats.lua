-- stats: the figures of a queue. Writes nothing.
--
-- Arguments: how many of the last minutes to show.
-- Touches: queue, ready, due, leases, waiting, dead, sleepers, readers, state, messages.
-- Reply: now, paused, counts, ready, delayed, waiting, leased, dead kept, ages of the oldest ready and leased message,
-- next due, next lease end (-1: none), sleepers, readers, minutes, records that were set aside as damaged, messages
-- accepted beyond `max_pending`, packed changes of the settings or ''.

-- include moves

open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('zset', SLEEPERS)
must_be('hash', READERS)

-- The oldest message of each priority is the first of it, but a reclaimed one may be younger than the next: read the
-- first of both parts. In an ordered group a retried message may precede messages that have waited longer.
local oldest
local function look(from, to, most)
  local ids = call('ZRANGEBYSCORE', READY, format('%.0f', from), format('(%.0f', to), 'LIMIT', 0, most)
  for i = 1, #ids do
    local s = state_of(ids[i])
    if s and (not oldest or s.ready < oldest) then oldest = s.ready end
  end
end
for priority = 0, 9 do
  local middle = score_of(priority, 0)
  look(middle - HEAD_OFFSET, middle, 1)
  look(middle, middle + HEAD_OFFSET, policy.order and priority == 0 and OLDEST_READ_MAX or 1)
end

local longest = -1
local held = call('ZRANGE', LEASES, 0, 999)
if #held > 0 then
  local states = call('HMGET', STATE, unpack(held))
  for i = 1, #states do
    if states[i] and is_sound(states[i]) then longest = max(longest, now - struct_unpack('>I8', states[i], 18)) end
  end
end

-- All except the entry that ends last and those of workers that poll again soon, which end first: a bounded number of
-- them.
local from = '(' .. format('%.0f', now)
local sleepers = call('ZCOUNT', SLEEPERS, from, '+inf')
local first_to_end = call('ZRANGEBYSCORE', SLEEPERS, from, '+inf', 'LIMIT', 0, SCANNED_MAX)
for i = 1, #first_to_end do
  if byte(first_to_end[i]) == 126 then sleepers = sleepers - 1 end
end
if (tonumber(call('ZSCORE', SLEEPERS, '') or '') or 0) > now then sleepers = sleepers - 1 end

local minutes = {}
local this_minute = floor(now / 60000)
local wanted = min(tonumber(ARGV[FIRST_ARGUMENT]), MINUTES_KEPT)
for i = wanted - 1, 1, -1 do
  local field = 'm' .. ((this_minute - i) % MINUTES_KEPT)
  local packed = field == past_field and past_minute or call('HGET', QUEUE, field)
  local minute = unpacked(packed)
  if minute and minute[1] == this_minute - i and #minute > MINUTE_COUNTERS_FIRST then minutes[#minutes + 1] = packed end
end
local current, counted = {this_minute}, 0
for i = COUNT.minute + 1, COUNTERS do
  current[#current + 1] = counts[i]
  counted = counted + counts[i]
end
if wanted > 0 and counted > 0 then minutes[#minutes + 1] = cmsgpack.pack(current) end

local readers, positions = {}, call('HGETALL', READERS)
for i = 1, #positions, 2 do
  if tonumber(positions[i + 1]) then
    readers[#readers + 1] = positions[i]
    readers[#readers + 1] = positions[i + 1]
  end
end
local set_apart = redis.pcall('ZCARD', BASE .. 'damaged')
return {
  now, paused and 1 or 0, cmsgpack.pack(counts), call('ZCARD', READY), call('ZCARD', DUE), call('ZCARD', WAITING),
  call('ZCARD', LEASES), call('ZCARD', DEAD), oldest and now - oldest or -1, longest, until_first(DUE) or -1,
  until_first(LEASES) or -1, sleepers,
  readers, minutes, type(set_apart) == 'number' and set_apart or 0,
  tonumber(call('HGET', QUEUE, 'over_cap') or '') or 0, wanted > 0 and call('HGET', QUEUE, 'changes') or '',
}
