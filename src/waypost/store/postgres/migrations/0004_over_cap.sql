-- Messages that a queue took in although its `max_pending` was reached: sent on by settles, or redriven.
ALTER TABLE {tally} ADD COLUMN over_cap bigint;
ALTER TABLE {total} ADD COLUMN over_cap bigint NOT NULL DEFAULT 0;

-- They take another parameter now, which of the drafts keep to the cap, or return another count.
DROP FUNCTION IF EXISTS {publish}(
    text, bigint, bytea, bigint, bigint, bytea[], smallint[], text[], bigint[], bigint[], bytea[], text[], bigint[],
    text[], boolean[], text[], integer[], text[]);
DROP FUNCTION IF EXISTS {accept}(
    {queue}, bigint, text, bytea[], smallint[], text[], bigint[], bigint[], bytea[], text[], bigint[], text[],
    boolean[], text[], integer[], text[]);
DROP FUNCTION IF EXISTS {accept_keyed}(
    {queue}, bigint, text, bytea[], smallint[], text[], bigint[], bigint[], bytea[], text[], bigint[], text[],
    boolean[], text[], integer[], text[]);
