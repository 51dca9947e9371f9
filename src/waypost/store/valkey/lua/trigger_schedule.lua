-- trigger_schedule: publish the message of a schedule now, in addition to its regular fires.
--
-- Arguments: key, one packed draft as for publish.
-- Touches: schedules, queue, messages, state, ready, due, keys, waiting, errors, journal, sleepers, arrivals, operations,
-- window:<key>, the keys of chains, the keys of groups.
-- Invariant: nothing is published if there is no such schedule. Reply: as of publish; nothing if there is none.

local first = first_result()
if first then
-- include known_answer
end
open_queue()
makes = true
must_be('zset', READY)
local SCHEDULES = BASE .. 'schedules'
must_be('hash', SCHEDULES)

-- include moves
-- include grouping as overload
-- include accept

fired_by = ARGV[FIRST_ARGUMENT]
if call('HEXISTS', SCHEDULES, fired_by) == 0 then return {} end
local drafts = plan_drafts(FIRST_ARGUMENT + 1)
local due_before = until_first(DUE)
begin_adding()
local statuses = store_drafts(drafts)

-- include chains

local names = wake(worth(due_before))
for i = 1, #expectant do names[#names + 1] = expectant[i] end
begin_removing()
write_book()
return remember_answer(statuses, names)
