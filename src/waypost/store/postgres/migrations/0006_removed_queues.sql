-- A row of `queue` may exist for a name that is not a queue: a worker claims from the name, or the queue was removed.
-- For a removed queue `removed_ms` and `removed_mark` say when it was removed, and by which operation, and
-- `removed_until` says how long that is remembered.
ALTER TABLE {queue} ADD COLUMN made boolean NOT NULL DEFAULT true;
ALTER TABLE {queue} ADD COLUMN removed_ms bigint;
ALTER TABLE {queue} ADD COLUMN removed_mark bytea;
ALTER TABLE {queue} ADD COLUMN removed_until bigint;
CREATE INDEX {#queue_gone} ON {queue} (removed_until) WHERE NOT made;

-- It has one more parameter now: when a queue of this name was removed.
DROP FUNCTION IF EXISTS {replayed}(integer, bytea, bigint, bigint, bigint);
