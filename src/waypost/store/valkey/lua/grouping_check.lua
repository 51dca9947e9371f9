-- grouping_check: check whether the records of groups agree with the messages, and repair them.
--
-- A part of grouping.lua, inside its function; see there for keys and layouts.
-- Invariant: only a wrong record is changed, and only to repair it.

-- What is wrong with the records of a group, and what was done about it; nil if nothing is wrong.
function grouping.check(name, mend, with_leases)
  if not serves or at then return end
  local g = group_named(name)
  local in_line = call('ZLEXCOUNT', LINE, '[' .. name .. '\0', '(' .. name .. '\1')
  local leased = with_leases and leased_by_group()
  local number = leased and #(leased[name] or {})
  if leased and number ~= g.running then
    local found = format('%d of its messages are leased, and %d are counted', number, g.running)
    if mend then
      g.running, g.freed = number, true
      join(g)
    end
    return found, 'counted anew'
  end
  -- A line may name messages that are no longer ready: a claim removes those.
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

-- Whether a ready message is missing from the line of its group. It is added on request.
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
