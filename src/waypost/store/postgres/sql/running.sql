-- Administration of a queue: redrive, purge, configure, pause and resume.
-- Touches: queue, message, completed, window (read), operation, sleeper, and what `end_message` and `apply_followups`
-- touch.
-- Keeps: the token of a redriven message continues to grow; if its key is in use meanwhile, the message stays dead as a
-- duplicate.

CREATE OR REPLACE FUNCTION {redrive}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_limit bigint, p_ids text[],
    p_reason text
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_first text;
    v_ids text[];
    v_moved text[];
    v_duplicates text[];
    v_keys text[];
    v_fresh bigint;
    v_tries integer := 0;
BEGIN
    -- The lock is taken before the row is read: messages are stored by the settings in the row, as in a publish.
    PERFORM pg_advisory_xact_lock_shared({lock_key}('removal'), hashtext(p_queue));
    q := {open_queue}(p_queue);
    IF p_ttl IS NULL THEN
        PERFORM {check_snapshot}(q.number);
        PERFORM set_config('waypost.in_transaction', 'on', true);
    ELSE
        v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
        IF v_first IS NOT NULL THEN
            RETURN v_first;
        END IF;
    END IF;
    -- One more than wanted, to know whether there are more. Each kind of filter has its index.
    IF p_ids IS NOT NULL THEN
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT t.id FROM {message} t
            WHERE t.queue = q.number AND t.id = ANY (p_ids) AND t.state + 0 = {DEAD}
                AND (p_reason IS NULL OR t.reason = p_reason)
            ORDER BY t.ended_ms, t.id LIMIT p_limit + 1 FOR UPDATE SKIP LOCKED) c;
    ELSIF p_reason IS NOT NULL THEN
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.state = {DEAD} AND t.reason = p_reason
            ORDER BY t.ended_ms, t.id LIMIT p_limit + 1 FOR UPDATE SKIP LOCKED) c;
    ELSE
        -- Without a filter, dead letters that are duplicates are excluded: they would be chosen again and again.
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.state = {DEAD} AND t.reason <> 'duplicate'
            ORDER BY t.ended_ms, t.id LIMIT p_limit + 1 FOR UPDATE SKIP LOCKED) c;
    END IF;
    LOOP
    -- If another transaction has published the key and is not committed, its message is not visible here, and the
    -- unique index makes this step wait for it. When it commits, this dead letter is a duplicate like others; the
    -- exception block lets the transaction of the caller continue.
    BEGIN
    WITH chosen AS MATERIALIZED (
        SELECT u.n, nextval('{sequence}') AS position, t.* FROM unnest(v_ids[:p_limit]) WITH ORDINALITY AS u (id, n) CROSS JOIN LATERAL (
            SELECT m.ctid AS place, m.key, m.key IS NOT NULL AND (
                EXISTS (SELECT 1 FROM {message} o
                    WHERE o.queue = q.number AND o.key = m.key AND o.key IS NOT NULL AND o.state < {WAITING})
                OR EXISTS (SELECT 1 FROM {window} w
                    WHERE w.queue = q.number AND w.key = m.key AND w.until_ms + 0 > v_now AND w.message_id <> m.id)) AS taken
            FROM {message} m WHERE m.queue = q.number AND m.id = u.id OFFSET 0) t
    ), judged AS MATERIALIZED (
        -- Of two letters with one key the first gets it.
        SELECT c.n, c.place, c.position, c.key,
            c.taken OR c.key IS NOT NULL AND row_number() OVER (PARTITION BY c.key, c.taken ORDER BY c.n) > 1 AS duplicate
        FROM chosen c
    ), back AS MATERIALIZED (
        UPDATE {message} t SET state = {READY}, position = j.position, ready_ms = v_now, deliveries = 0, attempts = 0,
            reason = NULL, error_type = NULL, error = NULL, ended_ms = NULL, cause = 'redriven', expires_ms = NULL,
            cancel_requested = false, group_rank = {group_rank}(q.group_mode, t."group", t.rank)
        FROM (SELECT * FROM judged o ORDER BY o.key, o.n) j WHERE t.ctid = j.place AND NOT j.duplicate
        RETURNING j.n, t.id, t.key, t."group", t.rank, t.token, t.claims, length(t.data) AS size, t.chain, t.key_mode
    ), stay AS MATERIALIZED (
        UPDATE {message} t SET reason = 'duplicate' FROM judged j WHERE t.ctid = j.place AND j.duplicate
        RETURNING j.n, t.id
    ), e AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            sizes, chains, claims)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), v_now, 'redriven', v_op,
            array_agg(b.id), array_agg(b.key), array_agg(b."group"), array_agg(b.rank), array_agg(b.token), '{0}',
            '{0}', array_agg(b.size), CASE WHEN count(b.chain) > 0 THEN array_agg(b.chain) END,
            CASE WHEN max(b.token - b.claims) > 0 THEN array_agg(b.claims) END
        FROM back b WHERE q.journal IN ('all', 'full') HAVING count(*) > 0
    ), c AS (
        INSERT INTO {tally} (seq, queue, minute, redriven, ready, dead_kept)
        SELECT nextval('{sequence}'), q.number, v_now / 60000, count(*), count(*), -count(*)
        FROM back HAVING count(*) > 0
    )
    SELECT coalesce((SELECT array_agg(b.id ORDER BY b.n) FROM back b), '{}'),
        coalesce((SELECT array_agg(s.id ORDER BY s.n) FROM stay s), '{}'),
        (SELECT array_agg(b.key) FROM back b WHERE b.key_mode = {LIVE_OR_DEAD})
    INTO v_moved, v_duplicates, v_keys;
    EXIT;
    EXCEPTION WHEN unique_violation THEN
        v_tries := v_tries + 1;
        IF p_ttl IS NOT NULL OR v_tries >= {REDRIVE_TRIES} THEN
            RAISE;
        END IF;
    END;
    END LOOP;
    IF v_keys IS NOT NULL THEN
        DELETE FROM {window} w WHERE w.queue = q.number AND w.key = ANY (v_keys) AND w.message_id = ANY (v_moved);
    END IF;
    v_fresh := cardinality(v_moved);
    IF q.group_mode > 0 THEN
        v_fresh := {add_to_groups}(q, v_now, array_fill('new'::text, ARRAY[cardinality(v_moved)]), NULL, ARRAY(
            SELECT t."group" FROM {message} t WHERE t.queue = q.number AND t.id = ANY (v_moved)), NULL, NULL);
    END IF;
    IF q.max_pending IS NOT NULL AND cardinality(v_moved) > 0 THEN
        PERFORM {count_over_cap}(v_now, array_fill(q.number, ARRAY[cardinality(v_moved)]));
    END IF;
    v_first := json_build_array(
        v_moved, v_duplicates, coalesce(cardinality(v_ids) > p_limit, false), {wake}(q, v_now, v_fresh))::text;
    IF p_ttl IS NOT NULL AND {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

-- Publish a message in place of a dead letter, which is deleted if the message is stored. Null if there is no such
-- letter.
CREATE OR REPLACE FUNCTION {replace_dead}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_id text, p_envelopes bytea[],
    p_priorities smallint[], p_groups text[], p_delays bigint[], p_ats bigint[], p_copies bytea[], p_keys text[],
    p_windows bigint[], p_rules text[], p_forwarded boolean[]
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue} := {open_queue}(p_queue);
    v_now bigint := {clock}(p_clock);
    v_first text := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
    m {message};
    v_had_key boolean := false;
