-- Messages that a queue accepted although its `max_pending` was reached: forwarded by settles, or redriven.
ALTER TABLE {tally} ADD COLUMN over_cap bigint;
ALTER TABLE {total} ADD COLUMN over_cap bigint NOT NULL DEFAULT 0;

-- They have another parameter now, which says which drafts count against `max_pending`, or return another count.
DROP FUNCTION IF EXISTS {publish}(
    text, bigint, bytea, bigint, bigint, bytea[], smallint[], text[], bigint[], bigint[], bytea[], text[], bigint[],
    text[], boolean[], text[], integer[], text[]);
DROP FUNCTION IF EXISTS {accept}(
    {queue}, bigint, text, bytea[], smallint[], text[], bigint[], bigint[], bytea[], text[], bigint[], text[],
    boolean[], text[], integer[], text[]);
DROP FUNCTION IF EXISTS {accept_keyed}(
    {queue}, bigint, text, bytea[], smallint[], text[], bigint[], bigint[], bytea[], text[], bigint[], text[],
    boolean[], text[], integer[], text[]);
