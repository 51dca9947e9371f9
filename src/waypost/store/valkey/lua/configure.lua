-- configure: change the queue's policy, or pause and resume it.
--
-- Arguments: 'configure', the packed changes (absent ones stay, false clears), and their text; or 'pause', or 'resume'.
-- Touches: queue, messages, state, ready, due, leases, waiting, journal, sleepers, the keys of groups.
-- Invariant: one policy, in the store; a change applies to the next step that reads it. Of the messages of a grouped
-- queue this step converts as many as one step may change; the following steps convert the rest.
-- Reply: the packed policy or '1' / '0' (whether anything changed), then the sleepers to wake.

-- include moves

open_queue()
local verb = ARGV[FIRST_ARGUMENT]
makes = verb ~= 'resume'
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('zset', SLEEPERS)

-- How many sleepers a change may have work for: one per ready message, and one for the timers, at a resume also for the
-- leases.
local function worth_waking(timed) return call('ZCARD', READY) + min(1, timed) end

-- Store the last changes, which charts mark: a bounded number.
local function keep_change(event, text)
  local kept = unpacked(call('HGET', QUEUE, 'changes')) or {}
  kept[#kept + 1] = {now, event, text}
  while #kept > CHANGES_KEPT do table.remove(kept, 1) end
  call('HSET', QUEUE, 'changes', cmsgpack.pack(kept))
end

if verb == 'configure' then
  local changed, differs = {}, false
  for name, value in pairs(policy) do changed[name] = value end
  for name, value in pairs(cmsgpack.unpack(ARGV[FIRST_ARGUMENT + 1])) do
    -- Release 0.1.0 does not know this name: its default is not stored.
    if value == false or (name == 'on_failure' and value == 'hold') then value = nil end
    changed[name] = value
    differs = differs or changed[name] ~= policy[name]
  end
  local limits = changed.group_max_running or changed.group_rate_count or changed.group_max_pending
  if (limits or changed.order) and not changed.lease_ms then error('WP-LEASE') end
  local is_grouped = limits or changed.order or changed.fair
  local before, ordered_before = grouped, policy.order
  policy = changed
  if is_grouped or grouped then
    -- The types of the keys are checked before the first write, whichever mode the queue gets.
    must_be('hash', MESSAGES)
    must_be('hash', STATE)
    must_be('zset', WAITING)
    grouped = is_grouped and (before == 'T' and 'T' or 'B') or 'E'
    must_be('set', BASE .. 'group_counted')
-- include grouping as configure
    if is_grouped and not changed.lease_ms and grouping.limits_of_own() then error('WP-LEASE') end
  end
  -- The previous release refuses a queue with settings that it does not know.
  layout = VERSION_WRITTEN
  for name in pairs(NEW_SETTINGS_TABLE) do
    if changed[name] then layout = VERSION end
  end
  local packed = cmsgpack.pack(changed)
  call('HSET', QUEUE, 'policy', packed)
  if grouping then grouping.reconfigure(before, ordered_before) end
  note_text('configured', nil, 0, ARGV[FIRST_ARGUMENT + 2])
  if differs then keep_change('configured', ARGV[FIRST_ARGUMENT + 2]) end
  local names = wake(worth_waking(call('ZCARD', DUE)))
  write_book()
  return {packed, unpack(names)}
end

local wanted = verb == 'pause'
if paused == wanted then
  if makes and gone then write_book() end
  return {'0'}
end
paused = wanted
call('HSET', QUEUE, 'paused', wanted and '1' or '0')
note_text(wanted and 'paused' or 'resumed', nil, 0, '')
keep_change(wanted and 'paused' or 'resumed', '')
local names = wake(worth_waking(call('ZCARD', DUE) + call('ZCARD', LEASES)))
write_book()
return {'1', unpack(names)}
