-- known_answer: the reply to a repeated operation, from the text that remember_answer stored as its first result.
--
-- Included where `first` is that text. Writes nothing.

local reply, rest = {}, string.find(first, '\0\0', 1, true)
for part in string.gmatch(rest and sub(first, 1, rest) or first, '%Z+') do reply[#reply + 1] = part end
if rest then reply[#reply + 1] = sub(first, rest + 2) end
return reply
