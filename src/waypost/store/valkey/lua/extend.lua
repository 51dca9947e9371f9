-- extend: renew leases that are still held.
--
-- Arguments: id (24) L token (4) nonce (12) of each, in one text.
-- Touches: queue, state, leases, operations.
-- Invariant: only the holder of the token and nonce changes the end of a lease. The first write removes.
-- Reply: one letter each: o renewed, l lost, c renewed, and a cancel is requested.

local first = first_result()
if first then return first end
open_queue()
must_be('hash', STATE)
must_be('zset', LEASES)

local holds = ARGV[FIRST_ARGUMENT]
local number = #holds / 41
local ids, statuses, renewed = {}, {}, {}
for i = 1, number do ids[i] = sub(holds, i * 41 - 40, i * 41 - 17) end
local states = call('HMGET', STATE, unpack(ids))
for i = 1, number do
  local state = states[i]
  if not state or sub(state, 1, 17) ~= sub(holds, i * 41 - 16, i * 41) or not is_sound(state) then
    statuses[i] = 'l'
  else
    statuses[i] = byte(state, 38) % 2 == 1 and 'c' or 'o'
    -- The lease length of its claim: its worker renews by that length, whatever the queue's lease is now.
    renewed[#renewed + 1] = now + struct_unpack('>I4', state, 26)
    renewed[#renewed + 1] = ids[i]
  end
end
begin_removing()
bulk('ZADD', LEASES, renewed, #renewed)
local reply = concat(statuses)
remember(reply)
return reply