BEGIN
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = p_id AND t.state + 0 = {DEAD} FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- The message inherits from the letter how long its key is in use, and the key itself.
    IF m.key_mode = {LIVE_OR_DEAD} THEN
        DELETE FROM {window} w WHERE w.queue = q.number AND w.key = m.key AND w.message_id = m.id;
        v_had_key := FOUND;
    END IF;
    v_first := {publish}(
        p_queue, v_now, p_session, p_number, 0, p_envelopes, p_priorities, p_groups, p_delays, p_ats, p_copies, p_keys,
        p_windows, p_rules, p_forwarded, p_modes => CASE WHEN m.key_mode IS NOT NULL THEN ARRAY[m.key_mode] END);
    IF (v_first::json ->> 0) IN ('', 'q', 'd') THEN
        PERFORM {remove_dead}(q, v_now, {operation_id}(p_session, p_number), 'edited', 1, ARRAY[p_id]);
    ELSIF v_had_key THEN
        PERFORM {keep_keys}(q.number, ARRAY[m.id]);
    END IF;
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

CREATE OR REPLACE FUNCTION {purge}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_state smallint, p_limit bigint,
    p_ids text[]
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_first text;
    v_removed bigint := 0;
    v_more boolean := false;
    v_followups json[];
    v_wakes json[] := '{}';
