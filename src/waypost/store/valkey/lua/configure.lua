-- configure: change the queue's policy, or pause and resume it.
--
-- Arguments: 'configure', the packed changes (absent ones stay, false clears), and their text; or 'pause', or 'resume'.
-- Touches: queue, ready, due, leases, journal, sleepers.
-- Invariant: one policy, in the store; a change acts at the next step that reads it.
-- Reply: the packed policy or '1' / '0' (did it change anything), then the sleepers to wake.

-- include moves

open_queue()
local verb = ARGV[FIRST_ARGUMENT]
makes = verb ~= 'resume'
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('zset', SLEEPERS)

-- How many sleepers a change can have made useful: one of them takes care of the timers, and at a resume the leases.
local function worth_waking(timed) return call('ZCARD', READY) + min(1, timed) end

-- The last changes, to be marked on charts: a bounded number.
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
    if value == false then changed[name] = nil else changed[name] = value end
    differs = differs or changed[name] ~= policy[name]
  end
  local packed = cmsgpack.pack(changed)
  call('HSET', QUEUE, 'policy', packed)
  policy = changed
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
