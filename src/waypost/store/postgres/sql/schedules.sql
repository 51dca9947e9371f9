-- Schedules, each with its queue; leaders; and timers that no worker claims.
-- Touches: schedule, leader, message, entry, tally, sleeper, operation, and what `publish` touches.
-- Keeps: of the clients that read the same next fire only one fires it, under the lock of the schedule's row; its
-- messages and the new state of the schedule are one transaction. If the queue is full, nothing changes.

-- Write a schedule if it is still as the caller read it. Its counters are kept.
CREATE OR REPLACE FUNCTION {save_schedule}(
    p_queue text, p_key text, p_seen_version text, p_seen_next bigint, p_version text, p_spec bytea, p_paused boolean,
    p_next bigint, p_due bigint, p_state bytea
) RETURNS TABLE (status text, at_ms bigint, wake text, s {schedule}) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    q {queue};
    v {schedule};
    v_saved boolean := false;
BEGIN
    PERFORM pg_advisory_xact_lock_shared({lock_key}('removal'), hashtext(p_queue));
    q := {open_queue}(p_queue);
    IF p_seen_version IS NULL THEN
        INSERT INTO {schedule} (queue, key, version, spec, paused, next_ms, due_ms, state, change)
        VALUES (q.number, p_key, p_version, p_spec, p_paused, p_next, p_due, p_state, nextval('{sequence}'))
        ON CONFLICT (queue, key) DO NOTHING;
        v_saved := FOUND;
    ELSE
        UPDATE {schedule} t SET version = p_version, spec = p_spec, paused = p_paused, next_ms = p_next, due_ms = p_due,
            state = p_state, change = nextval('{sequence}')
        WHERE t.queue = q.number AND t.key = p_key AND t.version = p_seen_version
            AND t.next_ms IS NOT DISTINCT FROM p_seen_next;
        v_saved := FOUND;
    END IF;
    IF v_saved AND NOT q.made THEN
        PERFORM {make_queue}(q);
    END IF;
    SELECT * INTO v FROM {schedule} t WHERE t.queue = q.number AND t.key = p_key;
    RETURN QUERY SELECT CASE WHEN v_saved THEN 'saved' ELSE 'conflict' END, NULL::bigint, NULL::text, v;
END $body$;

CREATE OR REPLACE FUNCTION {remove_schedule}(p_queue text, p_key text) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    DELETE FROM {schedule} t USING {queue} q WHERE q.name = p_queue AND t.queue = q.number AND t.key = p_key;
    RETURN FOUND;
END $body$;

-- The schedules of a queue; the first row has only the store's time.
CREATE OR REPLACE FUNCTION {schedules}(p_queue text, p_clock bigint)
RETURNS TABLE (status text, at_ms bigint, wake text, s {schedule}) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT NULL::text, {clock}(p_clock), NULL::text, NULL::{schedule};
    RETURN QUERY SELECT NULL::text, NULL::bigint, NULL::text, t FROM {schedule} t JOIN {queue} q ON q.number = t.queue
        WHERE q.name = p_queue ORDER BY t.queue, t.key;
END $body$;

CREATE OR REPLACE FUNCTION {fire_schedule}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_key text, p_version text,
    p_expected bigint, p_last_due bigint, p_valid_until bigint, p_last bigint, p_missed bigint, p_next bigint,
    p_due bigint, p_state bytea, p_new_version text, p_by_hand boolean, p_run text, p_running_state bytea,
    p_skipped bigint, p_skipped_ms bigint, p_envelopes bytea[], p_priorities smallint[], p_groups text[],
    p_copies bytea[], p_expires bigint[] DEFAULT NULL
) RETURNS TABLE (status text, at_ms bigint, wake text, s {schedule}) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    q {queue} := {open_queue}(p_queue);
    v {schedule};
    v_fires integer := CASE WHEN p_by_hand THEN 0 ELSE cardinality(p_envelopes) END;
    v_now bigint := {clock}(p_clock);
    v_status text := 'fired';
    v_wake text := '["", null, [], []]';
    v_first text := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