BEGIN
    q := {open_queue}(p_queue);
    v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    IF p_state = {DONE} THEN
        v_removed := {trim_completed}(q.number, 0, p_limit);
        v_more := EXISTS (SELECT 1 FROM {completed} c WHERE c.queue = q.number);
    ELSE
        IF p_state = {DEAD} THEN
            v_removed := {remove_dead}(q, v_now, v_op, 'purge', p_limit, p_ids);
        ELSE
            SELECT r.removed, r.followups INTO v_removed, v_followups FROM {remove_messages}(q, v_now, v_op, p_state, p_limit) r;
            v_wakes := {apply_followups}(v_now, v_followups);
        END IF;
        v_more := p_ids IS NULL AND v_removed >= p_limit AND EXISTS (
            SELECT 1 FROM {message} t WHERE t.queue = q.number AND t.state = p_state);
    END IF;
    v_first := json_build_array(v_removed, v_more, v_wakes, {take_side_effects}())::text;
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

-- Cancel waiting messages, in the order of claims, in one statement. None of them can have a next generation, which
-- waits only for a leased message. Messages that belong to chains are cancelled one by one.
CREATE OR REPLACE FUNCTION {remove_messages}(
    q {queue}, p_now bigint, p_op text, p_state smallint, p_limit bigint, OUT removed bigint, OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v_ids text[];
    v_keys text[];
    v_groups text[];
    v_held text[];
    v_ones integer := 0;
    m {message};
BEGIN
    followups := '{}';
    IF p_state = {READY} THEN
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.state = {READY}
            ORDER BY t.rank, t.position, t.id LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) c;
    ELSIF p_state = {DELAYED} THEN
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.state = {DELAYED}
            ORDER BY t.ready_ms, t.id LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED) c;
    ELSE
        -- Messages that wait for a key and messages that wait for chains are in different indexes.
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT w.id FROM (
                (SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.key IS NOT NULL AND t.state = {WAITING}
                ORDER BY t.id LIMIT p_limit)
                UNION ALL
                (SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.key IS NULL AND t.state = {WAITING}
                ORDER BY t.id LIMIT p_limit)) w
            ORDER BY w.id LIMIT p_limit) c;
        SELECT array_agg(c.id) INTO v_ids FROM (
            SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.id = ANY (v_ids) AND t.state + 0 = {WAITING}
            ORDER BY t.id FOR NO KEY UPDATE SKIP LOCKED) c;
    END IF;
    FOR m IN
        SELECT * FROM {message} t WHERE t.queue = q.number AND t.id = ANY (v_ids)
            AND (t.chain IS NOT NULL OR p_state = {WAITING} AND t.key IS NULL)
        ORDER BY t.id
    LOOP
        followups := followups || ({end_message}(q, m, p_now, p_op, 'cancelled', 'purge')).followups;
        v_ones := v_ones + 1;
    END LOOP;
    WITH gone AS MATERIALIZED (
        DELETE FROM {message} t WHERE t.queue = q.number AND t.id = ANY (v_ids)
        RETURNING t.id, coalesce(t.key, t.freed_key) AS key, t."group", t.rank, t.token, t.claims, t.deliveries, t.attempts,
            length(t.data) AS size, t.group_rank, t.keeps_place
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            causes, sizes, claims)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'cancelled', p_op,
            array_agg(g.id), array_agg(g.key), array_agg(g."group"), array_agg(g.rank), array_agg(g.token),
            array_agg(g.deliveries), array_agg(g.attempts), ARRAY['purge'], array_agg(g.size),
            CASE WHEN max(g.token - g.claims) > 0 THEN array_agg(g.claims) END
        FROM gone g WHERE q.journal <> 'off' HAVING count(*) > 0
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, cancelled, ready, delayed, waiting)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, count(*), CASE p_state WHEN {READY} THEN -count(*) END,
            CASE p_state WHEN {DELAYED} THEN -count(*) END, CASE p_state WHEN {WAITING} THEN -count(*) END
        FROM gone HAVING count(*) > 0
    )
    SELECT count(*) + v_ones, array_agg(g.key) FILTER (WHERE g.key IS NOT NULL),
        array_agg(g."group") FILTER (WHERE g.group_rank IS NOT NULL), array_agg(g."group") FILTER (WHERE g.keeps_place)
    INTO removed, v_keys, v_groups, v_held FROM gone g;
    IF v_groups IS NOT NULL THEN
        PERFORM {change_groups}(
            q.number, v_groups, 0::smallint, CASE p_state WHEN {READY} THEN -1 ELSE 0 END, 0,
            CASE p_state WHEN {READY} THEN 0 ELSE -1 END);
    END IF;
    IF v_held IS NOT NULL THEN
        -- The messages that held these groups are deleted.
        PERFORM {change_groups}(q.number, v_held, {JOINS}::smallint, 0, 0, 0);
        followups := followups || {wake_followup}(q.name, {wake}(q, p_now, {count_freed}(q, p_now, v_held)));
    END IF;
    IF v_keys IS NOT NULL THEN
        DELETE FROM {window} w WHERE w.queue = q.number AND w.key = ANY (v_keys) AND w.message_id = ANY (v_ids);
    END IF;
    followups := followups || {wake_followup}(q.name, {end_waits}(q, p_now, v_ids, ARRAY['cancelled']));
