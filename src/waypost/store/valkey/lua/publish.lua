-- publish: store messages, each once, in order; refuse all of them or none when the queue is full.
--
-- Arguments: one packed draft each. First byte below 16: a plain one, priority and envelope (version, id, …). From 32
-- on: the same, and its arrival is remembered. Otherwise as drafts.lua reads it.
-- Touches: queue, messages, state, ready, due, keys, waiting, dead, errors, journal, sleepers, outgoing, arrivals,
-- operations, window:<key>, the keys of chains, the keys of groups.
-- Invariant: one waiting message per key and at most one leased; `max_pending` is never exceeded; nothing is written if
-- the queue is full. The first write is one that a full memory refuses.
-- Reply: letters q queued, d delayed, r replaced, E extended by parking, and u duplicate, c conflict, e extended, each
-- followed by the id of the message concerned; then the sleepers to wake and, after a byte 1, the side effects.

local first = first_result()
if first then
-- include known_answer
end
open_queue()
makes = true
must_be('zset', READY)

local plain = true
for i = FIRST_ARGUMENT, #ARGV do
  if byte(ARGV[i], 1) >= 16 then plain = false break end
end

-- The fast path: plain drafts, no `max_pending`, bodies not journalled. Its first write is one that a full memory
-- refuses.
if plain and not policy.max_pending and policy.journal ~= 'full' and not grouped then
  local values, scores, ids, length = {}, {}, {}, 0
  local heads = {} -- of journal items, by size and priority: most messages of a batch share one
  local position, notes = counts[COUNT.sequence], policy.journal == 'all'
  for i = FIRST_ARGUMENT, #ARGV do
    local draft = ARGV[i]
    local id, priority = sub(draft, 3, 26), byte(draft, 1)
    position = position + 1
    ids[#ids + 1] = id
    values[length + 1], values[length + 2] = id, now8 .. draft
    scores[length + 1], scores[length + 2] = (9 - priority) * BAND + position, id
    if notes then
      local shape = #draft * 16 + priority
      local head = heads[shape]
      if not head then
        head = struct_pack('>c1I4B', 'p', #draft - 1, priority)
        heads[shape] = head
      end
      items[length + 1], items[length + 2] = head, id
    end
    length = length + 2
  end
  -- The first write itself shows whether its key has the right type, and for one message whether its id is new.
  local refused
  if length == 2 then
    refused = redis.pcall('HSETNX', MESSAGES, values[1], values[2])
    if refused == 0 then error('WP-KNOWN ' .. values[1]) end
  else
    refused = redis.pcall('HMGET', MESSAGES, unpack(ids))
    if not refused.err then
      for i = 1, #ids do
        if refused[i] then error('WP-KNOWN ' .. ids[i]) end
      end
      refused = redis.pcall('HSET', MESSAGES, unpack(values, 1, min(1000, length)))
    end
  end
  if type(refused) == 'table' then
    if string.find(refused.err, 'WRONGTYPE', 1, true) then error('WP-FOREIGN hash ' .. MESSAGES) end
    return refused
  end
  if length > 1000 then call('HSET', MESSAGES, unpack(values, 1001, length)) end
  call('ZADD', READY, unpack(scores, 1, min(1000, length)))
  if length > 1000 then call('ZADD', READY, unpack(scores, 1001, length)) end
  local stored = length / 2
  counts[COUNT.sequence] = position
  if notes then item_count, event_count = length, stored end
  count_up(COUNT.published, MINUTE.published, stored)
  local names = wake(stored)
  if operation_number % 32 == 0 then begin_removing() end
  write_book()
  return remember_answer(string.rep('q', stored), names)
end

-- include shared
-- include once

-- include moves
-- include grouping as overload
-- include accept

local drafts = plan_drafts(FIRST_ARGUMENT)
local due_before = until_first(DUE)
begin_adding()
local statuses = store_drafts(drafts)

-- include chains

local names = wake(worth(due_before))
for i = 1, #expectant do names[#names + 1] = expectant[i] end
begin_removing()
write_book()
return remember_answer(statuses, names)
