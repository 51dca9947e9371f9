-- The tables of one namespace. {name} stands for the quoted, prefixed name of a table or index.
--
-- A message is two rows: `envelope` holds its bytes and is written once, `message` is narrow and changes with every
-- step, so that renewing a lease never rewrites a body. States: 0 ready, 1 delayed, 2 leased, 3 waiting, 4 dead. Every
-- index on `message` except the first is partial: a message is only in the indexes that its state needs.

CREATE TABLE {meta} (name TEXT PRIMARY KEY, value) WITHOUT ROWID;

-- One row per queue: its policy, its counters, its numbers. SQLite has one writer, so a row that every step updates
-- causes no additional waiting, and the depth of a queue is never counted over messages.
CREATE TABLE {queue} (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    policy BLOB NOT NULL,
    paused INTEGER NOT NULL DEFAULT 0,
    sequence INTEGER NOT NULL DEFAULT 0,
    sleepers_known_until INTEGER NOT NULL DEFAULT 0,
    journal_first INTEGER NOT NULL DEFAULT 1,
    journal_last INTEGER NOT NULL DEFAULT 0,
    journal_swept INTEGER NOT NULL DEFAULT 1,
    completed_last INTEGER NOT NULL DEFAULT 0,
    rate_sum INTEGER NOT NULL DEFAULT 0,
    ready INTEGER NOT NULL DEFAULT 0,
    delayed INTEGER NOT NULL DEFAULT 0,
    leased INTEGER NOT NULL DEFAULT 0,
    waiting INTEGER NOT NULL DEFAULT 0,
    dead_kept INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    published INTEGER NOT NULL DEFAULT 0,
    redriven INTEGER NOT NULL DEFAULT 0,
    done INTEGER NOT NULL DEFAULT 0,
    dead INTEGER NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    replaced INTEGER NOT NULL DEFAULT 0,
    claims INTEGER NOT NULL DEFAULT 0,
    first_claims INTEGER NOT NULL DEFAULT 0,
    again_expired INTEGER NOT NULL DEFAULT 0,
    again_released INTEGER NOT NULL DEFAULT 0,
    again_retried INTEGER NOT NULL DEFAULT 0,
    again_snoozed INTEGER NOT NULL DEFAULT 0,
    again_redriven INTEGER NOT NULL DEFAULT 0,
    expired INTEGER NOT NULL DEFAULT 0,
    released INTEGER NOT NULL DEFAULT 0,
    retried INTEGER NOT NULL DEFAULT 0,
    snoozed INTEGER NOT NULL DEFAULT 0,
    duplicates INTEGER NOT NULL DEFAULT 0,
    transferred INTEGER NOT NULL DEFAULT 0,
    over_cap INTEGER NOT NULL DEFAULT 0,
    changes BLOB,
    grouping BLOB
);

CREATE TABLE {envelope} (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);

