-- Administration of groups: list, configure, skip; and the conversion of a queue whose settings of groups changed.
-- Touches: queue, message, operation, entry, sleeper, and what `groups.sql` touches.
-- Keeps: all of it is done under the lock that claims of such a queue take. A conversion proceeds in steps of bounded
-- length, one in each claim; until all messages are converted, claims choose messages as before.

-- The mode in which messages of a queue with these settings are stored.
CREATE OR REPLACE FUNCTION {mode_of}(q {queue}) RETURNS smallint LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN q."order" IS NOT NULL THEN {MODE_ORDERED}
        WHEN q.fair OR coalesce(q.group_max_running, q.group_rate_count, q.group_max_pending) IS NOT NULL THEN {MODE_FAIR}
        ELSE 0 END::smallint
$body$;

-- The conversion that a change of settings from `o` to `n` needs; null for none. `ready` and `after` are the position
-- of the conversion: first the ready messages in the order of claims, then all others by id, then the groups by name.
-- `skipped` are messages that other steps had locked: they are converted at the end of the pass. `was_ordered`: some
-- messages may still have their place in an order that ends.
CREATE OR REPLACE FUNCTION {plan_conversion}(o {queue}, n {queue}) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE
        WHEN {mode_of}(n) <> {mode_of}(o) THEN jsonb_build_object('after', '', 'group', '')
            || CASE WHEN {mode_of}(n) = {MODE_ORDERED} THEN '{"ready": [-1, 0, ""], "place": 0}'
                WHEN {mode_of}(o) = {MODE_ORDERED} OR o.conversion ? 'was_ordered' THEN '{"was_ordered": true}' ELSE '{}' END::jsonb
        WHEN {mode_of}(n) > 0 AND (n.on_failure, n.group_max_running, n.group_rate_count, n.group_rate_per_ms)
            IS DISTINCT FROM (o.on_failure, o.group_max_running, o.group_rate_count, o.group_rate_per_ms)
            THEN coalesce(o.conversion, '{}') || '{"group": ""}'
        ELSE o.conversion END
$body$;

-- Transactions that are storing messages in a queue, or have stored some and are not committed.
CREATE OR REPLACE FUNCTION {publishers}(p_queue text) RETURNS jsonb LANGUAGE plpgsql AS $body$
BEGIN
    RETURN (
        SELECT coalesce(jsonb_agg(l.virtualtransaction), '[]') FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.mode = 'ShareLock'
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            AND l.classid::bigint = {lock_key}('removal')::bigint & 4294967295
            AND l.objid::bigint = hashtext(p_queue)::bigint & 4294967295 AND l.pid IS DISTINCT FROM pg_backend_pid());
END $body$;

-- One step of a conversion. Returns the changed row of the queue. `p_limit` bounds the messages and the groups.
CREATE OR REPLACE FUNCTION {convert_queue}(q {queue}, p_limit integer) RETURNS {queue} LANGUAGE plpgsql AS $body$
DECLARE
    c jsonb := q.conversion;
    v_mode smallint := {mode_of}(q);
    v_was {queue} := q;
    v_skipped text[];
    v_passed boolean;
    v_unfolded boolean;
    v_ids text[];
    v_ranks smallint[];
    v_positions bigint[];
    v_count integer;
    v_names text[];
