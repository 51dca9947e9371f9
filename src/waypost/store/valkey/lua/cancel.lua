-- cancel: end messages that wait, ask those that run to stop.
--
-- Arguments: one target each: 'i' and an id, or 'k' and a key.
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, completed, journal, outgoing,
-- operations, window:<key>, result:<id>, the keys of chains.
-- Invariant: a leased message is only marked; its holder learns of it at the next extend. The first write removes.
-- Reply: one letter each: c cancelled, r requested, f finished, u unknown.

-- include moves

local first = first_result()
if first then return first end
open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('hash', HOLDERS)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('hash', ERRORS)
must_be('hash', OUTGOING)
must_be('list', COMPLETED)
begin_removing()

local function cancel_one(s)
  if s.status == 'X' then return 'f' end
  if s.status == 'L' then
    if not cancel_requested(s) then
      s.flags = s.flags + 1
      call('HSET', STATE, s.id, pack_state(s))
      note_state('cancel_requested', nil, s.id, s.raw)
    end
    return 'r'
  end
  end_message(s, 'cancelled', 'request')
  return 'c'
end

local function is_live(key)
  return kept_until(text_at(key), 1) > now
end

local function cancel(target)
  local name = sub(target, 2)
  if sub(target, 1, 1) == 'k' then
    local holder = call('HGET', HOLDERS, name)
    if not holder then
      return kept_until(text_at(BASE .. 'window:' .. name), 25) > now and 'f' or 'u'
    end
    local parked = #holder > 24 and state_of(sub(holder, 25), 'W')
    if parked then end_message(parked, 'cancelled', 'request') end
    local owner = state_of(sub(holder, 1, 24))
    return owner and cancel_one(owner) or 'u'
  end
  local s = state_of(name)
  if s then return cancel_one(s) end
  if is_live(BASE .. 'result:' .. name) then return 'f' end
  local completed = call('LRANGE', COMPLETED, 0, -1)
  for i = 1, #completed do
    local length = #completed[i] > 10 and struct_unpack('>H', completed[i], 9) or 0
    if sub(completed[i], 10 + length + 11, 10 + length + 34) == name then return 'f' end
  end
  return 'u'
end

local statuses = {}
for i = FIRST_ARGUMENT, #ARGV do statuses[#statuses + 1] = cancel(ARGV[i]) end

-- include chains

write_book()
local reply = concat(statuses)
remember(reply)
return reply
