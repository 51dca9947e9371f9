-- outgoing: continuations and notices that steps of this queue decided and that their target queue has not confirmed.
--
-- Arguments: 'outgoing', limit, age in milliseconds from which a continuation is undeliverable | 'forwarded', ids.
-- Touches: queue, outgoing, messages, state, ready, due, waiting, dead, errors, journal, the keys of chains, the keys
-- of groups.
-- Invariant: a continuation is removed from this hash only when its queue has stored it, or into the dead letters,
-- `undeliverable`. The same holds for a message that waits for a chain whose queue cannot be reached; other notices
-- expire with their chain.
-- An entry is its time (8), the id of the message that was settled or began the chain (24), length of the queue (2),
-- queue, and a draft, or N and a packed notice.
-- Reply to outgoing: id and entry of each.

-- include moves

-- include drafts

open_queue()
local length = must_be('hash', OUTGOING)
if ARGV[FIRST_ARGUMENT] == 'forwarded' then
  local removed = 0
  for i = FIRST_ARGUMENT + 1, #ARGV do removed = removed + call('HDEL', OUTGOING, ARGV[i]) end
  return removed
end

local limit, undeliverable_after = tonumber(ARGV[FIRST_ARGUMENT + 1]), tonumber(ARGV[FIRST_ARGUMENT + 2])
must_be('hash', MESSAGES)
must_be('hash', STATE)
must_be('zset', READY)
must_be('zset', DUE)
must_be('zset', WAITING)
must_be('zset', DEAD)
must_be('hash', ERRORS)
-- include grouping

local function bury_draft(id, draft, target)
  local s = {id = id, popped = true, status = 'R', token = 0, nonce = NO_NONCE, claimed = 0, lease = 0,
    deliveries = 0, attempts = 0, flags = draft.chain ~= '' and 4 or 0, cause = 0, published = now, priority = draft.priority,
    ready = now, size = #draft.envelope, key = '', group = draft.group, worker = '', chain = draft.chain}
  pack_state(s)
  call('HSET', MESSAGES, id, now8 .. char(s.priority) .. draft.envelope)
  count_up(COUNT.published, MINUTE.published, 1)
  end_message(s, 'dead', nil, {'undeliverable', '', 'queue ' .. target .. ' could not be reached'})
end

-- A notice of this age: true if it is given up.
local function give_up(age, notice)
  if notice[4] == '' then return false end -- to this very queue: it only waits for the next client
  if notice[2] == 'watch' then
    news[#news + 1] = {kind = 'completed', id = notice[1], chain = notice[3], member = notice[4], failed = 'undeliverable'}
    return true
  end
  -- A chain needs the notice of an end to finish, and a message that waits for a chain needs the notice of the chain's
  -- end: repeat them for long.
  return age >= COMPLETION_TTL_MS
end

-- Age, whether it is a notice, and the draft or notice in an entry; nil if it cannot be read: then the entry remains,
-- for `doctor`.
local function read_entry(packed)
  local at = struct_unpack('>I8', packed)
  local queue_length = struct_unpack('>H', packed, 33)
  local is_notice = byte(packed, 35 + queue_length) == 78
  local text = sub(packed, (is_notice and 36 or 35) + queue_length)
  local content = is_notice and cmsgpack.unpack(text) or parse_draft(text)
  for i = 1, is_notice and 4 or 0 do
    if type(content[i]) ~= 'string' then error('damaged') end
  end
  return now - at, is_notice, content, sub(packed, 35, 34 + queue_length)
end

local reply, buried, seen, read_count = {}, 0, {}, 0
-- If there are more entries than one reply has, each call begins at another cursor: entries that cannot be delivered,
-- or cannot be read, must not prevent that the others are found. One call reads a bounded number.
local cursor = length > limit and format('%.0f', now % 65536 * 40503 % 65536) or '0'
local from_first = cursor == '0'
repeat
  local page = call('HSCAN', OUTGOING, cursor, 'COUNT', limit)
  cursor = page[1]
  read_count = read_count + #page[2] / 2
  for i = 1, #page[2], 2 do
    local id, packed = page[2][i], page[2][i + 1]
    local readable, age, is_notice, content, target = pcall(read_entry, packed)
    if not readable then
      damaged[#damaged + 1] = id
    elseif age >= undeliverable_after and buried < BURY_MAX and (not is_notice or give_up(age, content)) then
      buried = buried + 1
      call('HDEL', OUTGOING, id)
      if not is_notice then bury_draft(id, content, target) end
    elseif #reply < limit * 2 and not seen[id] then
      seen[id] = true
      reply[#reply + 1] = id
      reply[#reply + 1] = packed
    end
  end
  local once_more = cursor == '0' and not from_first
  from_first = from_first or once_more
until (cursor == '0' and not once_more) or #reply >= limit * 2 or read_count >= SCANNED_MAX

-- include chains

for i = 1, min(#sent_on, limit * 2 - #reply) do reply[#reply + 1] = sent_on[i] end
if grouping then grouping.write() end
if buried > 0 then write_book() end
return reply
