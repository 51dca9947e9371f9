-- once: the second fast path of publish, for drafts whose arrival is remembered and which have no other option (32 or
-- 48 plus priority, then the envelope), none of which has arrived before, as in a bulk publish. Included in publish,
-- before moves.
--
-- Touches: queue, messages, ready, due, waiting, journal, sleepers, arrivals, operations.
-- Invariant: all of them are new and there is room for all, or nothing is written here and the general path decides
-- about each. It writes exactly what the general path would: the same events, the same counts, and the arrivals.
-- trace than that way would leave: the same events, the same counts, and its arrival.

if byte(ARGV[FIRST_ARGUMENT], 1) >= 32 and policy.journal ~= 'full' and not grouped then
  local ids, fresh = {}, true
  for i = FIRST_ARGUMENT, #ARGV do
    if byte(ARGV[i], 1) < 32 then fresh = false break end
    ids[#ids + 1] = sub(ARGV[i], 3, 26)
  end
  must_be('zset', ARRIVALS)
  must_be('hash', MESSAGES)
  must_be('zset', DUE)
  must_be('zset', WAITING)
  if fresh then
    local known, there = call('ZMSCORE', ARRIVALS, unpack(ids)), call('HMGET', MESSAGES, unpack(ids))
    for i = 1, #ids do
      if there[i] or (known[i] and tonumber(known[i]) > now) then fresh = false break end
    end
  end
  if fresh and policy.max_pending then
    local waiting = call('ZCARD', READY) + call('ZCARD', DUE) + call('ZCARD', WAITING)
    fresh = waiting + #ids <= policy.max_pending
  end
  if fresh then
    local values, scores, arrivals = {}, {}, {}
    local states = {} -- by size and priority: most messages of a batch share one
    local position, notes, until_ms = counts[COUNT.sequence], policy.journal == 'all', now + ARRIVAL_TTL_MS
    for i = 1, #ids do
      local draft, id = ARGV[FIRST_ARGUMENT + i - 1], ids[i]
      local priority = byte(draft, 1) % 16
      position = position + 1
      local at = 2 * i - 1
      values[at], values[at + 1] = id, now8 .. char(priority) .. sub(draft, 2)
      scores[at], scores[at + 1] = (9 - priority) * BAND + position, id
      arrivals[at], arrivals[at + 1] = until_ms, id
      if notes then
        local shape = #draft * 16 + priority
        local state = states[shape]
        if not state then
          state = struct_pack(STATE_FORMAT, 'R', 0, NO_NONCE, 0, 0, 0, 0, 0, 0, now, priority, now, #draft - 1, 0, 0, 0)
            .. '\0\0\0\0'
          states[shape] = state
        end
        items[item_count + 1], items[item_count + 2], items[item_count + 3] = 'P' .. CAUSE.forwarded, id, state
        item_count = item_count + 3
      end
    end
    local length = 2 * #ids
    -- The first write, refused by a server whose memory is full.
    call('HSET', MESSAGES, unpack(values, 1, min(1000, length)))
    if length > 1000 then call('HSET', MESSAGES, unpack(values, 1001, length)) end
    remember_arrivals(arrivals, length)
    bulk('ZADD', READY, scores, length)
    counts[COUNT.sequence] = position
    if notes then event_count = #ids end
    count_up(COUNT.published, MINUTE.published, #ids)
    local names = wake(#ids)
    begin_removing()
    write_book()
    return remember_answer(string.rep('q', #ids), names)
  end
end
