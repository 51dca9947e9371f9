-- claim: lease up to n messages, highest priority first, first in first out; in a grouped queue by the turns of its
-- groups.
--
-- Arguments: limit, worker, sleeper or '', '1' to repeat only (lease no new messages), in how many milliseconds it
-- polls again or '', how many bytes of envelopes at most (one message whatever its size), nonce of this attempt.
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, journal, sleepers, rate, outgoing,
-- completed, operations, expires, the keys of chains, the keys of groups.
-- Invariant: one holder. A lease is a member of leases and a state with status L, a greater token and this call's
-- nonce. The first write removes: a store whose memory is full can be drained.
-- Reply: lease end, next due, next lease end, when the rate allows the next message (milliseconds, -1: none), 1 if
-- paused, plus 2 if it is no queue, plus 4 if it is grouped, outgoing, now, the length of leases, 1 if there are more
-- messages, ids of damaged records that were set aside, separated by NUL, side effects or '' (length of the names to
-- wake (4), names separated by NUL, items of moves.lua), then value and state of each message; '' for the state of a
-- message that was never claimed before: it follows from the other values.

local limit = min(CHUNK_MESSAGES_MAX, tonumber(ARGV[FIRST_ARGUMENT]))
local worker, sleeper = ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2]
local repeat_only = ARGV[FIRST_ARGUMENT + 3] == '1'
local poll_soon_ms, bytes_left = tonumber(ARGV[FIRST_ARGUMENT + 4]), tonumber(ARGV[FIRST_ARGUMENT + 5])
local NONCE = ARGV[FIRST_ARGUMENT + 6]

local first = first_result()
open_queue()
must_be('hash', MESSAGES)
must_be('zset', READY)
local with_state, held = must_be('hash', STATE), must_be('zset', LEASES)
local timers, outgoing = must_be('zset', DUE), must_be('hash', OUTGOING)
if sleeper ~= '' or poll_soon_ms then must_be('zset', SLEEPERS) end
if policy.rate_count then must_be('list', RATE) end
if policy.completed_max > 0 then must_be('list', COMPLETED) end
if expiring then must_be('zset', BASE .. 'expires') end

local more = false -- the next message would have made the reply too long
local goes_on = false -- there may be groups that can go on behind those that this claim read
local extra = '' -- what else it did
local plain, leased = false, 0

