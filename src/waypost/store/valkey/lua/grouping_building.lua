-- grouping_building: the records of a queue that becomes grouped, or stops being grouped, built in bounded steps.
--
-- A part of grouping.lua, inside its function; see there for keys and layouts.
-- Invariant: a step does a bounded part, and each message is counted once, whatever moves it meanwhile.

if at or GROUP_USE == 'configure' then
  -- A page of ready after a cursor (score, and how many with this score are done), and the next cursor or nil.
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

  -- Messages of ordered groups return to their priorities, when the queue is no longer ordered. Returns whether one moved.
  local function restore_score(id, score, raw)
    local group = raw and group_in(raw)
    if not group or group == '' then return false end
    local position = score < -HEAD_OFFSET and score + BAND or score - ORDERED_BAND
    -- Inline: the fast path of settle has not included the functions of moves, and runs this too.
    local restored = (9 - byte(raw, 48)) * BAND + position
    if restored == score then return false end
    call('ZADD', READY, restored, id)
    if follows and call('ZREM', LINE, line_name(group, score, id)) == 1 then
      call('ZADD', LINE, 0, line_name(group, restored, id))
    end
    return true
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

  -- One page of the work that a change of settings requires. Returns the number of messages or groups.
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
      -- First the messages before all priorities, then the others.
      local ids, scores, raws, behind = ready_page(cursor, skip, cursor == '-inf' and '(-' .. HEAD_OFFSET or '+inf', room)
      -- Those that have moved are not behind the cursor any more.
      local last, stay = scores[#ids], 0
      if tonumber(cursor) == last then stay = tonumber(skip) or 0 end
      for i = 1, #ids do
        if not restore_score(ids[i], scores[i], raws[i]) and scores[i] == last then stay = stay + 1 end
      end
      if cursor == '-inf' then
        if #ids < room then at = format('restore %.0f', ORDERED_BAND) end
      elseif behind then
        at = format('restore %.0f %d', last, stay)
      elseif follows then
        at = serves and 'review 0' or 'leases 0'
      else
        call('HDEL', QUEUE, 'groups')
        at = nil
      end
      return #ids
    end
    -- review: every group with ready messages may be able to hand one out since the settings have changed.
    local page = call('ZSCAN', DEPTHS, cursor, 'COUNT', room)
    local names = {}
    for i = 1, #page[2], 2 do names[#names + 1] = page[2][i] end
    read_groups(names)
    for i = 1, #names do join(known[names[i]]) end
    at = page[1] ~= '0' and 'review ' .. page[1] or nil
    return #names
  end

  -- Continue the work that a change of settings requires: a bounded number of messages.
  function grouping.build()
    local room = CHUNK_MESSAGES_MAX
    -- The last page must find what this step has stored.
    if at then grouping.write_ready() end
    while at and room > 0 do room = room - build_page(room) - 1 end
    if at == fields[1] then return end
    if at then call('HSET', QUEUE, 'groups_at', at) else call('HDEL', QUEUE, 'groups_at') end
    fields[1] = at
  end

  -- Records and lines are no longer needed, or are built again. The settings of single groups remain.
  local function forget_all()
    call('UNLINK', GROUPS, NAMES, LINE, DEPTHS, TURNS, LIMITED, RATES, RATE_ENDS, POSITIONS, HELD, COUNTED)
  end

  -- Whether single groups have limits of their own.
  function grouping.limits_of_own()
    local own = call('HGETALL', SETTINGS)
    for i = 2, #own, 2 do
      local settings = unpacked(own[i])
      if settings and (settings.max_running or settings.rate_count or settings.max_pending) then return true end
    end
    return false
  end

  -- Start the work that changed settings of the queue require. `before`: the field `groups` before the change, or nil.
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
      -- No group is held or has places to return to any more.
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
