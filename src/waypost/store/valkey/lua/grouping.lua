-- grouping: what a grouped queue keeps beside its ready messages, and how that follows them.
--
-- Included behind open_queue and moves by every script that moves messages; a queue that is not grouped pays one test of a
-- flag, and a script gets the functions that its `group_use` needs. '' is the group of messages without one. Keys, all
-- derived in the slot of the queue:
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
-- Fields of queue: groups ('T': claims take turns, 'B': the records are being built, 'E': they are gone, and scores of ready
-- messages are being put back), groups_at (phase of that and its cursor), group_turn (the number of the last turn).
-- An ordered group has its messages in ready behind all priorities, by age alone.
-- Invariant: a message in ready is in the line of its group, and a group that can go on is in group_turns. While records are
-- built claims take messages in the order of ready, as if there were no groups.

if grouped then
-- A function, because a script has room for 200 local names.
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
  -- Behind a place that is remembered: a hash of longer values is a table in the server, and a short one is searched from its
  -- begin for each of them. Numbers are read without it.
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
  -- No group differs from another in its settings, and no message holds its group. Then the steps that every message takes
  -- (stored, claimed, done) follow it without a record of each group: to make one costs more than all the rest.
  local simple = serves and not configured and not limits and not at and (held == 0 or not ordered)

  -- ---- records -------------------------------------------------------------------------------------------------------

  local takes_turns = group_use == 'turns'
  local write_added -- writes messages that are counted, and not yet written; see below

  local function read_group(name, packed, depth, settings)
    local running, later, ready = 0, 0, depth and tonumber(depth) or 0
    if packed and #packed == 8 then running, later = struct_unpack('>I4I4', packed) end
    -- With all fields at once, 16 at most: a table that grows costs more than a command, also by a field that is nil.
    local g
    if takes_turns then
      g = {name = name, running = running, later = later, packed = packed, ready = ready, ready_before = ready, weight = 1,
        number = 0, planned = 0, left = false, heads = false, head_at = 1, joins = false, leaves = false, moved = false, freed = false}
    else
      g = {name = name, running = running, later = later, packed = packed, ready = ready, ready_before = ready, weight = 1,
        joins = false, leaves = false, moved = false, freed = false, fresh = false}
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

  -- Read the records of many groups at once: at most a chunk.
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
    local packed, depths = call('HMGET', GROUPS, unpack(missing)), call('ZMSCORE', DEPTHS, unpack(missing))
    local settings = configured and call('HMGET', SETTINGS, unpack(missing)) or {}
    for i = 1, number do read_group(missing[i], packed[i], depths[i], settings[i]) end
  end

  -- ---- limits --------------------------------------------------------------------------------------------------------

  -- The last millisecond of the part of a group's window that is under way.
  local function end_of_part(g)
    local part = -floor(-g.rate_per / GROUP_RATE_PARTS)
    return now - now % part + part - 1
  end

  -- Read what was claimed within the window of a group's rate.
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
      -- The clock was set back: the whole window counts from now on, not until the clock reaches the old time.
      g.windows, g.counts_rate = {{g.used, end_of_part(g)}}, true
    end
  end

  -- How many more messages the rate of a group allows now, and if none, when it allows the next one.
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

  -- The first message that holds a group, as its line would name it.
  local function holder_of(g)
    if not ordered or held == 0 or g.name == '' or policy.on_failure == 'pass' then return end
    return call('ZRANGEBYLEX', HELD, '[' .. g.name .. '\0', '(' .. g.name .. '\1', 'LIMIT', 0, 1)[1]
  end

  -- How many messages of a group a claim could take now; and if its rate forbids it, when it allows the next one.
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

  -- Put a group that may be able to go on in turn, unless it is: one step behind the last turn.
  local function join(g)
    if not g.joins then g.joins = turn + floor(GROUP_STRIDE / g.weight) end
  end

  -- The lease of a message has ended, or it holds its group no more.
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

  -- Messages that became ready, and have to be written to ready and to the lines: score and id, 0 and name. Only steps
  -- that store many messages at once collect them. `added`: how many by group, where there is no record of it.
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
      -- One that has messages and no order is in turn.
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

  -- The packed numbers of a group without delayed and waiting messages, by how many it has leased: most have the same.
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

  -- Write what has changed of the groups that this step concerns.
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

  -- Whether a group could go on if its rate allowed it, which is at `until_ms`, and no claim has returned that time yet.
  local function waits_for_rate(g, until_ms)
    return until_ms and not (ordered and (g.running > 0 or holder_of(g))) and not call('ZSCORE', LIMITED, g.name)
  end

  -- The same, and how many sleepers the groups are worth that can go on since a lease or a hold of them ended. Those with
  -- messages that became ready are counted already. One more if only a rate keeps some of them back: it learns until when.
  function grouping.worth()
    local number, waits = grouping.freed and grouping.freed() or 0, false
    for i = 1, #touched do
      local g = touched[i]
      if g.freed and not g.fresh and serves then
        local left, until_ms = claimable(g)
        if left > 0 then number = number + 1 else waits = waits or waits_for_rate(g, until_ms) end
      end
    end
    if waits then number = number + 1 end
    if grouping.build then grouping.build() end
    grouping.write()
    return number
  end

  -- ---- how records follow messages -----------------------------------------------------------------------------------

  -- The name of a message in the line of its group, from its score in ready.
  local function line_name(group, score, id) return group .. '\0' .. struct_pack('>I8', score + RANK_OFFSET) .. id end

  local function enter_line(g, score, id)
    g.ready = g.ready + call('ZADD', LINE, 0, line_name(g.name, score, id))
    join(g)
  end

  local function is_ordered(s) return follows and ordered and s.group ~= '' end

  -- The group of a message by its packed state; '' without one, nil if it cannot be read.
  local function group_in(raw)
    if not raw then return '' end
    if not is_sound(raw) then return end
    local from = 66 + byte(raw, 61) * 256 + byte(raw, 62)
    return sub(raw, from, from - 1 + byte(raw, 63) * 256 + byte(raw, 64))
  end

  -- A message that is not ready has come to the place that its status names.
  function grouping.enter(s)
    if not follows or (builds and call('SADD', COUNTED, s.id) == 0) then return end
    local g = group_named(s.group)
    if s.status == 'L' then g.running = g.running + 1 else g.later = g.later + 1 end
  end

  -- A message is about to leave the place that its status names.
  function grouping.leave(s)
    if not follows or s.status == 'X' then return end
    local g = group_named(s.group)
    if s.status == 'R' then
      grouping.write_ready()
      local score = call('ZSCORE', READY, s.id)
      if score then g.ready = max(0, g.ready - call('ZREM', LINE, line_name(s.group, tonumber(score), s.id))) end
    elseif serves or call('SREM', COUNTED, s.id) == 1 then
      if s.status == 'L' then
        g.running = max(0, g.running - 1)
        released(g)
        -- Claimed before there was an order: it returns to a place before all that were ready then.
        if is_ordered(s) then call('HSETNX', POSITIONS, s.id, format('%.0f', s.claimed - HEAD_OFFSET - BAND)) end
      else
        g.later = max(0, g.later - 1)
      end
    end
  end

  -- A message does not return to its place in an ordered group, or is there again: it holds the group no more.
  local function forget_place(s)
    -- One that was never claimed has no place to return to.
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

  -- A ready message that was claimed before leaves for its next due time, and keeps its place.
  function grouping.keep_place(s)
    local name = codes().cause_name[s.cause]
    if is_ordered(s) and s.status == 'R'
      and (name == 'expired' or name == 'released' or name == 'retried' or name == 'snoozed') then
      grouping.write_ready()
      call('HSET', POSITIONS, s.id, call('ZSCORE', READY, s.id))
    end
  end

  -- A message becomes ready, at its place in an ordered group if it has one. `head`: its position if it returns to the head
  -- of its priority. Returns whether its state is taken care of.
  local collects = follows and group_use == 'overload'

  function grouping.make_ready(s, head)
    local group = s.group
    local by_age = follows and ordered and group ~= ''
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
      -- An ordered group hands out one, however many became ready.
      if not (by_age and number) then freshly_ready = freshly_ready + 1 end
      -- One with a key may be found by it in this step.
      if s.key ~= '' then return false end
      length = #new_states
      new_states[length + 1], new_states[length + 2] = s.id, pack_state(s)
      return true
    end
    local score = forget_place(s)
    if not score then
      if by_age then
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
    if not (by_age and g.fresh) then freshly_ready = freshly_ready + 1 end
    g.fresh = by_age
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

  -- The same without records: how many leases of which groups have ended.
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

  -- Plain messages were done: their ids, and the groups of all of them.
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

  -- Whether a turn comes before another; of equal ones the first name does.
  local function comes_before(number, name, other_number, other_name)
    return number < other_number or (number == other_number and name < other_name)
  end

  -- ---- turns ---------------------------------------------------------------------------------------------------------

  if group_use == 'turns' then
    -- Put the groups in turn whose rate allows the next message, and forget windows that are over: a bounded number of both.
    function grouping.resume_limited()
      if limited + rates == 0 then return end
      local names = call('ZRANGEBYSCORE', LIMITED, '-inf', now, 'LIMIT', 0, CHUNK_MESSAGES_MAX)
      read_groups(names)
      for i = 1, #names do join(known[names[i]]) end
      -- Further ahead than a window: the clock was set back.
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

    -- How long until the rate of a group allows the next message, or nil.
    function grouping.next_rate()
      if limited == 0 then return end
      local first = call('ZRANGE', LIMITED, 0, 0, 'WITHSCORES')
      return first[2] and max(0, tonumber(first[2]) - now)
    end

    -- The groups that this claim has read of group_turns, in the order of their turns; those before `first` are used up.
    local in_turn, first, read_to, all_read = {}, 1, 0, false
    local last_number, last_name -- of the last group that was read

    local function put_in_turn(g)
      local low, high = first, #in_turn + 1
      -- Most go behind all others.
      if low < high and not comes_before(g.planned, g.name, in_turn[high - 1].planned, in_turn[high - 1].name) then low = high end
      while low < high do
        local middle = floor((low + high) / 2)
        local other = in_turn[middle]
        if comes_before(g.planned, g.name, other.planned, other.name) then high = middle else low = middle + 1 end
      end
      if low > #in_turn then in_turn[low] = g else table.insert(in_turn, low, g) end
    end

    -- Read the next groups of group_turns. Those that are not read come behind the last one.
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

    -- A group that cannot go on leaves the turns. It comes back by itself if only its rate is used up.
    local function leave_turns(g, until_ms)
      g.leaves = true
      if until_ms then
        call('ZADD', LIMITED, until_ms, g.name)
        limited = limited + 1
      end
    end

    -- The next message of a group's line that is not planned yet: its name there. `number`: how many to read.
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
    -- A plan without records: names of groups, the numbers of their turns, their packed numbers and depths, and how many of
    -- them were taken from. Nil otherwise.
    local short

    -- Plan one message of each of the first groups, if that is what their turns say: then no group has its next turn before
    -- the last of these. Ids, and for each its place in the plan and its name in the line; nothing otherwise.
    local function plan_short(number)
      local ids, names, numbers, places, heads, left_packed, left_depths, count = {}, {}, {}, {}, {}, {}, {}, 0
      repeat
        local page = call('ZRANGE', TURNS, 0, number - 1, 'WITHSCORES')
        local length = #page / 2
        if length == 0 or not ordered and (length < number or page[2 * length] - page[2] >= GROUP_STRIDE) then return end
        local all = {}
        for i = 1, length do
          all[i] = page[2 * i - 1]
          -- Messages without a group know no order.
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
    -- cannot go on leave the turns, a bounded number of them in one claim.
    function grouping.plan(number)
      local ids, groups, heads, planned = {}, {}, {}, 0
      if not serves then
        -- By priority and age. The groups of the messages are known when their states are read.
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
            -- About as many as this plan will take of it.
            local head = next_head(g, min(g.left, floor((number - planned) / (#in_turn - first + 2)) + 1))
            if head then
              planned = planned + 1
              ids[planned], groups[planned], heads[planned] = sub(head, -24), g, head
              g.left, g.planned = g.left - 1, g.planned + floor(GROUP_STRIDE / g.weight)
              if g.left > 0 then put_in_turn(g) end
            else
              -- Fewer are in its line than were counted.
              skipped = skipped + 1
              g.ready, g.left = call('ZLEXCOUNT', LINE, '[' .. g.name .. '\0', '(' .. g.name .. '\1'), 0
              if g.ready == 0 then leave_turns(g) end
            end
          end
        end
      end
      return ids, groups, heads
    end

    -- Whether there may be groups that can go on behind those that a claim has read.
    function grouping.has_more() return skipped >= GROUPS_SKIPPED_MAX end

    -- Whether a planned message is in ready, at the place that its line names.
    function grouping.is_there(head, score)
      return not serves or score and struct_unpack('>I8', head, #head - 31) == score + RANK_OFFSET
    end

    local left_line, left_ready, places = {}, {}, {}

    -- Write the numbers of the groups that a short plan took from. From there on there are records again.
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

    -- The record of a group that a short plan names by its place. What was taken before is written first.
    local function end_short(place)
      local name = short.names[place]
      write_short()
      short = nil
      simple = false
      return group_named(name)
    end

    -- A planned message leaves ready and the line of its group. `score`: of ready, nil if it is not there. Returns its group.
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

    -- A message of a group was handed out.
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

    -- Write what was taken. Of the rest of the plan nothing is remembered: the next plan begins anew.
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
  end

  -- ---- overload ------------------------------------------------------------------------------------------------------

  if group_use == 'overload' then
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

    -- What must be dropped so that no group has more than it may have: ids, or an error. `added`: how many by group. Reads only.
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
          if #chosen < over then error(format('WP-FULL %.0f %.0f %s', pending, g.max_pending, g.name)) end
          for j = 1, #chosen do
            doomed[#doomed + 1] = chosen[j]
            concerned[chosen[j]] = true
          end
        end
      end
      return doomed
    end

    -- What a full queue drops: one by one a message of the longest group; of equal ones of the first by name. Reads only.
    function grouping.longest_first(number, concerned)
      local page = call('ZREVRANGE', DEPTHS, 0, number - 1, 'WITHSCORES')
      local names, length_of = {}, {}
      for i = 1, #page, 2 do names[#names + 1], length_of[page[i]] = page[i], tonumber(page[i + 1]) end
      if #names == number then
        -- Of those as long as the last one, those with the first names.
        local last = length_of[names[number]]
        while #names > 0 and length_of[names[#names]] == last do names[#names] = nil end
        local same = call('ZRANGEBYSCORE', DEPTHS, last, last, 'LIMIT', 0, number - #names)
        for i = 1, #same do names[#names + 1], length_of[same[i]] = same[i], last end
      end
      read_groups(names)
      -- Level by level: of all that are as long as the longest one message each.
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
  end

  -- ---- building ------------------------------------------------------------------------------------------------------

  if at or group_use == 'configure' then
    -- A page of ready behind a cursor (score, and how many with this score are done), and the cursor behind it or nil.
    local function ready_page(cursor, skip, last_score, number)
      skip = tonumber(skip) or 0
      local ids, scores, raws = with_states(
        call('ZRANGEBYSCORE', READY, cursor, last_score, 'WITHSCORES', 'LIMIT', skip, number))
      if #ids < number then return ids, scores, raws end
      local last, same = scores[#ids], 0
      while same < #ids and scores[#ids - same] == last do same = same + 1 end
      if same == #ids and tonumber(cursor) == last then same = same + skip end
      return ids, scores, raws, format('%.0f %d', last, same)
    end

    -- The messages of ordered groups go back to their priorities, when there is no order any more.
    local function restore_score(id, score, raw)
      local group = raw and group_in(raw)
      if not group or group == '' then return end
      local position = score < -HEAD_OFFSET and score + BAND or score - ORDERED_BAND
      -- In line: the shortest way of settle does without the functions of moves, and comes by here too.
      local restored = (9 - byte(raw, 48)) * BAND + position
      if restored == score then return end
      call('ZADD', READY, restored, id)
      if follows and call('ZREM', LINE, line_name(group, score, id)) == 1 then
        call('ZADD', LINE, 0, line_name(group, restored, id))
      end
    end

    local COUNTED_PHASES = {leases = {LEASES, 'running', 'due 0'}, due = {DUE, 'later', 'waiting 0'},
      waiting = {WAITING, 'later', 'ready -inf'}}

    local function count_page(page, field)
      local ids, _, raws = with_states(page)
      for i = 1, #ids do
        local group = group_in(raws[i])
        if group and call('SADD', COUNTED, ids[i]) == 1 then
          local g = group_named(group)
          g[field] = g[field] + 1
        end
      end
      return #ids
    end

    -- One page of what a change of settings leaves to do. Returns how many messages or groups that were.
    local function build_page(room)
      local phase, cursor, skip = string.match(at, '^(%a+) (%S+) ?(%d*)$')
      if COUNTED_PHASES[phase] then
        local step = COUNTED_PHASES[phase]
        local page = call('ZSCAN', step[1], cursor, 'COUNT', room)
        at = page[1] == '0' and step[3] or phase .. ' ' .. page[1]
        return count_page(page[2], step[2])
      elseif phase == 'ready' or phase == 'again' then
        local ids, scores, raws, behind = ready_page(cursor, skip, '+inf', room)
        for i = 1, #ids do
          local group = group_in(raws[i])
          if group then enter_line(group_named(group), scores[i], ids[i]) end
        end
        if behind then
          at = phase .. ' ' .. behind
        elseif phase == 'ready' and cursor ~= '-inf' and call('ZCARD', LINE) < call('ZCARD', READY) then
          at = 'again -inf' -- messages left while others with the same score were counted: once more
        else
          call('UNLINK', COUNTED)
          call('HSET', QUEUE, 'groups', 'T')
          at = nil
        end
        return #ids
      elseif phase == 'restore' then
        -- First those before all priorities, then those behind them.
        local ids, scores, raws, behind = ready_page(cursor, skip, cursor == '-inf' and '(-' .. HEAD_OFFSET or '+inf', room)
        for i = 1, #ids do restore_score(ids[i], scores[i], raws[i]) end
        if cursor == '-inf' then
          if #ids < room then at = format('restore %.0f', ORDERED_BAND) end
        elseif behind then
          at = 'restore ' .. behind
        elseif follows then
          at = serves and 'review 0' or 'leases 0'
        else
          call('HDEL', QUEUE, 'groups')
          at = nil
        end
        return #ids
      end
      -- review: every group with ready messages may be able to go on since the settings have changed.
      local page = call('ZSCAN', DEPTHS, cursor, 'COUNT', room)
      local names = {}
      for i = 1, #page[2], 2 do names[#names + 1] = page[2][i] end
      read_groups(names)
      for i = 1, #names do join(known[names[i]]) end
      at = page[1] ~= '0' and 'review ' .. page[1] or nil
      return #names
    end

    -- Go on with what a change of settings leaves to do: a bounded number of messages.
    function grouping.build()
      local room = CHUNK_MESSAGES_MAX
      while at and room > 0 do room = room - build_page(room) - 1 end
      if at == fields[1] then return end
      if at then call('HSET', QUEUE, 'groups_at', at) else call('HDEL', QUEUE, 'groups_at') end
      fields[1] = at
    end

    -- Records and lines are of no use any more, or are built anew. The settings of single groups stay.
    local function forget_all()
      call('UNLINK', GROUPS, NAMES, LINE, DEPTHS, TURNS, LIMITED, RATES, RATE_ENDS, POSITIONS, HELD, COUNTED)
    end

    -- What changed settings of the queue mean for its groups. `before`: the field `groups` as it was, or nil.
    function grouping.reconfigure(before, ordered_before)
      if before ~= grouped then
        forget_all()
        held, turn, turn_before = 0, 0, 0
        call('HDEL', QUEUE, 'group_turn')
        call('HSET', QUEUE, 'groups', grouped)
        if grouped ~= 'E' then
          -- Groups with settings of their own are listed without messages, too.
          local own, names = call('HGETALL', SETTINGS), {}
          for i = 1, #own, 2 do names[i], names[i + 1] = 0, own[i] end
          bulk('ZADD', NAMES, names, #names)
        end
      end
      local restores = at and string.match(at, '^restore') and not ordered
      if ordered_before and not ordered then
        -- No group is held or has places to return to.
        call('UNLINK', POSITIONS, HELD)
        held = 0
        at = 'restore -inf'
      elseif serves and not restores then
        at = 'review 0'
      elseif builds and before ~= 'B' and not restores then
        at = 'leases 0'
      elseif not follows and not restores then
        call('HDEL', QUEUE, 'groups')
        at = nil
      end
      grouping.build()
      grouping.write()
    end
  end

  -- ---- settings and listings -----------------------------------------------------------------------------------------

  if group_use == 'records' then
    -- Change the settings of a single group; whether that changes anything.
    function grouping.change_settings(name, changes)
      local g = group_named(name)
      local own, differs, some = {weight = 1}, false, false
      for field, value in pairs(g.own or {}) do own[field] = value end
      for field, value in pairs(changes) do
        if value == false then value = nil end
        differs = differs or own[field] ~= value
        own[field] = value
      end
      if not differs then return false end
      for field, value in pairs(own) do some = some or field ~= 'weight' or value ~= 1 end
      local limits = own.max_running or own.rate_count or own.max_pending
      if limits and not policy.lease_ms then error('WP-LEASE') end
      if some and not g.own and call('HLEN', SETTINGS) >= GROUPS_KEPT_MAX then error('WP-GROUPS') end
      if some then
        call('HSET', SETTINGS, name, cmsgpack.pack(own))
        if not (g.own or g.packed or g.ready > 0) then call('ZADD', NAMES, 0, name) end
      else
        call('HDEL', SETTINGS, name)
        if not (g.packed or g.ready > 0) then call('ZREM', NAMES, name) end
      end
      call('ZREM', LIMITED, name)
      -- It has its turn by its new settings.
      known[name] = nil
      for i = 1, #touched do
        if touched[i] == g then table.remove(touched, i) break end
      end
      configured = true
      join(group_named(name))
      return true
    end

    -- How many sleepers a group is worth that was resumed or configured.
    function grouping.worth_waking(name)
      local g = known[name]
      if not serves then return 0 end
      local left, until_ms = claimable(g)
      if left == 0 then return waits_for_rate(g, until_ms) and 1 or 0 end
      return ordered and 1 or g.ready
    end

    -- Let a group go on without the delayed message that holds it: the id of that one, or nil.
    function grouping.skip_held(name)
      local g = group_named(name)
      local holder = holder_of(g)
      if not holder then return end
      call('ZREM', HELD, holder)
      held = held - 1
      released(g)
      return sub(holder, -24)
    end

    -- Names of groups behind one, or from the first on.
    function grouping.names(behind, number)
      return call('ZRANGEBYLEX', NAMES, behind and '(' .. behind or '-', '+', 'LIMIT', 0, number)
    end

    -- Add what a listing says of a group to a reply, if it says anything.
    function grouping.describe(name, reply)
      local g = group_named(name)
      local holder = holder_of(g)
      if g.ready + g.running == 0 and not holder and not g.own then return end
      local head, age = call('ZRANGEBYLEX', LINE, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, 1)[1], -1
      local s = head and state_of(sub(head, -24), 'R')
      if s then age = now - s.ready end
      local until_ms = 0
      if g.rate_count and not (g.max_running and g.running >= g.max_running) then
        local room, next_ms = allowed(g)
        if room == 0 then until_ms = next_ms end
      end
      local at_most = g.max_running and g.running >= g.max_running and 1 or 0
      local fields = {name, g.ready, g.running, age, holder and sub(holder, -24) or '', until_ms, at_most,
        g.own and cmsgpack.pack(g.own) or ''}
      for i = 1, 8 do reply[#reply + 1] = fields[i] end
    end
  end

  -- ---- checks ----------------------------------------------------------------------------------------------------------

  if group_use == 'check' then
    -- How many leased messages each group has, or nil if there are too many to count in one step.
    local leased_of
    local function count_leased()
      if leased_of or call('ZCARD', LEASES) > CHUNK_MESSAGES_MAX then return leased_of end
      leased_of = {}
      local _, _, raws = with_states(call('ZRANGE', LEASES, 0, -1, 'WITHSCORES'))
      for i = 1, #raws do
        local group = raws[i] and group_in(raws[i])
        if group then leased_of[group] = (leased_of[group] or 0) + 1 end
      end
      return leased_of
    end

    -- What is wrong with the records of a group, and what is done about it; nil if nothing is.
    function grouping.check(name, mend, with_leases)
      if not serves or at then return end
      local g = group_named(name)
      local in_line = call('ZLEXCOUNT', LINE, '[' .. name .. '\0', '(' .. name .. '\1')
      local leased = with_leases and count_leased()
      if leased and (leased[name] or 0) ~= g.running then
        local found = format('%d of its messages are leased, and %d are counted', leased[name] or 0, g.running)
        if mend then
          g.running, g.freed = leased[name] or 0, true
          join(g)
        end
        return found, 'counted anew'
      end
      -- A line may name messages that are not ready any more: a claim removes those.
      if mend then g.ready = in_line end
      local in_turn = g.joins or call('ZSCORE', TURNS, name) or call('ZSCORE', LIMITED, name)
      if in_line > 0 and claimable(g) > 0 and not in_turn then
        if mend then
          g.freed = true
          join(g)
        end
        return 'it has messages to hand out and is not in line', 'put in line'
      end
    end

    -- Whether a ready message is missing from the line of its group. It is put there on request.
    function grouping.misses(s, mend)
      if not serves or at then return false end
      local score = tonumber(call('ZSCORE', READY, s.id))
      if call('ZSCORE', LINE, line_name(s.group, score, s.id)) then return false end
      if mend then enter_line(group_named(s.group), score, s.id) end
      return true
    end

    -- Whether a member of a line names no ready message: then it is removed.
    function grouping.prune(member)
      local id = sub(member, -24)
      local score = call('ZSCORE', READY, id)
      local group = string.match(member, '^(%Z*)%z')
      if not score or not group or member ~= line_name(group, tonumber(score), id) then call('ZREM', LINE, member) end
    end
  end
end
follow_groups()
end
