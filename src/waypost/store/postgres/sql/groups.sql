-- Groups: turns between groups, order inside a group, limits for each group. The rules are in store/memory/groups.py.
-- Touches: group, group_change, group_turn, message, queue.
-- Keeps: only a step that holds the queue's lock of running messages writes `group`. Every other step that moves a
-- message with a `group_rank` adds the differences of its group's counts to `group_change`, in the same transaction,
-- whatever it knows of the queue's settings: so the counts always equal the messages with a `group_rank`, also during a
-- conversion. A claim folds the changes first. The number of running messages is increased under the lock and decreased
-- by changes, so it is never too low.

-- The place of a message inside its group: see `group_rank` in the migration 0016_groups.
CREATE OR REPLACE FUNCTION {group_rank}(p_mode smallint, p_group text, p_rank smallint) RETURNS smallint
LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN p_mode = 0 THEN NULL WHEN p_mode = {MODE_ORDERED} AND p_group IS NOT NULL THEN {RANK_ORDERED} ELSE p_rank END::smallint
$body$;

-- Add differences to the counts of the groups of these messages. Returns the number of groups.
CREATE OR REPLACE FUNCTION {change_groups}(
    p_queue integer, p_groups text[], p_joins smallint, p_ready integer, p_running integer, p_later integer
) RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_count bigint;
BEGIN
    INSERT INTO {group_change} (seq, queue, joins, names, ready, running, later)
    SELECT nextval('{sequence}'), p_queue, p_joins, array_agg(c.name), array_agg(c.count * p_ready),
        array_agg(c.count * p_running), array_agg(c.count * p_later)
    FROM (
        SELECT coalesce(u.name, '') AS name, count(*)::int AS count FROM unnest(p_groups) AS u (name) GROUP BY 1) c
    HAVING count(*) > 0
    RETURNING cardinality(names) INTO v_count;
    RETURN v_count;
END $body$;

-- Count one message that moved from one state to another; null means outside of the queue. `p_held`: the message held
-- its group.
CREATE OR REPLACE FUNCTION {change_group}(
    p_queue integer, p_group text, p_from smallint, p_to smallint, p_held boolean DEFAULT false
) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    INSERT INTO {group_change} (seq, queue, joins, names, ready, running, later)
    VALUES (
        nextval('{sequence}'), p_queue,
        CASE WHEN p_to = {READY} OR p_held THEN {JOINS} WHEN p_from = {LEASED} THEN {JOINS_IF_LIMITED} ELSE 0 END,
        ARRAY[coalesce(p_group, '')],
        ARRAY[coalesce((p_to = {READY})::int, 0) - coalesce((p_from = {READY})::int, 0)],
        ARRAY[coalesce((p_to = {LEASED})::int, 0) - coalesce((p_from = {LEASED})::int, 0)],
        ARRAY[coalesce((p_to IN ({DELAYED}, {WAITING}))::int, 0) - coalesce((p_from IN ({DELAYED}, {WAITING}))::int, 0)]);
END $body$;

-- Fold up to `p_rows` changes into the table of groups. Returns whether there are more.
CREATE OR REPLACE FUNCTION {fold_groups}(q {queue}, p_now bigint, p_rows integer) RETURNS boolean LANGUAGE plpgsql AS $body$
DECLARE
    v_names text[];
    v_ready bigint[];
    v_running bigint[];
    v_later bigint[];
    v_joins smallint[];
    v_count bigint;
BEGIN
    WITH chosen AS (
        SELECT c.ctid AS place FROM {group_change} c WHERE c.queue = q.number LIMIT p_rows
    ), gone AS MATERIALIZED (
        DELETE FROM {group_change} t USING chosen c WHERE t.ctid = c.place
        RETURNING t.joins, t.names, t.ready, t.running, t.later
    ), sums AS MATERIALIZED (
        SELECT u.name, sum(u.ready)::bigint AS ready, sum(u.running)::bigint AS running, sum(u.later)::bigint AS later,
            CASE WHEN bool_or(g.joins = {JOINS}) THEN {JOINS} ELSE max(g.joins) END AS joins
        FROM gone g
        CROSS JOIN LATERAL unnest(g.names, g.ready, g.running, g.later) AS u (name, ready, running, later)
        GROUP BY u.name
    )
    SELECT array_agg(s.name), array_agg(s.ready), array_agg(s.running), array_agg(s.later), array_agg(s.joins),
        (SELECT count(*) FROM gone)
    INTO v_names, v_ready, v_running, v_later, v_joins, v_count FROM sums s;
    IF v_names IS NULL THEN
        RETURN false;
    END IF;
    PERFORM {update_groups}(q, v_names, v_joins, v_ready, v_running, v_later);
    RETURN v_count >= p_rows;
