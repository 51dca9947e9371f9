-- skip_held: let the next message of an ordered group pass the delayed message that holds the group.
--
-- Arguments: group.
-- Touches: queue, messages, state, ready, due, leases, waiting, journal, sleepers, operations, the keys of groups.
-- Invariant: the skipped message keeps its place and its due time. The first write removes.
-- Reply: the id of the message that held the group or '', then the sleepers to wake.

-- include moves

local first = first_result()
if first then
  if first == '' then return {''} end
-- include known_answer
end
open_queue()
if not grouped or grouped == 'E' then error('WP-UNGROUPED') end
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('zset', WAITING)
-- include grouping as listing
begin_removing()

local id = grouping.skip_held(ARGV[FIRST_ARGUMENT])
local s = id and state_of(id, 'D')
if s then note_state('skipped', 'held', id, s.raw) end
local names = wake(grouping.worth())
write_book()
return remember_answer(id or '', names)
