-- grouping_turns: the turns of groups in a claim: which messages it leases, and how the records of their groups change.
--
-- A part of grouping.lua, inside its function; see there for keys and layouts.
-- Invariant: a message is handed out only from the place in ready that its line names; a group hands out no more
-- messages than its order and its limits allow at once.

-- Add groups to the turns whose rate allows the next message, and delete windows that are over: a bounded number of
-- both.
function grouping.resume_limited()
  if limited + rates == 0 then return end
  local names = call('ZRANGEBYSCORE', LIMITED, '-inf', now, 'LIMIT', 0, CHUNK_MESSAGES_MAX)
  read_groups(names)
  for i = 1, #names do join(known[names[i]]) end
  -- Later than a window from now: the clock was set back.
  local latest = call('ZREVRANGE', LIMITED, 0, LATEST_LIMITED - 1, 'WITHSCORES')
  for i = 1, #latest, 2 do
    local g = group_named(latest[i])
    if not g.rate_count or tonumber(latest[i + 1]) > end_of_part(g) + g.rate_per then
      join(g)
      names[#names + 1] = g.name
    end
  end
  bulk('ZREM', LIMITED, names, #names)
  local over = call('ZRANGEBYSCORE', RATE_ENDS, '-inf', now, 'LIMIT', 0, CHUNK_MESSAGES_MAX)
  bulk('HDEL', RATES, over, #over)
  bulk('ZREM', RATE_ENDS, over, #over)
end

-- The time until the rate of a group allows the next message, or nil.
function grouping.next_rate()
  if limited == 0 then return end
  local first = call('ZRANGE', LIMITED, 0, 0, 'WITHSCORES')
  return first[2] and max(0, tonumber(first[2]) - now)
end

-- The groups that this claim has read from group_turns, in the order of their turns; those before `first` are finished.
local in_turn, first, read_to, all_read = {}, 1, 0, false
local last_number, last_name -- of the last group that was read

local function put_in_turn(g)
  local low, high = first, #in_turn + 1
  -- Most groups go to the end.
  if low < high and not comes_before(g.planned, g.name, in_turn[high - 1].planned, in_turn[high - 1].name) then low = high end
  while low < high do
    local middle = floor((low + high) / 2)
    local other = in_turn[middle]
    if comes_before(g.planned, g.name, other.planned, other.name) then high = middle else low = middle + 1 end
  end
  if low > #in_turn then in_turn[low] = g else table.insert(in_turn, low, g) end
end

-- Read the next groups of group_turns. Groups that are not read have their turn after the last one that is.
local function read_turns(number)
  local page = call('ZRANGE', TURNS, read_to, read_to + number - 1, 'WITHSCORES')
  local names = {}
  for i = 1, #page, 2 do names[#names + 1] = page[i] end
  read_groups(names)
  for i = 1, #names do
    local g = known[names[i]]
    g.number = tonumber(page[i * 2])
    g.planned, g.left, g.heads, g.head_at = g.number, false, false, 1
    put_in_turn(g)
    last_number, last_name = g.number, g.name
  end
  read_to, all_read = read_to + #names, #names < number
end

-- Remove a group that cannot hand out a message from the turns. It returns by itself if only its rate is used up.
local function leave_turns(g, until_ms)
  g.leaves = true
  if until_ms then
    call('ZADD', LIMITED, until_ms, g.name)
    limited = limited + 1
  end
end

-- The name of the next message in a group's line that is not planned yet. `number`: how many to read at once.
local function next_head(g, number)
  local heads = g.heads
  if not heads or g.head_at > #heads then
    local from = heads and '(' .. heads[#heads] or '[' .. g.name .. '\0'
    heads = call('ZRANGEBYLEX', LINE, from, '(' .. g.name .. '\1', 'LIMIT', 0, number)
    if #heads == 0 then return end
    g.heads, g.head_at = heads, 1
  end
  g.head_at = g.head_at + 1
  return heads[g.head_at - 1]
end

local skipped = 0
-- A plan without Lua records of groups: their names, the numbers of their turns, their packed numbers and depths, and
-- how many of them have handed out their message. Nil otherwise.
local short

-- Plan one message of each of the first groups, if their turns allow that: no group has its next turn before the last
-- of these. Returns ids, and for each its place in the plan and its name in the line; nothing otherwise.
local function plan_short(number)
  local ids, names, numbers, places, heads, left_packed, left_depths, count = {}, {}, {}, {}, {}, {}, {}, 0
  repeat
    local page = call('ZRANGE', TURNS, 0, number - 1, 'WITHSCORES')
    local length = #page / 2
    if length == 0 or not ordered and (length < number or page[2 * length] - page[2] >= GROUP_STRIDE) then return end
    local all = {}
    for i = 1, length do
      all[i] = page[2 * i - 1]
      -- Messages without a group have no order.
      if ordered and all[i] == '' then return end
    end
    local packed = with_numbers > 0 and call('HMGET', GROUPS, unpack(all)) or {}
    local depths, leaves = call('ZMSCORE', DEPTHS, unpack(all)), {}
    for i = 1, length do
      local name, was = all[i], packed[i]
      if not depths[i] or ordered and was and sub(was, 1, 4) ~= NONE_RUNNING then
        leaves[#leaves + 1] = name
      else
        local head = call('ZRANGEBYLEX', LINE, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, 1)[1]
        if not head then return end
        count = count + 1
        ids[count], places[count], heads[count], names[count] = sub(head, -24), count, head, name
        numbers[count], left_packed[count], left_depths[count] = page[2 * i], was, depths[i]
      end
    end
    skipped = skipped + #leaves
    bulk('ZREM', TURNS, leaves, #leaves)
  until count > 0 or skipped >= GROUPS_SKIPPED_MAX
  if count == 0 then return end
  short = {names = names, numbers = numbers, packed = left_packed, depths = left_depths, taken = 0}
  return ids, places, heads
end

-- Plan up to `number` messages in the order of turns: ids, and for each its group and its name in the line. Groups that
-- cannot hand out a message are removed from the turns, a bounded number of them in one claim.
function grouping.plan(number)
  local ids, groups, heads, planned = {}, {}, {}, 0
  if not serves then
    -- By priority and age. The groups of the messages are known once their states are read.
    return call('ZRANGE', READY, 0, number - 1), groups, heads
  end
  if simple and #touched == 0 and policy.lease_ms then
    local short_ids, places, short_heads = plan_short(number)
    if short_ids then return short_ids, places, short_heads end
  end
  while planned < number and skipped < GROUPS_SKIPPED_MAX do
    local g = in_turn[first]
    if not all_read and (not g or comes_before(last_number, last_name, g.planned, g.name)) then
      read_turns(max(number - planned, skipped))
    elseif not g then
      break
    else
      first = first + 1
      if not g.left then
        local until_ms
        g.left, until_ms = claimable(g)
        if g.left == 0 then
          skipped = skipped + 1
          leave_turns(g, until_ms)
        end
      end
      if g.left > 0 then
        -- About as many as this plan will need of it.
        local head = next_head(g, min(g.left, floor((number - planned) / (#in_turn - first + 2)) + 1))
        if head then
          planned = planned + 1
          ids[planned], groups[planned], heads[planned] = sub(head, -24), g, head
          g.left, g.planned = g.left - 1, g.planned + floor(GROUP_STRIDE / g.weight)
          if g.left > 0 then put_in_turn(g) end
        else
          -- Its line has fewer messages than its count.
          skipped = skipped + 1
          g.ready, g.left = call('ZLEXCOUNT', LINE, '[' .. g.name .. '\0', '(' .. g.name .. '\1'), 0
          if g.ready == 0 then leave_turns(g) end
        end
      end
    end
  end
  return ids, groups, heads
end

-- Whether there may be groups that can hand out a message after those that this claim has read.
function grouping.has_more() return skipped >= GROUPS_SKIPPED_MAX end

-- Whether a planned message is in ready, at the place that its line names.
function grouping.is_there(head, score)
  return not serves or score and struct_unpack('>I8', head, #head - 31) == score + RANK_OFFSET
end

local left_line, left_ready, places = {}, {}, {}

-- Write the records of the groups that handed out messages of a short plan. From then on Lua records are used again.
local function write_short()
  local records, depths, no_depths, turns, leaves = {}, {}, {}, {}, {}
  for i = 1, short.taken do
    local name, packed, depth = short.names[i], short.packed[i], tonumber(short.depths[i]) - 1
    if packed then
      local running, later = 0, 0
      if #packed == 8 then running, later = struct_unpack('>I4I4', packed) end
      packed = struct_pack('>I4I4', running + 1, later)
    end
    local at_place = 2 * i - 1
    records[at_place], records[at_place + 1] = name, packed or ONE_RUNNING
    if depth > 0 then
      depths[#depths + 1], depths[#depths + 2] = depth, name
    else
      no_depths[#no_depths + 1] = name
    end
    if ordered or depth == 0 then
      leaves[#leaves + 1] = name
    else
      turns[#turns + 1], turns[#turns + 2] = short.numbers[i] + GROUP_STRIDE, name
    end
  end
  bulk('HSET', GROUPS, records, #records)
  bulk('ZREM', DEPTHS, no_depths, #no_depths)
  bulk('ZADD', DEPTHS, depths, #depths)
  bulk('ZREM', TURNS, leaves, #leaves)
  bulk('ZADD', TURNS, turns, #turns)
  if short.taken > 0 then turn = tonumber(short.numbers[short.taken]) end
  with_numbers = with_numbers + short.taken
end

-- The Lua record of a group that a short plan names by its place. Messages handed out before are written first.
local function end_short(place)
  local name = short.names[place]
  write_short()
  short = nil
  simple = false
  return group_named(name)
end

-- Remove a planned message from ready and from the line of its group. `score`: in ready, nil if it is not there.
-- Returns its group.
function grouping.take(g, head, id, score, is_handed_out)
  if short then
    if is_handed_out then
      left_line[g], left_ready[g] = head, id
      return g
    end
    g = end_short(g)
  end
  if serves then
    left_line[#left_line + 1] = head
    if score then left_ready[#left_ready + 1] = id end
    g.ready = max(0, g.ready - 1)
    return g
  end
  left_ready[#left_ready + 1] = id
  if not follows then return end
  g = group_named(group_in(call('HGET', STATE, id)) or '')
  g.ready = max(0, g.ready - call('ZREM', LINE, line_name(g.name, tonumber(score), id)))
  return g
end

-- Count a message for the rate of its group.
local function count_claim(g)
  read_windows(g)
  local last, newest = end_of_part(g), g.windows[#g.windows]
  if newest and newest[2] == last then
    newest[1] = newest[1] + 1
  else
    g.windows[#g.windows + 1] = {1, last}
  end
  g.used, g.counts_rate = g.used + 1, true
end

-- Count a message of a group that was handed out.
function grouping.hand_out(g, id, score, is_leased)
  if not follows then return end
  if short then
    short.taken = g
    if ordered then places[2 * g - 1], places[2 * g] = id, score .. PADDING end
    return
  end
  if is_leased then
    if serves or call('SADD', COUNTED, id) == 1 then g.running = g.running + 1 end
    if ordered and g.name ~= '' then places[#places + 1], places[#places + 2] = id, score .. PADDING end
  end
  if g.rate_count then count_claim(g) end
  if not serves then return end
  turn = g.number
  g.number, g.moved = turn + floor(GROUP_STRIDE / g.weight), true
  local left, until_ms = claimable(g)
  if left == 0 then leave_turns(g, until_ms) end
end

-- Write the groups of handed-out messages. The rest of the plan is discarded: the next plan starts anew.
function grouping.write_taken()
  bulk('ZREM', LINE, left_line, #left_line)
  bulk('ZREM', READY, left_ready, #left_ready)
  bulk('HSET', POSITIONS, places, #places)
  if short then
    write_short()
    short = nil
  end
  grouping.write()
  left_line, left_ready, places = {}, {}, {}
  in_turn, first, read_to, all_read, last_number, last_name = {}, 1, 0, false, nil, nil
end
