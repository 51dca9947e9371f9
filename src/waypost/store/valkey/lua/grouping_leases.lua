-- grouping_leases: the leased messages of each group.
--
-- A part of grouping.lua, inside its function; see there for keys and layouts.
-- Writes nothing.

-- The leased messages of each group, the first by id in front; nil if there are too many to read in one step.
local leased_of
local function leased_by_group()
  if leased_of or call('ZCARD', LEASES) > CHUNK_MESSAGES_MAX then return leased_of end
  leased_of = {}
  local ids, _, raws = with_states(call('ZRANGE', LEASES, 0, -1, 'WITHSCORES'))
  for i = 1, #ids do
    local group = raws[i] and group_in(raws[i])
    if group then
      leased_of[group] = leased_of[group] or {}
      table.insert(leased_of[group], ids[i])
    end
  end
  for _, members in pairs(leased_of) do table.sort(members) end
  return leased_of
end
