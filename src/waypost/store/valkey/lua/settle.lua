-- settle: end deliveries, each as its handler decided, if its token and nonce still hold the lease.
--
-- Arguments: the plain dones, id (24) L token (4) nonce (12) each in one text, or ''; the limit of the claim that
-- follows in the same flush, or 0: that many fewer sleepers are woken; and, if not all are plain dones, one packed
-- settlement each: id, token and nonce as above, outcome (1), after (8), result TTL (8), lengths of reason (2), error
-- type (2), error (4) and result (4), 1 if there is a result (1), number of continuations (1), the texts, and each
-- continuation as id (24), lengths of queue (2) and draft (4), queue, draft.
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, completed, journal, sleepers,
-- outgoing, operations, window:<key>, result:<id>, the keys of chains, the keys of groups.
-- Invariant: a stale token or nonce changes nothing. Dead, done and dropped are final. The messages that a handler
-- forwards are recorded in the same step as the end of its message. The first write removes, so that a full store can
-- be drained.
-- Reply: one letter per settlement, then the sleepers and waiters to wake and, after a byte 1, the side effects.

local first = first_result()
if first then
-- include known_answer
end
open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', LEASES)
must_be('zset', READY)
must_be('zset', DUE)
must_be('hash', HOLDERS)
if policy.completed_max > 0 then must_be('list', COMPLETED) end

-- Whether a state has a failed attempt, a flag or a key: the numbers of all of these, read byte by byte without
-- creating texts. Nil if the state cannot be read.
local function has_more(state)
  if #state < 65 then return end
  local a1, a2, a3, a4, flags = byte(state, 34, 38)
  local k1, k2, g1, g2, w = byte(state, 61, 65)
  if a1 + a2 + a3 + a4 + flags + k1 + k2 > 0 then
    if is_sound(state) then return true end
    return
  end
  if #state ~= 65 + g1 * 256 + g2 + w then return end
  return false
end

local plain = ARGV[FIRST_ARGUMENT]
local statuses = {}
local due_before, changes_places = nil, false
-- Of plain dones: their ids and states, and the results of `has_more` for those whose lease is still held.
local ids, states, more_of = {}, {}, {}
-- The fast path: dones that leave only their event.
local short = plain ~= '' and policy.completed_max == 0
if plain ~= '' then
  for i = 1, #plain / 41 do ids[i] = sub(plain, i * 41 - 40, i * 41 - 17) end
  states = call('HMGET', STATE, unpack(ids))
  for i = 1, #ids do
    if not states[i] or sub(states[i], 1, 17) ~= sub(plain, i * 41 - 16, i * 41) then
      statuses[i] = 'l'
    else
      more_of[i] = has_more(states[i])
      if more_of[i] ~= false then short = false end
    end
  end
end
-- include moves if not short
-- include grouping

