-- promote: make timers ready that are due, as a claim does, for sleeping workers.
--
-- Touches: queue, messages, state, ready, due, journal, sleepers, the keys of groups.
-- Invariant: a bounded number; a paused queue lets its timers gather. A repeat only finds less to do.
-- A timer whose record is damaged is set aside.
-- Reply: promoted, timers left, how late the oldest was, next due (-1: none), then the sleepers to wake and, behind a byte 1, what else
-- it did.

-- include moves

open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
-- include grouping
local timers = must_be('zset', DUE)
local oldest = timers > 0 and tonumber(call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2]) or now
local due, promoted = {}, 0
if not paused and timers > 0 then due = call('ZRANGEBYSCORE', DUE, '-inf', now, 'LIMIT', 0, PROMOTE_MAX) end
for i = 1, #due do
  local s = state_of(due[i], 'D')
  if s then
    leave_place(s)
    make_claimable(s, s.ready)
    promoted = promoted + 1
    note_state('promoted', 'due', s.id, s.raw)
    add_side_effect('promoted', 'due', s.id, s.raw)
  else
    set_aside(due[i], DUE)
  end
end
if grouping then grouping.write() end
local names = wake(freshly_ready)
if #due > 0 then write_book() end
if side_effects then names[#names + 1] = '\1' .. concat(side_effects) end
return {promoted, timers - #due, max(0, now - oldest), until_first(DUE) or -1, unpack(names)}
