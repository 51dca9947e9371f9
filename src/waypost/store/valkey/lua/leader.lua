-- leader: the leader of a role, and how it changes.
--
-- leader:<role> is a hash: name, token, until (store milliseconds).
-- Invariant: one leader until its lease ends or it resigns; the token grows with every change of the leader.

local function leader_of(key)
  local found = redis.pcall('HMGET', key, 'name', 'token', 'until')
  if found.err then
    if string.find(found.err, 'WRONGTYPE', 1, true) then error('WP-FOREIGN hash ' .. key) end
    error('WP-DENIED ' .. (string.match(found.err, 'script: (.*)') or found.err))
  end
  return found[1] or '', tonumber(found[2] or 0), tonumber(found[3] or 0)
end

-- Become leader if no other leads, or remain it: returns the leader, its token, how long its lease still lasts.
local function elect(key, name, ttl, at)
  local leader, token, lasts = leader_of(key)
  if leader ~= name and leader ~= '' and lasts > at then
    if lasts - at > 4 * ttl then
      -- The clock was set back: the lease is shortened, so that a leader that died is replaced before the clock has
      -- caught up.
      lasts = at + ttl
      redis.call('HSET', key, 'until', string.format('%.0f', lasts))
    end
    return {leader, token, lasts - at}
  end
  if leader ~= name or lasts <= at then token = token + 1 end
  redis.call('HSET', key, 'name', name, 'token', string.format('%.0f', token), 'until', string.format('%.0f', at + ttl))
  return {name, token, ttl}
end
