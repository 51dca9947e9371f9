-- Publish a batch, once per operation, within the queue's cap.
-- Touches: queue (read), operation, sleeper, and what `accept` and `finish` touch.
-- Keeps: with `max_pending`, publishers of one queue take turns, so that together they never pass it.
-- Without `p_ttl` it is a part of somebody's own transaction: no repeat can come, and nothing is tidied up, since the
-- locks
-- of that would be held until the transaction ends.

CREATE OR REPLACE FUNCTION {publish}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_envelopes bytea[],
    p_priorities smallint[], p_groups text[], p_delays bigint[], p_ats bigint[], p_copies bytea[], p_keys text[],
    p_windows bigint[], p_rules text[], p_forwarded boolean[]
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_op text := encode(p_session, 'hex') || '.' || p_number;
    v_first text;
    v_due bigint;
    v_pending bigint;
    v_over bigint;
    v_timers boolean := p_delays IS NOT NULL OR p_ats IS NOT NULL OR p_rules IS NOT NULL OR p_forwarded IS NOT NULL;
    v_done record;
    v_wake text[];
    m {message};
    v_dropped bigint := 0;
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open}(p_queue);
    END IF;
    IF p_ttl IS NOT NULL THEN
        v_first := {replayed}(q.number, p_session, p_number);
        IF v_first IS NOT NULL THEN
            RETURN v_first;
        END IF;
    END IF;
    IF q.max_pending IS NOT NULL THEN
        PERFORM pg_advisory_xact_lock({lock_of}('pending'), q.number);
        SELECT h.ready + h.delayed + h.waiting INTO v_pending FROM {held}(q.number) h;
    END IF;
    IF v_timers THEN
        v_due := {next_due}(q.number);
    END IF;
    v_done := {accept}(
        q, v_now, v_op, p_envelopes, p_priorities, p_groups, p_delays, p_ats, p_copies, p_keys, p_windows, p_rules,
        p_forwarded);
    IF q.max_pending IS NOT NULL AND v_done.added > 0 THEN
        -- A cap that was lowered far is reached bit by bit, so that no publish has to drop a whole queue.
        v_over := least(v_pending + v_done.added - q.max_pending, v_done.added + 256);
        IF v_over > 0 AND q.overload = 'drop_oldest' THEN
            FOR m IN
                SELECT c.* FROM generate_series(9, 0, -1) AS ranks (rank), LATERAL (
                    SELECT t.* FROM {message} t
                    WHERE t.queue = q.number AND t.state = 0 AND t.rank = ranks.rank AND t.seq < v_done.first_seq
                        AND (v_done.others IS NULL OR t.id <> ALL (v_done.others))
                    ORDER BY t.position, t.id LIMIT v_over FOR UPDATE SKIP LOCKED) c
                LIMIT v_over
            LOOP
                PERFORM {finish}(q, m, v_now, v_op, 'dropped', 'overload');
                v_dropped := v_dropped + 1;
            END LOOP;
        END IF;
        IF v_over > v_dropped THEN
            RAISE EXCEPTION '% %', v_pending, q.max_pending USING ERRCODE = 'WPFUL';
        END IF;
    END IF;
    IF v_timers THEN
        v_done.fresh := v_done.fresh + coalesce(({next_due}(q.number) < coalesce(v_due, 9223372036854775807))::int, 0);
    END IF;
    v_wake := {wake}(q, v_now, v_done.fresh, p_ttl IS NULL);
    v_first := json_build_array(
        CASE WHEN v_done.letters = repeat('q', v_done.added::int) THEN '' ELSE v_done.letters END,
        CASE WHEN v_done.letters ~ '[uce]' THEN v_done.others END, v_wake)::text;
    IF p_ttl IS NOT NULL AND {remember}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;
