-- one: the fast path of publish, for one plain draft into a queue without `max_pending`. It precedes base: to create
-- the functions of base takes the server longer than all commands here.
--
-- KEYS of publish are fewer than those of other scripts, since each name takes the server about 1,000 instructions: 1
-- queue, 2 messages, 3 ready, 4 journal, 5 sleepers, 6 operations. The general path derives the names of the others.
-- Touches: queue, messages, ready, journal, sleepers, operations.
-- Invariant: it writes exactly what the rest of publish would: message, event, counters, result, sleepers woken. In all
-- other cases it writes nothing and the general path runs: a repeat, an operation that is too old, a queue that is new,
-- removed, capped, grouped or of another version, a journal at its limit, the first publish of a minute, a key of
-- another type, a full memory.

if #ARGV == 5 and string.byte(ARGV[5]) < 16 then
  local call, byte, sub, format, floor, min, concat = redis.call, string.byte, string.sub, string.format, math.floor, math.min, table.concat
  local QUEUE, MESSAGES, READY, JOURNAL, SLEEPERS, OPERATIONS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
  local operation, replay_ttl, draft = ARGV[3], tonumber(ARGV[4]), ARGV[5]
  local now = tonumber(ARGV[1])
  if not now then
    local time = call('TIME')
    now = time[1] * 1000 + floor(time[2] / 1000)
  end
  local number, stamp = tonumber(ARGV[2]), struct.unpack('>I8', operation, 21)
  local last = redis.pcall('HGET', OPERATIONS, 'newest')
  local newest, expires = 0, 0
  if type(last) == 'string' then newest, expires = struct.unpack('>I8I8', last) end
  local fields, policy
  -- The packed counters; the positions after `published`, before `sequence`, and of the end of `minute_published`.
  local counts, rest, middle, tail
  local published, sequence, journal_last, journal_first, rate_sum, minute, minute_published
  -- Every 1,024th publish takes the general path, which makes the server store the results as a table.
  if number > newest and number % 1024 > 0 and stamp >= now - replay_ttl and stamp <= now + STAMP_AHEAD_MS
    and expires - now >= replay_ttl + STAMP_AHEAD_MS then
    fields = redis.pcall('HMGET', QUEUE, 'version', 'counts', 'policy', 'paused', 'removed', 'gone', 'groups')
  end
  if fields and not fields.err and tonumber(fields[1] or 0) >= VERSION_WRITTEN and tonumber(fields[1]) <= VERSION and fields[2]
    and not fields[5] and not fields[6] and not fields[7] then
    local readable = true
    if fields[3] then readable, policy = pcall(cmsgpack.unpack, fields[3]) end
    if readable and (not policy or type(policy) == 'table' and not policy.max_pending and policy.journal ~= 'full')
      and sub(fields[2], 1, 3) == COUNTS_HEAD then
      -- To unpack all counters took a sixth of the script's time, so only those that change are unpacked and packed
      -- again.
      readable, middle, published = pcall(cmsgpack.unpack_limit, fields[2], COUNT.sequence - 1, 3)
      if readable then
        readable, tail, sequence, journal_last, journal_first, rate_sum, minute, minute_published =
          pcall(cmsgpack.unpack_limit, fields[2], 6, middle)
      end
      local first = byte(fields[2], 4)
      rest = first < 128 and 5 or first == 204 and 6 or first == 205 and 7 or first == 206 and 9 or first == 207 and 13
      if readable and minute_published and rest and rate_sum >= 0 then counts = fields[2] end
    end
  end
  local notes, journal_limit = true, DEFAULT_JOURNAL_LIMIT
  if policy and counts then
    notes = policy.journal == 'all'
    journal_limit = policy.journal_max + math.max(CHUNK_MESSAGES_MAX, floor(policy.journal_max / JOURNAL_SLACK_PART))
  end
  local event = counts and journal_last + 1
  if counts and minute == floor(now / 60000) and event - journal_first < journal_limit then
    local id, priority, now8 = sub(draft, 3, 26), byte(draft), struct.pack('>I8', now)
    local position = sequence + 1
    -- The first write is the one that a full memory refuses. If a later write is refused, the earlier ones are undone.
    local stored = redis.pcall('HSETNX', MESSAGES, id, now8 .. draft) == 1
    if stored and redis.pcall('ZADD', READY, (9 - priority) * 2 ^ 49 + position, id) ~= 1 then
      call('HDEL', MESSAGES, id)
      stored = false
    end
    if stored and notes then
      local text = now8 .. sub(operation, 1, 12) .. struct.pack('>Hc1I4B', 1, 'p', #draft - 1, priority) .. id
      if type(redis.pcall('XADD', JOURNAL, format('%.0f-0', event), 'e', text)) == 'string' then
        journal_last = event
      else
        call('ZREM', READY, id)
        call('HDEL', MESSAGES, id)
        stored = false
      end
    end
    if stored then
      published, minute_published = published + 1, minute_published + 1
      -- MessagePack of four bytes each, or of eight; every release reads both.
      local kind, one, six = 206, '>BI4', '>BI4BI4BI4BI4BI4BI4'
      if position >= 2 ^ 32 or event >= 2 ^ 32 then kind, one, six = 207, '>BI8', '>BI8BI8BI8BI8BI8BI8' end
      counts = COUNTS_HEAD .. struct.pack(one, kind, published) .. sub(counts, rest, middle)
        .. struct.pack(six, kind, position, kind, journal_last, kind, journal_first, kind, rate_sum, kind, minute, kind, minute_published)
        .. sub(counts, tail + 1)
      call('HSET', QUEUE, 'counts', counts)
      local names, result = {}, 'q'
      local sleepers = redis.pcall('ZREVRANGE', SLEEPERS, 0, 1, 'WITHSCORES')
      -- Usually no worker sleeps, and the only entry is the mark that the list of sleepers is complete.
      if #sleepers ~= 2 or sleepers[1] ~= '' or tonumber(sleepers[2]) <= now then
        local BASE, paused = sub(QUEUE, 1, -6), fields[4] == '1'
-- include wake
        names = wake(1)
        if #names > 0 then result = 'q\0' .. concat(names, '\0') end
      end
      call('HSET', OPERATIONS, ARGV[2], sub(operation, 13, 20) .. result, 'newest', struct.pack('>I8I8', number, expires))
      if number % 32 == 0 then
        -- Delete results that are too old to be repeated, as begin_removing does.
        local old = {}
        for i = number - REPLAY_MAX - 31, number - REPLAY_MAX do old[#old + 1] = format('%.0f', i) end
        call('HDEL', OPERATIONS, unpack(old))
      end
      return {'q', unpack(names)}
    end
  end
end

local given, KEYS = KEYS, {}
for name in string.gmatch(KEY_NAMES, '%w+') do KEYS[#KEYS + 1] = string.sub(given[1], 1, -6) .. name end
KEYS[#KEYS + 1] = given[6]
