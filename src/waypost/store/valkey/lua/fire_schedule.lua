-- fire_schedule: publish the fires of a schedule and move it on, in one step, once.
--
-- Arguments: key, version, the next fire that was seen, the times between which the clock must lie, the newest instant
-- that fires or '', how many were missed, the next fire and its due time or ''; then packed drafts as for publish.
-- Touches: schedules, queue, messages, state, ready, due, keys, waiting, errors, journal, sleepers, arrivals, operations,
-- window:<key>, the keys of chains.
-- Invariant: of the clients that saw the same next fire, one fires it. A full queue refuses before anything is written.
-- Reply: f fired, c conflict, e early, s stale; now; the schedule as it is now or ''; the sleepers to wake and, behind a byte
-- 1, what else it did.

local first = first_result()
if first then return cmsgpack.unpack(first) end
open_queue()
makes = true
must_be('zset', READY)
local SCHEDULES = BASE .. 'schedules'
must_be('hash', SCHEDULES)

-- include moves
-- include accept

local key, version, expected = ARGV[FIRST_ARGUMENT], ARGV[FIRST_ARGUMENT + 1], tonumber(ARGV[FIRST_ARGUMENT + 2])
local last_due, valid_until = tonumber(ARGV[FIRST_ARGUMENT + 3]), tonumber(ARGV[FIRST_ARGUMENT + 4])
local found = call('HGET', SCHEDULES, key) or ''
local next_ms, due_ms, last_ms, fires, missed, halted
if found ~= '' then next_ms, due_ms, last_ms, fires, missed, halted = struct_unpack('>I8I8I8I8I8B', found) end
local refused
if next_ms ~= expected or halted == 1 or sub(found, 43, 42 + byte(found, 42)) ~= version then
  refused = 'c'
elseif now < last_due then
  refused = 'e'
elseif now > valid_until then
  refused = 's'
end
if refused then
  local reply = {refused, now, found}
  begin_removing()
  remember(cmsgpack.pack(reply))
  return reply
end

local drafts = plan_drafts(FIRST_ARGUMENT + 9)
local due_before = until_first(DUE)
begin_adding()
fired_by = key
store_drafts(drafts)
found = struct_pack('>I8I8I8I8I8', tonumber(ARGV[FIRST_ARGUMENT + 7]) or 0, tonumber(ARGV[FIRST_ARGUMENT + 8]) or 0,
  tonumber(ARGV[FIRST_ARGUMENT + 5]) or last_ms, fires + #drafts, missed + tonumber(ARGV[FIRST_ARGUMENT + 6])) .. sub(found, 41)
call('HSET', SCHEDULES, key, found)

-- include chains

local reply = {'f', now, found, unpack(wake(worth(due_before)))}
for i = 1, #expectant do reply[#reply + 1] = expectant[i] end
if side_effects then reply[#reply + 1] = '\1' .. concat(side_effects) end
begin_removing()
write_book()
remember(cmsgpack.pack(reply))
return reply
