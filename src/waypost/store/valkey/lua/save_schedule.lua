-- save_schedule: write a schedule if it is still as the caller read it.
--
-- Arguments: key, the version that was read or '' for none, the next fire that was read or '', the packed schedule.
-- Touches: schedules, queue.
-- A schedule: next_ms due_ms last_ms fires missed (8 bytes each, 0: none) flags (1: 1 paused, 2 has a state), length (1) and
-- text of its version, length (4) and bytes of its state if it has one, then the spec. State and spec are not read.
-- Invariant: a change or a fire by another client in the meantime is not overwritten; counters are kept.
-- Reply: '1' or '0' (whether it was written), the schedule as it is now or ''.

open_queue()
local SCHEDULES = BASE .. 'schedules'
must_be('hash', SCHEDULES)

local key, version, next_seen = ARGV[FIRST_ARGUMENT], ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2]
local packed = ARGV[FIRST_ARGUMENT + 3]
local found = call('HGET', SCHEDULES, key) or ''
local found_version, found_next = '', ''
if found ~= '' then
  found_version = sub(found, 43, 42 + byte(found, 42))
  local next_ms = struct_unpack('>I8', found)
  if next_ms > 0 then found_next = format('%.0f', next_ms) end
end
if found_version ~= version or found_next ~= next_seen then return {'0', found} end
if found ~= '' then packed = sub(packed, 1, 16) .. sub(found, 17, 40) .. sub(packed, 41) end
call('HSET', SCHEDULES, key, packed)
makes = true
if gone then write_book() end
return {'1', packed}
