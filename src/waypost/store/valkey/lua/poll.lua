-- poll: whether a claim of each of these queues may return messages, for a worker that has nothing to do in them. The
-- same step renews the registrations of the worker's sleepers, and stores its heartbeat and its candidacy as leader.
--
-- KEYS: with a heartbeat workers, records, leader:<role>; then the key `queue` of each queue; the names of the other
-- keys are derived from it. On a Cluster the queues of a call are in one slot, and `never` is last.
-- Arguments: how many queues, how many keys precede theirs (3 with a heartbeat, otherwise 0), the worker's own channel
-- or '', then of a heartbeat name, record, time to live, how many workers are remembered, and how long it would lead
-- ('': it is no candidate); then the sleeper of each queue or ''.
-- Touches: workers, records, leader:<role>, queue, ready, due, leases, outgoing, dead, sleepers, expires, the keys of
-- groups.
-- Invariant: it only changes how long registrations last. Foreign data is reported by the claim. The first write
-- removes: a store whose memory is full can be polled.
-- Reply: the store's time, {leader, token, how long it still leads} or {}, what was requested of the worker, then four
-- numbers for each queue: 1 if it needs a claim, 2 if its sleeper is in a blocking wait, 3 if both, otherwise 0; next
-- due time or time at which a group's rate allows the next message, next lease end, the length of leases (-1: none).

-- include register
-- include leader

local many, before = tonumber(ARGV[FIRST_ARGUMENT]), tonumber(ARGV[FIRST_ARGUMENT + 1])
local own_channel = ARGV[FIRST_ARGUMENT + 2]
local sleepers_from = FIRST_ARGUMENT + 2
local reply = {now, {}, ''}

if before > 0 then
  local name, record, ttl = ARGV[FIRST_ARGUMENT + 3], ARGV[FIRST_ARGUMENT + 4], tonumber(ARGV[FIRST_ARGUMENT + 5])
  local most, lead = tonumber(ARGV[FIRST_ARGUMENT + 6]), tonumber(ARGV[FIRST_ARGUMENT + 7])
  sleepers_from = FIRST_ARGUMENT + 7
  must_be('zset', REGISTER)
  must_be('hash', RECORDS)
  if lead then leader_of(KEYS[3]) end
  register(name, record, ttl, most)
  reply[3] = requested(name)
  if lead then reply[2] = elect(KEYS[3], name, lead, now) end
end

-- The first score of a sorted set, false if it is empty, nil if the key has another type.
local function first_score(key)
  local first = redis.pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first.err then return nil end
  return first[2] and tonumber(first[2]) or false
end

local function number_of(command, key)
  local number = redis.pcall(command, key)
  return type(number) == 'number' and number or 1
end

-- Whether a sleeper is registered, and whether as blocked. A registration of which half of the time is over is renewed.
local function renew(key, name)
  local found = redis.pcall('ZMSCORE', key, name, BLOCKED_MARK .. name)
  if found.err then return false, false end
  local blocked = found[2] and tonumber(found[2]) > now
  local lasts = blocked and tonumber(found[2]) or tonumber(found[1] or 0)
  if lasts <= now then return false, false end
  if lasts < now + SLEEPER_TTL_MS / 2 then
    local known_until = format('%.0f', now + SLEEPER_TTL_MS)
    call('ZREMRANGEBYSCORE', key, '-inf', format('%.0f', now))
    call('ZADD', key, known_until, blocked and BLOCKED_MARK .. name or name, known_until, '')
    call('PEXPIRE', key, SLEEPER_TTL_MS * 2)
  end
  return true, blocked
end

for i = 1, many do
  local key = KEYS[before + i]
  local base, sleeper = sub(key, 1, -6), ARGV[sleepers_from + i]
  local fields = redis.pcall('HMGET', key, 'version', 'policy', 'paused', 'groups', 'expiring')
  local due, lease = first_score(base .. 'due'), first_score(base .. 'leases')
  local expiry = not fields.err and fields[5] and first_score(base .. 'expires')
  if expiry and expiry >= EXPIRY_ASIDE then expiry = false end
  local rules = DEFAULT_POLICY
  local needed = fields.err or due == nil or lease == nil or (fields[1] and tonumber(fields[1]) > VERSION)
  if not needed then
    if fields[2] then rules = cmsgpack.unpack(fields[2]) end
    -- A paused queue hands out no messages, but its messages lapse.
    local paused = fields[3] == '1'
    if paused then due, lease = false, false end
    if expiry then due = due and min(due, expiry) or expiry end
    needed = number_of('HLEN', base .. 'outgoing') > 0 or (due and due <= now) or (lease and lease <= now)
    if not needed and not paused then
      if fields[4] == 'T' then
        -- Groups that cannot hand out their ready messages do not need a claim, until a rate allows the next one.
        local limited = first_score(base .. 'group_limited')
        needed = needed or number_of('ZCARD', base .. 'group_turns') > 0 or limited == nil or limited and limited <= now
        if limited and (not due or limited < due) then due = limited end
      else
        needed = needed or number_of('ZCARD', base .. 'ready') > 0
      end
    end
    -- A claim shortens leases that were given before the clock was set back.
    if lease and rules.lease_ms and lease - now > rules.lease_ms then needed = true end
    if not needed and rules.dead_keep_ms then
      local dead = first_score(base .. 'dead')
      needed = dead and dead <= now - rules.dead_keep_ms
    end
  end
  local blocked = false
  if sleeper ~= '' then
    local registered
    registered, blocked = renew(base .. 'sleepers', sleeper)
    needed = needed or not registered
  end
  local place = i * 4
  reply[place] = (needed and 1 or 0) + (blocked and 2 or 0)
  reply[place + 1] = due and max(0, due - now) or -1
  reply[place + 2] = lease and max(0, lease - now) or -1
  reply[place + 3] = rules.lease_ms or -1
end
-- The worker receives it itself: that proves that notifications arrive, without another request.
if own_channel ~= '' then redis.pcall('PUBLISH', own_channel, '') end
return reply
