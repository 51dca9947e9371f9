-- reschedule: change the due times of timers. Messages that wait for a retry are timers too.
--
-- Arguments: the due time in milliseconds or '', then the delay from now; then one target each: 'i' and an id, or 'k' and a key.
-- Touches: queue, messages, state, ready, due, keys, journal, sleepers, operations, the keys of groups.
-- Invariant: only a message that is not due is changed. The first write removes.
-- Reply: one letter each (m moved, d due already, u unknown), then the sleepers to wake.

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
must_be('zset', SLEEPERS)
-- include grouping
local due_before = until_first(DUE)
local ready = max(now, tonumber(ARGV[FIRST_ARGUMENT]) or now + tonumber(ARGV[FIRST_ARGUMENT + 1]))
begin_removing()

local function move(target)
  local id = sub(target, 2)
  if sub(target, 1, 1) == 'k' then
    local holder = call('HGET', HOLDERS, id)
    if not holder then return 'u' end
    id = sub(holder, 1, 24)
  end
  local s = state_of(id)
  if not s or s.status == 'X' then return 'u' end
  if s.status ~= 'D' then return 'd' end
  leave_place(s)
  make_claimable(s, ready)
  note_state('postponed', nil, id, s.raw)
  return 'm'
end

local statuses = {}
for i = FIRST_ARGUMENT + 2, #ARGV do statuses[#statuses + 1] = move(ARGV[i]) end
local names = wake(worth(due_before))
write_book()
return remember_answer(concat(statuses), names)