END $body$;

CREATE OR REPLACE FUNCTION {configure}(p_queue text, p_clock bigint, p_changes jsonb, p_text text) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    n {queue};
    v_now bigint := {clock}(p_clock);
    v_held record;
    v_alone boolean;
BEGIN
    q := {open_queue}(p_queue);
    IF q.conversion IS NOT NULL OR p_changes ?| ARRAY[
        'order', 'fair', 'on_failure', 'group_max_running', 'group_rate_count', 'group_max_pending', 'lease_ms']
    THEN
        -- The lock is taken before the row is locked, as claims do.
        PERFORM pg_advisory_xact_lock({lock_key}('running'), q.number);
    END IF;
    SELECT * INTO q FROM {queue} t WHERE t.number = q.number FOR UPDATE;
    n := jsonb_populate_record(q, p_changes);
    IF q.conversion ? 'was_ordered' AND {mode_of}(n) = {MODE_ORDERED} THEN
        -- Places of the previous order and of the next one must not be mixed.
        FOR i IN 1 .. 4 LOOP
            q := {convert_queue}(q, {CONVERT_MAX});
            EXIT WHEN NOT coalesce(q.conversion ? 'was_ordered', false);
        END LOOP;
        IF q.conversion ? 'was_ordered' THEN
            RAISE EXCEPTION 'conversion' USING ERRCODE = 'WPCNV';
        END IF;
        n := jsonb_populate_record(q, p_changes);
    END IF;
    -- A queue that becomes ordered stores messages as before until claims choose by the order: otherwise new messages
    -- would pass those that have no place yet.
    n.group_mode := CASE WHEN {mode_of}(n) = {MODE_ORDERED} AND q.claim_mode = {MODE_FAIR} THEN {MODE_FAIR} ELSE {mode_of}(n) END;
    IF n.lease_ms IS NULL AND (
        n."order" IS NOT NULL OR coalesce(n.group_max_running, n.group_rate_count, n.group_max_pending) IS NOT NULL
        OR {mode_of}(n) > 0 AND EXISTS (
            SELECT 1 FROM {group} g
            WHERE g.queue = q.number AND coalesce(g.max_running, g.rate_count, g.max_pending) IS NOT NULL))
    THEN
        RAISE EXCEPTION 'lease' USING ERRCODE = 'WPLSN';
    END IF;
    n.conversion := {plan_conversion}(q, n);
    n.claim_mode := CASE WHEN n.group_mode = 0 THEN 0 ELSE q.claim_mode END;
    n.group_capped := n.group_mode > 0 AND (n.group_max_pending IS NOT NULL OR EXISTS (
        SELECT 1 FROM {group} g WHERE g.queue = q.number AND g.max_pending IS NOT NULL));
    n.group_limited := n.group_mode > 0 AND (n.group_limited OR EXISTS (
        SELECT 1 FROM {group} g WHERE g.queue = q.number AND g.max_running IS NOT NULL));
    UPDATE {queue} t SET lease_ms = n.lease_ms, max_deliveries = n.max_deliveries, max_pending = n.max_pending,
        overload = n.overload, max_running = n.max_running, rate_count = n.rate_count, rate_per_ms = n.rate_per_ms,
        journal = n.journal, journal_max = n.journal_max, dead_max = n.dead_max, dead_keep_ms = n.dead_keep_ms,
        completed_max = n.completed_max, hide_bodies = n.hide_bodies,
        no_tracebacks = n.no_tracebacks, "order" = n."order", on_failure = n.on_failure, fair = n.fair,
        group_max_running = n.group_max_running, group_rate_count = n.group_rate_count,
        group_rate_per_ms = n.group_rate_per_ms, group_max_pending = n.group_max_pending, group_mode = n.group_mode,
        claim_mode = n.claim_mode, conversion = n.conversion, group_capped = n.group_capped,
        group_limited = n.group_limited, made = true,
        changes = CASE WHEN n IS DISTINCT FROM q THEN {add_change}(t.changes, v_now, 'configured', p_text) ELSE t.changes END
    WHERE t.number = q.number;
    IF n.conversion IS NOT NULL AND n.conversion IS DISTINCT FROM q.conversion THEN
        -- A short queue is converted at once. For a long one claims continue the conversion, and at its end convert the
        -- messages that other transactions have stored by the old settings. If no other transaction stores messages
        -- now, there are no such messages: a transaction that begins to store waits for this lock, and then reads the
        -- new settings.
        IF n.conversion ? 'after' THEN
            SELECT count(*) <= {CHUNK_MESSAGES_MAX} INTO v_alone
            FROM (SELECT 1 FROM {message} t WHERE t.queue = q.number LIMIT {CHUNK_MESSAGES_MAX} + 1) o;
            -- A conversion that is already in progress does not start again, so the messages that it has passed are
            -- checked again at its end.
            v_alone := v_alone AND n.conversion ->> 'after' = '' AND pg_try_advisory_xact_lock({lock_key}('removal'), hashtext(p_queue));
            n.conversion := n.conversion || CASE WHEN v_alone THEN '{"old": []}' ELSE '{"old": ["configure"]}' END::jsonb;
        END IF;
        FOR i IN 1 .. 4 LOOP
            n := {convert_queue}(n, {CONVERT_MAX});
            EXIT WHEN n.conversion IS NULL OR n.conversion ? 'waits';
        END LOOP;
    END IF;
    PERFORM {write_event}(n, v_now, NULL, 'configured', NULL, p_text);
    SELECT * INTO v_held FROM {state_counts}(q.number);
    RETURN json_build_array(
        {policy}(p_queue)::json, {wake}(n, v_now, v_held.ready + (v_held.delayed > 0)::int))::text;