if plain ~= '' then
  local ended, done, unreadable, groups = {}, 0, {}, {}
  local total_run, longest_run = 0, 0
  local slow = policy.completed_max > 0
  local notes = policy.journal == 'all' or policy.journal == 'full'
  local head, same_head = 'S' .. EVENT.done .. '\0', 's' .. EVENT.done .. '\0'
  for i = 1, #ids do
    local state, id, more = states[i], ids[i], more_of[i]
    if ended[id] then statuses[i] = 'l' end
    if statuses[i] then
      -- Lost.
    elseif more == nil then
      -- Its record is damaged: whether others wait for its end, or its key has a next generation, cannot be known.
      unreadable[#unreadable + 1] = id
      statuses[i] = 'l'
    elseif slow or more then
      -- Its key may have a next generation, its failures are recorded, others wait for it, or it is kept: the general
      -- path.
      if not changes_places then
        must_be('zset', WAITING)
        must_be('zset', DEAD)
        must_be('hash', ERRORS)
        must_be('hash', OUTGOING)
        changes_places = true
        due_before = until_first(DUE)
        begin_removing()
      end
      statuses[i] = 'd'
      ended[id] = true
      end_message(read_state(id, state), 'done')
    else
      statuses[i] = 'd'
      ended[id] = true
      done = done + 1
      ended[done] = id
      if grouping then groups[done] = sub(state, 66, 65 + byte(state, 63) * 256 + byte(state, 64)) end
      local ran = max(0, now - struct_unpack('>I8', state, 18))
      total_run, longest_run = total_run + ran, max(longest_run, ran)
      if notes then
        event_count = event_count + 1
        local tail = sub(state, 66)
        if tail == last_tail then
          items[item_count + 1], items[item_count + 3] = same_head, sub(state, 1, 65)
        else
          items[item_count + 1], items[item_count + 3] = head, state
          last_tail = tail
        end
        items[item_count + 2] = id
        item_count = item_count + 3
      end
    end
  end
  if not changes_places then begin_removing() end
  for i = 1, #unreadable do set_aside(unreadable[i], LEASES) end
  if done > 0 then
    bulk('ZREM', LEASES, ended, done)
    bulk('HDEL', STATE, ended, done)
    bulk('HDEL', MESSAGES, ended, done)
    count_up(COUNT.done, MINUTE.done, done)
    counts[MINUTE.runs] = counts[MINUTE.runs] + done
    counts[MINUTE.run_ms] = counts[MINUTE.run_ms] + total_run
    counts[MINUTE.run_ms_max] = max(counts[MINUTE.run_ms_max], longest_run)
    if grouping then grouping.done(ended, groups, done) end
  end
else
  must_be('zset', WAITING)
  must_be('zset', DEAD)
  must_be('hash', ERRORS)
  must_be('hash', OUTGOING)
  due_before, changes_places = until_first(DUE), true

  local OUTCOMES = {d = 'done', r = 'retry', s = 'snooze', x = 'dead', p = 'drop', b = 'release'}

  local function unpack_settlement(text)
    local t = {id = sub(text, 1, 24), fence = sub(text, 25, 41)}
    local outcome, reason_length, type_length, error_length, result_length, has_result, number, at
    outcome, t.after, t.result_ttl, reason_length, type_length, error_length, result_length, has_result, number, at =
      struct_unpack('>c1I8I8HHI4I4BB', text, 42)
    t.outcome = OUTCOMES[outcome]
    local function take(length)
      local part = sub(text, at, at + length - 1)
      at = at + length
      return part
    end
    t.reason, t.error_type, t.error = take(reason_length), take(type_length), take(error_length)
    local result = take(result_length)
    t.result = has_result == 1 and result or nil
    t.continuations, t.begun = {}, {}
    for i = 1, number do
      local id = take(24)
      local queue_length, draft_length = struct_unpack('>HI4', take(6))
      local queue = take(queue_length)
      t.continuations[i] = {id, struct_pack('>H', queue_length) .. queue .. take(draft_length)}
      t.begun[i] = queue .. '/' .. id
    end
    return t
  end

  local function finish(s, t)
    if t.result then
      call('SET', OWN .. 'result:' .. s.id, struct_pack('>I8', now + t.result_ttl) .. t.result, 'PX', max(1, t.result_ttl))
    end
    end_message(s, 'done', nil, nil, t.begun)
    for i = 1, #t.continuations do
      count_up(COUNT.transferred, nil, 1)
      call('HSET', OUTGOING, t.continuations[i][1], now8 .. s.id .. t.continuations[i][2])
    end
    return 'd'
  end

  local function settle(t)
    local id, outcome = t.id, t.outcome
    local raw = call('HGET', STATE, id)
    if not raw or sub(raw, 1, 17) ~= t.fence then return 'l' end
    if not is_sound(raw, 'L') then
      set_aside(id, LEASES)
      return 'l'
    end
    local s = read_state(id, raw)
    if outcome == 'done' then return finish(s, t) end
    if cancel_requested(s) then
      end_message(s, 'cancelled', outcome)
      return 'c'
    end
    local reason, error_type, error_text = t.reason, t.error_type, t.error
    if policy.no_tracebacks then error_text = without_traceback(error_text) end
    if outcome == 'dead' then
      if reason == 'retries_exhausted' or reason == 'retry_policy_failed' then
        -- A failure of the handler ended it, and the dead letter counts that failure, too.
        s.attempts = s.attempts + 1
        pack_state(s)
      end
      end_message(s, 'dead', nil, {reason ~= '' and reason or 'rejected', error_type, error_text})
      return 'x'
    end
    if outcome == 'drop' then
      end_message(s, 'dropped', 'drop')
      return 'p'
    end
    if ends_otherwise(s, outcome) then return 'e' end
    leave_place(s)
    if outcome == 'release' then
      s.deliveries = s.deliveries - 1
      count_up(COUNT.released, nil, 1)
      to_head(s, now, 'released')
      note_state('released', nil, id, s.raw)
      return 'b'
    end
    local event = 'snoozed'
    if outcome == 'retry' then
      event = 'retried'
      s.attempts = s.attempts + 1
      call('HSET', ERRORS, id, cmsgpack.pack({'', error_type, error_text}))
    else
      s.deliveries = s.deliveries - 1
    end
    s.cause = codes().cause_number[event]
    tally(event, 1)
    count_run(s)
    make_claimable(s, now + t.after)
    if grouping and s.status == 'D' then grouping.hold(s) end
    note_state(event, nil, id, s.raw, reason ~= '' and reason or nil, error_type ~= '' and error_type or nil,
      event == 'retried' and error_text ~= '' and error_text or nil)
    return event == 'retried' and 'r' or 's'
  end

  local settlements = {}
  for i = FIRST_ARGUMENT + 2, #ARGV do settlements[#settlements + 1] = unpack_settlement(ARGV[i]) end
  begin_removing()
  for i = 1, #settlements do statuses[i] = settle(settlements[i]) end
end

-- include chains

local worth_now, timer = 0, 0
if changes_places then
  worth_now, timer = worth(due_before)
elseif grouping then
  worth_now = grouping.worth()
end
if policy.max_running then
  worth_now = worth_now + min(#statuses, max(0, call('ZCARD', READY) - (freshly_ready or 0)))
end
local names = wake(max(0, worth_now - timer - tonumber(ARGV[FIRST_ARGUMENT + 1])) + timer)
for i = 1, #expectant do names[#names + 1] = expectant[i] end
write_book()
return remember_answer(concat(statuses), names)