BEGIN
    SELECT * INTO v FROM {schedule} t WHERE t.queue = q.number AND t.key = p_key FOR UPDATE;
    IF v_first IS NOT NULL THEN
        RETURN QUERY SELECT v_first::json ->> 0, (v_first::json ->> 1)::bigint, v_first::json ->> 2, v;
        RETURN;
    END IF;
    -- After waiting for the row the time is later, and the next fire may have changed.
    v_now := {clock}(p_clock);
    IF v.key IS NULL OR (v.paused AND NOT p_by_hand) OR v.version <> p_version OR v.next_ms IS DISTINCT FROM p_expected THEN
        v_status := 'conflict';
    ELSIF v_now < p_last_due THEN
        v_status := 'early';
    ELSIF v_now > p_valid_until THEN
        v_status := 'stale';
    ELSIF p_run IS NOT NULL AND EXISTS (
        SELECT 1 FROM {message} t WHERE t.queue = q.number AND t.id = p_run AND t.state + 0 <> {DEAD}
            AND (t.expires_ms IS NULL OR t.expires_ms > v_now OR t.state = {LEASED}))
    THEN
        -- Its run has not ended: the message waits, is leased, or waits for a retry. A message that has lapsed does not
        -- run any more.
        v_status := CASE WHEN p_running_state IS NULL THEN 'running' ELSE 'skipped' END;
    END IF;
    IF v_status = 'skipped' THEN
        IF p_skipped > 0 AND {journal_keeps}(q.journal, 'skipped') THEN
            INSERT INTO {entry} (queue, count, xid, seq, at_ms, event, operation, schedule, dues, causes, reasons, sizes)
            VALUES (
                q.number, 1, pg_current_xact_id()::text::bigint, nextval('{sequence}'), v_now, 'skipped',
                {operation_id}(p_session, p_number), p_key, ARRAY[p_skipped_ms], ARRAY['overlap'], ARRAY[p_run],
                ARRAY[p_skipped]);
        END IF;
        UPDATE {schedule} t SET next_ms = p_next, due_ms = p_due, missed = t.missed + p_missed, state = p_running_state,
            version = coalesce(p_new_version, t.version)
        WHERE t.queue = q.number AND t.key = p_key RETURNING * INTO v;
    ELSIF v_status = 'fired' THEN
        IF cardinality(p_envelopes) > 0 THEN
            v_wake := {publish}(
                p_queue, v_now, p_session, p_number, 0, p_envelopes, p_priorities, p_groups, NULL, NULL, p_copies,
                NULL, NULL, NULL, NULL, p_expires => p_expires);
            PERFORM {label_fires}(q.number, p_key);
        END IF;
        UPDATE {schedule} t SET next_ms = p_next, due_ms = p_due, fires = t.fires + v_fires,
            missed = t.missed + p_missed, last_ms = coalesce(p_last, t.last_ms), state = coalesce(p_state, t.state),
            version = coalesce(p_new_version, t.version)
        WHERE t.queue = q.number AND t.key = p_key RETURNING * INTO v;
    END IF;
    IF {store_result}(
        q.number, p_session, p_number, v_now + p_ttl, json_build_array(v_status, v_now, v_wake)::text) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN QUERY SELECT v_status, v_now, v_wake, v;
END $body$;

-- Write the key of the schedule to the journal entries of the messages of this transaction.
CREATE OR REPLACE FUNCTION {label_fires}(p_queue integer, p_key text) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {entry} e SET schedule = p_key
    WHERE e.queue = p_queue AND e.xid = pg_current_xact_id()::text::bigint AND e.event = 'published';
END $body$;

CREATE OR REPLACE FUNCTION {trigger_schedule}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_key text, p_envelopes bytea[],
    p_priorities smallint[], p_groups text[], p_copies bytea[], p_expires bigint[] DEFAULT NULL
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue} := {open_queue}(p_queue);
    v_now bigint := {clock}(p_clock);
    v_first text := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
