-- elect: lead in a role if nobody else does, or lead no more. It belongs to no queue, so it has its own beginning.
--
-- Touches: leader:<role>, the only key, a hash: name, token, until (store milliseconds).
-- Arguments: the clock of a test or '', 'elect' or 'resign', name, how long the lease is in milliseconds.
-- Invariant: one leader until its lease ends or it resigns; the token grows with every change of the leader.
-- Reply: elect: who leads, its token, how long its lease still lasts; resign: '1' or '0'.

local now
if ARGV[1] ~= '' then
  now = tonumber(ARGV[1])
else
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local found = redis.pcall('HMGET', KEYS[1], 'name', 'token', 'until')
if found.err then error('WP-FOREIGN hash ' .. KEYS[1]) end
local leader, token, lasts = found[1] or '', tonumber(found[2] or 0), tonumber(found[3] or 0)
local name, ttl = ARGV[3], tonumber(ARGV[4])
if ARGV[2] == 'resign' then
  if leader ~= name or lasts <= now then return '0' end
  redis.call('HSET', KEYS[1], 'name', '', 'until', '0')
  return '1'
end
if leader ~= name and leader ~= '' and lasts > now then
  if lasts - now > 4 * ttl then
    -- The clock was set back: a leader that is gone is not waited for until the clock has caught up.
    lasts = now + ttl
    redis.call('HSET', KEYS[1], 'until', string.format('%.0f', lasts))
  end
  return {leader, token, lasts - now}
end
if leader ~= name or lasts <= now then token = token + 1 end
redis.call('HSET', KEYS[1], 'name', name, 'token', string.format('%.0f', token), 'until', string.format('%.0f', now + ttl))
return {name, token, ttl}
