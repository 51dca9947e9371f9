-- schedules: the schedules of a queue, and the store's time. Writes nothing.
--
-- Touches: schedules.
-- Reply: now, then alternately key and packed schedule.

open_queue()
local SCHEDULES = BASE .. 'schedules'
must_be('hash', SCHEDULES)
local reply = call('HGETALL', SCHEDULES)
table.insert(reply, 1, now)
return reply