BEGIN
    IF c ? 'after' AND NOT c ? 'old' THEN
        -- Transactions that store messages at this moment may have read the settings from before the change.
        c := c || jsonb_build_object('old', {publishers}(q.name));
    END IF;
    IF c ? 'ready' THEN
        SELECT array_agg(o.id), array_agg(o.rank), array_agg(o.position) INTO v_ids, v_ranks, v_positions FROM (
            SELECT t.id, t.rank, t.position FROM {message} t
            WHERE t.queue = q.number AND t.state = {READY}
                AND (t.rank, t.position, t.id) > ((c -> 'ready' ->> 0)::int, (c -> 'ready' ->> 1)::bigint, c -> 'ready' ->> 2)
            ORDER BY t.rank, t.position, t.id LIMIT p_limit) o;
        -- Up to the first message that another step has locked, since the order matters.
        SELECT coalesce(min(u.n) - 1, coalesce(cardinality(v_ids), 0)) INTO v_count FROM unnest(v_ids) WITH ORDINALITY AS u (id, n)
        WHERE NOT EXISTS (
            SELECT 1 FROM (
                SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.id = u.id FOR NO KEY UPDATE SKIP LOCKED) l);
        PERFORM {convert_messages}(q, v_ids[:v_count], (c ->> 'place')::bigint);
        IF v_count > 0 THEN
            c := c || jsonb_build_object(
                'ready', jsonb_build_array(v_ranks[v_count], v_positions[v_count], v_ids[v_count]), 'place', (c ->> 'place')::bigint + v_count);
        END IF;
        IF v_count = coalesce(cardinality(v_ids), 0) AND v_count < p_limit THEN
            c := c - 'ready' - 'place';
        END IF;
    END IF;
    IF c ? 'after' AND NOT c ? 'ready' THEN
        IF c ->> 'after' = '' AND c ? 'waits' THEN
            -- Transactions with the old settings may have stored messages behind the position of the last pass: when
            -- they are committed, another pass follows.
            c := c || jsonb_build_object('old', (
                SELECT coalesce(jsonb_agg(p.name), '[]') FROM jsonb_array_elements_text({publishers}(q.name)) AS p (name)
                WHERE c -> 'old' ? p.name OR c -> 'old' ? 'configure'));
        END IF;
        IF NOT c ? 'waits' OR c ->> 'after' <> '' OR c -> 'old' = '[]' THEN
            v_skipped := ARRAY(SELECT jsonb_array_elements_text(c -> 'skipped'));
            v_passed := c ? 'passed';
            IF v_passed OR cardinality(v_skipped) >= p_limit THEN
                -- Only messages that were locked remain, or there are too many of them to continue.
                v_ids := NULL;
                v_skipped := {convert_messages}(q, v_skipped, NULL);
            ELSE
                SELECT array_agg(o.id) INTO v_ids FROM (
                    SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.id > c ->> 'after' ORDER BY t.id LIMIT p_limit) o;
                v_passed := coalesce(cardinality(v_ids), 0) < p_limit;
                v_skipped := v_skipped || {convert_messages}(q, v_ids, NULL);
            END IF;
            c := c - 'skipped';
            IF cardinality(v_skipped) > 0 THEN
                c := c || jsonb_build_object('skipped', v_skipped);
            END IF;
            IF NOT v_passed THEN
                c := c || jsonb_build_object('after', coalesce(v_ids[cardinality(v_ids)], c ->> 'after'));
            ELSIF c ? 'skipped' THEN
                c := c || '{"passed": true}';
            ELSE
                c := c - 'passed' - 'was_ordered';
                q.claim_mode := v_mode;
                IF q.group_mode <> v_mode THEN
                    -- From now on messages are stored in order, but not by transactions that read the row before this
                    -- one is committed.
                    q.group_mode := v_mode;
                    c := c || '{"old": ["configure"]}';
                END IF;
                IF c -> 'old' = '[]' THEN
                    c := c - 'after' - 'old' - 'waits';
                ELSE
                    c := c || '{"after": "", "waits": true}';
                END IF;
            END IF;
        END IF;
    END IF;
    IF v_mode > 0 AND v_was.conversion ? 'after' THEN
        -- A claim that chooses by groups must count all leased messages.
        LOOP
            v_unfolded := {fold_groups}(q, 0, {FOLDED_MAX});
            EXIT WHEN NOT v_unfolded OR q.claim_mode = 0;
        END LOOP;
    END IF;
    IF c ? 'group' AND (NOT c ? 'after' OR c ? 'waits') AND v_mode > 0 THEN
        -- All groups with ready messages join the line: whether they can hand out a message is checked when they have
        -- their turn.
        SELECT array_agg(o.name) INTO v_names FROM (
            SELECT t.name FROM {group} t WHERE t.queue = q.number AND t.name > c ->> 'group' ORDER BY t.name LIMIT p_limit) o;
        PERFORM {update_groups}(
            q, array_agg(t.name), array_agg({JOINS}::smallint), NULL, NULL, NULL)
        FROM unnest(v_names) AS u (name) JOIN {group} t ON t.queue = q.number AND t.name = u.name
        WHERE t.ready > 0 AND NOT t.in_line HAVING count(*) > 0;
        c := CASE WHEN cardinality(v_names) >= p_limit THEN c || jsonb_build_object('group', v_names[cardinality(v_names)])
            ELSE c - 'group' END;
    ELSIF v_mode = 0 AND NOT c ? 'after' THEN
        IF {clear_groups}(q.number, p_limit) THEN
            c := '{}';
        END IF;
    END IF;
    q.conversion := nullif(c, '{}');
    IF q IS DISTINCT FROM v_was THEN
        UPDATE {queue} t SET group_mode = q.group_mode, claim_mode = q.claim_mode, conversion = q.conversion WHERE t.number = q.number;
    END IF;
    RETURN q;
