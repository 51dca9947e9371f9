-- grouping_overload: which messages a publish drops when a group or the queue is full.
--
-- A part of grouping.lua, inside its function; see there for keys and layouts.
-- Writes nothing: the caller drops the messages.

-- Up to `number` ready messages of a group that an overload may drop: of the lowest priority, the oldest first.
local function droppable(g, number, concerned)
  local chosen = {}
  local function choose(from, to)
    while #chosen < number do
      local page = call('ZRANGEBYLEX', LINE, from, to, 'LIMIT', 0, CHUNK_MESSAGES_MAX)
      for i = 1, #page do
        local id = sub(page[i], -24)
        if not concerned[id] and #chosen < number then chosen[#chosen + 1] = id end
      end
      if #page < CHUNK_MESSAGES_MAX then return end
      from = '(' .. page[#page]
    end
  end
  if ordered and g.name ~= '' then
    choose('[' .. g.name .. '\0', '(' .. g.name .. '\1')
    return chosen
  end
  for priority = 0, 9 do
    local rank = score_of(priority, -HEAD_OFFSET) + RANK_OFFSET
    choose('[' .. g.name .. '\0' .. struct_pack('>I8', rank), '(' .. g.name .. '\0' .. struct_pack('>I8', rank + BAND))
  end
  return chosen
end

-- What must be dropped so that no group exceeds its limit: ids, or an error. `added`: how many by group. Reads only.
function grouping.over_caps(added, concerned)
  local names, doomed = {}, {}
  for name in pairs(added) do names[#names + 1] = name end
  read_groups(names)
  if not serves or not (policy.group_max_pending or configured) then return doomed end
  table.sort(names)
  for i = 1, #names do
    local g, number = known[names[i]], added[names[i]]
    local pending = g.ready + g.later
    local over = g.max_pending and min(pending + number - g.max_pending, number + BURY_MAX) or 0
    if over > 0 then
      local chosen = policy.overload == 'drop_oldest' and droppable(g, over, concerned) or {}
      if #chosen < over then
        -- As hexadecimal digits: servers cut and change the text of errors.
        local name = string.gsub(g.name, '.', function(one) return format('%02x', byte(one)) end)
        error(format('WP-FULL %.0f %.0f %s', pending, g.max_pending, name))
      end
      for j = 1, #chosen do
        doomed[#doomed + 1] = chosen[j]
        concerned[chosen[j]] = true
      end
    end
  end
  return doomed
end

-- How many ready messages of each group an overload must not drop, and how many messages were read for that.
local function spared_of(concerned)
  local ids, spared = {}, {}
  for id in pairs(concerned) do ids[#ids + 1] = id end
  for first = 1, #ids, 1000 do
    local last = min(first + 999, #ids)
    local raws, scores = call('HMGET', STATE, unpack(ids, first, last)), call('ZMSCORE', READY, unpack(ids, first, last))
    for i = 1, #raws do
      local group = scores[i] and group_in(raws[i])
      if group then spared[group] = (spared[group] or 0) + 1 end
    end
  end
  return spared, #ids
end

-- What a full queue drops: one by one a message of the longest group; of equally long ones of the first by name. Reads
-- only.
function grouping.longest_first(number, concerned)
  -- Some groups among the longest may have nothing that can be dropped.
  local spared, number_spared = spared_of(concerned)
  local most = number + number_spared
  local page = call('ZREVRANGE', DEPTHS, 0, most - 1, 'WITHSCORES')
  local names, length_of = {}, {}
  for i = 1, #page, 2 do names[#names + 1], length_of[page[i]] = page[i], tonumber(page[i + 1]) end
  if #names == most then
    -- Of the groups as long as the last one, the first by name.
    local last = length_of[names[most]]
    while #names > 0 and length_of[names[#names]] == last do names[#names] = nil end
    local same = call('ZRANGEBYSCORE', DEPTHS, last, last, 'LIMIT', 0, most - #names)
    for i = 1, #same do names[#names + 1], length_of[same[i]] = same[i], last end
  end
  read_groups(names)
  for i = 1, #names do length_of[names[i]] = length_of[names[i]] - (spared[names[i]] or 0) end
  table.sort(names, function(one, other) return comes_before(-length_of[one], one, -length_of[other], other) end)
  -- Level by level: one message each of all groups that are as long as the longest one.
  local level_of, order, planned = {}, {}, {}
  local level, next_name = names[1] and length_of[names[1]] or 0, 1
  while #order < number and level > 0 do
    while names[next_name] and length_of[names[next_name]] >= level do
      local low = 1
      while level_of[low] and comes_before(0, level_of[low], 0, names[next_name]) do low = low + 1 end
      table.insert(level_of, low, names[next_name])
      next_name = next_name + 1
    end
    for i = 1, #level_of do
      if #order < number then
        order[#order + 1] = level_of[i]
        planned[level_of[i]] = (planned[level_of[i]] or 0) + 1
      end
    end
    level = level - 1
  end
  local chosen, choices = {}, {}
  for name, most in pairs(planned) do choices[name] = droppable(known[name], most, concerned) end
  for i = 1, #order do
    local choice = choices[order[i]]
    choice.used = (choice.used or 0) + 1
    chosen[#chosen + 1] = choice[choice.used]
  end
  return chosen
end
