-- Cancel by id or key, once per operation: waiting messages at once, a running one by a flag that its renewal finds.
-- Touches: queue (read), message, window, completed and result (read), operation, and what `end_message` and `apply_followups` touch.
-- Keeps: done and dead are final. Returns letters (c cancelled, r requested, f finished, u unknown), the clients to wake
-- by queue, and the side effects.

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
    v_followups json[] := '{}';
    v_wakes json[];
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
            v_followups := v_followups || ({end_message}(q, m, v_now, v_op, 'cancelled', 'request')).followups;
            v_letters := v_letters || 'c';
        END IF;
    END LOOP;
    v_wakes := {apply_followups}(v_now, v_followups);
    v_first := json_build_array(v_letters, v_wakes, {take_side_effects}())::text;
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;
