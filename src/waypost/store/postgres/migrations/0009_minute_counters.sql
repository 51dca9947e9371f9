-- What is needed to compute the backlog of a queue backwards from now, and how long messages waited and ran. In minutes
-- that were counted before, these are null: not known.
ALTER TABLE {tally} ADD COLUMN runs bigint;
ALTER TABLE {tally} ADD COLUMN wait_ms bigint;
ALTER TABLE {tally} ADD COLUMN wait_ms_max bigint;
ALTER TABLE {tally} ADD COLUMN run_ms bigint;
ALTER TABLE {tally} ADD COLUMN run_ms_max bigint;
ALTER TABLE {minute} ADD COLUMN redriven bigint;
ALTER TABLE {minute} ADD COLUMN cancelled bigint;
ALTER TABLE {minute} ADD COLUMN replaced bigint;
ALTER TABLE {minute} ADD COLUMN runs bigint;
ALTER TABLE {minute} ADD COLUMN wait_ms bigint;
ALTER TABLE {minute} ADD COLUMN wait_ms_max bigint;
ALTER TABLE {minute} ADD COLUMN run_ms bigint;
ALTER TABLE {minute} ADD COLUMN run_ms_max bigint;
