-- grouping_listing: settings of single groups, and the listing of groups.
--
-- A part of grouping.lua, inside its function; see there for keys and layouts.
-- Invariant: a group with settings of its own is in group_names.

-- Change the settings of a single group; return whether anything changed.
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
  -- Read it again with its new settings, and let it have its turn by them.
  known[name] = nil
  for i = 1, #touched do
    if touched[i] == g then table.remove(touched, i) break end
  end
  configured = true
  join(group_named(name))
  return true
end

-- How many sleepers to wake for a group that was resumed or configured.
function grouping.worth_waking(name)
  local g = known[name]
  if not serves then return 0 end
  local left, until_ms = claimable(g)
  if left == 0 then return waits_for_rate(g, until_ms) and 1 or 0 end
  return ordered and 1 or g.ready
end

-- Let a group continue without the delayed message that holds it. Returns the id of that message, or nil.
function grouping.skip_held(name)
  local g = group_named(name)
  local holder = holder_of(g)
  if not holder then return end
  call('ZREM', HELD, holder)
  held = held - 1
  released(g)
  return sub(holder, -24)
end

-- Names of groups after one, or from the first on.
function grouping.names(behind, number)
  return call('ZRANGEBYLEX', NAMES, behind and '(' .. behind or '-', '+', 'LIMIT', 0, number)
end

-- Append the figures of a group to the reply of a listing, if it has messages or settings.
function grouping.describe(name, reply)
  local g = group_named(name)
  if g.ready + g.later + g.running == 0 and not g.own then return end
  local holder, leased = holder_of(g), nil
  if holder then
    holder = sub(holder, -24)
  elseif ordered and name ~= '' and g.running > 0 then
    leased = (leased_by_group() or {})[name]
  end
  local head, age = call('ZRANGEBYLEX', LINE, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, 1)[1], -1
  local s = head and state_of(sub(head, -24), 'R')
  if s then age = now - s.ready end
  local until_ms = 0
  if g.rate_count and not (g.max_running and g.running >= g.max_running) then
    local room, next_ms = allowed(g)
    if room == 0 then until_ms = next_ms end
  end
  local at_most = g.max_running and g.running >= g.max_running and 1 or 0
  local full = g.max_pending and g.ready + g.later >= g.max_pending and 1 or 0
  local fields = {name, g.ready, g.later, g.running, age, holder or leased and leased[1] or '', leased and 1 or 0, until_ms, at_most,
    full, g.own and cmsgpack.pack(g.own) or ''}
  for i = 1, 11 do reply[#reply + 1] = fields[i] end
end
