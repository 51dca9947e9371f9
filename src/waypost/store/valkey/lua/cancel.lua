-- cancel: end waiting messages, and request running ones to stop.
--
-- Arguments: one target each: 'i' and an id, or 'k' and a key.
-- Touches: queue, messages, state, ready, due, leases, keys, waiting, dead, errors, completed, journal, outgoing,
-- operations, window:<key>, result:<id>, the keys of chains, the keys of groups.
-- Invariant: a leased message is only marked; its worker reads the mark when it next renews the lease. The first write
-- removes.
-- Of the finished messages that are kept it reads the newest, a bounded number; `peek` lists all.
-- Reply: one letter each (c cancelled, r requested, f finished, u unknown), then the clients to wake and, after a byte
-- 1, the side effects.

-- include moves

local first = first_result()
if first then
-- include known_answer
end
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
-- include grouping
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

-- Whether a message is among the newest finished ones that are kept. They are read once for all targets.
local kept
local function is_kept(id)
  if not kept then
    kept = {}
    local seen, bytes = 0, 0
    repeat
      local part = call('LRANGE', COMPLETED, seen, seen + 19)
      for i = 1, #part do
        local length = #part[i] > 10 and struct_unpack('>H', part[i], 9) or 0
        kept[sub(part[i], 10 + length + 11, 10 + length + 34)] = true
        bytes = bytes + #part[i]
      end
      seen = seen + #part
    until #part < 20 or seen >= SCANNED_MAX or bytes >= CHUNK_BYTES_MAX
  end
  return kept[id]
end

local function cancel(target)
  local name = sub(target, 2)
  if sub(target, 1, 1) == 'k' then
    local holder = call('HGET', HOLDERS, name)
    if not holder then
      return kept_until(text_at(OWN .. 'window:' .. name), 25) > now and 'f' or 'u'
    end
    local parked = #holder > 24 and state_of(sub(holder, 25), 'W')
    if parked then end_message(parked, 'cancelled', 'parked') end
    local owner = state_of(sub(holder, 1, 24))
    return owner and cancel_one(owner) or 'u'
  end
  local s = state_of(name)
  if s then return cancel_one(s) end
  if is_live(OWN .. 'result:' .. name) then return 'f' end
  if is_kept(name) then return 'f' end
  return 'u'
end

local statuses = {}
for i = FIRST_ARGUMENT, #ARGV do statuses[#statuses + 1] = cancel(ARGV[i]) end

-- include chains

local names = expectant
if grouping then
  names = wake(grouping.worth())
  for i = 1, #expectant do names[#names + 1] = expectant[i] end
end
write_book()
return remember_answer(concat(statuses), names)