END $body$;

-- Change the counts of groups, and put groups into line that may be able to hand out a message: whether they can is
-- checked when they have their turn. A group without messages and settings is deleted, unless it is in line or the use
-- of its rate must still be stored.
CREATE OR REPLACE FUNCTION {update_groups}(
    q {queue}, p_names text[], p_joins smallint[], p_ready bigint[], p_running bigint[], p_later bigint[]
) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_turn bigint := coalesce((SELECT t.turn FROM {group_turn} t WHERE t.queue = q.number), 0);
BEGIN
    -- Find each group by its name, and update it by its ctid: the planner cannot reverse such a join.
    WITH changed AS MATERIALIZED (
        SELECT g.place, u.name, coalesce(g.ready, 0) + coalesce(u.ready, 0) AS ready,
            coalesce(g.running, 0) + coalesce(u.running, 0) AS running, coalesce(g.later, 0) + coalesce(u.later, 0) AS later,
            coalesce(g.turn, 0) AS turn, coalesce(g.weight, 1) AS weight, coalesce(g.in_line, false) AS was,
            coalesce(g.in_line OR u.joins = {JOINS} OR u.joins = {JOINS_IF_LIMITED} AND u.name <> '' AND (
                q.claim_mode = {MODE_ORDERED} OR coalesce(g.max_running, q.group_max_running) IS NOT NULL), false) AS in_line,
            coalesce(
                g.paused OR g.weight <> 1 OR g.rate_ends IS NOT NULL
                OR coalesce(g.max_running, g.rate_count, g.max_pending) IS NOT NULL, false) AS kept
        FROM unnest(p_names, p_joins, p_ready, p_running, p_later) AS u (name, joins, ready, running, later)
        LEFT JOIN LATERAL (
            SELECT t.ctid AS place, t.* FROM {group} t WHERE t.queue = q.number AND t.name = u.name OFFSET 0) g ON true
    ), judged AS MATERIALIZED (
        SELECT c.*, CASE WHEN c.in_line AND NOT c.was THEN v_turn + {GROUP_STRIDE} / c.weight ELSE c.turn END AS place_in_line,
            NOT c.kept AND NOT c.in_line AND c.ready = 0 AND c.running = 0 AND c.later = 0 AS empty
        FROM changed c
    ), gone AS (
        DELETE FROM {group} t USING judged j WHERE t.ctid = j.place AND j.empty
    ), known AS (
        UPDATE {group} t SET turn = j.place_in_line, ready = j.ready, running = j.running, later = j.later, in_line = j.in_line
        FROM judged j WHERE t.ctid = j.place AND NOT j.empty
    )
    INSERT INTO {group} (queue, name, turn, ready, running, later, in_line)
    SELECT q.number, j.name, j.place_in_line, j.ready, j.running, j.later, j.in_line FROM judged j
    WHERE j.place IS NULL AND NOT j.empty;
END $body$;

