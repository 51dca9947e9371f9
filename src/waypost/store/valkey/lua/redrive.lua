-- redrive: make dead letters claimable again, oldest first. Their counts start again, their tokens continue to grow.
--
-- Arguments: limit, reason or '', cursor or '', then ids if only these are wanted.
-- Touches: queue, messages, state, ready, due, waiting, keys, dead, errors, journal, sleepers, operations,
-- window:<key>, the keys of groups.
-- Invariant: if its key is in use meanwhile, the letter stays dead, as `duplicate`. The first write removes.
-- A call reads at most SCANNED_MAX letters. A cursor is the last letter seen that is still dead, and its score: the
-- next call continues after it. A cursor with '0' means that it is not known yet whether more match.
-- Reply: '1' if more match, followed by the cursor or '', the ids made ready in one text, the ids left dead in another,
-- then the sleepers to wake.

-- include moves
-- include cursor

local first = first_result()
if first then return cmsgpack.unpack(first) end
open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('hash', HOLDERS)
must_be('zset', DUE)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('hash', ERRORS)
-- include grouping

local limit, reason = min(CHUNK_MESSAGES_MAX, tonumber(ARGV[FIRST_ARGUMENT])), ARGV[FIRST_ARGUMENT + 1]
local cursor = ARGV[FIRST_ARGUMENT + 2]
local by_id = #ARGV > FIRST_ARGUMENT + 2

local function fits(id)
  local have = failure_of(id)[1]
  if reason ~= '' then return have == reason end
  -- Without a filter, dead letters that are duplicates are excluded: they would be chosen again and again.
  return by_id or have ~= 'duplicate'
end

local chosen, seen, at_end = {}, {}, true
if by_id then
  local named = {}
  for i = FIRST_ARGUMENT + 3, #ARGV do
    local died = call('ZSCORE', DEAD, ARGV[i])
    if died and fits(ARGV[i]) and not named[ARGV[i]] then
      named[ARGV[i]] = true
      chosen[#chosen + 1] = {tonumber(died), ARGV[i]}
    end
  end
  table.sort(chosen, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
  for i = 1, #chosen do chosen[i] = chosen[i][2] end
else
  local start = cursor ~= '' and rank_behind(DEAD, cursor) or 0
  local letters
  repeat
    letters = call('ZRANGE', DEAD, start, start + 199, 'WITHSCORES')
    for i = 1, #letters, 2 do
      if fits(letters[i]) then chosen[#chosen + 1] = letters[i] end
      if #chosen > limit then break end
      seen[#seen + 1] = {letters[i], letters[i + 1]}
    end
    start = start + 200
  until #letters < 400 or #chosen > limit or #seen >= SCANNED_MAX
  at_end = #letters < 400 and #chosen <= limit
end
local more = #chosen > limit

begin_removing()
local moved, duplicates, gone = {}, {}, {}
for i = 1, min(limit, #chosen) do
  local s = state_of(chosen[i], 'X')
  local taken = false
  if s and s.key ~= '' then
    local window = text_at(OWN .. 'window:' .. s.key)
    taken = call('HEXISTS', HOLDERS, s.key) == 1 or kept_until(window, 25) > now and sub(window, 1, 24) ~= s.id
  end
  gone[chosen[i]] = not (s and taken)
  if not s then
    set_aside(chosen[i], DEAD)
  elseif taken then
    local failure = failure_of(s.id)
    failure[1] = 'duplicate'
    call('HSET', ERRORS, s.id, cmsgpack.pack(failure))
    duplicates[#duplicates + 1] = s.id
  else
    if s.key ~= '' then call('HSET', HOLDERS, s.key, s.id) end
    if has_key_while_dead(s) then forget_window(s) end
    call('ZREM', DEAD, s.id)
    call('HDEL', ERRORS, s.id)
    s.deliveries, s.attempts, s.flags, s.cause = 0, 0, floor(s.flags / 4) * 4, CAUSE_NUMBER.redriven
    count_up(COUNT.redriven, MINUTE.redriven, 1)
    make_claimable(s, now)
    note_state('redriven', nil, s.id, s.raw)
    moved[#moved + 1] = s.id
  end
end
if #moved > 0 and policy.max_pending then
  local waiting = call('ZCARD', READY) + call('ZCARD', DUE) + call('ZCARD', WAITING)
  local over = min(#moved, waiting - policy.max_pending)
  if over > 0 then call('HINCRBY', QUEUE, 'over_cap', over) end
end
-- All letters that were seen have moved: the next call begins where this one did.
local next_cursor = at_end and '' or cursor
for i = at_end and 0 or #seen, 1, -1 do
  if not gone[seen[i][1]] then
    next_cursor = seen[i][2] .. ' ' .. seen[i][1]
    break
  end
end
if grouping then grouping.write() end
local reply = {(more and '1' or '0') .. next_cursor, concat(moved), concat(duplicates), unpack(wake(freshly_ready))}
write_book()
remember(cmsgpack.pack(reply))
return reply
