-- groups: list the groups of a queue by name, page by page, or one of them. Writes nothing.
--
-- Arguments: limit, '1' and the last group of the previous page or '', '1' and the only group that is wanted or ''.
-- Touches: queue, ready, due, leases, waiting, state, messages, the keys of groups.
-- A page reads at most SCANNED_MAX groups: it may be short or empty, with a cursor to continue from.
-- Reply: '1' and the cursor or '', then for each group: name, ready, delayed and waiting, running, how long the next
-- message has been ready (-1: none), id of the message that holds it or '', 1 if that is leased, when its rate allows
-- the next message (0: now), 1 if it is at its limit of leases, 1 if it is full, packed settings or ''.

-- include moves

open_queue()
if not grouped or grouped == 'E' then error('WP-UNGROUPED') end
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', LEASES)
must_be('zset', WAITING)
-- include grouping as listing

local limit, cursor, wanted = tonumber(ARGV[FIRST_ARGUMENT]), ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2]
local names
if wanted ~= '' then
  names = {sub(wanted, 2)}
else
  names = grouping.names(cursor ~= '' and sub(cursor, 2) or nil, SCANNED_MAX)
end
local reply, seen = {''}, 0
for i = 1, #names do
  if (#reply - 1) / 11 >= limit then break end
  seen = i
  grouping.describe(names[i], reply)
end
if wanted == '' and (seen < #names or #names == SCANNED_MAX) then reply[1] = '1' .. names[seen] end
return reply