END $body$;

-- The last changes of a queue's settings, a bounded number, with one more appended.
CREATE OR REPLACE FUNCTION {add_change}(p_changes jsonb, p_now bigint, p_event text, p_text text) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN jsonb_array_length(p_changes) >= {CHANGES_KEPT} THEN p_changes - 0 ELSE p_changes END
        || jsonb_build_array(jsonb_build_array(p_now, p_event, p_text))
$body$;

-- Only the settings of this release: the next release may have added columns.
CREATE OR REPLACE FUNCTION {policy}(p_queue text) RETURNS text LANGUAGE sql AS $body$
    SELECT (SELECT jsonb_object_agg(f.key, f.value) FROM jsonb_each(to_jsonb(q)) f WHERE f.key = ANY ('{POLICY_FIELDS}'::text[]))::text
    FROM {queue} q WHERE q.name = p_queue
$body$;

CREATE OR REPLACE FUNCTION {pause}(p_queue text, p_clock bigint, p_paused boolean) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_held record;
BEGIN
    q := {open_queue}(p_queue);
    SELECT * INTO q FROM {queue} t WHERE t.number = q.number FOR UPDATE;
    IF q.paused = p_paused THEN
        RETURN '[false, []]';
    END IF;
    UPDATE {queue} t SET paused = p_paused, made = t.made OR p_paused,
        changes = {add_change}(t.changes, v_now, CASE WHEN p_paused THEN 'paused' ELSE 'resumed' END, '')
    WHERE t.number = q.number;
    q.paused := p_paused;
    PERFORM {write_event}(q, v_now, NULL, CASE WHEN p_paused THEN 'paused' ELSE 'resumed' END, NULL);
    SELECT * INTO v_held FROM {state_counts}(q.number);
    RETURN json_build_array(
        true, {wake}(q, v_now, v_held.ready + (v_held.delayed + v_held.leased > 0)::int))::text;
END $body$;
