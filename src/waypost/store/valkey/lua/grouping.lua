-- grouping: the records of a grouped queue's groups, and the functions that update them when messages move.
--
-- Included after open_queue and moves by every script that moves messages; a queue that is not grouped only tests one
-- flag, and a script gets only the functions that its use (GROUP_USE, from `include grouping as …`) needs. '' is the
-- group of messages without one. Keys, all derived in the slot of the queue:
--   groups          hash  group -> running (4) later (4): its leased messages, its delayed and waiting ones; unless both are 0
--   group_names     zset  groups that have anything here, all with score 0
--   group_line      zset  group NUL rank (8) id, all with score 0: the ready messages of each group in their order
--   group_depths    zset  groups with ready messages, by their number
--   group_turns     zset  groups that may have a message for a claim, by the number of their turn
--   group_limited   zset  groups with ready messages whose rate is used up, by the time at which it allows the next one
--   group_rates     hash  group -> count (4) and last millisecond (8) of each part of its rate's window, oldest first
--   group_rate_ends zset  groups in group_rates, by the time at which the whole window is over
--   group_settings  hash  group -> packed settings of this group alone
--   positions       hash  id -> score in ready to which a message of an ordered group returns
--   group_held      zset  like group_line: delayed messages that hold their ordered group
--   group_counted   set   while records are built: ids of leased, delayed and waiting messages that they count
-- Fields of queue: groups ('T': claims take turns between groups, 'B': the records are being built, 'E': the records
-- are deleted, and scores of ready messages are being restored), groups_at (phase of that and its cursor), group_turn
-- (the number of the last turn).
-- Messages of an ordered group are in ready after all priorities, by age alone.
-- Invariant: a message in ready is in the line of its group, and a group that can hand out a message is in group_turns.
-- While records are built, claims lease messages in the order of ready, as if there were no groups.

