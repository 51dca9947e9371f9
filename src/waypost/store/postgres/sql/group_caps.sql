-- Limits of pending messages per group, what an overload drops, and the check of groups.
-- Touches: group, group_change, message, and what `end_message` touches.
-- Keeps: publishers of a queue with such a limit wait for each other, so that together they never exceed it. The table
-- of groups is only read, so claims do not wait.

-- Enforce the limits of the groups in which drafts were stored; drafts have numbers from `p_first_seq` on, and
-- `p_groups` has the group of each. Drops the oldest messages of a group if the queue's overload rule says so, and
-- refuses all drafts otherwise.
CREATE OR REPLACE FUNCTION {keep_group_caps}(
    q {queue}, p_now bigint, p_op text, p_first_seq bigint, p_others text[], p_groups text[], OUT dropped bigint,
    OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v record;
    v_over bigint;
    v_ended record;
BEGIN
    dropped := 0;
    followups := '{}';
    FOR v IN
        SELECT u.name, u.added, coalesce(g.max_pending, q.group_max_pending) AS cap,
            coalesce(g.pending, 0) + coalesce(c.before, 0) AS pending
        FROM (SELECT o.name, count(*) AS added FROM unnest(p_groups) AS o (name) WHERE o.name IS NOT NULL GROUP BY o.name) u
        LEFT JOIN LATERAL (
            SELECT t.max_pending, t.ready + t.later AS pending FROM {group} t
            WHERE t.queue = q.number AND t.name = u.name OFFSET 0) g ON true
        LEFT JOIN (
            SELECT n.name, sum(n.ready + n.later) AS before
            FROM {group_change} t CROSS JOIN LATERAL unnest(t.names, t.ready, t.later) AS n (name, ready, later)
            WHERE t.queue = q.number AND t.seq < p_first_seq AND n.name = ANY (p_groups)
            GROUP BY n.name) c ON c.name = u.name
        ORDER BY u.name
    LOOP
        v_over := least(v.pending + v.added - v.cap, v.added + {BURY_MAX});
        CONTINUE WHEN v.cap IS NULL OR v_over <= 0;
        IF q.overload = 'drop_oldest' THEN
            v_ended := {drop_from_group}(q, p_now, p_op, v.name, p_first_seq, p_others, v_over);
            dropped := dropped + v_ended.dropped;
            followups := followups || v_ended.followups;
            v_over := v_over - v_ended.dropped;
        END IF;
        IF v_over > 0 THEN
            RAISE EXCEPTION '% % %', v.pending, v.cap, v.name USING ERRCODE = 'WPFUL';
        END IF;
    END LOOP;
END $body$;

-- Drop ready messages of a group: the lowest priority first, and the oldest of a priority first; in an ordered group
-- the oldest first.
CREATE OR REPLACE FUNCTION {drop_from_group}(
    q {queue}, p_now bigint, p_op text, p_name text, p_first_seq bigint, p_others text[], p_count bigint, OUT dropped bigint,
    OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    m {message};
BEGIN
    dropped := 0;
    followups := '{}';
    FOR m IN
        SELECT c.* FROM generate_series({PRIORITY_MAX}, {RANK_ORDERED}, -1) AS ranks (rank), LATERAL (
            SELECT t.* FROM {message} t
            WHERE t.queue = q.number AND coalesce(t."group", '') = p_name AND t.group_rank = ranks.rank
                AND t.group_rank IS NOT NULL AND t.state = {READY} AND t.seq < p_first_seq
                AND (p_others IS NULL OR t.id <> ALL (p_others))
            ORDER BY t.position, t.id LIMIT p_count FOR NO KEY UPDATE SKIP LOCKED) c
        LIMIT p_count
    LOOP
        followups := followups || ({end_message}(q, m, p_now, p_op, 'dropped', 'overload')).followups;
        dropped := dropped + 1;
    END LOOP;
END $body$;

-- Make room in a full queue: drop messages one by one, each from the group that has the most ready messages at that
-- moment. A message that another step has locked is not dropped: the next group is tried.
CREATE OR REPLACE FUNCTION {drop_longest}(
    q {queue}, p_now bigint, p_op text, p_first_seq bigint, p_others text[], p_count bigint, OUT dropped bigint,
    OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v record;
    v_ended record;
    v_dropped bigint := 0;
    v_short boolean;
    v_locked text[] := '{}';
BEGIN
    dropped := 0;
    followups := '{}';
    LOOP
        v_short := false;
        FOR v IN
            WITH lengths AS (
                SELECT o.name, sum(o.ready) AS length FROM (
                    SELECT t.name, t.ready FROM {group} t WHERE t.queue = q.number
                    UNION ALL
                    -- Of this step: not what it stores, but what it replaces and drops.
                    SELECT n.name, CASE WHEN t.seq < p_first_seq THEN n.ready ELSE least(n.ready, 0) END
                    FROM {group_change} t CROSS JOIN LATERAL unnest(t.names, t.ready) AS n (name, ready)
                    WHERE t.queue = q.number) o
                WHERE o.name <> ALL (v_locked)
                GROUP BY o.name HAVING sum(o.ready) > 0 ORDER BY 2 DESC, 1 LIMIT p_count - dropped
            )
            SELECT p.name, count(*) AS count FROM (
                SELECT l.name FROM lengths l
                CROSS JOIN LATERAL generate_series(greatest(l.length - (p_count - dropped) + 1, 1), l.length) AS s (length)
                ORDER BY s.length DESC, l.name LIMIT p_count - dropped) p
            GROUP BY p.name ORDER BY p.name
        LOOP
            v_ended := {drop_from_group}(q, p_now, p_op, v.name, p_first_seq, p_others, v.count);
            followups := followups || v_ended.followups;
            v_dropped := v_dropped + v_ended.dropped;
            IF v_ended.dropped < v.count THEN
                v_locked := v_locked || v.name;
                v_short := true;
            END IF;
        END LOOP;
        dropped := v_dropped;
        EXIT WHEN NOT v_short OR dropped >= p_count;
    END LOOP;
END $body$;

-- The groups of a queue whose counts differ from their messages, and by how much. One statement, so one snapshot.
CREATE OR REPLACE FUNCTION {wrong_group_counts}(p_queue integer) RETURNS TABLE (name text, ready bigint, running bigint, later bigint)
LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH counted AS (
        SELECT o.name, sum(o.ready) AS ready, sum(o.running) AS running, sum(o.later) AS later FROM (
            SELECT t.name, t.ready, t.running, t.later FROM {group} t WHERE t.queue = p_queue
            UNION ALL
            SELECT n.name, n.ready, n.running, n.later FROM {group_change} t
            CROSS JOIN LATERAL unnest(t.names, t.ready, t.running, t.later) AS n (name, ready, running, later)
            WHERE t.queue = p_queue
            UNION ALL
            SELECT coalesce(t."group", ''), -(t.state = {READY})::int, -(t.state = {LEASED})::int,
                -(t.state IN ({DELAYED}, {WAITING}))::int
            FROM {message} t WHERE t.queue = p_queue AND t.group_rank IS NOT NULL AND t.state < {DEAD}) o
        GROUP BY o.name
    )
    SELECT c.name, -c.ready::bigint, -c.running::bigint, -c.later::bigint FROM counted c
    WHERE (c.ready, c.running, c.later) <> (0, 0, 0) ORDER BY c.name;
END $body$;

-- Find groups whose counts differ from their messages, and groups that can continue and are not in line. `fresh` is how
-- many sleepers to wake for the repaired groups.
CREATE OR REPLACE FUNCTION {check_groups}(p_queue text, p_now bigint, p_mend boolean, OUT damages json[], OUT fresh integer)
LANGUAGE plpgsql AS $body$
DECLARE
    -- All messages are counted before claims have to wait for the lock; under the lock only the wrong groups are
    -- counted again.
    v_wrong boolean := EXISTS (
        SELECT 1 FROM {queue} t CROSS JOIN LATERAL {wrong_group_counts}(t.number) WHERE t.name = p_queue);
    q {queue} := {open_groups}(p_queue, p_now);
    g {group};
    m {message};
    v record;
    v_room record;
    v_what text;
BEGIN
    damages := '{}';
    fresh := 0;
    IF q.conversion IS NOT NULL THEN
        RETURN;
    END IF;
    FOR v IN SELECT c.* FROM {wrong_group_counts}(q.number) c WHERE v_wrong
    LOOP
        v_what := format(
            'counts of group %s are off: ready %s, leased %s, delayed and waiting %s', nullif(v.name, ''), -v.ready, -v.running, -v.later);
        IF p_mend THEN
            PERFORM {update_groups}(q, ARRAY[v.name], ARRAY[{JOINS}::smallint], ARRAY[v.ready], ARRAY[v.running], ARRAY[v.later]);
            m."group" := nullif(v.name, '');
            PERFORM {write_event}(q, p_now, NULL, 'configured', m, 'mended counters: ' || v_what);
            fresh := fresh + 1;
        END IF;
        damages := damages || json_build_array('counters', nullif(v.name, ''), v_what, CASE WHEN p_mend THEN 'counted anew' END);
    END LOOP;
    FOR g IN
        SELECT * FROM {group} t WHERE t.queue = q.number AND t.ready > 0 AND NOT t.in_line AND t.limited_until IS NULL ORDER BY t.name
    LOOP
        v_room := {group_room}(q, g, p_now);
        CONTINUE WHEN v_room.room <= 0;
        IF p_mend THEN
            PERFORM {update_groups}(q, ARRAY[g.name], ARRAY[{JOINS}::smallint], NULL, NULL, NULL);
            m."group" := nullif(g.name, '');
            PERFORM {write_event}(q, p_now, NULL, 'configured', m, 'mended group: put in line');
            fresh := fresh + 1;
        END IF;
        damages := damages || json_build_array(
            'group', nullif(g.name, ''), 'it has messages to hand out and is not in line', CASE WHEN p_mend THEN 'put in line' END);
    END LOOP;
END $body$;