local function header(lease_end, next_rate)
  -- The fast path adds no timer, and only leases that end at `lease_end`: if there were none before, no search is
  -- needed.
  local next_due = not (plain and timers == 0) and until_first(DUE) or -1
  if expiring then
    local next_lapse = call('ZRANGE', BASE .. 'expires', 0, 0, 'WITHSCORES')[2]
    if next_lapse and tonumber(next_lapse) < EXPIRY_ASIDE then
      next_lapse = max(0, tonumber(next_lapse) - now)
      next_due = next_due < 0 and next_lapse or min(next_due, next_lapse)
    end
  end
  local next_lease = plain and held == 0 and (leased > 0 and lease_end - now or -1) or until_first(LEASES) or -1
  return {lease_end, next_due, next_lease, next_rate or -1, (paused and 1 or 0) + (gone and 2 or 0) + (grouped and grouped ~= 'E' and 4 or 0),
    outgoing + #sent_on / 2, now, policy.lease_ms or -1, more and 1 or 0, concat(damaged, '\0'), extra}
end

if first or repeat_only then
  -- The leases get the nonce of this attempt: the first reply may have reached another process.
  first = first or NONCE
  begin_removing()
  local held_by, lease_end = sub(first, 1, 12), -1
  remember(NONCE .. sub(first, 13))
  local again = {}
  local at = 13
  while at <= #first and byte(first, at) ~= 1 do
    local id = sub(first, at, at + 23)
    at = at + 24
    local state, value = call('HGET', STATE, id), call('HGET', MESSAGES, id)
    if state and is_sound(state, 'L') and sub(state, 6, 17) == held_by and value and sub(value, 11, 34) == id then
      state = sub(state, 1, 5) .. NONCE .. sub(state, 18)
      lease_end = now + struct_unpack('>I4', state, 26)
      call('HSET', STATE, id, state)
      call('ZADD', LEASES, lease_end, id)
      again[#again + 1] = value
      again[#again + 1] = state
    end
  end
  more, extra = #again > 0, sub(first, at + 1)
  local reply = header(lease_end)
  for i = 1, #again do reply[i + 11] = again[i] end
  return reply
end

local due, expired, late_leases = {}, {}, {}
if not paused then
  if timers > 0 then due = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, PROMOTE_MAX) end
  if held > 0 then expired = call('ZRANGEBYSCORE', LEASES, '-inf', now, 'LIMIT', 0, RECLAIM_MAX) end
  if policy.rate_count then must_be('list', RATE) end
end
-- Messages that wait for chains and have not checked these for long.
local unsure = redis.pcall('ZRANGEBYSCORE', BASE .. 'blocked', '-inf', now, 'LIMIT', 0, BLOCKER_CHECKS_MAX)
if unsure.err then unsure = {} end
-- The fast path: only new messages, none of which ends here. A message that has a state and no lease may have a key or
-- have failed; new messages have neither.
-- If a record is damaged these numbers can be equal by chance: the queue is then marked as uneven, until it is
-- repaired.
plain = with_state == held and not uneven and #due == 0 and #expired == 0 and #unsure == 0 and policy.lease_ms
  and not (policy.dead_max or policy.dead_keep_ms) and not grouped and not expiring
if not plain then
  must_be('hash', HOLDERS)
  must_be('zset', WAITING)
  must_be('zset', DEAD)
  must_be('hash', ERRORS)
end
-- include moves if not plain
-- include grouping as turns

begin_removing()
if sleeper ~= '' then call('ZREM', SLEEPERS, sleeper, BLOCKED_MARK .. sleeper) end
if poll_soon_ms then call('ZREM', SLEEPERS, '~' .. worker) end

for i = 1, #unsure do
  local chains = redis.pcall('SMEMBERS', OWN .. 'blockers:' .. unsure[i])
  if i > 1 and #news + #chains > CHUNK_MESSAGES_MAX then break end
  call('ZADD', BASE .. 'blocked', now + BLOCKER_CHECK_MS, unsure[i])
  for j = 1, #chains do news[#news + 1] = {kind = 'watching', id = unsure[i], chain = chains[j]} end
  if #chains == 0 then call('ZREM', BASE .. 'blocked', unsure[i]) end
end

for i = 1, #due do
  local s = state_of(due[i], 'D')
  if s then
    leave_place(s)
    make_claimable(s, s.ready)
    note_state('promoted', 'due', s.id, s.raw)
    add_side_effect('promoted', 'due', s.id, s.raw)
  else
    set_aside(due[i], DUE)
  end
end

-- A lease that ends later than now plus its own length was given before the clock was set back: it is shortened to its
-- length from now.
if policy.lease_ms and held > 0 and not paused then
  for i = 0, RECLAIM_MAX - 1 do
    local latest = call('ZREVRANGE', LEASES, i, i, 'WITHSCORES')
    if not latest[2] or tonumber(latest[2]) <= now + policy.lease_ms then break end
    local raw = call('HGET', STATE, latest[1])
    local ends = raw and #raw >= 29 and now + struct_unpack('>I4', raw, 26)
    if not ends or tonumber(latest[2]) <= ends then break end
    late_leases[i * 2 + 1], late_leases[i * 2 + 2] = ends, latest[1]
  end
  bulk('ZADD', LEASES, late_leases, #late_leases)
end

for i = 1, #expired do
  local s = state_of(expired[i], 'L')
  if not s then
    set_aside(expired[i], LEASES)
  elseif not ends_otherwise(s, 'expired') then
    count_up(COUNT.expired, MINUTE.expired, 1)
    note_state('expired', nil, s.id, s.raw)
    add_side_effect('expired', nil, s.id, s.raw)
    local deadline = tonumber(call('ZSCORE', LEASES, s.id))
    leave_place(s)
    to_head(s, deadline, 'expired')
  end
end

-- A step ends a bounded number of lapsed messages. If there are more, each message is checked before it is handed out.
local lapsed = expiring and lapse() or 0

if grouping then
  if grouping.build then grouping.build() end
  if not paused then grouping.resume_limited() end
  grouping.write()
end

-- How many may be leased now.
local room = paused and 0 or limit
local function rate_entry(text)
  local at, number = string.match(text, '(%d+):(%d+)')
  return tonumber(at) or 0, tonumber(number) or 0
end
if policy.max_running then room = min(room, max(0, policy.max_running - call('ZCARD', LEASES))) end
if policy.rate_count and not paused then
  -- Delete claims that are older than the rate's window, a bounded number: until the rest is deleted the sum is too
  -- high, never too low.
  local function forget_rate(horizon)
    local last = rate_entry(call('LINDEX', RATE, -1) or '')
    if last <= horizon then
      call('DEL', RATE)
      counts[COUNT.rate_sum] = 0
      return
    end
    if last > now then
      -- The clock was set back. The whole window counts from now on: that is too much for one window, but otherwise it
      -- would count until the clock has caught up.
      call('DEL', RATE)
      call('RPUSH', RATE, format('%.0f:%.0f', now, counts[COUNT.rate_sum]))
      return
    end
    for _ = 1, RECLAIM_MAX do
      local at, number = rate_entry(call('LINDEX', RATE, 0) or '')
      if at > horizon then return end
      call('LPOP', RATE)
      counts[COUNT.rate_sum] = counts[COUNT.rate_sum] - number
    end
  end

  forget_rate(now - policy.rate_per_ms)
  room = min(room, max(0, policy.rate_count - counts[COUNT.rate_sum]))
end

local at_most_once = not policy.lease_ms
local lease_end = at_most_once and -1 or now + policy.lease_ms
local replies, ids = {}, {}
local states, leases = {}, {}
local notes = policy.journal == 'all' or policy.journal == 'full'
local first_claims, again, buried = 0, {}, 0
local total_wait, longest_wait = 0, 0

-- The part that the states of all new messages of this claim have in common.
local FRESH_HEAD = struct_pack('>c1I4c12I8I4I4I4BB', 'L', 1, NONCE, now, policy.lease_ms or 0, 1, 0, 0, 0)
local FIRST_NOTE, SAME_NOTE = 'S' .. EVENT.claimed .. '\0', 's' .. EVENT.claimed .. '\0'

local function finish_at_once(s)
  s.status, s.popped = 'R', true
  pack_state(s)
  end_message(s, 'done', 'at_most_once')
end

-- Lease a message that was claimed before, or has a key, a group or a due time.
local function lease_known(id, raw)
  local s = read_state(id, raw)
  local wait = max(0, now - s.ready)
  total_wait, longest_wait = total_wait + wait, max(longest_wait, wait)
  if s.token == 0 then
    first_claims = first_claims + 1
  else
    local cause = s.cause >= 1 and s.cause <= REDELIVERY_CAUSES and s.cause or CAUSE_NUMBER.expired
    again[cause] = (again[cause] or 0) + 1
  end
  s.status, s.token, s.nonce, s.claimed = 'L', s.token + 1, NONCE, now
  s.lease, s.deliveries, s.worker = policy.lease_ms or 0, s.deliveries + 1, worker
  if may_lapse(s) then put_expiry_aside(id) end
  local state = pack_state(s)
  note_state('claimed', codes().cause_name[s.cause], id, state)
  if has_key_until_claimed(s) and s.key ~= '' then release_key(s, 'claimed') end
  if at_most_once then finish_at_once(s) end
  return state
end

local TAILS = {} -- of the fixed part of a state, by the size of its message

-- Lease a plain message that was never claimed: its state consists of the common part and the head of its value.
local function lease_fresh(id, value)
  first_claims = first_claims + 1
  local wait = max(0, now - struct_unpack('>I8', value))
  total_wait, longest_wait = total_wait + wait, max(longest_wait, wait)
  local tail = TAILS[#value]
  if not tail then
    tail = struct_pack('>I4HHB', #value - 9, 0, 0, #worker)
    TAILS[#value] = tail
  end
  local fixed = FRESH_HEAD .. sub(value, 1, 9) .. sub(value, 1, 8) .. tail
  local state = fixed .. worker
  if notes then
    event_count = event_count + 1
    if last_tail == worker then
      items[item_count + 1], items[item_count + 3] = SAME_NOTE, fixed
    else
      items[item_count + 1], items[item_count + 3] = FIRST_NOTE, state
      last_tail = worker
    end
    items[item_count + 2] = id
    item_count = item_count + 3
  end
  if at_most_once then finish_at_once(read_state(id, state)) end
  return state
end

local function lease(id, value, raw)
  local state = raw and lease_known(id, raw) or lease_fresh(id, value)
  leased = leased + 1
  replies[leased * 2 - 1], replies[leased * 2] = value, raw and state or ''
  ids[leased] = id
  if not at_most_once then
    states[leased * 2 - 1], states[leased * 2] = id, state
    leases[leased * 2 - 1], leases[leased * 2] = lease_end, id
  end
end

-- The same for a grouped queue: messages by the turns of their groups, each removed from its places when it is leased.
if grouping then
  local round = 64
  while leased < room and not more and #damaged < RECLAIM_MAX do
    local ids, groups, heads = grouping.plan(min(round, room - leased))
    if #ids == 0 then break end
    round = round * 8
    local scores, raws = call('ZMSCORE', READY, unpack(ids)), call('HMGET', STATE, unpack(ids))
    local one_by_one = #ids > 1 and call('HSTRLEN', MESSAGES, ids[1]) * #ids > bytes_left
    local values = not one_by_one and call('HMGET', MESSAGES, unpack(ids))
    local stopped, as_planned = false, true
    for i = 1, #ids do
      local id, raw, score, g = ids[i], raws[i], scores[i], groups[i]
      local value = values and values[i] or call('HGET', MESSAGES, id)
      if not grouping.is_there(heads[i], score) then
        grouping.take(g, heads[i], id)
        as_planned = false
      elseif not value or sub(value, 11, 34) ~= id or byte(value, 9) > 9 or (raw and not is_sound(raw, 'R')) then
        grouping.take(g, heads[i], id, score)
        set_aside(id)
        as_planned = false
      elseif lapsed == LAPSE_MAX and raw and byte(raw, 38) >= 16 and has_lapsed(id) then
        grouping.take(g, heads[i], id, score)
        local s = read_state(id, raw)
        s.popped = true
        end_message(s, 'dropped', 'lapsed')
        as_planned = false
      elseif raw and policy.max_deliveries and struct_unpack('>I4', raw, 30) >= policy.max_deliveries then
        if buried == BURY_MAX then
          stopped = true
        else
          buried = buried + 1
          grouping.take(g, heads[i], id, score)
          local s = read_state(id, raw)
          s.popped = true
          local failure = s.attempts > 0 and failure_of(s.id) or {'', '', ''}
          end_message(s, 'dead', nil, {'max_deliveries', failure[2], failure[3]})
        end
        as_planned = false
      else
        bytes_left = bytes_left - (#value - 9)
        if bytes_left < 0 and leased > 0 then
          more, as_planned = true, false
        else
          g = grouping.take(g, heads[i], id, score, true)
          lease(id, value, raw)
          grouping.hand_out(g, id, score, not at_most_once)
        end
      end
      -- The rest of the plan assumed that this message would be handed out.
      if not as_planned then break end
    end
    grouping.write_taken()
    if stopped then break end
  end
  -- None of the groups that this claim read can hand out a message: the next claim follows at once and reads others.
  goes_on = leased < room and grouping.has_more()
  more = more or goes_on and leased > 0
end

local round, put_back = 64, {}
while not grouping and leased < room and not more and #damaged < RECLAIM_MAX do
  local asked = min(round, room - leased)
  local popped = call('ZPOPMIN', READY, asked)
  local number = #popped / 2
  if number == 0 then break end
  -- Sizes are known only when values are read: the rounds grow, so that a few small messages at first do not cause many
  -- large ones to be read at once.
  round = round * 8
  local wanted = {}
  for i = 1, number do wanted[i] = popped[i * 2 - 1] end
  -- If the first message's size suggests that they do not all fit, values are read one by one.
  local one_by_one = number > 1 and call('HSTRLEN', MESSAGES, wanted[1]) * number > bytes_left
  local values = not one_by_one and call('HMGET', MESSAGES, unpack(wanted))
  local raws = plain and with_state == 0 and {} or call('HMGET', STATE, unpack(wanted))
  local stopped = false
  for i = 1, number do
    local raw = raws[i]
    local value = values and values[i]
    if not values and not stopped and not more then value = call('HGET', MESSAGES, wanted[i]) end
    if stopped or more then
      put_back[#put_back + 1], put_back[#put_back + 2] = popped[i * 2], wanted[i]
    elseif not value or sub(value, 11, 34) ~= wanted[i] or byte(value, 9) > 9 or (raw and not is_sound(raw, 'R')) then
      set_aside(wanted[i])
    elseif lapsed == LAPSE_MAX and raw and byte(raw, 38) >= 16 and has_lapsed(wanted[i]) then
      local s = read_state(wanted[i], raw)
      s.popped = true
      end_message(s, 'dropped', 'lapsed')
    elseif raw and plain then
      -- States and leases are of different messages though they are equal in number: let the next claim use the general
      -- path.
      if not uneven then call('HSET', QUEUE, 'uneven', '1') end
      uneven = '1'
      put_back[#put_back + 1], put_back[#put_back + 2] = popped[i * 2], wanted[i]
    elseif raw and policy.max_deliveries and struct_unpack('>I4', raw, 30) >= policy.max_deliveries then
      if buried == BURY_MAX then
        stopped = true
        put_back[#put_back + 1], put_back[#put_back + 2] = popped[i * 2], wanted[i]
      else
        buried = buried + 1
        local s = read_state(wanted[i], raw)
        s.popped = true
        local failure = s.attempts > 0 and failure_of(s.id) or {'', '', ''}
        end_message(s, 'dead', nil, {'max_deliveries', failure[2], failure[3]})
      end
    else
      bytes_left = bytes_left - (#value - 9)
      if bytes_left < 0 and leased > 0 then
        more = true
        put_back[#put_back + 1], put_back[#put_back + 2] = popped[i * 2], wanted[i]
      else
        lease(wanted[i], value, raw)
      end
    end
  end
  if stopped or plain and (uneven or number < asked) then break end
end
bulk('ZADD', READY, put_back, #put_back)

if leased > 0 then
  bulk('HSET', STATE, states, #states)
  bulk('ZADD', LEASES, leases, #leases)
  count_up(COUNT.claims, MINUTE.claims, leased)
  counts[MINUTE.wait_ms] = counts[MINUTE.wait_ms] + total_wait
  counts[MINUTE.wait_ms_max] = max(counts[MINUTE.wait_ms_max], longest_wait)
  count_up(COUNT.first_claims, nil, first_claims)
  for cause, number in pairs(again) do tally('again_' .. codes().cause_name[cause], number) end
  if policy.rate_count then
    call('RPUSH', RATE, format('%.0f:%.0f', now, leased))
    counts[COUNT.rate_sum] = counts[COUNT.rate_sum] + leased
  end
end
-- It leased all messages that there were, and has capacity for more; a claim with limit 0 only removes the registration
-- of the sleeper.
if sleeper ~= '' and leased < limit and not more then
  call('ZREMRANGEBYSCORE', SLEEPERS, '-inf', now)
  call('ZADD', SLEEPERS, now + SLEEPER_TTL_MS, sleeper, now + SLEEPER_TTL_MS, '')
  call('PEXPIRE', SLEEPERS, SLEEPER_TTL_MS * 2)
end
if poll_soon_ms and poll_soon_ms > 0 and leased < limit and not more then
  call('ZADD', SLEEPERS, now + min(poll_soon_ms, POLL_SOON_MS_MAX), '~' .. worker)
  call('PEXPIRE', SLEEPERS, SLEEPER_TTL_MS * 2)
end
if not plain then enforce_dead_limits() end

local ready_before = freshly_ready
-- include chains
if grouping then grouping.write() end
if ready_before and freshly_ready > ready_before then
  -- Messages whose chains ended in this step.
  local names = wake(freshly_ready - ready_before)
  for i = 1, #names do expectant[#expectant + 1] = names[i] end
end
if side_effects or #expectant > 0 then
  local names = concat(expectant, '\0')
  extra = struct_pack('>I4', #names) .. names .. (side_effects and concat(side_effects) or '')
end

-- Also if nothing was journalled: messages that became due or expired have been counted, or have got a number of the
-- sequence.
if item_count > 0 or leased > 0 or buried > 0 or lapsed > 0 or #due > 0 or #expired > 0 or #unsure > 0 or #damaged > 0
  or policy.rate_count then
  write_book()
end
remember(NONCE .. concat(ids) .. (extra ~= '' and '\1' .. extra or ''))

-- The time until the rate allows another message.
local next_rate = nil
if policy.rate_count and not paused and counts[COUNT.rate_sum] >= policy.rate_count then
  next_rate = max(0, rate_entry(call('LINDEX', RATE, 0) or '') + policy.rate_per_ms - now)
end
if grouping and not paused then next_rate = goes_on and 0 or next_rate or grouping.next_rate() end
local reply = header(lease_end, next_rate)
for i = 1, leased * 2 do reply[i + 11] = replies[i] end
return reply
