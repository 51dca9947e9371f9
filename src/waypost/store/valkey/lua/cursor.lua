-- cursor: where a listing of a sorted set goes on.
--
-- Included by scripts that list in parts. A cursor is the score and the name of the last member seen, with a space between.
-- Invariant: the listing goes on right behind that place, whether or not the member is still there, with about as many
-- calls as the number of members with this score has binary digits.

-- Whether a name comes behind another in a sorted set, which compares bytes; strings are compared by the server's locale.
local function follows(name, other)
  for i = 1, min(#name, #other) do
    local one, two = byte(name, i), byte(other, i)
    if one ~= two then return one > two end
  end
  return #name > #other
end

-- The rank of the first member behind a cursor.
local function rank_behind(key, cursor)
  local score, member = string.match(cursor, '^(%S+) (.*)$')
  if call('ZSCORE', key, member) == score then return call('ZRANK', key, member) + 1 end
  local low, high = call('ZCOUNT', key, '-inf', '(' .. score), call('ZCOUNT', key, '-inf', score)
  while low < high do
    local middle = floor((low + high) / 2)
    if follows(call('ZRANGE', key, middle, middle)[1], member) then high = middle else low = middle + 1 end
  end
  return low
end
