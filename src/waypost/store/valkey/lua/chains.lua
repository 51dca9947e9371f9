-- chains: the effects of a step on chains, on messages that wait for them, and on clients that wait for an end.
--
-- Included at the end of every script that can end a message: a step without effects on chains does not create these
-- functions. Keys, all derived in the slot of the queue:
--   chain:<id>           hash    a chain, kept in the queue of its first message: until, open (how many members have a count
--                                that is not 0), last (the member whose end was counted last), last_leaf (the same, of members that
--                                sent nothing on), failed (member NUL reason), watched ('1' if there are watchers), and
--                                each member (queue/id) with its count: + 1 when it began, - 1 when it ended
--   chains               set     the chains of this queue that have not finished: a queue with some is not removed
--   watchers:<id>        set     messages (queue/id) that wait for this chain
--   blockers:<id>        set     chains that a message of this queue still waits for; goes with the message
--   blocked              zset    messages that wait for chains, by the time at which a claim checks those again: what was
--                                lost with a server or a notice must not keep a message waiting for ever
--   waiters:<id>, waiters:chain:<id>  zset  clients that wait for an end, by the time until which they do
--   end:<id>             string  until (8) and how a message ended that a client waited for
-- Invariant: an end is counted once. It is applied here if this is the first queue of the chain, otherwise it is
-- written to outgoing in the same step; so is everything that would make one step too long. If a derived key has
-- another type, it is treated as empty.