BEGIN
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    IF NOT EXISTS (SELECT 1 FROM {schedule} t WHERE t.queue = q.number AND t.key = p_key) THEN
        RETURN NULL;
    END IF;
    v_first := {publish}(
        p_queue, v_now, p_session, p_number, 0, p_envelopes, p_priorities, p_groups, NULL, NULL, p_copies,
        NULL, NULL, NULL, NULL, p_expires => p_expires);
    PERFORM {label_fires}(q.number, p_key);
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

-- Make timers ready that are due, and end messages that have lapsed, as a claim does; the timers of a paused queue
-- accumulate.
CREATE OR REPLACE FUNCTION {promote}(p_queue text, p_clock bigint) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_oldest bigint;
    v_before bigint;
    v_after bigint;
    v_wake text[] := '{}';
    v_promoted bigint;
    v_lapsed record;
    v_more json[] := '{}';
BEGIN
    SELECT * INTO q FROM {queue} t WHERE t.name = p_queue;
    v_oldest := {next_due}(q.number);
    SELECT h.delayed INTO v_before FROM {state_counts}(q.number) h;
    v_after := v_before;
    IF v_oldest <= v_now AND NOT q.paused THEN
        PERFORM {promote}(q, v_now, NULL);
        SELECT h.delayed INTO v_after FROM {state_counts}(q.number) h;
    END IF;
    v_promoted := v_before - v_after;
    IF {next_lapse}(q.number) <= v_now THEN
        v_lapsed := {lapse}(q, v_now, NULL);
        SELECT h.delayed INTO v_after FROM {state_counts}(q.number) h;
        v_wake := {wake}(q, v_now, v_promoted + v_lapsed.fresh);
        v_more := {apply_followups}(v_now, v_lapsed.followups);
    ELSIF v_promoted > 0 THEN
        v_wake := {wake}(q, v_now, v_promoted);
    END IF;
    RETURN json_build_array(
        v_promoted, v_after, coalesce(greatest(v_now - v_oldest, 0), 0),
        {ms_until}(least({next_due}(q.number), {next_lapse}(q.number)), v_now), v_wake, {take_side_effects}(), v_more)::text;
END $body$;

-- Become the leader of a role, or remain it, if no other leads. The token grows with every change of the leader.
CREATE OR REPLACE FUNCTION {elect}(p_role text, p_clock bigint, p_name text, p_ttl bigint) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v {leader};
    v_now bigint;
BEGIN
    INSERT INTO {leader} (role, name, token, until_ms) VALUES (p_role, '', 0, 0) ON CONFLICT (role) DO NOTHING;
    SELECT * INTO v FROM {leader} t WHERE t.role = p_role FOR UPDATE;
    v_now := {clock}(p_clock);
    IF v.name NOT IN ('', p_name) AND v.until_ms > v_now THEN
        IF v.until_ms - v_now > 4 * p_ttl THEN
            -- The clock was set back: shorten the term, so that a leader that died is replaced before the clock has
            -- caught up.
            UPDATE {leader} t SET until_ms = v_now + p_ttl WHERE t.role = p_role;
            v.until_ms := v_now + p_ttl;
        END IF;
        RETURN json_build_array(v.name, v.token, v.until_ms - v_now)::text;
    END IF;
    IF v.name <> p_name OR v.until_ms <= v_now THEN
        v.token := v.token + 1;
    END IF;
    UPDATE {leader} t SET name = p_name, token = v.token, until_ms = v_now + p_ttl WHERE t.role = p_role;
    RETURN json_build_array(p_name, v.token, p_ttl)::text;
END $body$;

CREATE OR REPLACE FUNCTION {resign}(p_role text, p_clock bigint, p_name text) RETURNS boolean
LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {leader} t SET name = '', until_ms = 0
    WHERE t.role = p_role AND t.name = p_name AND t.until_ms > {clock}(p_clock);
    RETURN FOUND;
END $body$;
