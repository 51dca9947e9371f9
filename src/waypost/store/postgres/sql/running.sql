-- Running a queue: redrive, purge, configure, pause and resume.
-- Touches: queue, message, completed, window (read), operation, sleeper, and what `finish` touches.
-- Keeps: a redriven message's token goes on; a key taken meanwhile leaves it dead as a duplicate.

CREATE OR REPLACE FUNCTION {redrive}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_limit bigint, p_ids text[],
    p_reason text
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_op text := encode(p_session, 'hex') || '.' || p_number;
    v_first text;
    v_moved text[] := '{}';
    v_duplicates text[] := '{}';
    v_seen bigint := 0;
    v_more boolean := false;
BEGIN
    q := {open}(p_queue);
    v_first := {replayed}(q.number, p_session, p_number);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    FOR m IN
        SELECT * FROM {message} t
        WHERE t.queue = q.number AND t.state = 4 AND (p_ids IS NULL OR t.id = ANY (p_ids))
            AND CASE WHEN p_reason IS NOT NULL THEN t.reason = p_reason
                -- Without a filter, those left dead as duplicates would be chosen again and again.
                ELSE p_ids IS NOT NULL OR t.reason <> 'duplicate' END
        ORDER BY t.ended_ms, t.id LIMIT p_limit + 1 FOR UPDATE SKIP LOCKED
    LOOP
        IF v_seen = p_limit THEN
            v_more := true;
            EXIT;
        END IF;
        v_seen := v_seen + 1;
        IF m.key IS NOT NULL AND (
            EXISTS (SELECT 1 FROM {message} o
                WHERE o.queue = q.number AND o.key = m.key AND o.key IS NOT NULL AND o.state < 3)
            OR EXISTS (SELECT 1 FROM {window} w WHERE w.queue = q.number AND w.key = m.key AND w.until_ms > v_now))
        THEN
            UPDATE {message} t SET reason = 'duplicate' WHERE t.queue = q.number AND t.id = m.id;
            v_duplicates := v_duplicates || m.id;
            CONTINUE;
        END IF;
        UPDATE {message} t SET state = 0, position = nextval('{sequence}'), ready_ms = v_now, deliveries = 0,
            attempts = 0,
            reason = NULL, error_type = NULL, error = NULL, ended_ms = NULL, cause = 'redriven',
                cancel_requested = false
        WHERE t.queue = q.number AND t.id = m.id;
        m.deliveries := 0;
        m.attempts := 0;
        INSERT INTO {tally} (seq, queue, minute, redriven, ready, dead_kept)
        VALUES (nextval('{sequence}'), q.number, v_now / 60000, 1, 1, -1);
        PERFORM {note}(q, v_now, v_op, 'redriven', m);
        v_moved := v_moved || m.id;
    END LOOP;
    v_first := json_build_array(v_moved, v_duplicates, v_more, {wake}(q, v_now, cardinality(v_moved)))::text;
    IF {remember}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

CREATE OR REPLACE FUNCTION {purge}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_state smallint, p_limit bigint
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_op text := encode(p_session, 'hex') || '.' || p_number;
    v_first text;
    v_removed bigint := 0;
    v_more boolean := false;
BEGIN
    q := {open}(p_queue);
    v_first := {replayed}(q.number, p_session, p_number);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    IF p_state = 5 THEN
        v_removed := {forget_done}(q.number, 0, p_limit);
        v_more := EXISTS (SELECT 1 FROM {completed} c WHERE c.queue = q.number);
    ELSE
        FOR m IN
            SELECT * FROM {message} t WHERE t.queue = q.number AND t.state = p_state
            ORDER BY CASE p_state WHEN 0 THEN t.rank WHEN 1 THEN t.ready_ms WHEN 4 THEN t.ended_ms END,
                CASE p_state WHEN 0 THEN t.position END, t.id
            LIMIT p_limit + 1 FOR UPDATE SKIP LOCKED
        LOOP
            IF v_removed = p_limit THEN
                v_more := true;
                EXIT;
            END IF;
            v_removed := v_removed + 1;
            IF p_state = 4 THEN
                PERFORM {forget_dead}(q, m, v_now, v_op, 'purge');
            ELSE
                PERFORM {finish}(q, m, v_now, v_op, 'cancelled', 'purge');
            END IF;
        END LOOP;
    END IF;
    v_first := json_build_array(v_removed, v_more)::text;
    IF {remember}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

CREATE OR REPLACE FUNCTION {configure}(p_queue text, p_clock bigint, p_changes jsonb, p_told text) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    n {queue};
    v_now bigint := {clock}(p_clock);
    v_held record;
BEGIN
    q := {open}(p_queue);
    SELECT * INTO q FROM {queue} t WHERE t.number = q.number FOR UPDATE;
    n := jsonb_populate_record(q, p_changes);
    UPDATE {queue} t SET lease_ms = n.lease_ms, max_deliveries = n.max_deliveries, max_pending = n.max_pending,
        overload = n.overload, max_running = n.max_running, rate_count = n.rate_count, rate_per_ms = n.rate_per_ms,
        journal = n.journal, journal_max = n.journal_max, dead_max = n.dead_max, dead_keep_ms = n.dead_keep_ms,
        completed_max = n.completed_max
    WHERE t.number = q.number;
    PERFORM {note}(n, v_now, NULL, 'configured', NULL, p_told);
    SELECT * INTO v_held FROM {held}(q.number);
    RETURN json_build_array(
        {policy}(p_queue)::json, {wake}(n, v_now, v_held.ready + (v_held.delayed > 0)::int))::text;
END $body$;

CREATE OR REPLACE FUNCTION {policy}(p_queue text) RETURNS text LANGUAGE sql AS $body$
    SELECT (to_jsonb(q) - 'number' - 'name' - 'paused')::text FROM {queue} q WHERE q.name = p_queue
$body$;

CREATE OR REPLACE FUNCTION {pause}(p_queue text, p_clock bigint, p_paused boolean) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_held record;
BEGIN
    q := {open}(p_queue);
    SELECT * INTO q FROM {queue} t WHERE t.number = q.number FOR UPDATE;
    IF q.paused = p_paused THEN
        RETURN '[false, []]';
    END IF;
    UPDATE {queue} t SET paused = p_paused WHERE t.number = q.number;
    q.paused := p_paused;
    PERFORM {note}(q, v_now, NULL, CASE WHEN p_paused THEN 'paused' ELSE 'resumed' END, NULL);
    SELECT * INTO v_held FROM {held}(q.number);
    RETURN json_build_array(
        true, {wake}(q, v_now, v_held.ready + (v_held.delayed + v_held.leased > 0)::int))::text;
END $body$;
