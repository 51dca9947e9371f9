-- How often a message was claimed. A token grows with each claim too, but continues above `floor` after a restart of
-- the server.
ALTER TABLE {message} ADD COLUMN claims bigint NOT NULL DEFAULT 0;
UPDATE {message} SET claims = token WHERE token > 0;
-- The same for the events of an entry; null where it is equal to the token.
ALTER TABLE {entry} ADD COLUMN claims bigint[];

-- New tokens are greater than `floor`. It is one row, raised by the first claim after each start of the server.
CREATE TABLE {epoch} (floor bigint NOT NULL);
INSERT INTO {epoch} VALUES (0);
-- The floor, and the start of the server since which it holds. An unlogged table is empty after every recovery: a
-- crash, a backend that was killed, a restored backup, a promoted replica. `place` is the table's own oid, by which a
-- restored dump is recognized.
CREATE UNLOGGED TABLE {server} (started timestamptz NOT NULL, place oid NOT NULL, floor bigint NOT NULL);
INSERT INTO {server} VALUES (pg_postmaster_start_time(), '{server}'::regclass, 0);

DROP FUNCTION IF EXISTS {again}(bigint[], text[], bigint);

-- Rows of `tally` are inserted and deleted all the time. In an index on a key that only grows, entries of deleted rows
-- would fill pages that get no new entries, and each sum would read these pages until the next vacuum. In this index
-- new entries are put into the same pages, and PostgreSQL removes the dead ones first.
DROP INDEX {tally_queue};
CREATE INDEX {#tally_queue} ON {tally} (queue, (hashint8(seq) & 63));

-- It has other parameters now: the time, and for how long operations may be repeated.
DROP FUNCTION IF EXISTS {replayed}(integer, bytea, bigint);