CREATE TABLE {message} (
    seq INTEGER PRIMARY KEY REFERENCES {envelope} (seq),
    queue INTEGER NOT NULL REFERENCES {queue} (number),
    id TEXT NOT NULL,
    state INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    position INTEGER NOT NULL,
    ready_ms INTEGER NOT NULL,
    published_ms INTEGER NOT NULL,
    size INTEGER NOT NULL,
    key TEXT,
    "group" TEXT,
    token INTEGER NOT NULL DEFAULT 0,
    deliveries INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    nonce BLOB NOT NULL DEFAULT x'',
    worker TEXT,
    claimed_ms INTEGER,
    lease_end_ms INTEGER,
    lease_ms INTEGER NOT NULL DEFAULT 0,
    cancel_requested INTEGER NOT NULL DEFAULT 0,
    cause TEXT,
    ended_ms INTEGER,
    reason TEXT,
    error_type TEXT,
    error TEXT,
    chain TEXT,
    -- Only in a queue that takes turns between groups: see `grouping.py`.
    rank INTEGER,
    holds INTEGER NOT NULL DEFAULT 0,
    -- When it lapses: see `expires.py`.
    expires_ms INTEGER,
    -- How long it has its key (a number of `UNIQUE_NUMBERS`; null: while it is unfinished), and the key that it gave up
    -- when it was claimed: `key` is null since then.
    key_mode INTEGER,
    freed_key TEXT
);
CREATE UNIQUE INDEX {message:id} ON {message} (queue, id);
CREATE INDEX {message:ready} ON {message} (queue, priority DESC, position, id) WHERE state = {READY};
CREATE INDEX {message:delayed} ON {message} (queue, ready_ms, id) WHERE state = {DELAYED};
CREATE INDEX {message:leased} ON {message} (queue, lease_end_ms, id) WHERE state = {LEASED};
CREATE INDEX {message:waiting} ON {message} (queue, id) WHERE state = {WAITING};
CREATE INDEX {message:dead} ON {message} (queue, ended_ms, id) WHERE state = {DEAD};
CREATE INDEX {message:reason} ON {message} (queue, reason, ended_ms, id) WHERE state = {DEAD};
-- The owner of a key, and the next generation that waits for the key: at most one of each, or the step fails.
CREATE UNIQUE INDEX {message:owner} ON {message} (queue, key) WHERE key IS NOT NULL AND state < {WAITING};
CREATE UNIQUE INDEX {message:parked} ON {message} (queue, key) WHERE key IS NOT NULL AND state = {WAITING};
-- Messages that can lapse now: ready, delayed or waiting.
CREATE INDEX {message:expires} ON {message} (queue, expires_ms, id)
    WHERE expires_ms IS NOT NULL AND state <> {LEASED} AND state < {DEAD};
-- The ready messages of each group, and the delayed ones that have a place in an ordered group.
CREATE INDEX {message:group} ON {message} (queue, "group", rank, position, id)
    WHERE state = {READY} AND rank IS NOT NULL;
CREATE INDEX {message:held} ON {message} (queue, "group", rank, position, id) WHERE holds > 0;

-- The groups of queues with turns between groups, '' for messages without one: how many messages each has, its number
-- in the line, its settings, the claims that its rate counts and when it allows the next one.
CREATE TABLE {group} (
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    turn INTEGER,
    ready INTEGER NOT NULL DEFAULT 0,
    leased INTEGER NOT NULL DEFAULT 0,
    others INTEGER NOT NULL DEFAULT 0,
    own INTEGER NOT NULL DEFAULT 0,
    weight INTEGER NOT NULL DEFAULT 1,
    paused INTEGER NOT NULL DEFAULT 0,
    max_running INTEGER,
    rate_count INTEGER,
    rate_per_ms INTEGER,
    max_pending INTEGER,
    claims BLOB,
    claims_until INTEGER,
    limited_until INTEGER,
    PRIMARY KEY (queue, name)
) WITHOUT ROWID;
CREATE INDEX {group:turn} ON {group} (queue, turn, name) WHERE turn IS NOT NULL;
CREATE INDEX {group:limited} ON {group} (queue, limited_until) WHERE limited_until IS NOT NULL;
CREATE INDEX {group:empty} ON {group} (queue) WHERE ready = 0 AND leased = 0 AND others = 0 AND turn IS NULL
    AND limited_until IS NULL AND claims IS NULL AND own = 0;
CREATE INDEX {group:until} ON {group} (queue, claims_until) WHERE claims_until IS NOT NULL;

-- Finished messages, kept if the queue's policy says so.
CREATE TABLE {completed} (
    seq INTEGER PRIMARY KEY REFERENCES {envelope} (seq),
    queue INTEGER NOT NULL,
    number INTEGER NOT NULL,
    id TEXT NOT NULL,
    key TEXT,
    "group" TEXT,
    priority INTEGER NOT NULL,
    token INTEGER NOT NULL,
    deliveries INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    published_ms INTEGER NOT NULL,
    ready_ms INTEGER NOT NULL,
    cancel_requested INTEGER NOT NULL,
    ended_ms INTEGER NOT NULL,
    reason TEXT,
    error_type TEXT,
    error TEXT
);
CREATE UNIQUE INDEX {completed:number} ON {completed} (queue, number);
CREATE INDEX {completed:id} ON {completed} (queue, id);

