-- Shared records: small data by kind and name; the version grows with each save.
CREATE TABLE {record} (
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    version bigint NOT NULL,
    created_ms bigint NOT NULL,
    until_ms bigint,
    PRIMARY KEY (kind, name)
);
CREATE INDEX {#record_created} ON {record} (kind, created_ms, name);
-- They take the ids of the dead letters.
DROP FUNCTION IF EXISTS {purge}, {remove_dead};
