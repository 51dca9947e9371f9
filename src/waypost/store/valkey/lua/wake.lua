-- wake: which sleeping workers and waiters a step wakes, and how. Part of the base.
--
-- Invariant: called after writes, so it never fails: a sleeper that is not woken finds its messages at its safety poll.

-- Remove up to `number` sleepers from the list, the last registered first; '*' if the list is lost.
local function choose_sleepers(number)
  if number == 0 or paused then return {} end
  number = min(number, CHUNK_MESSAGES_MAX)
  -- Called after writes, so it must not fail: if the key has another type, all workers are woken, as if it were absent.
  local found = redis.pcall('ZREVRANGE', SLEEPERS, 0, number + 1, 'WITHSCORES')
  if found.err then return {'*'} end
  local names, known = {}, false
  for i = 1, #found, 2 do
    local name = found[i]
    if tonumber(found[i + 1]) <= now then break end
    if byte(name) == 126 then
      -- A worker polls again so soon that it finds a few messages without a notification. An entry that is further in
      -- the future than a worker may announce is from before the clock was set back.
      if number <= POLL_SOON_MESSAGES_MAX and tonumber(found[i + 1]) <= now + POLL_SOON_MS_MAX then return {} end
    else
      known = true
      if name ~= '' and #names < number then names[#names + 1] = name end
    end
  end
  if not known then
    call('ZADD', SLEEPERS, now + SLEEPER_TTL_MS, '')
    call('PEXPIRE', SLEEPERS, SLEEPER_TTL_MS * 2)
    return {'*'}
  end
  if #names > 0 and number <= POLL_SOON_MESSAGES_MAX and #found == 2 * (number + 2) then
    -- There may be more sleepers. Workers that poll again soon are at the other end: their entries last milliseconds,
    -- not a minute.
    local soon = call('ZRANGEBYSCORE', SLEEPERS, '(' .. format('%.0f', now), now + POLL_SOON_MS_MAX, 'LIMIT', 0, 64)
    for i = 1, #soon do
      if byte(soon[i]) == 126 then return {} end
    end
  end
  if #names > 0 then call('ZREM', SLEEPERS, unpack(names)) end
  return names
end

-- Wake sleepers for messages that a step made claimable: those in a blocking wait by a push to their list, the others
-- by a notification on the channel <base>ready. A notification that cannot be sent is no failure: the sleeper finds its
-- messages at its next safety poll. Returns the names that were notified.
local function wake(number)
  local names, notified = choose_sleepers(number), {}
  for i = 1, #names do
    if byte(names[i]) == BLOCKED_BYTE then
      local unblocks = BASE .. 'unblock:' .. names[i]
      redis.pcall('RPUSH', unblocks, '')
      redis.pcall('PEXPIRE', unblocks, UNBLOCK_TTL_MS)
    else
      notified[#notified + 1] = names[i]
    end
  end
  if #notified > 0 then redis.pcall('PUBLISH', BASE .. 'ready', concat(notified, '\n')) end
  return notified
end
