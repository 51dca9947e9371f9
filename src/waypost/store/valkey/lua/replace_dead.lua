-- replace_dead: publish a message in place of a dead letter.
--
-- Arguments: id of the letter, one packed draft as for publish.
-- Touches: queue, messages, state, ready, due, keys, waiting, dead, errors, journal, sleepers, arrivals, operations,
-- window:<key>, the keys of chains, the keys of groups.
-- Invariant: the letter is deleted only if the message is stored, and nothing is published if there is no such letter.
-- Reply: as of publish; nothing if there is no such letter.

local first = first_result()
if first then
-- include known_answer
end
open_queue()
must_be('zset', READY)
must_be('zset', DEAD)
must_be('hash', ERRORS)

-- include moves
-- include grouping as overload
-- include accept

local letter = ARGV[FIRST_ARGUMENT]
if not call('ZSCORE', DEAD, letter) then return {} end
makes = true
edited_letter = letter
local drafts = plan_drafts(FIRST_ARGUMENT + 1)
-- The message inherits from the letter how long its key is in use.
local replaced = state_of(letter, 'X')
drafts[1].unique = replaced and floor(replaced.flags / 32) % 4
local due_before = until_first(DUE)
begin_adding()
local statuses = store_drafts(drafts)
if statuses == 'q' or statuses == 'd' then trim_dead({letter}, 'edited') end

-- include chains

local names = wake(worth(due_before))
for i = 1, #expectant do names[#names + 1] = expectant[i] end
begin_removing()
write_book()
return remember_answer(statuses, names)