-- The journal: a row holds the events of a step, packed (see `entries.py`). `low` and `high` are the smallest and the
-- largest message id in it.
CREATE TABLE {entry} (
    queue INTEGER NOT NULL,
    last INTEGER NOT NULL,
    first INTEGER NOT NULL,
    low TEXT,
    high TEXT,
    data BLOB NOT NULL,
    PRIMARY KEY (queue, last)
) WITHOUT ROWID;
CREATE INDEX {entry:one} ON {entry} (queue, low) WHERE low = high;
CREATE INDEX {entry:many} ON {entry} (queue, high, low) WHERE low < high;

-- Events as release 0.1.0 wrote them, a row for each: read and trimmed, never added.
CREATE TABLE {journal} (
    queue INTEGER NOT NULL,
    number INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    event TEXT NOT NULL,
    message_id TEXT,
    key TEXT,
    "group" TEXT,
    priority INTEGER,
    token INTEGER,
    claims INTEGER,
    deliveries INTEGER,
    attempts INTEGER,
    worker TEXT,
    due_ms INTEGER,
    cause TEXT,
    reason TEXT,
    error_type TEXT,
    run_ms INTEGER,
    wait_ms INTEGER,
    size INTEGER,
    operation_id TEXT,
    chain_id TEXT,
    schedule TEXT,
    body BLOB,
    error TEXT,
    PRIMARY KEY (queue, number)
) WITHOUT ROWID;
CREATE INDEX {journal:message} ON {journal} (queue, message_id) WHERE message_id IS NOT NULL;

CREATE TABLE {reader} (
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    read_to INTEGER NOT NULL,
    PRIMARY KEY (queue, name)
) WITHOUT ROWID;

-- Rows with a limited lifetime: each has an end and an index on it, and a bounded number of expired rows is deleted at
-- a time. The window of a dead letter whose key is in use has no end.
CREATE TABLE {window} (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    message_id TEXT NOT NULL,
    until_ms INTEGER NOT NULL,
    UNIQUE (queue, key)
);
CREATE INDEX {window:until} ON {window} (until_ms);
CREATE TABLE {result} (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    data BLOB NOT NULL,
    until_ms INTEGER NOT NULL,
    UNIQUE (queue, id)
);
CREATE INDEX {result:until} ON {result} (until_ms);
CREATE TABLE {arrival} (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    until_ms INTEGER NOT NULL,
    UNIQUE (queue, id)
);
CREATE INDEX {arrival:until} ON {arrival} (until_ms);
-- Chains, stored with their first queue under the id of their first message: the open messages of each, and the
-- messages that wait for it. A message is named as queue/id.
CREATE TABLE {chain} (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    failed_member TEXT,
    failed TEXT,
    last TEXT,
    until_ms INTEGER NOT NULL,
    UNIQUE (queue, id)
);
CREATE INDEX {chain:until} ON {chain} (until_ms);
CREATE TABLE {member} (
    queue INTEGER NOT NULL,
    chain TEXT NOT NULL,
    name TEXT NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (queue, chain, name)
) WITHOUT ROWID;
CREATE TABLE {watcher} (
    queue INTEGER NOT NULL,
    chain TEXT NOT NULL,
    name TEXT NOT NULL,
    PRIMARY KEY (queue, chain, name)
) WITHOUT ROWID;
-- The chains for which a message still waits.
CREATE TABLE {blocker} (
    seq INTEGER NOT NULL,
    chain TEXT NOT NULL,
    PRIMARY KEY (seq, chain)
) WITHOUT ROWID;
-- Clients that wait for the end of a message, or of a chain (`chain/` before the id of its first message).
CREATE TABLE {waiter} (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    until_ms INTEGER NOT NULL,
    UNIQUE (queue, id, name)
);
CREATE INDEX {waiter:until} ON {waiter} (until_ms);
-- Ends of messages for which a client waited.
CREATE TABLE {ending} (
    queue INTEGER NOT NULL,
    id TEXT NOT NULL,
    how TEXT NOT NULL,
    until_ms INTEGER NOT NULL,
    UNIQUE (queue, id)
);
CREATE INDEX {ending:until} ON {ending} (until_ms);
CREATE TABLE {sleeper} (
    queue INTEGER NOT NULL,
    name TEXT NOT NULL,
    until_ms INTEGER NOT NULL,
    PRIMARY KEY (queue, name)
) WITHOUT ROWID;
CREATE INDEX {sleeper:until} ON {sleeper} (queue, until_ms, name);
CREATE TABLE {rate} (
    queue INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    count INTEGER NOT NULL,
    PRIMARY KEY (queue, at_ms)
) WITHOUT ROWID;
CREATE TABLE {minute} (
    queue INTEGER NOT NULL,
    minute INTEGER NOT NULL,
    published INTEGER NOT NULL,
    duplicates INTEGER NOT NULL,
    claims INTEGER NOT NULL,
    done INTEGER NOT NULL,
    retried INTEGER NOT NULL,
    dead INTEGER NOT NULL,
    expired INTEGER NOT NULL,
    dropped INTEGER NOT NULL,
    redriven INTEGER,
    cancelled INTEGER,
    replaced INTEGER,
    runs INTEGER,
    wait_ms INTEGER,
    wait_ms_max INTEGER,
    run_ms INTEGER,
    run_ms_max INTEGER,
    PRIMARY KEY (queue, minute)
) WITHOUT ROWID;

