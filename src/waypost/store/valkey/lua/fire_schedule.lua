-- fire_schedule: publish the fires of a schedule and store its next fire, in one step, once.
--
-- Arguments: key, version, the next fire that was read or '', the times between which the clock must be, the newest
-- instant that fires or '', how many were missed, the next fire and its due time or ''; '1' and its new state or '',
-- its new version or '', '1' if by hand; a run that must have ended or '', '1' and the state to store if it has not
-- ended or '', how many instants are skipped then and the newest of them; then packed drafts as for publish.
-- Touches: schedules, queue, messages, state, ready, due, keys, waiting, dead, errors, journal, sleepers, arrivals,
-- operations, window:<key>, the keys of chains, the keys of groups. Also damaged, which it reads.
-- Invariant: of the clients that read the same next fire, only one fires it. A full queue refuses before anything is
-- written.
-- Reply: f fired, k skipped because the run has not ended, c conflict, e early, s stale, r running; now; the schedule
-- as it is now or ''; the sleepers to wake and, after a byte 1, the side effects.

local first = first_result()
if first then return cmsgpack.unpack(first) end
open_queue()
makes = true
must_be('zset', READY)
local SCHEDULES = BASE .. 'schedules'
must_be('hash', SCHEDULES)

-- include moves
-- include grouping as overload
-- include accept

local A = FIRST_ARGUMENT
local key, version, expected = ARGV[A], ARGV[A + 1], tonumber(ARGV[A + 2]) or 0
local last_due, valid_until, by_hand, run = tonumber(ARGV[A + 3]), tonumber(ARGV[A + 4]), ARGV[A + 11] == '1', ARGV[A + 12]
local found = call('HGET', SCHEDULES, key) or ''
local next_ms, due_ms, last_ms, fires, missed, flags, found_version, rest
if found ~= '' then
  next_ms, due_ms, last_ms, fires, missed, flags = struct_unpack('>I8I8I8I8I8B', found)
  local length = byte(found, 42)
  found_version, rest = sub(found, 43, 42 + length), sub(found, 43 + length)
end

-- Whether the message of a run has not ended: it waits, is leased, or waits for a retry, and has not lapsed.
local function is_running()
  if run == '' then return false end
  must_be('zset', DEAD)
  must_be('zset', BASE .. 'damaged')
  if expiring then
    must_be('zset', BASE .. 'expires')
    if tonumber(call('ZSCORE', BASE .. 'expires', run) or now + 1) <= now then return false end
  end
  return call('HEXISTS', MESSAGES, run) == 1 and not call('ZSCORE', DEAD, run)
    and not call('ZSCORE', BASE .. 'damaged', run)
end

local refused, skipping
if next_ms ~= expected or (flags % 2 == 1 and not by_hand) or found_version ~= version then
  refused = 'c'
elseif now < last_due then
  refused = 'e'
elseif now > valid_until then
  refused = 's'
elseif is_running() then
  skipping = ARGV[A + 13] ~= ''
  if not skipping then refused = 'r' end
end
if refused then
  local reply = {refused, now, found}
  begin_removing()
  remember(cmsgpack.pack(reply))
  return reply
end

local drafts, due_before = {}
if not skipping then
  drafts = plan_drafts(A + 16)
  due_before = until_first(DUE)
end
begin_adding()
local state = ARGV[A + 9]
if skipping then
  state = ARGV[A + 13]
  local skipped = tonumber(ARGV[A + 14])
  if skipped > 0 then note_text('skipped', nil, skipped, run .. '\0' .. ARGV[A + 15] .. '\0' .. key) end
else
  fired_by = key
  store_drafts(drafts)
  last_ms = tonumber(ARGV[A + 5]) or last_ms
  if not by_hand then fires = fires + #drafts end
end
if state ~= '' then
  -- Replace the state that the schedule has.
  if flags >= 2 then rest = sub(rest, 5 + struct_unpack('>I4', rest)) end
  flags = flags % 2
  if #state > 1 then
    rest = struct_pack('>I4', #state - 1) .. sub(state, 2) .. rest
    flags = flags + 2
  end
end
if ARGV[A + 10] ~= '' then found_version = ARGV[A + 10] end
found = struct_pack('>I8I8I8I8I8BB', tonumber(ARGV[A + 7]) or 0, tonumber(ARGV[A + 8]) or 0, last_ms, fires,
  missed + tonumber(ARGV[A + 6]), flags, #found_version) .. found_version .. rest
call('HSET', SCHEDULES, key, found)

-- include chains

local names = skipping and {} or wake(worth(due_before))
local reply = {skipping and 'k' or 'f', now, found, unpack(names)}
for i = 1, #expectant do reply[#reply + 1] = expectant[i] end
if side_effects then reply[#reply + 1] = '\1' .. concat(side_effects) end
begin_removing()
write_book()
remember(cmsgpack.pack(reply))
return reply