if #news > 0 then
  local NAME = string.match(QUEUE, QUEUE_PATTERN)
  local room = CHUNK_MESSAGES_MAX * 2

  local function send_out(target, notice)
    local entry = now8 .. sub(notice.chain, -24) .. struct_pack('>H', #target) .. target .. 'N'
      .. cmsgpack.pack({notice.id, notice.kind, notice.chain, notice.member, notice.failed or false,
        notice.begun and concat(notice.begun, '\0') or ''})
    call('HSET', OUTGOING, notice.id, entry)
    sent_on[#sent_on + 1] = notice.id
    sent_on[#sent_on + 1] = entry
  end

  -- Apply it in this queue at once, as long as this step has room; write it to outgoing for any other queue.
  local function send(target, notice)
    if target ~= NAME or room == 0 then return send_out(target, notice) end
    room = room - 1
    news[#news + 1] = notice
  end

  local function home_of(chain) return sub(chain, 1, -26) end

  local function wake_waiters(key)
    local names = redis.pcall('ZRANGEBYSCORE', key, '(' .. format('%.0f', now), '+inf', 'LIMIT', 0, CHUNK_MESSAGES_MAX)
    if names.err then return end
    for i = 1, min(#names, CHUNK_MESSAGES_MAX - #expectant) do expectant[#expectant + 1] = names[i] end
    call('DEL', key)
  end

  -- Delete the list of chains that a message waited for, when the message ends.
  local function forget_blockers(id)
    local key = OWN .. 'blockers:' .. id
    if type(redis.pcall('SCARD', key)) == 'number' then call('DEL', key) end
    redis.pcall('ZREM', BASE .. 'blocked', id)
  end

  local function remember_end(id, how)
    local key = OWN .. 'end:' .. id
    if type(redis.pcall('GET', key)) == 'table' then return end
    call('SET', key, struct_pack('>I8', now + ENDED_TTL_MS) .. how, 'PX', ENDED_TTL_MS)
  end

  local function ended_here(one)
    local flags = floor(one.flags / 2)
    if flags % 2 == 1 then
      wake_waiters(OWN .. 'waiters:' .. one.id)
      remember_end(one.id, one.how)
    end
    if floor(flags / 2) % 2 == 1 then
      send(home_of(one.chain), {kind = 'ended', id = one.id .. ':' .. format('%.0f', one.token), chain = one.chain,
        member = NAME .. '/' .. one.id, begun = one.begun, failed = one.how ~= 'done' and (one.reason or one.how) or nil})
    end
    if flags % 8 >= 4 then forget_blockers(one.id) end
  end

  local function chain_at(first)
    local fields = redis.pcall('HMGET', OWN .. 'chain:' .. first, 'until', 'open', 'failed', 'watched')
    if fields.err or (tonumber(fields[1] or 0) or 0) <= now or not tonumber(fields[2]) then return end
    return {open = tonumber(fields[2]), failed = fields[3], watched = fields[4]}
  end

  -- Notify the watchers of a chain, at most a chunk of them in one step: for the rest a notice is sent to this same
  -- queue.
  local function complete(chain, failed)
    local first = sub(chain, -24)
    local members = redis.pcall('SPOP', OWN .. 'watchers:' .. first, CHUNK_MESSAGES_MAX)
    if members.err then return end
    for i = 1, #members do
      send(home_of(members[i]), {kind = 'completed', id = sub(members[i], -24) .. ':' .. first, chain = chain, member = members[i],
        failed = failed})
    end
    if #members == CHUNK_MESSAGES_MAX then
      send_out(NAME, {kind = 'watch', id = first .. ':' .. sub(members[1], -24), chain = chain, member = '', failed = failed})
    end
  end

  -- Change the count of a member; return the change of the number of members whose count is not 0.
  local function count_member(key, member, by)
    local count = redis.pcall('HINCRBY', key, member, by)
    if type(count) ~= 'number' then -- a count that is none: as if there had been one
      call('HDEL', key, member)
      return -1
    end
    if count == 0 then
      call('HDEL', key, member)
      return -1
    end
    return count == by and 1 or 0
  end

  local function count_end(notice)
    local first = sub(notice.chain, -24)
    local chain, key = chain_at(first), OWN .. 'chain:' .. first
    if not chain or chain.failed or chain.open == 0 then return end
    local open = chain.open + count_member(key, notice.member, -1)
    local begun = notice.begun or {}
    for i = 1, #begun do open = open + count_member(key, begun[i], 1) end
    local finished = notice.failed or open == 0
    call('HSET', key, 'until', finished and now + ENDED_TTL_MS or NO_END_MS, 'open', open, 'last', notice.member,
      -- Notices may arrive out of order: the end of a message that was sent on may be counted before the end of its sender.
      #begun == 0 and 'last_leaf' or 'last', notice.member)
    if notice.failed then call('HSET', key, 'failed', notice.member .. '\0' .. notice.failed) end
    if finished then
      call('PEXPIRE', key, ENDED_TTL_MS)
      redis.pcall('SREM', BASE .. 'chains', first)
      if chain.watched then call('PEXPIRE', OWN .. 'watchers:' .. first, COMPLETION_TTL_MS) end
      wake_waiters(OWN .. 'waiters:chain:' .. first)
      if chain.watched then complete(notice.chain, notice.failed) end
    end
  end

  local function add_watcher(notice)
    if notice.member == '' then return complete(notice.chain, notice.failed) end
    local first = sub(notice.chain, -24)
    local chain = chain_at(first)
    if chain and not chain.failed and chain.open > 0 then
      local key = OWN .. 'watchers:' .. first
      if type(redis.pcall('SADD', key, notice.member)) == 'table' then return end
      if not chain.watched then call('HSET', OWN .. 'chain:' .. first, 'watched', '1') end
      return
    end
    local completed = sub(notice.member, -24) .. ':' .. first
    local failed = nil
    if not chain then
      -- The chain has ended and was deleted while a notice of its end is still in outgoing: that notice decides.
      if call('HEXISTS', OUTGOING, completed) == 1 then return end
      failed = 'unknown chain'
    elseif chain.failed then
      failed = string.match(chain.failed, '%z(.*)$')
    end
    send(home_of(notice.member), {kind = 'completed', id = completed, chain = notice.chain, member = notice.member,
      failed = failed})
  end

  local function unblock(notice)
    local id = sub(notice.member, -24)
    local raw = call('HGET', STATE, id)
    if not raw or sub(raw, 1, 1) ~= 'W' then return end
    local s = state_of(id, 'W')
    if not s then return set_aside(id, WAITING) end
    if not waits_for_chains(s) then return end
    local key = OWN .. 'blockers:' .. id
    if redis.pcall('SREM', key, notice.chain) ~= 1 then return end
    if notice.failed then
      end_message(s, 'dead', nil, {'blocker_failed', 'ChainFailed', 'chain ' .. notice.chain .. ': ' .. notice.failed})
    elseif call('SCARD', key) == 0 then
      leave_place(s)
      redis.pcall('ZREM', BASE .. 'blocked', id)
      s.flags = s.flags - 8
      make_claimable(s, ready_after_wait(s))
      note_state('promoted', 'unblocked', id, s.raw)
      add_side_effect('promoted', 'unblocked', id, s.raw)
    end
  end

  -- Not again while the last notice is in outgoing: that one is given up after a time limit.
  local function watch(one)
    local id = one.id .. ':w' .. sub(one.chain, -24)
    if call('HEXISTS', OUTGOING, id) == 1 then return end
    send(home_of(one.chain), {kind = 'watch', id = id, chain = one.chain, member = NAME .. '/' .. one.id})
  end

  local act = {['end'] = ended_here, watching = watch, ended = count_end, watch = add_watcher, completed = unblock}
  local at = 1
  while news[at] do
    act[news[at].kind](news[at])
    at = at + 1
  end
end