-- The last results of each session, for repeats. `newest` and `until_ms` are not written by every operation: see
-- `replays.py`.
CREATE TABLE {session} (
    queue INTEGER NOT NULL,
    session BLOB NOT NULL,
    newest INTEGER NOT NULL,
    until_ms INTEGER NOT NULL,
    PRIMARY KEY (queue, session)
) WITHOUT ROWID;
CREATE INDEX {session:until} ON {session} (until_ms);
CREATE TABLE {replay} (
    queue INTEGER NOT NULL,
    session BLOB NOT NULL,
    number INTEGER NOT NULL,
    result BLOB NOT NULL,
    PRIMARY KEY (queue, session, number)
) WITHOUT ROWID;

-- Workers: the last heartbeat of each, and its expiry.
CREATE TABLE {worker} (
    name TEXT NOT NULL,
    record BLOB NOT NULL,
    at_ms INTEGER NOT NULL,
    until_ms INTEGER NOT NULL,
    request TEXT,
    request_ms INTEGER,
    UNIQUE (name)
);
CREATE INDEX {worker:until} ON {worker} (until_ms);

-- Reserved space: released when the disk or the file's limit is reached, so that claims and settles can continue.
CREATE TABLE {reserve} (number INTEGER PRIMARY KEY, room BLOB NOT NULL);

-- Schedules, each with its queue. `change` grows with every save, so that a scheduler finds the schedules that it must
-- read again.
CREATE TABLE {schedule} (
    queue INTEGER NOT NULL,
    key TEXT NOT NULL,
    version TEXT NOT NULL,
    spec BLOB NOT NULL,
    paused INTEGER NOT NULL,
    next_ms INTEGER,
    due_ms INTEGER,
    fires INTEGER NOT NULL DEFAULT 0,
    missed INTEGER NOT NULL DEFAULT 0,
    last_ms INTEGER,
    change INTEGER NOT NULL,
    state BLOB,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;

-- The leader of each role, and until when it leads.
CREATE TABLE {leader} (
    role TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    token INTEGER NOT NULL,
    until_ms INTEGER NOT NULL
) WITHOUT ROWID;

-- Shared records: small data by kind and name; the version grows with each save.
CREATE TABLE {record} (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    data BLOB NOT NULL,
    version INTEGER NOT NULL,
    created_ms INTEGER NOT NULL,
    until_ms INTEGER,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;
CREATE INDEX {record:created} ON {record} (kind, created_ms, name);
