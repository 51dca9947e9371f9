-- Counters from which the backlog of a queue in the past is computed, and how long messages waited and ran. They are
-- null (unknown) for minutes that were counted before this version.
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

-- The last changes of a queue's settings, which charts mark.
ALTER TABLE {queue} ADD COLUMN changes jsonb NOT NULL DEFAULT '[]';

-- What was requested of a worker, and when.
ALTER TABLE {worker} ADD COLUMN request text;
ALTER TABLE {worker} ADD COLUMN request_ms bigint;
-- It returns that too now.
DROP FUNCTION IF EXISTS {workers}(bigint, bigint);
