-- configure_group: change the settings of a single group, or pause and resume it.
--
-- Arguments: group, the packed changes (absent ones stay, false clears), and their text.
-- Touches: queue, ready, due, leases, waiting, state, journal, sleepers, the keys of groups.
-- Invariant: a group has settings here only if they differ from those of all groups of the queue; a bounded number has.
-- Reply: '1' if it changed anything, otherwise '0', then the sleepers to wake.

-- include moves

open_queue()
if not grouped or grouped == 'E' then error('WP-UNGROUPED') end
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('zset', WAITING)
must_be('zset', SLEEPERS)
-- include grouping as listing

local group = ARGV[FIRST_ARGUMENT]
if not grouping.change_settings(group, cmsgpack.unpack(ARGV[FIRST_ARGUMENT + 1])) then return {'0'} end
note_text('configured', 'group', 0, group .. '\0' .. ARGV[FIRST_ARGUMENT + 2])
local names = wake(grouping.worth_waking(group))
grouping.worth()
write_book()
return {'1', unpack(names)}
