-- outgoing: continuations that settles of this queue decided and that have not been confirmed by their own queue.
--
-- Arguments: 'list', limit, age in milliseconds from which one is undeliverable | 'confirm', ids.
-- Touches: queue, outgoing, messages, state, dead, errors, journal.
-- Invariant: a continuation leaves this hash only when its queue has it, or into the dead letters, `undeliverable`.
-- An entry is its time (8), the id of the message that was settled (24), length of the queue (2), queue, draft.
-- Reply to list: id and entry of each.

-- include moves

open_queue()
must_be('hash', OUTGOING)
if ARGV[FIRST_ARGUMENT] == 'confirm' then
  local removed = 0
  for i = FIRST_ARGUMENT + 1, #ARGV do removed = removed + call('HDEL', OUTGOING, ARGV[i]) end
  return removed
end

local limit, undeliverable_after = tonumber(ARGV[FIRST_ARGUMENT + 1]), tonumber(ARGV[FIRST_ARGUMENT + 2])
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', DEAD)
must_be('hash', ERRORS)

local reply, buried, seen = {}, 0, {}
local cursor = '0'
repeat
  local page = call('HSCAN', OUTGOING, cursor, 'COUNT', limit)
  cursor = page[1]
  for i = 1, #page[2], 2 do
    local id, packed = page[2][i], page[2][i + 1]
    local queue_length = struct_unpack('>H', packed, 33)
    if now - struct_unpack('>I8', packed) >= undeliverable_after and buried < BURY_MAX then
      buried = buried + 1
      call('HDEL', OUTGOING, id)
      local draft = sub(packed, 35 + queue_length)
      local key_length, group_length, copy_length, at = struct_unpack('>HHI4', draft, 19)
      local group_at = at + key_length
      local envelope = sub(draft, group_at + group_length + copy_length)
      local s = {id = id, popped = true, status = 'R', token = 0, nonce = NO_NONCE, claimed = 0, lease = 0,
        deliveries = 0, attempts = 0, flags = 0, cause = 0, published = now, priority = byte(draft, 1) - 16, ready = now,
        size = #envelope, key = '', group = sub(draft, group_at, group_at + group_length - 1), worker = ''}
      pack_state(s)
      call('HSET', MESSAGES, id, now8 .. char(s.priority) .. envelope)
      count_up(COUNT.published, MINUTE.published, 1)
      end_message(s, 'dead', nil, {'undeliverable', '', 'queue ' .. sub(packed, 35, 34 + queue_length) .. ' could not be reached'})
    elseif #reply < limit * 2 and not seen[id] then
      seen[id] = true
      reply[#reply + 1] = id
      reply[#reply + 1] = packed
    end
  end
until cursor == '0' or #reply >= limit * 2
if buried > 0 then write_book() end
return reply
