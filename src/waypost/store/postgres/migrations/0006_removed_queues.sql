-- A row of `queue` may stand for a name that is no queue: a worker claims from it, or the queue was removed. Then `removed_ms`
-- and `removed_mark` say when, and by which operation, and `removed_until` how long that is remembered.
ALTER TABLE {queue} ADD COLUMN made boolean NOT NULL DEFAULT true;
ALTER TABLE {queue} ADD COLUMN removed_ms bigint;
ALTER TABLE {queue} ADD COLUMN removed_mark bytea;
ALTER TABLE {queue} ADD COLUMN removed_until bigint;
CREATE INDEX {#queue_gone} ON {queue} (removed_until) WHERE NOT made;

-- It takes one parameter more now: when a queue of this name was removed.
DROP FUNCTION IF EXISTS {replayed}(integer, bytea, bigint, bigint, bigint);
