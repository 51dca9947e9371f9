-- schedules: the schedules of a queue, and what time it is. Writes nothing.
--
-- Touches: schedules.
-- Reply: now, then key and packed schedule by turns.

open_queue()
local SCHEDULES = BASE .. 'schedules'
must_be('hash', SCHEDULES)
local reply = call('HGETALL', SCHEDULES)
table.insert(reply, 1, now)
return reply
