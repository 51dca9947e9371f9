-- Cancel by id or key, once per operation: a waiting message at once, a running one by a flag that is read when its
-- lease is renewed.
-- Touches: queue (read), message, window, completed and result (read), operation, and what `end_message` and
-- `apply_followups` touch.
-- Keeps: done and dead are final. Returns letters (c cancelled, r requested, f finished, u unknown), the clients to
-- wake by queue, and the side effects.
-- Without `p_ttl` it is a part of the caller's own transaction: the operation cannot be repeated, no maintenance is
-- done, and sleepers are chosen at the commit.

CREATE OR REPLACE FUNCTION {cancel}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_ids text[], p_keys text[]
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    m {message};
    h {message};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_first text;
    v_letters text := '';
    v_end record;
    v_fresh bigint := 0;
    v_followups json[] := '{}';
    v_wakes json[];
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open_queue}(p_queue);
    END IF;
    IF p_ttl IS NULL THEN
        PERFORM set_config('waypost.in_transaction', 'on', true);
    ELSE
        v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
        IF v_first IS NOT NULL THEN
            RETURN v_first;
        END IF;
    END IF;
    FOR i IN 1 .. cardinality(p_ids) LOOP
        IF p_keys[i] IS NOT NULL THEN
            SELECT * INTO m FROM {message} t
            WHERE t.queue = q.number AND t.key = p_keys[i] AND t.key IS NOT NULL AND t.state < {WAITING} FOR UPDATE;
            IF NOT FOUND THEN
                v_letters := v_letters || CASE WHEN EXISTS (
                    SELECT 1 FROM {window} w WHERE w.queue = q.number AND w.key = p_keys[i] AND w.until_ms > v_now)
                    THEN 'f' ELSE 'u' END;
                CONTINUE;
            END IF;
            SELECT * INTO h FROM {message} t
            WHERE t.queue = q.number AND t.key = p_keys[i] AND t.key IS NOT NULL AND t.state = {WAITING} FOR UPDATE;
            IF FOUND THEN
                v_followups := v_followups || ({end_message}(q, h, v_now, v_op, 'cancelled', 'parked')).followups;
            END IF;
        ELSE
            SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = p_ids[i] FOR UPDATE;
            IF NOT FOUND THEN
                v_letters := v_letters || CASE WHEN EXISTS (
                    SELECT 1 FROM {completed} c WHERE c.queue = q.number AND c.id = p_ids[i]) OR EXISTS (
                    SELECT 1 FROM {result} r WHERE r.queue = q.number AND r.id = p_ids[i] AND r.until_ms > v_now)
                    THEN 'f' ELSE 'u' END;
                CONTINUE;
            END IF;
        END IF;
        IF m.state = {DEAD} THEN
            v_letters := v_letters || 'f';
        ELSIF m.state = {LEASED} THEN
            IF NOT m.cancel_requested THEN
                UPDATE {message} t SET cancel_requested = true WHERE t.queue = q.number AND t.id = m.id;
                PERFORM {write_event}(q, v_now, v_op, 'cancel_requested', m);
            END IF;
            v_letters := v_letters || 'r';
        ELSE
            SELECT e.fresh, e.followups INTO v_end FROM {end_message}(q, m, v_now, v_op, 'cancelled', 'request') e;
            v_fresh := v_fresh + v_end.fresh;
            v_followups := v_followups || v_end.followups;
            v_letters := v_letters || 'c';
        END IF;
    END LOOP;
    IF v_fresh > 0 THEN
        -- The groups that these messages held can continue.
        v_followups := v_followups || {wake_followup}(q.name, {wake}(q, v_now, v_fresh, p_ttl IS NULL));
    END IF;
    v_wakes := {apply_followups}(v_now, v_followups);
    v_first := json_build_array(v_letters, v_wakes, {take_side_effects}())::text;
    IF p_ttl IS NOT NULL AND {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

-- Change the due times of timers, once per operation; messages that wait for a retry are timers too. Touches: queue
-- (read), message, entry, tally, sleeper, operation. Keeps: only a message that is not due yet is changed.
-- Returns letters (m moved, d due already, u unknown) and the sleepers to wake. Without `p_ttl` as in `cancel`.
CREATE OR REPLACE FUNCTION {reschedule}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_ids text[], p_keys text[],
    p_at bigint, p_delay bigint
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_ready bigint := greatest(v_now, coalesce(p_at, v_now + p_delay));
    v_state smallint := (v_ready > v_now)::int;
    v_due bigint;
    v_after bigint;
    v_fresh bigint := 0;
    v_first text;
    v_letters text := '';
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open_queue}(p_queue);
    END IF;
    IF p_ttl IS NULL THEN
        PERFORM set_config('waypost.in_transaction', 'on', true);
    ELSE
        v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
        IF v_first IS NOT NULL THEN
            RETURN v_first;
        END IF;
    END IF;
    v_due := {next_due}(q.number);
    FOR i IN 1 .. cardinality(p_ids) LOOP
        IF p_keys[i] IS NOT NULL THEN
            SELECT * INTO m FROM {message} t
            WHERE t.queue = q.number AND t.key = p_keys[i] AND t.key IS NOT NULL AND t.state < {WAITING} FOR UPDATE;
        ELSE
            SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = p_ids[i] FOR UPDATE;
        END IF;
        IF NOT FOUND OR m.state = {DEAD} THEN
            v_letters := v_letters || 'u';
        ELSIF m.state <> {DELAYED} THEN
            v_letters := v_letters || 'd';
        ELSE
            UPDATE {message} t SET state = v_state, ready_ms = v_ready,
                position = CASE WHEN m.keeps_place IS NULL THEN nextval('{sequence}') ELSE t.position END,
                keeps_place = CASE WHEN v_state = {DELAYED} THEN t.keeps_place END
            WHERE t.queue = q.number AND t.id = m.id;
            IF m.group_rank IS NOT NULL AND v_state = {READY} THEN
                PERFORM {change_group}(q.number, m."group", {DELAYED}::smallint, {READY}::smallint);
            END IF;
            IF v_state = {READY} THEN
                PERFORM {count_move}(q.number, v_now, {DELAYED}::smallint, {READY}::smallint);
                v_fresh := v_fresh + 1;
            END IF;
            PERFORM {write_event}(q, v_now, v_op, 'postponed', m, NULL, false, v_ready);
            v_letters := v_letters || 'm';
        END IF;
    END LOOP;
    v_after := {next_due}(q.number);
    v_first := json_build_array(
        v_letters, {wake}(q, v_now, v_fresh + coalesce((v_after < coalesce(v_due, v_after + 1))::int, 0)))::text;
    IF p_ttl IS NOT NULL AND {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

-- Change the priority of messages that are ready or delayed, once per operation; a ready message becomes the last of
-- its new priority. Touches: queue (read), message, entry, group_change, sleeper, operation. Keeps: a message stays in
-- its state.
-- Returns letters (c changed, s unchanged, u unknown) and the sleepers to wake.
CREATE OR REPLACE FUNCTION {change_priority}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_ids text[], p_priority bigint
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_rank smallint := {PRIORITY_MAX} - p_priority;
    v_fresh bigint := 0;
    v_first text;
    v_letters text := '';
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open_queue}(p_queue);
    END IF;
    v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    FOR i IN 1 .. cardinality(p_ids) LOOP
        SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = p_ids[i] FOR UPDATE;
        IF NOT FOUND OR m.state = {DEAD} THEN
            v_letters := v_letters || 'u';
        ELSIF m.state NOT IN ({READY}, {DELAYED}) OR m.rank = v_rank OR (q.group_mode = {MODE_ORDERED} AND m."group" IS NOT NULL) THEN
            v_letters := v_letters || 's';
        ELSE
            UPDATE {message} t SET rank = v_rank, group_rank = CASE WHEN t.group_rank IS NOT NULL THEN v_rank END,
                position = CASE WHEN t.state = {READY} THEN nextval('{sequence}') ELSE t.position END,
                ready_ms = CASE WHEN t.state = {READY} THEN least(t.ready_ms, v_now) ELSE t.ready_ms END
            WHERE t.queue = q.number AND t.id = m.id
            RETURNING * INTO m;
            IF m.state = {READY} THEN
                IF m.group_rank IS NOT NULL THEN
                    PERFORM {change_group}(q.number, m."group", {READY}::smallint, {READY}::smallint);
                END IF;
                v_fresh := v_fresh + 1;
            END IF;
            PERFORM {write_event}(q, v_now, v_op, 'postponed', m, 'priority', false, m.ready_ms);
            v_letters := v_letters || 'c';
        END IF;
    END LOOP;
    v_first := json_build_array(v_letters, {wake}(q, v_now, v_fresh))::text;
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;
