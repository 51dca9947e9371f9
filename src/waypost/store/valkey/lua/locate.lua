-- locate: which of many queues know a message by its id. Writes nothing.
--
-- KEYS: the key `queue` of each queue; the names of the other keys are derived from it. On a Cluster one queue, and
-- `never` is last.
-- Arguments: how many queues, the id, 'message' or 'journal', for journals the time from which on to search.
-- Touches: queue, messages, state, result:<id>, end:<id>, journal.
-- Foreign data is reported by other verbs: here such a queue does not know the message.
-- Reply for each queue: the status letter of the message, the name of its end, or ''. For journals '1' if the journal
-- has an event of it, '?' if the journal is too long to be searched here, or ''.

-- include moves

local many, id, place = tonumber(ARGV[FIRST_ARGUMENT]), ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2]
-- How many entries of a journal are searched here. A script over many queues must not block the server for long.
local ENTRIES_MAX = 32
-- Journals with large entries are not searched, judged by the newest one: the journal of some queues has bodies.
local ENTRY_BYTES_MAX = 16384

local function value_of(command, ...)
  local value = redis.pcall(command, ...)
  return type(value) == 'string' and value or nil
end

local function find_message(base)
  local raw, message = value_of('HGET', base .. 'state', id), nil
  if raw then
    if is_sound(raw) and redis.pcall('HEXISTS', base .. 'messages', id) == 1 then return sub(raw, 1, 1) end
    return ''
  end
  message = value_of('HGET', base .. 'messages', id)
  if is_whole(id, message) then return 'R' end
  local fields = redis.pcall('HMGET', base .. 'queue', 'version', 'removed')
  if fields.err then return '' end
  if fields[1] and tonumber(fields[1]) > VERSION then error('WP-NEWER ' .. fields[1]) end
  local own = fields[2] and base .. format('@%.0f:', struct_unpack('>I8', fields[2])) or base
  if kept_until(text_at(own .. 'result:' .. id), 1) > now then return 'done' end
  local ended = text_at(own .. 'end:' .. id)
  return kept_until(ended, 1) > now and sub(ended, 9) or ''
end

local function find_in_journal(base, since)
  local key = base .. 'journal'
  local newest = redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1)
  if newest.err or not newest[1] or kept_until(newest[1][2][2], 1) < since then return '' end
  if call('XLEN', key) > ENTRIES_MAX then return '?' end
  if #newest[1][2][2] > ENTRY_BYTES_MAX then return '?' end
  local entries = call('XRANGE', key, '-', '+', 'COUNT', ENTRIES_MAX)
  for i = 1, #entries do
    if string.find(entries[i][2][2], id, 1, true) then return '1' end
  end
  return ''
end

local reply, since = {}, tonumber(ARGV[FIRST_ARGUMENT + 3])
for i = 1, many do
  local base = sub(KEYS[i], 1, -6)
  reply[i] = place == 'journal' and find_in_journal(base, since) or find_message(base)
end
return reply
