-- peek: list messages of one state, in their order, page by page. Writes nothing.
--
-- Arguments: state, limit, cursor or '', then id, key, group and reason to filter by, each or ''.
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, completed, expires.
-- A page reads at most SCANNED_MAX messages and about CHUNK_BYTES_MAX bytes, so that a filter without matches does not
-- block the server: a page may be short or empty, with a cursor to continue from. A cursor is the last message seen and
-- its score; for done messages, how many were seen.
-- Reply: cursor or '', then score (and, if it lapses, a space and its expiry), value, state and failure of each.

-- include moves
-- include cursor

open_queue()
local state, limit, cursor = ARGV[FIRST_ARGUMENT], tonumber(ARGV[FIRST_ARGUMENT + 1]), ARGV[FIRST_ARGUMENT + 2]
local want_id, want_key = ARGV[FIRST_ARGUMENT + 3], ARGV[FIRST_ARGUMENT + 4]
local want_group, want_reason = ARGV[FIRST_ARGUMENT + 5], ARGV[FIRST_ARGUMENT + 6]

local function fits(s, reason)
  return (want_id == '' or s.id == want_id) and (want_key == '' or s.key == want_key)
    and (want_group == '' or s.group == want_group) and (want_reason == '' or reason == want_reason)
end

local reply = {''}
local found, bytes = 0, 0

local function show(score, value, s, failure)
  found = found + 1
  local at = #reply
  local expiry = may_lapse(s) and state ~= 'done' and call('ZSCORE', BASE .. 'expires', s.id)
  if expiry then score = score .. ' ' .. format('%.0f', tonumber(expiry) % EXPIRY_ASIDE) end
  reply[at + 1], reply[at + 2], reply[at + 3], reply[at + 4] = score, value, s.raw, failure
end

if state == 'done' then
  local length = must_be('list', COMPLETED)
  -- The list has the newest first, the reply the oldest first: count from the end.
  local seen = cursor == '' and 0 or tonumber(cursor)
  local last = min(length, seen + SCANNED_MAX)
  -- The server walks along the list once for each part. Parts are small, because bodies may be large.
  while seen < last and found < limit and bytes < CHUNK_BYTES_MAX do
    local size = min(20, last - seen)
    local part = call('LRANGE', COMPLETED, length - seen - size, length - seen - 1)
    for i = size, 1, -1 do
      if found == limit then break end
      seen = seen + 1
      local kept = part[i]
      bytes = bytes + #kept
      local state_size = #kept > 10 and struct_unpack('>H', kept, 9) or 0
      local value, raw = sub(kept, 11 + state_size), sub(kept, 11, 10 + state_size)
      local s = is_sound(raw) and read_state(sub(value, 11, 34), raw)
      if s and #value >= 34 and fits(s, '') then show(format('%.0f', struct_unpack('>I8', kept)), value, s, '') end
    end
  end
  if seen < length then reply[1] = format('%.0f', seen) end
  return reply
end

local places = {ready = READY, delayed = DUE, waiting = WAITING, leased = LEASES, dead = DEAD}
local place = places[state]
must_be('zset', place)
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('hash', ERRORS)

-- A message whose record is damaged is not listed: `doctor` lists those.
local function look_at(id, score)
  local s, value = state_of(id), call('HGET', MESSAGES, id)
  if value then bytes = bytes + #value end
  if not s or not is_whole(id, value) then return end
  local failure = unpacked(call('HGET', ERRORS, id)) and call('HGET', ERRORS, id) or ''
  if fits(s, failure_of(id)[1]) then show(score, value, s, failure) end
end

local ids = want_id ~= '' and {want_id}
if not ids and want_key ~= '' and state ~= 'dead' then
  -- An unfinished message with a key is the owner of the key, or its next generation.
  must_be('hash', HOLDERS)
  local holder = call('HGET', HOLDERS, want_key) or ''
  ids = {sub(holder, 1, 24), sub(holder, 25, 48)}
end
local start = cursor ~= '' and rank_behind(place, cursor) or 0
if ids then
  for i = 1, #ids do
    local score = call('ZSCORE', place, ids[i])
    if score and found < limit and (start == 0 or call('ZRANK', place, ids[i]) >= start) then look_at(ids[i], score) end
  end
  return reply
end

local seen, last_score, last_id = 0, nil, nil
while found < limit and seen < SCANNED_MAX and bytes < CHUNK_BYTES_MAX do
  local page = call('ZRANGE', place, start, start + 199, 'WITHSCORES')
  if #page == 0 then return reply end
  for i = 1, #page, 2 do
    if found == limit or bytes >= CHUNK_BYTES_MAX then break end
    local id = page[i]
    look_at(id, page[i + 1])
    start, seen, last_score, last_id = start + 1, seen + 1, page[i + 1], id
  end
end
if start < call('ZCARD', place) then reply[1] = last_score .. ' ' .. last_id end
return reply
