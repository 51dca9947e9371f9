-- elect: become leader of a role if no other leads, or resign. It belongs to no queue, so it does not include base.
--
-- Touches: leader:<role>, the only key, a hash: name, token, until (store milliseconds).
-- Arguments: the clock of a test or '', 'elect' or 'resign', name, how long the lease is in milliseconds.
-- Invariant: one leader until its lease ends or it resigns; the token grows with every change of the leader.
-- Reply: elect: the leader, its token, how long its lease still lasts; resign: '1' or '0'.

-- include leader

local now
if ARGV[1] ~= '' then
  now = tonumber(ARGV[1])
else
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
local name = ARGV[3]
if ARGV[2] == 'elect' then return elect(KEYS[1], name, tonumber(ARGV[4]), now) end
local leader, token, lasts = leader_of(KEYS[1])
if leader ~= name or lasts <= now then return '0' end
redis.call('HSET', KEYS[1], 'name', '', 'until', '0')
return '1'
