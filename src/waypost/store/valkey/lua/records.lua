-- records: a page of the shared records of one kind, the newest first, or those of some names. Writes nothing.
--
-- KEYS: as in save_record.
-- Arguments: how many at most, creation and name of the last record of the previous page or '' and '', then names if
-- only these are wanted.
-- Touches: shared, shared data.
-- Invariant: no record that has expired is shown.
-- Reply: the store's time, creation and name of the last record if there are more, and names and packed records in turn.

local SHARED, SHARED_DATA = KEYS[1], KEYS[2]

must_be('zset', SHARED)
must_be('hash', SHARED_DATA)
local limit, created, last = tonumber(ARGV[FIRST_ARGUMENT]), ARGV[FIRST_ARGUMENT + 1], ARGV[FIRST_ARGUMENT + 2]
local found, more = {}, {}

local function add(name)
  local packed = call('HGET', SHARED_DATA, name)
  if not packed then return false end
  local ends = struct_unpack('>I8', packed, 17)
  if ends > 0 and ends <= now then return false end
  found[#found + 1], found[#found + 2] = name, packed
  return true
end

if #ARGV > FIRST_ARGUMENT + 2 then
  for i = FIRST_ARGUMENT + 3, #ARGV do add(ARGV[i]) end
  return {now, more, found}
end
local start = 0
if created ~= '' then
  start = call('ZCOUNT', SHARED, '(' .. created, '+inf')
  local same = call('ZRANGEBYSCORE', SHARED, created, created)
  for i = 1, #same do
    if same[i] >= last then start = start + 1 end
  end
end
local count, names = 0, nil
repeat
  names = call('ZRANGE', SHARED, start, start + limit, 'REV')
  for i = 1, #names do
    if count == limit then
      local name = found[#found - 1]
      local _, made = struct_unpack('>I8I8', found[#found])
      more = {format('%.0f', made), name}
      names = {}
      break
    end
    if add(names[i]) then count = count + 1 end
  end
  start = start + #names
until #names == 0
return {now, more, found}
