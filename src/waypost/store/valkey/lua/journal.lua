-- journal: read events after a number, store how far readers have read, and trim events that all have read.
--
-- Arguments: 'journal', after, limit | 'trace', message id, cursor, from time | 'journal_reader', name, number or '' |
-- 'journal_forget', name | 'journal_trim', up to.
-- Touches: queue, journal, readers.
-- Invariant: an explicit trim deletes no event that a registered reader has not read.

open_queue()
must_be('hash', READERS)
local first_kept, last = counts[COUNT.journal_first] + 1, counts[COUNT.journal_last]

local TRACE_BYTES = 1048576

local function entry(number) return format('%.0f-0', number) end

-- Entries whose last event is after `after`, until they have `limit` events: each as the number of its last event and
-- text.
local function read(after, limit)
  local found, start, events = {}, after + 1, 0
  while events < limit do
    local entries = call('XRANGE', JOURNAL, entry(start), '+', 'COUNT', 64)
    for i = 1, #entries do
      if events >= limit then break end
      local number = tonumber(string.match(entries[i][1], '^%d+'))
      local text = entries[i][2][2]
      found[#found + 1] = format('%.0f', number)
      found[#found + 1] = text
      events = events + struct_unpack('>H', text, 21) - max(0, start - (number - struct_unpack('>H', text, 21) + 1))
      start = number + 1
    end
    if #entries < 64 then break end
  end
  return found
end

-- The number of the first entry written at or after a time: entries are in the order of the store's clock.
local function first_since(time)
  local low, high = first_kept, last + 1
  while low < high do
    local middle = floor((low + high) / 2)
    local found = call('XRANGE', JOURNAL, entry(middle), '+', 'COUNT', 1)
    if #found == 0 or struct_unpack('>I8', found[1][2][2]) >= time then high = middle else low = middle + 1 end
  end
  return low
end

-- Entries that mention a message. One call searches about a megabyte, so that it does not block the server for long.
local function trace(id, cursor, since)
  local start = cursor == '' and first_since(since) or tonumber(cursor)
  local found, bytes = {}, 0
  while bytes < TRACE_BYTES do
    local entries = call('XRANGE', JOURNAL, entry(start), '+', 'COUNT', 64)
    for i = 1, #entries do
      local text = entries[i][2][2]
      bytes = bytes + #text + 64
      start = tonumber(string.match(entries[i][1], '^%d+')) + 1
      if string.find(text, id, 1, true) then
        found[#found + 1] = format('%.0f', start - 1)
        found[#found + 1] = text
      end
      if bytes >= TRACE_BYTES then return {format('%.0f', start), found} end
    end
    if #entries < 64 then return {'', found} end
  end
  return {format('%.0f', start), found}
end

local verb = ARGV[FIRST_ARGUMENT]
if verb == 'trace' then
  return trace(ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2], tonumber(ARGV[FIRST_ARGUMENT + 3]))
elseif verb == 'journal' then
  local after = max(tonumber(ARGV[FIRST_ARGUMENT + 1]), first_kept - 1)
  return {first_kept, last, read(after, tonumber(ARGV[FIRST_ARGUMENT + 2]))}
elseif verb == 'journal_reader' then
  local name, read_to = ARGV[FIRST_ARGUMENT + 1], tonumber(ARGV[FIRST_ARGUMENT + 2])
  local position = tonumber(call('HGET', READERS, name) or '') or first_kept - 1
  if read_to then position = max(position, min(read_to, last)) end
  call('HSET', READERS, name, format('%.0f', position))
  makes = true
  if gone then write_book() end
  return position
elseif verb == 'journal_forget' then
  return call('HDEL', READERS, ARGV[FIRST_ARGUMENT + 1])
end

local read_to = last
local positions = call('HVALS', READERS)
for i = 1, #positions do read_to = min(read_to, tonumber(positions[i]) or last) end
local first = min(tonumber(ARGV[FIRST_ARGUMENT + 1]), read_to) + 1
if first > first_kept then
  write_book(first)
  return first
end
return first_kept
