-- The tables of one namespace. {name} stands for the quoted, schema-qualified name of a table, {#name} for the bare
-- name of an index or constraint.
--
-- A message is one row that includes its bytes: PostgreSQL stores long values outside of the row by itself, and a step
-- that does not change the bytes does not write them again. States: 0 ready, 1 delayed, 2 leased, 3 waiting, 4 dead.
-- `rank` is 9 minus the priority, so that all sort orders are ascending. All indexes of `message` except the first are
-- partial: a message is only in the indexes that its state needs.
-- No row is written by every step: counts are rows with differences, and readers of the journal determine its order.

CREATE SEQUENCE {sequence};

CREATE TABLE {queue} (
    number integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    paused boolean NOT NULL DEFAULT false,
    lease_ms bigint DEFAULT 60000,
    max_deliveries bigint DEFAULT 10,
    max_pending bigint,
    overload text NOT NULL DEFAULT 'raise',
    max_running bigint,
    rate_count bigint,
    rate_per_ms bigint,
    journal text NOT NULL DEFAULT 'all',
    journal_max bigint NOT NULL DEFAULT 1000000,
    dead_max bigint,
    dead_keep_ms bigint,
    completed_max bigint NOT NULL DEFAULT 0
);

CREATE TABLE {message} (
    seq bigint NOT NULL,
    position bigint NOT NULL,
    ready_ms bigint NOT NULL,
    published_ms bigint NOT NULL,
    token bigint NOT NULL DEFAULT 0,
    claimed_ms bigint,
    lease_end_ms bigint,
    lease_ms bigint,
    ended_ms bigint,
    queue integer NOT NULL,
    deliveries integer NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    state smallint NOT NULL,
    rank smallint NOT NULL,
    cancel_requested boolean NOT NULL DEFAULT false,
    id text COLLATE "C" NOT NULL,
    nonce bytea,
    key text COLLATE "C",
    "group" text COLLATE "C",
    worker text,
    cause text,
    reason text COLLATE "C",
    error_type text,
    error text,
    chain text COLLATE "C",
    data bytea NOT NULL
) WITH (
    -- Every message leaves two dead rows: vacuum in each round of the server, without pauses.
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0,
    toast.autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_cost_delay = 0
);
CREATE UNIQUE INDEX {#message_id} ON {message} (queue, id);
CREATE INDEX {#message_ready} ON {message} (queue, rank, position) WHERE state = 0;
CREATE INDEX {#message_delay} ON {message} (queue, ready_ms) WHERE state = 1;
CREATE INDEX {#message_lease} ON {message} (queue, lease_end_ms) WHERE state = 2;
CREATE INDEX {#message_dead} ON {message} (queue, ended_ms, id) WHERE state = 4;
CREATE INDEX {#message_reason} ON {message} (queue, reason, ended_ms, id) WHERE state = 4;
-- The owner of a key, and the next generation that waits for the key: at most one of each, or the step fails.
CREATE UNIQUE INDEX {#message_owner} ON {message} (queue, key) WHERE key IS NOT NULL AND state < 3;
CREATE UNIQUE INDEX {#message_heir} ON {message} (queue, key) WHERE key IS NOT NULL AND state = 3;
-- Messages that wait for chains.
CREATE INDEX {#message_blocked} ON {message} (queue, id) WHERE key IS NULL AND state = 3;

-- Finished messages, kept for inspection if the queue's policy says so, in the order of `number`.
CREATE TABLE {completed} (
    number bigint NOT NULL,
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    key text COLLATE "C",
    "group" text COLLATE "C",
    rank smallint NOT NULL,
    token bigint NOT NULL,
    deliveries integer NOT NULL,
    attempts integer NOT NULL,
    published_ms bigint NOT NULL,
    ready_ms bigint NOT NULL,
    cancel_requested boolean NOT NULL,
    ended_ms bigint NOT NULL,
    reason text COLLATE "C",
    error_type text,
    error text,
    data bytea NOT NULL,
    CONSTRAINT {#completed_pkey} PRIMARY KEY (queue, number)
);
CREATE INDEX {#completed_id} ON {completed} (queue, id);

-- Counts. `tally` has a row for each step that counts; rows of `tally` are folded into `total` and `minute`. A column
-- that a step does not count is null. A sum is total plus tally, read in one statement.
CREATE TABLE {tally} (
    seq bigint NOT NULL,
    queue integer NOT NULL,
    minute integer NOT NULL,
    ready bigint, delayed bigint, leased bigint, waiting bigint, dead_kept bigint,
    published bigint, redriven bigint, done bigint, dead bigint, dropped bigint, cancelled bigint, replaced bigint,
    claims bigint, first_claims bigint, again_expired bigint, again_released bigint, again_retried bigint,
    again_snoozed bigint, again_redriven bigint, expired bigint, released bigint, retried bigint, snoozed bigint,
    duplicates bigint, transferred bigint
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX {#tally_queue} ON {tally} (queue, seq);
CREATE TABLE {total} (
    queue integer NOT NULL CONSTRAINT {#total_pkey} PRIMARY KEY,
    ready bigint, delayed bigint, leased bigint, waiting bigint, dead_kept bigint,
    published bigint, redriven bigint, done bigint, dead bigint, dropped bigint, cancelled bigint, replaced bigint,
    claims bigint, first_claims bigint, again_expired bigint, again_released bigint, again_retried bigint,
    again_snoozed bigint, again_redriven bigint, expired bigint, released bigint, retried bigint, snoozed bigint,
    duplicates bigint, transferred bigint
) WITH (fillfactor = 50);
CREATE TABLE {minute} (
    queue integer NOT NULL,
    minute integer NOT NULL,
    published bigint, duplicates bigint, claims bigint, done bigint, retried bigint, dead bigint, expired bigint,
    dropped bigint,
    CONSTRAINT {#minute_pkey} PRIMARY KEY (queue, minute)
) WITH (fillfactor = 50);

-- The journal: one entry per step and kind of event, with its messages side by side in arrays. An array of one element
-- holds for all messages of the entry, a null array stands for nulls. `xid` is the transaction that wrote the entry.
-- Entries are stored in slices by time. Writers fill the slice that `turn` names. A slice of which all events are
-- forgotten is truncated, not deleted row by row, and filled again. The few events of it that are still needed are
-- moved to `rest` (-1) before.
CREATE SEQUENCE {turn} MINVALUE 0 MAXVALUE 7;
SELECT setval('{turn}', 0);
CREATE TABLE {entry} (
    queue integer NOT NULL,
    count integer NOT NULL,
    xid bigint NOT NULL,
    seq bigint NOT NULL,
    at_ms bigint NOT NULL,
    event text NOT NULL,
    operation text,
    ids text[],
    keys text[],
    groups text[],
    ranks smallint[],
    tokens bigint[],
    deliveries integer[],
    attempts integer[],
    workers text[],
    dues bigint[],
    causes text[],
    reasons text[],
    error_types text[],
    runs bigint[],
    waits bigint[],
    sizes bigint[],
    bodies bytea[],
    schedule text,
    chains text[],
    slice smallint NOT NULL DEFAULT coalesce(pg_sequence_last_value('{turn}'), 0)
) PARTITION BY LIST (slice);
CREATE INDEX {#entry_place} ON {entry} (queue, xid, seq);
-- For the history of one message: entries of a single message are found by this index, entries of many messages are
-- scanned.
CREATE INDEX {#entry_one} ON {entry} (queue, (ids[1])) WHERE count = 1 AND ids IS NOT NULL;
CREATE TABLE {entry_a} PARTITION OF {entry} FOR VALUES IN (0) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_b} PARTITION OF {entry} FOR VALUES IN (1) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_c} PARTITION OF {entry} FOR VALUES IN (2) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_d} PARTITION OF {entry} FOR VALUES IN (3) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_e} PARTITION OF {entry} FOR VALUES IN (4) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_f} PARTITION OF {entry} FOR VALUES IN (5) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_g} PARTITION OF {entry} FOR VALUES IN (6) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {entry_h} PARTITION OF {entry} FOR VALUES IN (7) WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE {rest} PARTITION OF {entry} DEFAULT WITH (autovacuum_vacuum_scale_factor = 0.05);
-- When the last needed events of a slice that is no longer filled were moved to `rest`; null while the slice has needed
-- events.
CREATE TABLE {slice} (
    number smallint NOT NULL CONSTRAINT {#slice_pkey} PRIMARY KEY,
    moved_ms bigint
) WITH (fillfactor = 50);
INSERT INTO {slice} (number) SELECT generate_series(0, 7);
-- "So many events end with this entry": written by readers, for entries older than the oldest open transaction.
CREATE TABLE {mark} (
    queue integer NOT NULL,
    number bigint NOT NULL,
    xid bigint NOT NULL,
    seq bigint NOT NULL,
    CONSTRAINT {#mark_pkey} PRIMARY KEY (queue, number)
);
CREATE TABLE {kept} (
    queue integer NOT NULL CONSTRAINT {#kept_pkey} PRIMARY KEY,
    first bigint NOT NULL
) WITH (fillfactor = 50);
CREATE TABLE {reader} (
    queue integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    read_to bigint NOT NULL,
    CONSTRAINT {#reader_pkey} PRIMARY KEY (queue, name)
) WITH (fillfactor = 50);

-- Rows with a limited lifetime: each has an end and an index on it, and a bounded number of expired rows is deleted at
-- a time.
CREATE TABLE {window} (
    queue integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    message_id text NOT NULL,
    until_ms bigint NOT NULL,
    CONSTRAINT {#window_pkey} PRIMARY KEY (queue, key)
);
CREATE INDEX {#window_until} ON {window} (until_ms);
CREATE TABLE {result} (
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    until_ms bigint NOT NULL,
    CONSTRAINT {#result_pkey} PRIMARY KEY (queue, id)
);
CREATE INDEX {#result_until} ON {result} (until_ms);
CREATE TABLE {arrival} (
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    until_ms bigint NOT NULL,
    CONSTRAINT {#arrival_pkey} PRIMARY KEY (queue, id)
);
CREATE INDEX {#arrival_until} ON {arrival} (until_ms);
-- Sleeping workers. A row remains after its worker was woken, until the row expires: the newest expiry of all rows says
-- until when the list of sleepers is complete. The row without a name means "all workers were woken".
CREATE TABLE {sleeper} (
    queue integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    until_ms bigint NOT NULL,
    awake boolean NOT NULL,
    -- When it was last notified.
    woken_ms bigint NOT NULL DEFAULT 0,
    CONSTRAINT {#sleeper_pkey} PRIMARY KEY (queue, name)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
CREATE INDEX {#sleeper_until} ON {sleeper} (queue, until_ms);
CREATE TABLE {rate} (
    queue integer NOT NULL,
    at_ms bigint NOT NULL,
    count bigint NOT NULL,
    CONSTRAINT {#rate_pkey} PRIMARY KEY (queue, at_ms)
);

-- The last 128 results of each session: a new result replaces the one 128 operations before it.
CREATE TABLE {operation} (
    queue integer NOT NULL,
    slot smallint NOT NULL,
    session bytea NOT NULL,
    number bigint NOT NULL,
    until_ms bigint NOT NULL,
    result text NOT NULL,
    CONSTRAINT {#operation_pkey} PRIMARY KEY (queue, session, slot)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- The workers: the last heartbeat of each. Each worker writes only its own row.
CREATE TABLE {worker} (
    name text COLLATE "C" NOT NULL CONSTRAINT {#worker_pkey} PRIMARY KEY,
    record bytea NOT NULL,
    at_ms bigint NOT NULL,
    until_ms bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200);
CREATE INDEX {#worker_until} ON {worker} (until_ms);
-- Schedules, each with its queue. `change` grows with every save, so that a scheduler finds the schedules that it must
-- read again.
CREATE TABLE {schedule} (
    queue integer NOT NULL,
    key text COLLATE "C" NOT NULL,
    version text COLLATE "C" NOT NULL,
    spec bytea NOT NULL,
    paused boolean NOT NULL,
    next_ms bigint,
    due_ms bigint,
    fires bigint NOT NULL DEFAULT 0,
    missed bigint NOT NULL DEFAULT 0,
    last_ms bigint,
    change bigint NOT NULL,
    CONSTRAINT {#schedule_pkey} PRIMARY KEY (queue, key)
) WITH (fillfactor = 50);
-- The leader of each role, and until when it leads.
CREATE TABLE {leader} (
    role text COLLATE "C" NOT NULL CONSTRAINT {#leader_pkey} PRIMARY KEY,
    name text NOT NULL,
    token bigint NOT NULL,
    until_ms bigint NOT NULL
) WITH (fillfactor = 50);

-- Chains, stored with the queue of their first message (`home`). `open` is the number of rows of `member` that a chain
-- has: its messages that have begun and not ended. A chain that has ended is kept for a while, with its result.
CREATE TABLE {chain} (
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    open integer NOT NULL DEFAULT 1,
    last text,
    failed_member text,
    failed text,
    until_ms bigint NOT NULL,
    CONSTRAINT {#chain_pkey} PRIMARY KEY (queue, id)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200);
CREATE INDEX {#chain_until} ON {chain} (until_ms);
CREATE TABLE {member} (
    queue integer NOT NULL,
    chain text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    count integer NOT NULL,
    CONSTRAINT {#member_pkey} PRIMARY KEY (queue, chain, name)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200);
-- Which chain (with its `home`) blocks which message. A row is deleted when the chain or the message ends.
CREATE TABLE {blocker} (
    home integer NOT NULL,
    chain text COLLATE "C" NOT NULL,
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    CONSTRAINT {#blocker_pkey} PRIMARY KEY (home, chain, queue, id)
);
CREATE INDEX {#blocker_message} ON {blocker} (queue, id);
-- Clients that wait for the end of a message or of a chain (`chain/` and its id), and the ends for which a client
-- waited.
CREATE TABLE {waiter} (
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    until_ms bigint NOT NULL,
    CONSTRAINT {#waiter_pkey} PRIMARY KEY (queue, id, name)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200);
CREATE INDEX {#waiter_until} ON {waiter} (until_ms);
CREATE TABLE {ending} (
    queue integer NOT NULL,
    id text COLLATE "C" NOT NULL,
    how text NOT NULL,
    until_ms bigint NOT NULL,
    CONSTRAINT {#ending_pkey} PRIMARY KEY (queue, id)
);
CREATE INDEX {#ending_until} ON {ending} (until_ms);
