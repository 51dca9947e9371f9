-- A step inside the caller's own transaction records here how many sleepers it may wake. They are chosen when that
-- transaction commits, by the trigger that calls `wake_at_commit`.
ALTER TABLE {tally} ADD COLUMN wake bigint;
