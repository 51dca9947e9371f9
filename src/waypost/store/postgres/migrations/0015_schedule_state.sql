-- What schedulers store with a schedule: which instants fired, and what the overlap rule needs.
ALTER TABLE {schedule} ADD COLUMN state bytea;
-- They read and write it now.
DROP FUNCTION IF EXISTS {save_schedule}(text, text, text, bigint, text, bytea, boolean, bigint, bigint);
DROP FUNCTION IF EXISTS {fire_schedule}(
    text, bigint, bytea, bigint, bigint, text, text, bigint, bigint, bigint, bigint, bigint, bigint, bigint, bytea[],
    smallint[], text[], bytea[]);
