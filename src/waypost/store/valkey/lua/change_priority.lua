-- change_priority: change the priority of messages that are ready or delayed. A ready message becomes the last of its
-- new priority.
--
-- Arguments: the priority, then one id each.
-- Touches: queue, messages, state, ready, due, journal, sleepers, operations, the keys of groups.
-- Invariant: a message stays in its state. The first write removes.
-- Reply: one letter each (c changed, s unchanged, u unknown), then the sleepers to wake.

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
must_be('zset', SLEEPERS)
-- include grouping
local due_before = until_first(DUE)
local priority = tonumber(ARGV[FIRST_ARGUMENT])
begin_removing()

local function change(id)
  local s = state_of(id)
  if not s or s.status == 'X' then return 'u' end
  if (s.status ~= 'R' and s.status ~= 'D') or s.priority == priority or (policy.order and s.group ~= '') then return 's' end
  if s.status == 'R' then
    leave_place(s)
    s.priority = priority
    make_claimable(s, min(s.ready, now))
  else
    s.priority = priority
    call('HSET', STATE, id, pack_state(s))
  end
  note_state('postponed', 'priority', id, pack_state(s))
  return 'c'
end

local statuses = {}
for i = FIRST_ARGUMENT + 1, #ARGV do statuses[#statuses + 1] = change(ARGV[i]) end
local names = wake(worth(due_before))
write_book()
return remember_answer(concat(statuses), names)
