-- Groups: order inside a group, turns between groups, limits for each group. The settings of a queue:
ALTER TABLE {queue} ADD COLUMN "order" text;
ALTER TABLE {queue} ADD COLUMN on_failure text NOT NULL DEFAULT 'hold';
ALTER TABLE {queue} ADD COLUMN fair boolean NOT NULL DEFAULT false;
ALTER TABLE {queue} ADD COLUMN group_max_running bigint;
ALTER TABLE {queue} ADD COLUMN group_rate_count bigint;
ALTER TABLE {queue} ADD COLUMN group_rate_per_ms bigint;
ALTER TABLE {queue} ADD COLUMN group_max_pending bigint;
-- `group_mode` is how new messages are stored: 0 without regard to groups, 1 by group, 2 by group and in order.
-- `claim_mode` is how claims choose messages, by the same numbers. `conversion` is the progress of the conversion from
-- one mode to another; null if there is nothing to convert.
ALTER TABLE {queue} ADD COLUMN group_mode smallint NOT NULL DEFAULT 0;
ALTER TABLE {queue} ADD COLUMN claim_mode smallint NOT NULL DEFAULT 0;
ALTER TABLE {queue} ADD COLUMN conversion jsonb;
-- Whether groups have a limit of pending messages, of the queue or their own.
ALTER TABLE {queue} ADD COLUMN group_capped boolean NOT NULL DEFAULT false;
-- Whether a group may have a limit of running messages of its own.
ALTER TABLE {queue} ADD COLUMN group_limited boolean NOT NULL DEFAULT false;

-- The place of a message inside its group: its rank, or -1 where only age decides; null where groups do not matter. A
-- message of an ordered group that waits for its next attempt keeps its place, and either holds the group (true) or
-- does not (false).
ALTER TABLE {message} ADD COLUMN group_rank smallint;
ALTER TABLE {message} ADD COLUMN keeps_place boolean;
-- These indexes have only messages of queues with groups.
CREATE INDEX {#message_group} ON {message} (queue, (coalesce("group", '')), group_rank, position, id)
    WHERE group_rank IS NOT NULL AND state = 0;
CREATE INDEX {#message_held} ON {message} (queue, (coalesce("group", ''))) WHERE keeps_place;

-- Groups with messages, or with settings of their own. Only steps that hold the queue's lock of running messages write
-- to this table: claims, and steps that list or configure groups. The name '' stands for the messages without a group.
-- `later` counts delayed and waiting messages. Of the groups that are `in_line`, the one with the smallest `turn` is
-- next.
CREATE TABLE {group} (
    queue integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    turn bigint NOT NULL,
    ready bigint NOT NULL,
    running bigint NOT NULL,
    later bigint NOT NULL,
    in_line boolean NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    weight integer NOT NULL DEFAULT 1,
    max_running bigint,
    rate_count bigint,
    rate_per_ms bigint,
    max_pending bigint,
    -- When the group's rate allows the next message, and when the use of the rate need not be stored any longer.
    limited_until bigint,
    forget_at bigint,
    -- How many messages were handed out in each part of the rate's window; each part is identified by its last
    -- millisecond.
    rate_ends bigint[],
    rate_counts bigint[],
    CONSTRAINT {#group_pkey} PRIMARY KEY (queue, name)
) WITH (
    fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 200,
    autovacuum_vacuum_cost_delay = 0
);
CREATE INDEX {#group_line} ON {group} (queue, turn, name) WHERE in_line;
CREATE INDEX {#group_limited} ON {group} (queue, limited_until) WHERE limited_until IS NOT NULL;
CREATE INDEX {#group_forget} ON {group} (queue, forget_at) WHERE forget_at IS NOT NULL;
-- Changes by steps that do not hold that lock: the groups, the differences of their counts, and whether the groups join
-- the line: 0 no, 1 yes, 2 if they wait for the end of a lease. Claims fold these rows into `group`. As in `tally`, new
-- entries of the index replace the dead ones.
CREATE TABLE {group_change} (
    seq bigint NOT NULL,
    queue integer NOT NULL,
    joins smallint NOT NULL,
    names text[] NOT NULL,
    ready integer[] NOT NULL,
    running integer[] NOT NULL,
    later integer[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX {#group_change_queue} ON {group_change} (queue, (hashint8(seq) & 63));
-- The number of the turn that a group of the queue had last.
CREATE TABLE {group_turn} (
    queue integer NOT NULL CONSTRAINT {#group_turn_pkey} PRIMARY KEY,
    turn bigint NOT NULL
) WITH (fillfactor = 50);
