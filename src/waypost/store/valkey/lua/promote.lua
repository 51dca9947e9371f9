-- promote: make timers ready that are due, and end messages that have lapsed, as a claim does, so that workers can
-- sleep.
--
-- Touches: queue, messages, state, ready, due, keys, waiting, dead, errors, journal, sleepers, outgoing, expires,
-- window:<key>, the keys of chains, the keys of groups.
-- Invariant: a bounded number; the timers of a paused queue accumulate. A repeat only finds less to do.
-- A timer whose record is damaged is set aside.
-- Reply: promoted, timers left, how late the oldest was, next due or next to lapse (-1: none), then the clients to wake
-- and, after a byte 1, the side effects.

-- include moves

open_queue()
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
if expiring then
  must_be('zset', BASE .. 'expires')
  must_be('hash', HOLDERS)
  must_be('zset', WAITING)
  must_be('zset', DEAD)
  must_be('hash', ERRORS)
  must_be('hash', OUTGOING)
end
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
local lapsed = expiring and lapse() or 0
-- include chains
if grouping then grouping.write() end
local names = wake(freshly_ready + (lapsed > 0 and grouping and grouping.worth() or 0))
for i = 1, #expectant do names[#names + 1] = expectant[i] end
if #due > 0 or lapsed > 0 then write_book() end
if side_effects then names[#names + 1] = '\1' .. concat(side_effects) end
local next_due, next_lapse = until_first(DUE) or -1, expiring and until_lapse()
if next_lapse and (next_due < 0 or next_lapse < next_due) then next_due = next_lapse end
return {promoted, call('ZCARD', DUE), max(0, now - oldest), next_due, unpack(names)}