-- The end of the part of a rate's window that contains a moment.
CREATE OR REPLACE FUNCTION {rate_part_end}(p_now bigint, p_per_ms bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT p_now - p_now % ((p_per_ms + {GROUP_RATE_PARTS} - 1) / {GROUP_RATE_PARTS}) + (p_per_ms + {GROUP_RATE_PARTS} - 1) / {GROUP_RATE_PARTS} - 1
$body$;

-- How many messages a group's rate still allows, when it allows the next one if none, and the use of the rate to store.
CREATE OR REPLACE FUNCTION {rate_room}(
    p_ends bigint[], p_counts bigint[], p_count bigint, p_per_ms bigint, p_now bigint, OUT room bigint,
    OUT until_ms bigint, OUT ends bigint[], OUT counts bigint[]
) LANGUAGE plpgsql IMMUTABLE AS $body$
DECLARE
    v_end bigint := {rate_part_end}(p_now, p_per_ms);
    v_used bigint;
BEGIN
    -- Parts in the future mean that the clock was set back. The whole window then counts from now on.
    SELECT array_agg(o.at ORDER BY o.at), array_agg(o.count ORDER BY o.at), coalesce(sum(o.count), 0)
    INTO ends, counts, v_used FROM (
        SELECT CASE WHEN b.back THEN v_end ELSE u.at END AS at, sum(u.count)::bigint AS count
        FROM unnest(p_ends, p_counts) AS u (at, count)
        CROSS JOIN (SELECT bool_or(e.at > v_end) AS back FROM unnest(p_ends) AS e (at)) b
        WHERE u.at + p_per_ms > p_now GROUP BY 1) o;
    room := p_count - v_used;
    FOR i IN 1 .. coalesce(cardinality(ends), 0) LOOP
        EXIT WHEN v_used < p_count;
        v_used := v_used - counts[i];
        until_ms := ends[i] + p_per_ms;
    END LOOP;
END $body$;

-- When the use of a group's rate need not be stored any longer; null if nothing is stored.
CREATE OR REPLACE FUNCTION {forget_rate_at}(p_ends bigint[], p_per_ms bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT p_ends[cardinality(p_ends)] + coalesce(p_per_ms, 0)
$body$;

-- Count handed-out messages in the rates of groups, and store when groups that leave the line because of their rate may
-- continue.
CREATE OR REPLACE FUNCTION {spend_rates}(q {queue}, p_now bigint, p_names text[], p_counts bigint[]) RETURNS void
LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {group} t SET rate_ends = n.ends, rate_counts = n.counts, in_line = t.in_line AND n.room > 0,
        limited_until = CASE WHEN n.room <= 0 AND t.ready > 0
            AND coalesce(t.running < coalesce(t.max_running, q.group_max_running), true) THEN n.until_ms END,
        forget_at = CASE WHEN t.ready = 0 THEN {forget_rate_at}(n.ends, o.per_ms) ELSE t.forget_at END
    FROM unnest(p_names, p_counts) AS u (name, count)
    CROSS JOIN LATERAL (
        SELECT g.ctid AS place, coalesce(g.rate_count, q.group_rate_count) AS count, coalesce(g.rate_per_ms, q.group_rate_per_ms) AS per_ms,
            g.rate_ends, g.rate_counts
        FROM {group} g
        WHERE g.queue = q.number AND g.name = u.name AND g.name <> '' AND coalesce(g.rate_count, q.group_rate_count) IS NOT NULL
        OFFSET 0) o
    CROSS JOIN LATERAL {rate_room}(
        o.rate_ends || {rate_part_end}(p_now, o.per_ms), o.rate_counts || u.count, o.count, o.per_ms, p_now) n
    WHERE t.ctid = o.place;
END $body$;

-- Put groups into line whose rate allows the next message by now, or whose time is in the future only because the clock
-- was set back; delete the stored use of rates that is no longer needed.
CREATE OR REPLACE FUNCTION {end_limits}(q {queue}, p_now bigint) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_names text[];
    v_joins smallint[];
BEGIN
    IF NOT EXISTS (SELECT 1 FROM {group} t WHERE t.queue = q.number AND t.limited_until IS NOT NULL) AND NOT EXISTS (
        SELECT 1 FROM {group} t WHERE t.queue = q.number AND t.forget_at IS NOT NULL)
    THEN
        RETURN;
    END IF;
    SELECT array_agg(o.name), array_agg(CASE WHEN o.ready > 0 THEN {JOINS} ELSE 0 END) INTO v_names, v_joins FROM (
        (SELECT t.name, t.ready FROM {group} t
        WHERE t.queue = q.number AND t.limited_until IS NOT NULL AND t.limited_until <= p_now
        ORDER BY t.limited_until LIMIT {GROUPS_SKIPPED_MAX})
        UNION
        (SELECT t.name, t.ready FROM {group} t
        WHERE t.queue = q.number AND t.forget_at IS NOT NULL AND t.forget_at <= p_now
        ORDER BY t.forget_at LIMIT {GROUPS_SKIPPED_MAX})
        UNION
        -- Only some of the last ones: every claim reads this.
        (SELECT l.name, l.ready FROM (
            SELECT t.* FROM {group} t WHERE t.queue = q.number AND t.limited_until IS NOT NULL AND t.limited_until > p_now
            ORDER BY t.limited_until DESC LIMIT 64) l
        WHERE l.limited_until > coalesce(
            {rate_part_end}(p_now, coalesce(l.rate_per_ms, q.group_rate_per_ms)) + coalesce(l.rate_per_ms, q.group_rate_per_ms), 0))) o;
    IF v_names IS NULL THEN
        RETURN;
    END IF;
    UPDATE {group} t SET limited_until = NULL, rate_ends = n.ends, rate_counts = n.counts,
        forget_at = {forget_rate_at}(n.ends, coalesce(o.rate_per_ms, q.group_rate_per_ms))
    FROM unnest(v_names) AS u (name)
    CROSS JOIN LATERAL (SELECT g.ctid AS place, g.* FROM {group} g WHERE g.queue = q.number AND g.name = u.name OFFSET 0) o
    LEFT JOIN LATERAL {rate_room}(
        o.rate_ends, o.rate_counts, coalesce(o.rate_count, q.group_rate_count),
        coalesce(o.rate_per_ms, q.group_rate_per_ms), p_now) n ON coalesce(o.rate_per_ms, q.group_rate_per_ms) IS NOT NULL
    WHERE t.ctid = o.place;
    PERFORM {update_groups}(q, v_names, v_joins, NULL, NULL, NULL);
END $body$;

-- The time until the rate of a group with messages allows the next one; null if no group waits for its rate.
CREATE OR REPLACE FUNCTION {next_group_rate}(p_queue integer, p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $body$
BEGIN
    RETURN (
        SELECT greatest(t.limited_until - p_now, 0) FROM {group} t
        WHERE t.queue = p_queue AND t.limited_until IS NOT NULL AND t.ready > 0 ORDER BY t.limited_until LIMIT 1);
END $body$;

-- How many messages a group may hand out now, and, if its rate allows none, when it allows the next one.
CREATE OR REPLACE FUNCTION {group_room}(q {queue}, g {group}, p_now bigint, OUT room bigint, OUT until_ms bigint, OUT limited_by text)
LANGUAGE plpgsql AS $body$
DECLARE
    r record;
BEGIN
    room := g.ready;
    IF g.name <> '' THEN
        IF g.running >= coalesce(g.max_running, q.group_max_running) THEN
            limited_by := 'max_running';
        ELSIF coalesce(g.rate_count, q.group_rate_count) IS NOT NULL AND g.rate_ends IS NOT NULL THEN
            r := {rate_room}(
                g.rate_ends, g.rate_counts, coalesce(g.rate_count, q.group_rate_count),
                coalesce(g.rate_per_ms, q.group_rate_per_ms), p_now);
            room := least(room, r.room);
            until_ms := r.until_ms;
            limited_by := CASE WHEN r.room <= 0 THEN 'rate' END;
        ELSIF coalesce(g.rate_count, q.group_rate_count) IS NOT NULL THEN
            room := least(room, coalesce(g.rate_count, q.group_rate_count));
        END IF;
        room := least(
            room, coalesce(g.max_running, q.group_max_running) - g.running,
            CASE WHEN q.claim_mode = {MODE_ORDERED} THEN 1 - g.running END);
        IF room > 0 AND q.claim_mode = {MODE_ORDERED} AND q.on_failure = 'hold' AND EXISTS (
            SELECT 1 FROM {message} m WHERE m.queue = q.number AND coalesce(m."group", '') = g.name AND m.keeps_place)
        THEN
            room := 0;
        END IF;
    END IF;
    IF g.paused THEN
        room := 0;
    END IF;
END $body$;

-- Remove groups from the line that had their turn but cannot hand out a message.
CREATE OR REPLACE FUNCTION {leave_line}(q {queue}, p_now bigint, p_names text[]) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {group} t SET in_line = false, limited_until = CASE WHEN r.limited_by = 'rate' AND t.ready > 0 THEN r.until_ms END,
        forget_at = CASE WHEN t.ready = 0 THEN {forget_rate_at}(t.rate_ends, coalesce(t.rate_per_ms, q.group_rate_per_ms))
            ELSE t.forget_at END
    FROM unnest(p_names) AS u (name)
    CROSS JOIN LATERAL (
        SELECT g.ctid AS place, g AS whole FROM {group} g WHERE g.queue = q.number AND g.name = u.name OFFSET 0) o
    CROSS JOIN LATERAL {group_room}(q, o.whole, p_now) r
    WHERE t.ctid = o.place;
    PERFORM {update_groups}(q, p_names, NULL, NULL, NULL, NULL);
END $body$;

-- The same for the most common case, where each of the first groups hands out one message: no limit applies to any of
-- them, and no group has its next turn before the last of them has had its turn. Returns nulls in other cases;
-- `choose_messages` then chooses again, also among the messages locked here.
CREATE OR REPLACE FUNCTION {choose_one_each}(
    q {queue}, p_now bigint, p_room bigint, p_left bigint, p_held boolean, OUT places tid[], OUT size bigint, OUT groups tid[], OUT turn bigint
) LANGUAGE plpgsql AS $body$
DECLARE
    v_names text[];
    v_count bigint;
    v_plain boolean;
BEGIN
    SELECT array_agg(o.place), array_agg(o.name), count(*), max(o.turn),
        bool_and(o.plain) AND (q.claim_mode = {MODE_ORDERED} OR count(*) = p_room AND max(o.turn) - min(o.turn) < {GROUP_STRIDE})
    INTO groups, v_names, v_count, turn, v_plain FROM (
        SELECT t.ctid AS place, t.name, t.turn, t.ready > 0 AND NOT t.paused AND t.weight = 1
            AND t.max_running IS NULL AND t.rate_count IS NULL
            AND (q.claim_mode < {MODE_ORDERED} OR t.running = 0 AND t.name <> '') AS plain
        FROM {group} t WHERE t.queue = q.number AND t.in_line ORDER BY t.turn, t.name LIMIT p_room) o;
    IF v_plain IS NOT TRUE OR p_held THEN
        RETURN;
    END IF;
    IF q.claim_mode < {MODE_ORDERED} THEN
        SELECT array_agg(c.place), sum(c.size), bool_and(c.good) INTO places, size, v_plain FROM unnest(v_names) AS u (name)
        CROSS JOIN LATERAL (
            SELECT m.ctid AS place, length(m.data) AS size, (q.max_deliveries IS NULL OR m.deliveries < q.max_deliveries)
                AND (m.expires_ms IS NULL OR m.expires_ms > p_now) AS good
            FROM {message} m
            WHERE m.queue = q.number AND coalesce(m."group", '') = u.name AND m.group_rank IS NOT NULL AND m.state = {READY}
            ORDER BY m.group_rank, m.position, m.id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) c;
    ELSE
        -- A group whose first message is locked by another step is skipped. No message is chosen if a group has been
        -- held in the meantime.
        WITH heads AS MATERIALIZED (
            SELECT f.place FROM unnest(v_names) AS u (name)
            CROSS JOIN LATERAL (
                SELECT m.ctid AS place FROM {message} m
                WHERE m.queue = q.number AND coalesce(m."group", '') = u.name AND m.group_rank = {RANK_ORDERED}
                    AND m.group_rank IS NOT NULL AND m.state = {READY}
                ORDER BY m.position, m.id LIMIT 1) f
            WHERE q.on_failure = 'pass' OR (
                SELECT true FROM {message} o WHERE o.queue = q.number AND o.keeps_place LIMIT 1) IS NULL
        )
        SELECT array_agg(c.place), sum(c.size), bool_and(c.good) INTO places, size, v_plain FROM (
            SELECT m.ctid AS place, length(m.data) AS size, (q.max_deliveries IS NULL OR m.deliveries < q.max_deliveries)
                AND (m.expires_ms IS NULL OR m.expires_ms > p_now) AS good
            FROM heads h JOIN {message} m ON m.ctid = h.place FOR NO KEY UPDATE OF m SKIP LOCKED) c;
    END IF;
    IF v_plain IS NOT TRUE OR cardinality(places) < v_count OR size > p_left THEN
        places := NULL;
    END IF;
END $body$;

-- Choose messages for a claim by the turns of their groups, lock them and count them as running. `p_left` is the number
-- of bytes that the claim may still return, `p_leased` the number of messages that it has. `exhausted` are messages
-- over their limit of deliveries whose turn it is: the caller buries them, then chooses again. `again`: the caller may
-- choose again. `missed` are groups whose messages are locked by other steps: the caller passes them as `p_missed`, and
-- the next choice excludes them. `skipped` is the number of groups that were removed from the line. At most `p_groups`
-- groups are read, or `p_room` if that is more.
CREATE OR REPLACE FUNCTION {choose_messages}(
    q {queue}, p_now bigint, p_room bigint, p_leased bigint, p_left bigint, p_missed text[], p_groups bigint, OUT places tid[], OUT size bigint,
    OUT more boolean, OUT exhausted text[], OUT again boolean, OUT limited boolean, OUT missed text[],
    OUT skipped bigint
) LANGUAGE plpgsql AS $body$
DECLARE
    v_places tid[];
    v_names text[];
    v_counts bigint[];
    v_stale text[];
    v_turn bigint;
    -- Usually no message of the whole queue holds its group. A message that begins to hold one later is found below.
    v_held boolean := q.claim_mode = {MODE_ORDERED} AND q.on_failure <> 'pass' AND EXISTS (
        SELECT 1 FROM {message} m WHERE m.queue = q.number AND m.keeps_place);
    v_short record;
BEGIN
    IF q.group_max_running IS NULL AND q.group_rate_count IS NULL AND q.conversion IS NULL AND q.lease_ms IS NOT NULL
        AND p_missed IS NULL
    THEN
        v_short := {choose_one_each}(q, p_now, p_room, p_left, v_held);
        IF v_short.places IS NOT NULL THEN
            places := v_short.places;
            size := v_short.size;
            more := false;
            limited := false;
            skipped := 0;
            -- The claim now has as many messages as it may have, or the line of an ordered queue is exhausted.
            again := false;
            UPDATE {group} t SET turn = t.turn + {GROUP_STRIDE}, ready = t.ready - 1, running = t.running + 1,
                in_line = t.ready > 1 AND q.claim_mode < {MODE_ORDERED}
            FROM unnest(v_short.groups) AS u (place) WHERE t.ctid = u.place;
            INSERT INTO {group_turn} AS t (queue, turn) VALUES (q.number, v_short.turn)
            ON CONFLICT (queue) DO UPDATE SET turn = excluded.turn;
            RETURN;
        END IF;
    END IF;
    -- A group without limits hands out all its ready messages. This is written inline, not as a function, since every
    -- claim runs it.
    WITH first AS MATERIALIZED (
        SELECT t.place, (t.whole).name, (t.whole).turn, {GROUP_STRIDE} / (t.whole).weight AS stride,
            coalesce((t.whole).max_running, (t.whole).rate_count) IS NOT NULL AS limited,
            CASE WHEN NOT (t.whole).paused AND q.claim_mode < {MODE_ORDERED} AND q.group_max_running IS NULL
                AND q.group_rate_count IS NULL AND coalesce((t.whole).max_running, (t.whole).rate_count) IS NULL
                THEN (t.whole).ready
            WHEN NOT (t.whole).paused AND q.claim_mode = {MODE_ORDERED} AND q.group_max_running IS NULL
                AND q.group_rate_count IS NULL AND coalesce((t.whole).max_running, (t.whole).rate_count) IS NULL
                AND (t.whole).name <> '' AND ((t.whole).running > 0 OR NOT v_held OR (
                    SELECT true FROM {message} m
                    WHERE m.queue = q.number AND coalesce(m."group", '') = (t.whole).name AND m.keeps_place LIMIT 1) IS NULL)
                THEN least((t.whole).ready, 1 - (t.whole).running)
            ELSE (SELECT r.room FROM {group_room}(q, t.whole, p_now) r) END AS free
        FROM (
            SELECT o.ctid AS place, o AS whole FROM {group} o
            WHERE o.queue = q.number AND o.in_line AND (p_missed IS NULL OR o.name <> ALL (p_missed))
            ORDER BY o.turn, o.name LIMIT greatest(p_room, p_groups)) t
    ), bound AS MATERIALIZED (
        -- No group gets a further message before a group that was not read, which may have the same turn and a smaller
        -- name.
        SELECT CASE WHEN count(*) >= greatest(p_room, p_groups) THEN max(f.turn) - 1
            ELSE max(f.turn) + ceil(p_room / sum(1.0 / f.stride))::bigint END AS turn
        FROM first f
    ), picks AS MATERIALIZED (
        SELECT f.place, f.name, f.turn, f.stride, f.turn + i.n * f.stride AS at FROM first f CROSS JOIN bound b
        CROSS JOIN LATERAL generate_series(0, least(f.free - 1, (b.turn - f.turn) / f.stride)) AS i (n)
        ORDER BY f.turn + i.n * f.stride, f.name LIMIT p_room
    ), wanted AS MATERIALIZED (
        SELECT p.place, p.name, p.turn, p.stride, count(*) AS count FROM picks p GROUP BY p.place, p.name, p.turn, p.stride
    ), found AS MATERIALIZED (
        SELECT w.place AS group_place, w.name, c.place, c.id, c.size, c.good, c.n, w.turn + w.stride * count(*) FILTER (WHERE c.good) OVER (
            PARTITION BY w.name ORDER BY c.n ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS at
        FROM wanted w CROSS JOIN LATERAL (
            SELECT l.*, row_number() OVER () AS n FROM (
                SELECT m.ctid AS place, m.id, length(m.data) AS size,
                    q.max_deliveries IS NULL OR m.deliveries < q.max_deliveries AS good
                FROM {message} m
                WHERE (q.claim_mode < {MODE_ORDERED} OR w.name = '') AND m.queue = q.number
                    AND coalesce(m."group", '') = w.name AND m.group_rank IS NOT NULL AND m.state = {READY}
                    AND (m.expires_ms IS NULL OR m.expires_ms > p_now)
                ORDER BY m.group_rank, m.position, m.id LIMIT w.count FOR NO KEY UPDATE SKIP LOCKED) l
            UNION ALL
            -- In order: if another step has locked the first message of a group, the group is skipped. During a
            -- conversion some messages may be stored by the old settings. Whether a message holds the group is checked
            -- again, since `v_held` may be of a later moment than the rows read here.
            SELECT l.*, 1 FROM (
                SELECT o.* FROM generate_series({RANK_ORDERED}, CASE WHEN q.conversion IS NULL THEN {RANK_ORDERED} ELSE {PRIORITY_MAX} END) AS ranks (rank)
                CROSS JOIN LATERAL (
                    SELECT m.ctid AS place, m.id, m.position FROM {message} m
                    WHERE q.claim_mode = {MODE_ORDERED} AND w.name <> '' AND m.queue = q.number
                        AND coalesce(m."group", '') = w.name AND m.group_rank = ranks.rank AND m.group_rank IS NOT NULL AND m.state = {READY}
                        AND (m.expires_ms IS NULL OR m.expires_ms > p_now)
                    ORDER BY m.position, m.id LIMIT 1) o
                WHERE q.claim_mode < {MODE_ORDERED} OR q.on_failure = 'pass' OR (
                    SELECT true FROM {message} m
                    WHERE m.queue = q.number AND coalesce(m."group", '') = w.name AND m.keeps_place LIMIT 1) IS NULL
                ORDER BY o.position, o.id LIMIT 1) h
            CROSS JOIN LATERAL (
                SELECT m.ctid AS place, m.id, length(m.data) AS size,
                    q.max_deliveries IS NULL OR m.deliveries < q.max_deliveries AS good
                FROM {message} m WHERE m.ctid = h.place LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) l) c
    ), judged AS MATERIALIZED (
        SELECT f.*, sum(f.size) OVER w > p_left AND p_leased + count(*) OVER w > 1 AS over, count(*) FILTER (WHERE NOT f.good) OVER w AS bad
        FROM found f WINDOW w AS (ORDER BY f.at, f.name, f.n ROWS UNBOUNDED PRECEDING)
    ), taken AS MATERIALIZED (
        SELECT j.* FROM judged j WHERE j.bad = 0 AND NOT j.over ORDER BY j.at, j.name, j.n
    ), groups AS (
        SELECT t.group_place, t.name, count(*) AS count FROM taken t GROUP BY t.group_place, t.name
    )
    SELECT (SELECT array_agg(t.place) FROM taken t), coalesce((SELECT sum(t.size) FROM taken t), 0),
        (SELECT coalesce(bool_or(j.bad = 0 AND j.over), false) FROM judged j),
        (SELECT array_agg(j.id ORDER BY j.n) FROM judged j
        WHERE NOT j.good AND j.name = (SELECT o.name FROM judged o WHERE o.bad = 1 AND NOT o.good)),
        (SELECT array_agg(f.name) FROM first f WHERE coalesce(f.free, 0) <= 0 AND (
            (SELECT count(*) FROM picks) < p_room
            OR (f.turn, f.name) < (SELECT p.at, p.name FROM picks p ORDER BY p.at DESC, p.name DESC LIMIT 1))),
        (SELECT max(t.at) FROM taken t), (SELECT coalesce(bool_or(f.limited), false) FROM first f),
        CASE WHEN (SELECT count(*) FROM wanted) > (SELECT count(*) FROM found f WHERE f.n = 1) THEN (
            SELECT array_agg(w.name) FROM wanted w WHERE (SELECT true FROM found f WHERE f.name = w.name LIMIT 1) IS NULL) END,
        g.places, g.names, g.counts
    INTO places, size, more, exhausted, v_stale, v_turn, limited, missed, v_places, v_names, v_counts
    FROM (SELECT array_agg(o.group_place) AS places, array_agg(o.name) AS names, array_agg(o.count) AS counts FROM groups o) g;
    IF more THEN
        -- The claim ends at the first message that does not fit: the groups after it keep their place in line.
        v_stale := NULL;
    END IF;
    IF missed IS NOT NULL THEN
        -- A group without any ready message has a wrong count.
        SELECT v_stale || array_agg(u.name) FILTER (WHERE NOT u.found), array_agg(u.name) FILTER (WHERE u.found)
        INTO v_stale, missed FROM (
            SELECT o.name, (
                SELECT true FROM {message} m
                WHERE m.queue = q.number AND coalesce(m."group", '') = o.name AND m.group_rank IS NOT NULL AND m.state = {READY}
                LIMIT 1) IS NOT NULL AS found
            FROM unnest(missed) AS o (name)) u;
    END IF;
    skipped := coalesce(cardinality(v_stale), 0);
    again := v_stale IS NOT NULL OR places IS NOT NULL OR missed IS NOT NULL;
    IF v_names IS NULL THEN
        IF v_stale IS NOT NULL THEN
            PERFORM {leave_line}(q, p_now, v_stale);
        END IF;
        RETURN;
    END IF;
    UPDATE {group} t SET turn = t.turn + u.count * ({GROUP_STRIDE} / t.weight), ready = t.ready - u.count,
        running = CASE WHEN q.lease_ms IS NULL THEN t.running ELSE t.running + u.count END,
        in_line = t.ready > u.count AND (t.name = '' OR q.claim_mode < {MODE_ORDERED}
            AND coalesce(t.running + u.count < coalesce(t.max_running, q.group_max_running), true))
    FROM unnest(v_places, v_counts) AS u (place, count) WHERE t.ctid = u.place;
    IF v_stale IS NOT NULL THEN
        PERFORM {leave_line}(q, p_now, v_stale);
    END IF;
    INSERT INTO {group_turn} AS t (queue, turn) VALUES (q.number, v_turn)
    ON CONFLICT (queue) DO UPDATE SET turn = excluded.turn;
    IF q.group_rate_count IS NOT NULL OR limited THEN
        PERFORM {spend_rates}(q, p_now, v_names, v_counts);
    END IF;
    IF q.lease_ms IS NULL THEN
        -- None of these messages remains whose end would update the group later.
        PERFORM {update_groups}(q, v_names, NULL, NULL, NULL, NULL);
    END IF;
END $body$;

-- Count messages that a claim leased or removed without choosing them by group: during a conversion, or by a claim that
-- began before it.
CREATE OR REPLACE FUNCTION {change_claimed}(q {queue}, p_places tid[]) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_groups text[];
BEGIN
    SELECT array_agg(coalesce(m."group", '')) INTO v_groups
    FROM unnest(p_places) AS u (place) JOIN {message} m ON m.ctid = u.place WHERE m.group_rank IS NOT NULL;
    PERFORM {change_groups}(q.number, v_groups, 0::smallint, -1, CASE WHEN q.lease_ms IS NULL THEN 0 ELSE 1 END, 0);
    IF (SELECT t.claim_mode FROM {queue} t WHERE t.number = q.number) > 0 THEN
        RAISE EXCEPTION 'the queue was configured meanwhile' USING ERRCODE = 'WPAGN';
    END IF;
END $body$;

-- How many sleepers to wake for these groups after a lease or a hold in them has ended: one for each group that can
-- continue, and one more if only their rate holds some groups back and no claim has returned yet until when.
CREATE OR REPLACE FUNCTION {count_freed}(q {queue}, p_now bigint, p_groups text[]) RETURNS bigint LANGUAGE plpgsql AS $body$
BEGIN
    IF q.group_mode < {MODE_ORDERED} AND q.group_max_running IS NULL AND NOT q.group_limited THEN
        RETURN 0;
    END IF;
    IF coalesce(current_setting('waypost.in_transaction', true), '') <> 'on' AND (
        SELECT bool_or(NOT s.awake OR coalesce(s.woken_ms > p_now - 250, false)) FROM {sleeper} s
        WHERE s.queue = q.number AND s.until_ms > p_now AND s.name NOT LIKE '~%') IS FALSE
    THEN
        -- As on every busy queue: there is no sleeper, as `wake` would find. If there is no row at all, the list of
        -- sleepers is lost, and `wake` notifies all workers.
        RETURN 0;
    END IF;
    -- Scalar subqueries, so that the planner turns none of them into a join.
    RETURN (
        SELECT count(*) FILTER (WHERE NOT f.waits) + coalesce(bool_or(f.waits AND f.limited_until IS NULL), false)::int FROM (
            SELECT g.limited_until, CASE WHEN g.rate_ends IS NULL OR coalesce(g.rate_count, q.group_rate_count) IS NULL THEN false
                ELSE (
                    SELECT r.room <= 0 FROM {rate_room}(
                        g.rate_ends, g.rate_counts, coalesce(g.rate_count, q.group_rate_count),
                        coalesce(g.rate_per_ms, q.group_rate_per_ms), p_now) r) END AS waits
            FROM (SELECT DISTINCT o.name FROM unnest(p_groups) AS o (name) WHERE o.name IS NOT NULL) u
            LEFT JOIN LATERAL (SELECT * FROM {group} t WHERE t.queue = q.number AND t.name = u.name OFFSET 0) g ON true
            WHERE (q.group_mode = {MODE_ORDERED} OR coalesce(g.max_running, q.group_max_running) IS NOT NULL)
                AND NOT coalesce(g.paused, false)
                AND (
                    SELECT true FROM {message} m
                    WHERE m.queue = q.number AND coalesce(m."group", '') = u.name AND m.group_rank IS NOT NULL AND m.state = {READY}
                    LIMIT 1) IS NOT NULL
                AND (q.group_mode < {MODE_ORDERED} OR q.on_failure = 'pass' OR (
                    SELECT true FROM {message} m WHERE m.queue = q.number AND coalesce(m."group", '') = u.name AND m.keeps_place
                    LIMIT 1) IS NULL)) f);
END $body$;
