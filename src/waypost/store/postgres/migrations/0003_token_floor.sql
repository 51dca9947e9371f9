-- How often a message was claimed. A token grows with each claim too, but begins anew above `floor` after a restart.
ALTER TABLE {message} ADD COLUMN claims bigint NOT NULL DEFAULT 0;
UPDATE {message} SET claims = token WHERE token > 0;
-- The same for the events of an entry; null where it is equal to the token.
ALTER TABLE {entry} ADD COLUMN claims bigint[];

-- Tokens that are given now are above `floor`. It is one row, raised by the first claim after each start of the server.
CREATE TABLE {epoch} (floor bigint NOT NULL);
INSERT INTO {epoch} VALUES (0);
-- What the floor is since which start of the server. An unlogged table is empty after every recovery: a crash, a backend
-- that was killed, a restored backup, a promoted replica. `place` is the table itself, and tells a restored dump.
CREATE UNLOGGED TABLE {server} (started timestamptz NOT NULL, place oid NOT NULL, floor bigint NOT NULL);
INSERT INTO {server} VALUES (pg_postmaster_start_time(), '{server}'::regclass, 0);

DROP FUNCTION IF EXISTS {again}(bigint[], text[], bigint);

-- Rows of `tally` come and go all the time. By a key that only grows, their dead entries would fill pages that no new entry
-- is ever put into, and that each sum walks through until the next vacuum; here new entries clear the old ones away.
DROP INDEX {tally_queue};
CREATE INDEX {#tally_queue} ON {tally} (queue, (hashint8(seq) & 63));

-- It takes other parameters now: the time, and for how long operations may be repeated.
DROP FUNCTION IF EXISTS {replayed}(integer, bytea, bigint);
