-- cursor: the place where a listing of a sorted set continues.
--
-- Included by scripts that list in parts. A cursor is the score and the name of the last member seen, separated by a
-- space.
-- Invariant: the listing continues directly after that place, even if the member is gone, with about log2(n) calls for
-- n members with this score.

-- Whether a name follows another in a sorted set, which compares bytes; Lua compares strings by the server's locale.
local function follows(name, other)
  for i = 1, min(#name, #other) do
    local one, two = byte(name, i), byte(other, i)
    if one ~= two then return one > two end
  end
  return #name > #other
end

-- The rank of the first member after a cursor.
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
