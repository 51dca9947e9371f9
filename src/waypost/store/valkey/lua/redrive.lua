-- redrive: make dead letters claimable again, oldest first. Counts start anew, the token goes on.
--
-- Arguments: limit, reason or '', then ids if only these are meant.
-- Touches: queue, messages, state, ready, keys, dead, errors, journal, sleepers, operations, window:<key>.
-- Invariant: a key that was taken meanwhile keeps its letter dead, as `duplicate`. The first write removes.
-- Reply: '1' if more match, the ids made ready in one text, those left dead in another, then the sleepers to wake.

-- include moves

local first = first_result()
if first then return cmsgpack.unpack(first) end
open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('hash', HOLDERS)
must_be('zset', DEAD)
must_be('hash', ERRORS)

local limit, reason = min(CHUNK_MESSAGES_MAX, tonumber(ARGV[FIRST_ARGUMENT])), ARGV[FIRST_ARGUMENT + 1]
local by_id = #ARGV > FIRST_ARGUMENT + 1

local function fits(id)
  local have = failure_of(id)[1]
  if reason ~= '' then return have == reason end
  -- Without a filter, those left dead as duplicates would be chosen again and again.
  return by_id or have ~= 'duplicate'
end

local chosen, more = {}, false
if by_id then
  local named = {}
  for i = FIRST_ARGUMENT + 2, #ARGV do
    local died = call('ZSCORE', DEAD, ARGV[i])
    if died and fits(ARGV[i]) and not named[ARGV[i]] then
      named[ARGV[i]] = true
      chosen[#chosen + 1] = {tonumber(died), ARGV[i]}
    end
  end
  table.sort(chosen, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
  for i = 1, #chosen do chosen[i] = chosen[i][2] end
else
  local start = 0
  while #chosen <= limit do
    local ids = call('ZRANGE', DEAD, start, start + 499)
    for i = 1, #ids do
      if #chosen <= limit and fits(ids[i]) then chosen[#chosen + 1] = ids[i] end
    end
    if #ids < 500 then break end
    start = start + 500
  end
end
more = #chosen > limit

begin_removing()
local moved, duplicates = {}, {}
for i = 1, min(limit, #chosen) do
  local s = state_of(chosen[i], 'X')
  local taken = false
  if s and s.key ~= '' then
    taken = call('HEXISTS', HOLDERS, s.key) == 1 or kept_until(text_at(BASE .. 'window:' .. s.key), 25) > now
  end
  if not s then
    set_aside(chosen[i], DEAD)
  elseif taken then
    local failure = failure_of(s.id)
    failure[1] = 'duplicate'
    call('HSET', ERRORS, s.id, cmsgpack.pack(failure))
    duplicates[#duplicates + 1] = s.id
  else
    if s.key ~= '' then call('HSET', HOLDERS, s.key, s.id) end
    call('ZREM', DEAD, s.id)
    call('HDEL', ERRORS, s.id)
    s.deliveries, s.attempts, s.flags, s.cause = 0, 0, floor(s.flags / 4) * 4, CAUSE_NUMBER.redriven
    count_up(COUNT.redriven, nil, 1)
    make_claimable(s, now)
    note_state('redriven', nil, s.id, s.raw)
    moved[#moved + 1] = s.id
  end
end
local reply = {more and '1' or '0', concat(moved), concat(duplicates), unpack(wake(freshly_ready))}
write_book()
remember(cmsgpack.pack(reply))
return reply
