-- Functions that were renamed: a verb has the same name as in Python, and the name of a helper function says what the
-- function does.
DROP FUNCTION IF EXISTS {beat}, {leave}, {read}, {forget}, {trim}, {remove_queue}, {remove};
DROP FUNCTION IF EXISTS {keeps}, {open}, {make}, {op}, {replayed}, {remember}, {is_due}, {is_much}, {held}, {lock_of}, {from_now};
DROP FUNCTION IF EXISTS {add_also}, {take_also}, {note}, {moved}, {finish}, {forget_done}, {forget_dead};
DROP FUNCTION IF EXISTS {end_of}, {woken}, {sent_on}, {begin}, {place_of}, {block}, {unblock}, {ended}, {carry};
DROP FUNCTION IF EXISTS {again}, {take}, {room}, {ordered}, {forgotten}, {move_wanted}, {turn_journal}, {left_in};
DROP FUNCTION IF EXISTS {tell}, {sleepers}, {cover};
-- The same name, and other names of parameters or columns.
DROP FUNCTION IF EXISTS {accept}, {accept_keyed}, {accept_conflict}, {bury_exhausted}, {settle_one}, {end_waits}, {wake}, {configure};
DROP FUNCTION IF EXISTS {claim}(text, bigint, bytea, bigint, bigint, bigint, text, text, boolean, bigint, bigint);