END $body$;

-- Remove the groups of a queue that no longer distinguishes groups. Groups that are paused or have settings of their
-- own remain, without counts. Returns whether all others are removed.
CREATE OR REPLACE FUNCTION {clear_groups}(p_queue integer, p_limit integer) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    DELETE FROM {group_change} t WHERE t.queue = p_queue;
    DELETE FROM {group} t WHERE t.ctid = ANY (ARRAY(
        SELECT o.ctid FROM {group} o
        WHERE o.queue = p_queue AND NOT o.paused AND o.weight = 1 AND coalesce(o.max_running, o.rate_count, o.max_pending) IS NULL
        LIMIT p_limit));
    IF EXISTS (
        SELECT 1 FROM {group} o
        WHERE o.queue = p_queue AND NOT o.paused AND o.weight = 1 AND coalesce(o.max_running, o.rate_count, o.max_pending) IS NULL)
    THEN
        RETURN false;
    END IF;
    -- The number of remaining groups is bounded.
    UPDATE {group} t SET turn = 0, ready = 0, running = 0, later = 0, in_line = false, limited_until = NULL, forget_at = NULL,
        rate_ends = NULL, rate_counts = NULL
    WHERE t.queue = p_queue;
    DELETE FROM {group_turn} t WHERE t.queue = p_queue;
    RETURN true;
END $body$;

-- Give messages the place inside their group that the queue's settings require. Returns the ids of messages that were
-- skipped because other steps had locked them. With `p_place` the messages are ready and get positions from that number
-- on, before all later messages, in the order of `p_ids`.
CREATE OR REPLACE FUNCTION {convert_messages}(q {queue}, p_ids text[], p_place bigint) RETURNS text[]
LANGUAGE plpgsql AS $body$
DECLARE
    v_mode smallint := {mode_of}(q);
