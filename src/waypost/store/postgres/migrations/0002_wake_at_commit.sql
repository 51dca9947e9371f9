-- A step inside somebody's own transaction notes here how many sleepers it is worth. They are chosen when that
-- transaction is committed, by a trigger beside the function that does it.
ALTER TABLE {tally} ADD COLUMN wake bigint;
