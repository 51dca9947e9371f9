-- drafts: a message before it is stored, as publish receives it and outgoing stores it. Included where a draft is read.
--
-- A plain draft: priority (1, below 16) and envelope (version, id, …); plus 32: its arrival is remembered and
-- `max_pending` does not apply; plus 48: its arrival is remembered and `max_pending` applies.
-- Otherwise 16 + priority, flags (conflict rule in the lowest two bits, 4 absolute due time, 8 forwarded, 16 has a
-- journal copy, 32 of a chain, 64 waits for chains, 128 forwarded and `max_pending` applies), due (8), window (8), key,
-- group and journal copy lengths (2, 2, 4), key, group, journal copy; then length (1) and id of its chain; then length
-- (4) of the chains that it waits for and their ids, separated by NUL; then the envelope.
-- If its key is not simply in use while it is unfinished, a prefix: 30, 1 until it is claimed or 2 also while it is
-- dead (1).
-- If it lapses, a prefix: 31, 1 if the next number is a time and 0 if it is a duration from now (1), expiry (8).
-- Invariant: reads its argument and nothing else.

local RULES = {[0] = 'keep', [1] = 'replace', [2] = 'extend', [3] = 'error'}

local function parse_draft(argument)
  local mark = byte(argument, 1)
  if mark == 31 then
    local absolute, expires = struct_unpack('>BI8', argument, 2)
    local draft = parse_draft(sub(argument, 11))
    draft.expires = absolute == 1 and expires or now + expires
    return draft
  elseif mark == 30 then
    local draft = parse_draft(sub(argument, 3))
    draft.unique = byte(argument, 2)
    return draft
  end
  if mark < 16 then
    return {id = sub(argument, 3, 26), priority = mark, flags = 0, due = 0, window = 0, key = '', group = '', chain = '',
      envelope = sub(argument, 2), rule = 'keep'}
  elseif mark >= 32 then
    return {id = sub(argument, 3, 26), priority = mark % 16, flags = 8, due = 0, window = 0, key = '', group = '', chain = '',
      envelope = sub(argument, 2), rule = 'keep', forwarded = true, capped = mark >= 48}
  end
  local flags, due, window, key_length, group_length, copy_length, at = struct_unpack('>BI8I8HHI4', argument, 2)
  local key_end = at + key_length
  local group_end = key_end + group_length
  local ends = group_end + copy_length
  local draft = {priority = mark - 16, flags = flags, due = due, window = window,
    key = sub(argument, at, key_end - 1), group = sub(argument, key_end, group_end - 1),
    copy = floor(flags / 16) % 2 == 1 and sub(argument, group_end, ends - 1) or nil, rule = RULES[flags % 4],
    absolute = floor(flags / 4) % 2 == 1, forwarded = floor(flags / 8) % 2 == 1,
    capped = flags >= 128, chain = ''}
  if flags >= 32 then
    if floor(flags / 32) % 2 == 1 then
      local chain_end = ends + 1 + byte(argument, ends)
      draft.chain = sub(argument, ends + 1, chain_end - 1)
      ends = chain_end
    end
    if floor(flags / 64) % 2 == 1 then
      local length = struct_unpack('>I4', argument, ends)
      local after = {}
      for chain in string.gmatch(sub(argument, ends + 4, ends + 3 + length), '%Z+') do after[#after + 1] = chain end
      draft.after = after
      ends = ends + 4 + length
    end
  end
  draft.envelope = sub(argument, ends)
  draft.id = sub(draft.envelope, 2, 25)
  return draft
end