BEGIN
    WITH wrong AS MATERIALIZED (
        SELECT t.id, t.group_rank AS was, {group_rank}(v_mode, t."group", t.rank) AS wanted
        FROM {message} t
        WHERE t.queue = q.number AND t.id = ANY (p_ids) AND t.state + 0 < {DEAD}
            AND t.group_rank IS DISTINCT FROM {group_rank}(v_mode, t."group", t.rank)
        ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED
    ), changed AS MATERIALIZED (
        UPDATE {message} m SET group_rank = w.wanted, keeps_place = CASE WHEN w.wanted = {RANK_ORDERED} THEN m.keeps_place END,
            position = CASE
                WHEN w.wanted IS DISTINCT FROM {RANK_ORDERED} THEN m.position
                WHEN m.state = {READY} AND p_place IS NOT NULL THEN p_place - {CONVERTED_OFFSET} + array_position(p_ids, m.id)
                -- It was claimed before all messages that are ready, so it returns to a place before them.
                WHEN m.state = {LEASED} THEN m.claimed_ms - {HEAD_OFFSET}
                ELSE m.position END
        FROM wrong w WHERE m.queue = q.number AND m.id = w.id AND m.state + 0 < {DEAD}
        RETURNING coalesce(m."group", '') AS name, m.state, (w.wanted IS NOT NULL)::int - (w.was IS NOT NULL)::int AS change
    )
    INSERT INTO {group_change} (seq, queue, joins, names, ready, running, later)
    SELECT nextval('{sequence}'), q.number, s.joins, array_agg(s.name), array_agg(s.ready), array_agg(s.running), array_agg(s.later)
    FROM (
        SELECT CASE WHEN c.state = {READY} AND c.change > 0 THEN {JOINS} ELSE 0 END AS joins, c.name,
            coalesce(sum(c.change) FILTER (WHERE c.state = {READY}), 0)::int AS ready,
            coalesce(sum(c.change) FILTER (WHERE c.state = {LEASED}), 0)::int AS running,
            coalesce(sum(c.change) FILTER (WHERE c.state IN ({DELAYED}, {WAITING})), 0)::int AS later
        FROM changed c WHERE c.change <> 0 GROUP BY 1, 2) s
    GROUP BY s.joins;
    RETURN ARRAY(
        SELECT t.id FROM {message} t
        WHERE t.queue = q.number AND t.id = ANY (p_ids) AND t.state + 0 < {DEAD}
            AND t.group_rank IS DISTINCT FROM {group_rank}(v_mode, t."group", t.rank)
        ORDER BY t.id);
END $body$;

-- The queue with its groups as they are now, for a step that reads or changes groups. Takes the lock of claims. Null if
-- the queue does not distinguish groups. Continues the conversion and folds changes, for a few steps.
CREATE OR REPLACE FUNCTION {open_groups}(p_queue text, p_now bigint) RETURNS {queue} LANGUAGE plpgsql AS $body$
DECLARE
    q {queue};
    v_mode smallint;
BEGIN
    SELECT * INTO q FROM {queue} t WHERE t.name = p_queue;
    IF coalesce(q.group_mode, 0) = 0 THEN
        RETURN NULL;
    END IF;
    PERFORM pg_advisory_xact_lock({lock_key}('running'), q.number);
    SELECT * INTO q FROM {queue} t WHERE t.name = p_queue;
    v_mode := q.group_mode;
    FOR i IN 1 .. 8 LOOP
        -- Messages that other transactions store in the old mode can be found only after these are committed.
        EXIT WHEN q.conversion IS NULL OR q.group_mode <> v_mode;
        q := {convert_queue}(q, 1024);
    END LOOP;
    FOR i IN 1 .. 16 LOOP
        EXIT WHEN NOT {fold_groups}(q, p_now, 256);
    END LOOP;
    RETURN q;
END $body$;

-- The groups of a queue by name, from `p_after` on, or only one group: groups that have unfinished messages, are
-- paused, or have settings of their own. At most `p_limit`: the client passes one more than a page has, to know whether
-- there are more. No index has leased messages by group: the leased message of an ordered group is returned only while
-- the queue has few leased messages.
CREATE OR REPLACE FUNCTION {groups}(p_queue text, p_clock bigint, p_after text, p_group text, p_limit bigint) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
    q {queue} := {open_groups}(p_queue, v_now);
