-- schedules: the schedules of a queue, and what time it is. Writes nothing.
--
-- Touches: schedules. Reply: now, then key and packed schedule by turns.

open_queue()
must_be('hash', BASE .. 'schedules')
local reply = call('HGETALL', BASE .. 'schedules')
table.insert(reply, 1, now)
return reply