if grouped then
-- A function, because a script can have only 200 local names.
local function follow_groups()
  local GROUPS, NAMES, LINE, DEPTHS = BASE .. 'groups', BASE .. 'group_names', BASE .. 'group_line', BASE .. 'group_depths'
  local TURNS, LIMITED, RATES, RATE_ENDS =
    BASE .. 'group_turns', BASE .. 'group_limited', BASE .. 'group_rates', BASE .. 'group_rate_ends'
  local SETTINGS, POSITIONS, HELD, COUNTED =
    BASE .. 'group_settings', BASE .. 'positions', BASE .. 'group_held', BASE .. 'group_counted'
  local LATEST_LIMITED = 8 -- so many limited groups are examined by a claim because the clock may have been set back
  local RANK_OFFSET = 2 * BAND -- ranks are no negative numbers
  local ORDERED_BAND = 9 * BAND -- where the messages of ordered groups are in ready
  local ONE_RUNNING, NONE_RUNNING = '\0\0\0\1\0\0\0\0', '\0\0\0\0'
  -- Added to the stored position, and not read: the server stores a hash with longer values as a table, and searches a
  -- hash with short values from its beginning for each position.
  local PADDING = string.rep(' ', 64)

  local serves, builds = grouped == 'T', grouped == 'B'
  local follows = serves or builds
  local ordered = policy.order ~= nil

  local with_numbers = must_be('hash', GROUPS)
  must_be('zset', NAMES)
  must_be('zset', LINE)
  must_be('zset', DEPTHS)
  must_be('zset', TURNS)
  local limited = must_be('zset', LIMITED)
  must_be('hash', RATES)
  local rates = must_be('zset', RATE_ENDS)
  local configured = must_be('hash', SETTINGS) > 0
  must_be('hash', POSITIONS)
  local held = must_be('zset', HELD)
  if builds then must_be('set', COUNTED) end
  local fields = call('HMGET', QUEUE, 'groups_at', 'group_turn')
  local at, turn = fields[1], tonumber(fields[2] or '') or 0
  local turn_before = turn
  grouping = {serves = serves, capped = policy.group_max_pending or configured}

  local known, touched = {}, {}
  local limits = policy.group_max_running or policy.group_rate_count or policy.group_max_pending
  -- All groups have the same settings, and no message holds its group. Then the steps that every message takes (stored,
  -- claimed, done) work without a Lua record of each group: to create one costs more than the rest of the step.
  local simple = serves and not configured and not limits and not at and (held == 0 or not ordered)

  -- ---- records -------------------------------------------------------------------------------------------------------

  local takes_turns = GROUP_USE == 'turns'
  local write_added -- writes messages that are counted, and not yet written; see below

  local function read_group(name, packed, depth, settings)
    local running, later, ready = 0, 0, depth and tonumber(depth) or 0
    if packed and #packed == 8 then running, later = struct_unpack('>I4I4', packed) end
    -- Created with all its fields, 16 at most: to extend a table costs more than a command, even by a field that is
    -- nil.
    local g
    if takes_turns then
      g = {name = name, running = running, later = later, packed = packed, ready = ready, ready_before = ready, weight = 1,
        number = 0, planned = 0, left = false, heads = false, head_at = 1, joins = false, leaves = false, moved = false, freed = false}
    else
      g = {name = name, running = running, later = later, packed = packed, ready = ready, ready_before = ready, weight = 1,
        joins = false, leaves = false, moved = false, freed = false}
    end
    local own = settings and unpacked(settings)
    if own then g.own, g.weight = own, own.weight or 1 end
    if (limits or own) and name ~= '' then
      g.max_running, g.max_pending = policy.group_max_running, policy.group_max_pending
      g.rate_count, g.rate_per = policy.group_rate_count, policy.group_rate_per_ms
      if own then
        g.max_running, g.max_pending = own.max_running or g.max_running, own.max_pending or g.max_pending
        if own.rate_count then g.rate_count, g.rate_per = own.rate_count, own.rate_per_ms end
      end
    end
    known[name] = g
    touched[#touched + 1] = g
    return g
  end

  local function group_named(name)
    if known[name] then return known[name] end
    write_added()
    return read_group(name, call('HGET', GROUPS, name), call('ZSCORE', DEPTHS, name),
      configured and call('HGET', SETTINGS, name))
  end

  -- Read the records of many groups, in batches as large as the number of arguments that a command may have.
  local function read_groups(names)
    local missing, number = {}, 0
    for i = 1, #names do
      local name = names[i]
      if known[name] == nil then
        number = number + 1
        missing[number] = name
        known[name] = false -- until it is read below
      end
    end
    if number == 0 then return end
    write_added()
    for first = 1, number, 1000 do
      local last = min(first + 999, number)
      local packed, depths = call('HMGET', GROUPS, unpack(missing, first, last)), call('ZMSCORE', DEPTHS, unpack(missing, first, last))
      local settings = configured and call('HMGET', SETTINGS, unpack(missing, first, last)) or {}
      for i = 1, #packed do read_group(missing[first + i - 1], packed[i], depths[i], settings[i]) end
    end
  end

  -- ---- limits --------------------------------------------------------------------------------------------------------

  -- The last millisecond of the current part of a group's window.
  local function end_of_part(g)
    local part = -floor(-g.rate_per / GROUP_RATE_PARTS)
    return now - now % part + part - 1
  end

  -- Read how many messages were claimed within the window of a group's rate.
  local function read_windows(g)
    if g.windows then return end
    g.windows, g.used = {}, 0
    local packed = call('HGET', RATES, g.name) or ''
    for i = 1, #packed - 11, 12 do
      local number, last = struct_unpack('>I4I8', packed, i)
      if last + g.rate_per > now then
        g.windows[#g.windows + 1] = {number, last}
        g.used = g.used + number
      end
    end
    if #g.windows > 0 and g.windows[#g.windows][2] > end_of_part(g) then
      -- The clock was set back: the whole window counts from now on, not only when the clock has reached the old time.
      g.windows, g.counts_rate = {{g.used, end_of_part(g)}}, true
    end
  end

  -- How many more messages the rate of a group allows now, and, if none, when it allows the next one.
  local function allowed(g)
    read_windows(g)
    if g.used < g.rate_count then return g.rate_count - g.used end
    local used = g.used
    for i = 1, #g.windows do
      used = used - g.windows[i][1]
      if used < g.rate_count then return 0, g.windows[i][2] + g.rate_per end
    end
    return 0, now
  end

  -- The first message that holds a group, by the name that it would have in the line.
  local function holder_of(g)
    if not ordered or held == 0 or g.name == '' or policy.on_failure == 'pass' then return end
    return call('ZRANGEBYLEX', HELD, '[' .. g.name .. '\0', '(' .. g.name .. '\1', 'LIMIT', 0, 1)[1]
  end

  -- How many messages of a group a claim could lease now; and, if its rate allows none, when it allows the next one.
  local function claimable(g)
    if g.ready == 0 or (g.own and g.own.paused) then return 0 end
    if g.name == '' then return g.ready end
    local number = g.ready
    if g.max_running then
      if g.running >= g.max_running then return 0 end
      number = min(number, g.max_running - g.running)
    end
    if g.rate_count then
      local room, until_ms = allowed(g)
      if room == 0 then return 0, until_ms end
      number = min(number, room)
    end
    if ordered then
      if g.running > 0 or holder_of(g) then return 0 end
      number = 1
    end
    return number
  end

  -- Add a group to the turns that may be able to hand out a message, unless it is there: one stride after the last
  -- turn.
  local function join(g)
    if not g.joins then g.joins = turn + floor(GROUP_STRIDE / g.weight) end
  end

  -- The lease of a message has ended, or it no longer holds its group.
  local function released(g)
    if (ordered and g.name ~= '') or g.max_running then
      g.freed = true
      join(g)
    end
  end

  -- ---- writing -------------------------------------------------------------------------------------------------------

  local function write_windows(g)
    local parts = {}
    for i = 1, #g.windows do parts[i] = struct_pack('>I4I8', g.windows[i][1], g.windows[i][2]) end
    call('HSET', RATES, g.name, concat(parts))
    call('ZADD', RATE_ENDS, g.windows[#parts][2] + g.rate_per, g.name)
    g.counts_rate = nil
  end

  -- Messages that became ready and are not yet written to ready and to the lines: score and id, 0 and name. Only steps
  -- that store many messages at once collect them. `added`: how many by group, for groups without a Lua record.
  local new_ready, new_line, new_states = {}, {}, {}
  local added, added_names = {}, {}

  function write_added()
    local number = #added_names
    if number == 0 then return end
    local names, depths, new_names, joins = added_names, {}, {}, {}
    local before, number_in_turn = call('ZMSCORE', DEPTHS, unpack(names)), turn + GROUP_STRIDE
    for i = 1, number do
      local name, depth = names[i], before[i]
      local at_place = 2 * i - 1
      depths[at_place], depths[at_place + 1] = (depth or 0) + added[name], name
      if not depth then new_names[#new_names + 1], new_names[#new_names + 2] = 0, name end
      -- A group that has messages and is not ordered is already in the turns.
      if ordered or not depth then joins[#joins + 1], joins[#joins + 2] = number_in_turn, name end
    end
    added, added_names = {}, {}
    bulk('ZADD', DEPTHS, depths, 2 * number)
    bulk('ZADD', NAMES, new_names, #new_names)
    for i = 1, #joins, 1000 do call('ZADD', TURNS, 'NX', unpack(joins, i, min(i + 999, #joins))) end
  end

  function grouping.write_ready()
    write_added()
    if #new_ready == 0 then return end
    bulk('ZADD', READY, new_ready, #new_ready)
    bulk('ZADD', LINE, new_line, #new_line)
    bulk('HSET', STATE, new_states, #new_states)
    new_ready, new_line, new_states = {}, {}, {}
  end

  -- The packed numbers of groups without delayed and waiting messages, by number of leases: most groups share them.
  local packed_running = {}

  local function pack_numbers(g)
    local running = g.running
    if g.later > 0 then return struct_pack('>I4I4', running, g.later) end
    if running == 0 then return false end
    local packed = packed_running[running]
    if not packed then
      packed = struct_pack('>I4I4', running, 0)
      packed_running[running] = packed
    end
    return packed
  end

  -- Write the changed records of the groups that this step changed.
  function grouping.write()
    grouping.write_ready()
    local records, no_records, depths, no_depths, new_names, gone = {}, {}, {}, {}, {}, {}
    local turns, joins, leaves = {}, {}, {}
    for i = 1, #touched do
      local g = touched[i]
      local name, ready, before, was_packed, packed = g.name, g.ready, g.ready_before, g.packed, pack_numbers(g)
      if packed ~= was_packed then
        if packed then
          local length = #records
          records[length + 1], records[length + 2] = name, packed
        else
          no_records[#no_records + 1] = name
        end
        g.packed = packed
      end
      if ready ~= before then
        if ready > 0 then
          local length = #depths
          depths[length + 1], depths[length + 2] = ready, name
        else
          no_depths[#no_depths + 1] = name
        end
        g.ready_before = ready
      end
      if packed or ready > 0 then
        if not (was_packed or before > 0 or g.own) then new_names[#new_names + 1], new_names[#new_names + 2] = 0, name end
      elseif (was_packed or before > 0) and not g.own then
        gone[#gone + 1] = name
      end
      if g.leaves then
        leaves[#leaves + 1] = name
        g.leaves, g.moved = false, false
      elseif g.moved then
        local length = #turns
        turns[length + 1], turns[length + 2] = g.number, name
        g.moved = false
      end
      if g.joins then
        local length = #joins
        joins[length + 1], joins[length + 2] = g.joins, name
        g.joins = false
      end
      if g.counts_rate then write_windows(g) end
    end
    bulk('HDEL', GROUPS, no_records, #no_records)
    bulk('HSET', GROUPS, records, #records)
    bulk('ZREM', DEPTHS, no_depths, #no_depths)
    bulk('ZADD', DEPTHS, depths, #depths)
    bulk('ZREM', NAMES, gone, #gone)
    bulk('ZADD', NAMES, new_names, #new_names)
    bulk('ZREM', TURNS, leaves, #leaves)
    bulk('ZADD', TURNS, turns, #turns)
    for i = 1, #joins, 1000 do call('ZADD', TURNS, 'NX', unpack(joins, i, min(i + 999, #joins))) end
    if turn ~= turn_before then
      call('HSET', QUEUE, 'group_turn', format('%.0f', turn))
      turn_before = turn
    end
  end

  local fresh = {} -- ordered groups of which a message became ready in this step

  -- Count a message that became ready: an ordered group hands out one message, however many became ready.
  local function count_ready(group, by_age)
    if by_age then
      if fresh[group] then return end
      fresh[group] = true
    end
    freshly_ready = freshly_ready + 1
  end

  -- Whether only the rate keeps a group from handing out a message, until `until_ms`, and no claim has returned that
  -- time yet.
  local function waits_for_rate(g, until_ms)
    return until_ms and not (ordered and (g.running > 0 or holder_of(g))) and not call('ZSCORE', LIMITED, g.name)
  end

  -- Write the records; return how many sleepers to wake for groups that can continue after a lease or a hold in them
  -- has ended. Groups with messages that became ready are already counted. One more if only their rate holds some
  -- groups back: its claim returns until when.
  function grouping.worth()
    local number, waits = grouping.freed and grouping.freed() or 0, false
    for i = 1, #touched do
      local g = touched[i]
      if g.freed and not fresh[g.name] and serves then
        local left, until_ms = claimable(g)
        if left > 0 then number = number + 1 else waits = waits or waits_for_rate(g, until_ms) end
      end
    end
    if waits then number = number + 1 end
    if grouping.build then grouping.build() end
    grouping.write()
    return number
  end

  -- ---- how records are updated when messages move -------------------------------------------------------------------

  -- The name of a message in the line of its group, from its score in ready.
  local function line_name(group, score, id) return group .. '\0' .. struct_pack('>I8', score + RANK_OFFSET) .. id end

  local function enter_line(g, score, id)
    g.ready = g.ready + call('ZADD', LINE, 0, line_name(g.name, score, id))
    join(g)
  end

  local function is_ordered(s) return follows and ordered and s.group ~= '' end

  -- The group of a message by its packed state; '' if it has none, nil if the state cannot be read.
  local function group_in(raw)
    if not raw then return '' end
    if not is_sound(raw) then return end
    local from = 66 + byte(raw, 61) * 256 + byte(raw, 62)
    return sub(raw, from, from - 1 + byte(raw, 63) * 256 + byte(raw, 64))
  end

  -- A message that is not ready has been added to the place that its status names.
  function grouping.enter(s)
    if not follows or (builds and call('SADD', COUNTED, s.id) == 0) then return end
    local g = group_named(s.group)
    if s.status == 'L' then g.running = g.running + 1 else g.later = g.later + 1 end
  end

  -- A message is about to be removed from the place that its status names.
  function grouping.leave(s)
    if not follows or s.status == 'X' then return end
    local g = group_named(s.group)
    if s.status == 'R' then
      grouping.write_ready()
      local score = call('ZSCORE', READY, s.id)
      if score then g.ready = max(0, g.ready - call('ZREM', LINE, line_name(s.group, tonumber(score), s.id))) end
    else
      -- Claimed before there was an order: it returns to a place before all that were ready then.
      if s.status == 'L' and is_ordered(s) then
        call('HSETNX', POSITIONS, s.id, format('%.0f', s.claimed - HEAD_OFFSET - BAND))
      end
      if not serves and call('SREM', COUNTED, s.id) == 0 then return end
      if s.status == 'L' then
        g.running = max(0, g.running - 1)
        released(g)
      else
        g.later = max(0, g.later - 1)
      end
    end
  end

  -- A message does not return to its place in an ordered group, or has returned to it: it no longer holds the group.
  local function forget_place(s)
    -- A message that was never claimed has no place to return to.
    local score = s.token > 0 and is_ordered(s) and call('HGET', POSITIONS, s.id)
    if not score then return end
    call('HDEL', POSITIONS, s.id)
    if held > 0 and call('ZREM', HELD, line_name(s.group, tonumber(score), s.id)) == 1 then
      held = held - 1
      released(group_named(s.group))
    end
    return tonumber(score)
  end

  function grouping.ended(s) forget_place(s) end

  -- A message whose next delivery is in the future holds its ordered group.
  function grouping.hold(s)
    local score = is_ordered(s) and call('HGET', POSITIONS, s.id)
    if not score then return end
    call('ZADD', HELD, 0, line_name(s.group, tonumber(score), s.id))
    held = held + 1
  end

  -- A ready message that was claimed before becomes delayed, and keeps its place.
  function grouping.keep_place(s)
    local name = codes().cause_name[s.cause]
    if is_ordered(s) and s.status == 'R'
      and (name == 'expired' or name == 'released' or name == 'retried' or name == 'snoozed') then
      grouping.write_ready()
      call('HSET', POSITIONS, s.id, call('ZSCORE', READY, s.id))
    end
  end

  -- A message becomes ready, at its place in an ordered group if it has one. `head`: its position if it becomes the
  -- first of its priority. Returns whether its state is written here.
  local collects = follows and GROUP_USE == 'overload'

  function grouping.make_ready(s, head)
    local group = s.group
    local by_age = follows and ordered and group ~= ''
    -- While messages of an order that was removed go back to their priorities, others are stored behind them: it may be set again.
    local as_before = not head and group ~= '' and at and sub(at, 1, 7) == 'restore'
    if simple and collects and s.token == 0 and not known[group] then
      local score = by_age and ORDERED_BAND + next_position() or score_of(s.priority, head or next_position())
      local length, number = #new_ready, added[group]
      new_ready[length + 1], new_ready[length + 2] = score, s.id
      new_line[length + 1], new_line[length + 2] = 0, line_name(group, score, s.id)
      if not number then
        added[group] = 1
        added_names[#added_names + 1] = group
      else
        added[group] = number + 1
      end
      count_ready(group, by_age)
      -- A later draft of this step may find a message with a key by its key.
      if s.key ~= '' then return false end
      length = #new_states
      new_states[length + 1], new_states[length + 2] = s.id, pack_state(s)
      return true
    end
    local score = forget_place(s)
    if not score then
      if by_age or as_before then
        score = ORDERED_BAND + next_position()
      else
        score = score_of(s.priority, head or next_position())
      end
    end
    if not follows then
      call('ZADD', READY, score, s.id)
      freshly_ready = freshly_ready + 1
      return
    end
    local g = group_named(group)
    count_ready(group, by_age)
    if not collects then
      call('ZADD', READY, score, s.id)
      enter_line(g, score, s.id)
      return
    end
    local length = #new_ready
    new_ready[length + 1], new_ready[length + 2] = score, s.id
    new_line[length + 1], new_line[length + 2] = 0, line_name(g.name, score, s.id)
    g.ready = g.ready + 1
    join(g)
  end

  local freed = 0 -- groups without a record that can go on since a lease of theirs ended

  function grouping.freed() return freed end

  -- The same without Lua records of groups: how many leases of which groups have ended.
  local function leave_leases(names, ended, number)
    local packed, depths = call('HMGET', GROUPS, unpack(names)), call('ZMSCORE', DEPTHS, unpack(names))
    local records, no_records, gone, joins = {}, {}, {}, {}
    local number_in_turn = turn + GROUP_STRIDE
    for i = 1, number do
      local name, before, later = names[i], packed[i], 0
      local running = before == ONE_RUNNING and 1 or 0
      if before and before ~= ONE_RUNNING and #before == 8 then running, later = struct_unpack('>I4I4', before) end
      running = max(0, running - ended[name])
      if running + later > 0 then
        records[#records + 1], records[#records + 2] = name, struct_pack('>I4I4', running, later)
      else
        no_records[#no_records + 1] = name
        if not depths[i] then gone[#gone + 1] = name end
      end
      if ordered and name ~= '' then
        joins[#joins + 1], joins[#joins + 2] = number_in_turn, name
        if depths[i] and running == 0 then freed = freed + 1 end
      end
    end
    bulk('HDEL', GROUPS, no_records, #no_records)
    bulk('HSET', GROUPS, records, #records)
    bulk('ZREM', NAMES, gone, #gone)
    for i = 1, #joins, 1000 do call('ZADD', TURNS, 'NX', unpack(joins, i, min(i + 999, #joins))) end
  end

  -- Count plain messages that were done: their ids, and the groups of all of them.
  function grouping.done(ids, names, number)
    if not follows then return end
    if simple and #touched == 0 then
      local ended, different, length = {}, {}, 0
      for i = 1, number do
        local name = names[i]
        local before = ended[name]
        if before then
          ended[name] = before + 1
        else
          length = length + 1
          different[length], ended[name] = name, 1
        end
      end
      leave_leases(different, ended, length)
    else
      read_groups(names)
      for i = 1, number do
        if serves or call('SREM', COUNTED, ids[i]) == 1 then
          local g = known[names[i]]
          g.running = max(0, g.running - 1)
          released(g)
        end
      end
    end
    if ordered then bulk('HDEL', POSITIONS, ids, number) end
  end

  -- A page of a sorted set: ids, scores and packed states.
  local function with_states(page)
    local ids, scores = {}, {}
    for i = 1, #page, 2 do ids[#ids + 1], scores[#scores + 1] = page[i], tonumber(page[i + 1]) end
    return ids, scores, #ids > 0 and call('HMGET', STATE, unpack(ids)) or {}
  end

  -- Whether a turn precedes another; of equal ones the first by name.
  local function comes_before(number, name, other_number, other_name)
    return number < other_number or (number == other_number and name < other_name)
  end

  -- include grouping_turns where turns
  -- include grouping_overload where overload
  -- include grouping_building
  -- include grouping_leases where listing, check
  -- include grouping_listing where listing
  -- include grouping_check where check
end
follow_groups()
end