BEGIN
    IF q.number IS NULL THEN
        RETURN NULL;
    END IF;
    RETURN (
        WITH leased AS MATERIALIZED (
            SELECT m.id, m."group" AS name FROM {message} m
            WHERE m.queue = q.number AND m.state = {LEASED} AND q."order" IS NOT NULL LIMIT {CHUNK_MESSAGES_MAX} + 1
        ), busy AS MATERIALIZED (
            SELECT l.name, min(l.id) AS id FROM leased l
            WHERE l.name IS NOT NULL AND (SELECT count(*) FROM leased) <= {CHUNK_MESSAGES_MAX} GROUP BY l.name
        )
        SELECT coalesce(json_agg(json_build_array(
            nullif(g.name, ''), g.ready, g.later, g.running,
            v_now - (
                SELECT m.ready_ms FROM {message} m
                WHERE m.queue = q.number AND coalesce(m."group", '') = g.name AND m.group_rank IS NOT NULL AND m.state = {READY}
                ORDER BY m.group_rank, m.position, m.id LIMIT 1),
            g.paused, coalesce(g.held, b.id), CASE WHEN g.held IS NOT NULL THEN 'delayed' WHEN b.id IS NOT NULL THEN 'leased' END,
            r.limited_by, CASE WHEN r.limited_by = 'rate' THEN r.until_ms END,
            g.name <> '' AND coalesce(g.ready + g.later >= coalesce(g.max_pending, q.group_max_pending), false),
            g.weight, g.max_running, g.rate_count, g.rate_per_ms, g.max_pending) ORDER BY g.name), '[]')
        FROM (
            SELECT t AS whole, t.*, h.id AS held FROM {group} t
            LEFT JOIN LATERAL (
                SELECT m.id FROM {message} m
                WHERE m.queue = q.number AND coalesce(m."group", '') = t.name AND m.keeps_place AND q."order" IS NOT NULL
                    AND q.on_failure = 'hold'
                ORDER BY m.position, m.id LIMIT 1) h ON true
            WHERE t.queue = q.number AND t.name >= coalesce(p_after, '') AND t.name IS DISTINCT FROM p_after
                AND (p_group IS NULL OR t.name = p_group)
                AND (t.ready > 0 OR t.later > 0 OR t.running > 0 OR t.paused OR t.weight <> 1
                    OR coalesce(t.max_running, t.rate_count, t.max_pending) IS NOT NULL)
            ORDER BY t.name LIMIT p_limit) g
        LEFT JOIN busy b ON b.name = g.name
        CROSS JOIN LATERAL {group_room}(q, g.whole, v_now) r)::text;
END $body$;

-- Change the settings of a group; to pause it is one of them. Returns whether anything changed, and the sleepers to
-- wake; null if the queue does not distinguish groups.
CREATE OR REPLACE FUNCTION {configure_group}(p_queue text, p_clock bigint, p_group text, p_changes jsonb, p_text text) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
    q {queue} := {open_groups}(p_queue, v_now);
    g {group};
    n {group};
    m {message};
    r record;
    v_kept boolean;
BEGIN
    IF q.number IS NULL THEN
        RETURN NULL;
    END IF;
    SELECT * INTO g FROM {group} t WHERE t.queue = q.number AND t.name = p_group;
    IF NOT FOUND THEN
        g.weight := 1;
        g.paused := false;
        g.in_line := false;
        g.ready := 0;
        g.running := 0;
    END IF;
    n := jsonb_populate_record(g, p_changes);
    IF n IS NOT DISTINCT FROM g THEN
        RETURN '[false, []]';
    END IF;
    IF q.lease_ms IS NULL AND coalesce(n.max_running, n.rate_count, n.max_pending) IS NOT NULL THEN
        RAISE EXCEPTION 'lease' USING ERRCODE = 'WPLSN';
    END IF;
    v_kept := n.paused OR n.weight <> 1 OR coalesce(n.max_running, n.rate_count, n.max_pending) IS NOT NULL;
    IF v_kept AND {GROUPS_KEPT_MAX} <= (
        SELECT count(*) FROM {group} t
        WHERE t.queue = q.number AND t.name <> p_group
            AND (t.paused OR t.weight <> 1 OR coalesce(t.max_running, t.rate_count, t.max_pending) IS NOT NULL))
    THEN
        RAISE EXCEPTION 'groups' USING ERRCODE = 'WPGRP';
    END IF;
    INSERT INTO {group} AS t (
        queue, name, turn, ready, running, later, in_line, paused, weight, max_running, rate_count, rate_per_ms, max_pending)
    VALUES (
        q.number, p_group, 0, 0, 0, 0, false, n.paused, n.weight, n.max_running, n.rate_count, n.rate_per_ms, n.max_pending)
    ON CONFLICT (queue, name) DO UPDATE SET paused = excluded.paused, weight = excluded.weight,
        max_running = excluded.max_running, rate_count = excluded.rate_count, rate_per_ms = excluded.rate_per_ms,
        max_pending = excluded.max_pending, limited_until = NULL;
    PERFORM {update_groups}(q, ARRAY[p_group], ARRAY[{JOINS}::smallint], NULL, NULL, NULL);
    IF n.max_pending IS NOT NULL AND NOT q.group_capped OR n.max_running IS NOT NULL AND NOT q.group_limited THEN
        UPDATE {queue} t SET group_capped = t.group_capped OR n.max_pending IS NOT NULL,
            group_limited = t.group_limited OR n.max_running IS NOT NULL
        WHERE t.number = q.number;
        SELECT * INTO q FROM {queue} t WHERE t.number = q.number;
    END IF;
    m."group" := p_group;
    PERFORM {write_event}(q, v_now, NULL, 'configured', m, p_text);
    SELECT * INTO g FROM {group} t WHERE t.queue = q.number AND t.name = p_group;
    r := {group_room}(q, g, v_now);
    RETURN json_build_array(
        true, {wake}(q, v_now, CASE
            -- Wake one sleeper: its claim returns when the rate allows the next message.
            WHEN r.room <= 0 THEN (r.limited_by = 'rate' AND g.ready > 0 AND NOT g.paused)::int
            WHEN q."order" IS NOT NULL THEN 1 ELSE g.ready END))::text;
END $body$;

-- Let the next message of a group pass the one that holds the group, once per operation. Returns the id of the message
-- that held it, null if there is none, and the sleepers to wake; null if the queue does not distinguish groups.
CREATE OR REPLACE FUNCTION {skip_held}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_group text
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
    q {queue} := {open_groups}(p_queue, v_now);
    m {message};
    v_first text;
    v_wake text[] := '{}';
BEGIN
    IF q.number IS NULL THEN
        RETURN NULL;
    END IF;
    v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    IF q.on_failure = 'hold' THEN
        -- Claims wait for this step, so this step waits for no other: a step that has locked the message is about to
        -- move it.
        SELECT * INTO m FROM {message} t
        WHERE t.queue = q.number AND t.keeps_place AND t.id = (
            SELECT h.id FROM {message} h WHERE h.queue = q.number AND coalesce(h."group", '') = p_group AND h.keeps_place
            ORDER BY h.position, h.id LIMIT 1)
        FOR NO KEY UPDATE SKIP LOCKED;
    END IF;
    IF m.id IS NOT NULL THEN
        UPDATE {message} t SET keeps_place = false WHERE t.queue = q.number AND t.id = m.id;
        PERFORM {update_groups}(q, ARRAY[p_group], ARRAY[{JOINS}::smallint], NULL, NULL, NULL);
        PERFORM {write_event}(q, v_now, {operation_id}(p_session, p_number), 'skipped', m, 'held');
        v_wake := {wake}(q, v_now, {count_freed}(q, v_now, ARRAY[p_group]));
    END IF;
    v_first := json_build_array(m.id, v_wake)::text;
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;
