-- Settle deliveries, once per operation; what a done one sends on arrives in the same transaction.
-- Touches: queue (read), message, envelope, result, entry, tally, sleeper, operation, and what `finish` and `accept`
-- touch.
-- Keeps: a settle whose token or nonce is stale changes nothing and says lost (l).
-- letters: d done, r retried, s snoozed, x dead, p dropped, b released, c cancelled, e replaced, l lost.

CREATE OR REPLACE FUNCTION {settle}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_ids text[], p_tokens bigint[],
    p_nonces bytea[], p_outcomes text[], p_afters bigint[], p_reasons text[], p_error_types text[], p_errors text[],
    p_results bytea[], p_result_ttls bigint[], p_sources integer[], p_then_queues text[], p_then_envelopes bytea[],
    p_then_keys text[], p_then_delays bigint[], p_then_priorities smallint[], p_then_groups text[]
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    target {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_op text := encode(p_session, 'hex') || '.' || p_number;
    v_first text;
    v_due bigint;
    v_fresh bigint := 0;
    v_plain bigint[];
    v_letters text[] := array_fill('l'::text, ARRAY[cardinality(p_ids)]);
    v_wakes json[] := '{}';
    v_one record;
    v_sent record;
    v_settled record;
    v_before bigint;
    v_names text[];
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open}(p_queue);
    END IF;
    v_first := {replayed}(q.number, p_session, p_number);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    IF p_outcomes IS NULL AND q.completed_max = 0 THEN
        v_plain := {settle_done}(q, v_now, v_op, p_ids, p_tokens, p_nonces, false);
    END IF;
    IF v_plain IS NOT NULL AND cardinality(v_plain) = cardinality(p_ids) THEN
        v_letters := NULL;
    ELSE
        FOR i IN 1 .. coalesce(cardinality(v_plain), 0) LOOP
            v_letters[v_plain[i]] := 'd';
        END LOOP;
        v_due := {next_due}(q.number);
        -- Locked in one order by everybody, then settled in the order of the call.
        PERFORM 1 FROM {message} t
        WHERE t.queue = q.number AND t.id = ANY (p_ids) ORDER BY t.id FOR UPDATE;
        IF p_outcomes IS NULL AND q.completed_max = 0 THEN
            v_plain := {settle_done}(q, v_now, v_op, p_ids, p_tokens, p_nonces, true);
            FOR i IN 1 .. cardinality(v_plain) LOOP
                v_letters[v_plain[i]] := 'd';
            END LOOP;
        END IF;
        FOR v_one IN
            SELECT u.* FROM unnest(p_ids, p_tokens, p_nonces, p_outcomes, p_afters, p_reasons, p_error_types, p_errors,
                p_results, p_result_ttls, v_letters) WITH ORDINALITY
                AS u (id, token, nonce, outcome, after, reason, error_type, error, result, result_ttl, letter, n)
            WHERE u.letter = 'l' ORDER BY u.n
        LOOP
            SELECT * INTO m FROM {message} t
            WHERE t.queue = q.number AND t.id = v_one.id AND t.state = 2 AND t.token = v_one.token
                AND t.nonce = coalesce(v_one.nonce, p_nonces[1]) FOR UPDATE;
            CONTINUE WHEN NOT FOUND;
            SELECT * INTO v_settled
            FROM {settle_one}(
                q, m, v_now, v_op, coalesce(v_one.outcome, 'done'), coalesce(v_one.after, 0), v_one.reason,
                v_one.error_type, v_one.error, v_one.result, v_one.result_ttl);
            v_letters[v_one.n] := v_settled.letter;
            v_fresh := v_fresh + v_settled.fresh;
            CONTINUE WHEN p_sources IS NULL OR v_letters[v_one.n] <> 'd';
            FOR v_sent IN
                SELECT u.* FROM unnest(p_sources, p_then_queues, p_then_envelopes, p_then_keys, p_then_delays,
                    p_then_priorities, p_then_groups) WITH ORDINALITY
                    AS u (source, queue, data, key, delay, priority, "group", n)
                WHERE u.source = v_one.n ORDER BY u.n
            LOOP
                INSERT INTO {tally} (seq, queue, minute, transferred)
                VALUES (nextval('{sequence}'), q.number, v_now / 60000, 1);
                target := {open}(v_sent.queue);
                v_before := {next_due}(target.number);
                SELECT a.fresh INTO v_sent.n FROM {accept}(
                    target, v_now, v_op, ARRAY[v_sent.data], ARRAY[v_sent.priority], ARRAY[v_sent."group"],
                    ARRAY[v_sent.delay], NULL, NULL, ARRAY[v_sent.key], NULL, NULL, ARRAY[true]) a;
                IF target.number = q.number THEN
                    v_fresh := v_fresh + v_sent.n;
                    CONTINUE;
                END IF;
                v_names := {wake}(target, v_now, v_sent.n + coalesce(
                    ({next_due}(target.number) < coalesce(v_before, 9223372036854775807))::int, 0));
                IF cardinality(v_names) > 0 THEN
                    v_wakes := v_wakes || json_build_array(target.name, v_names);
                END IF;
            END LOOP;
        END LOOP;
        v_fresh := v_fresh + coalesce(({next_due}(q.number) < coalesce(v_due, 9223372036854775807))::int, 0);
    END IF;
    IF q.max_running IS NOT NULL THEN
        -- A slot that is free now is worth a sleeper, if something waits for it.
        v_fresh := v_fresh + least(
            cardinality(p_ids), greatest(0, (SELECT h.ready FROM {held}(q.number) h) - coalesce(v_fresh, 0)));
    END IF;
    v_names := {wake}(q, v_now, v_fresh);
    IF cardinality(v_names) > 0 THEN
        v_wakes := v_wakes || json_build_array(q.name, v_names);
    END IF;
    v_first := json_build_array(coalesce(array_to_string(v_letters, ''), ''), v_wakes)::text;
    IF {remember}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    END IF;
    RETURN v_first;
END $body$;

-- Plain dones in bulk: those that leave nothing behind. Returns their places in the call. A message with a key may have
-- a next generation waiting for it, which only its row's lock keeps from being parked now: so they come second.
CREATE OR REPLACE FUNCTION {settle_done}(
    q {queue}, p_now bigint, p_op text, p_ids text[], p_tokens bigint[], p_nonces bytea[], p_keyed boolean
) RETURNS bigint[] LANGUAGE plpgsql AS $body$
DECLARE
    v_places bigint[];
BEGIN
    -- Found through the index of ids alone (hence the OFFSET, and a state that no partial index can be matched with),
    -- then removed by place. A row that changes meanwhile is left to the caller, who locks it first.
    WITH found AS MATERIALIZED (
        SELECT u.n, u.token, coalesce(u.nonce, p_nonces[1]) AS nonce, t.place
        FROM unnest(p_ids, p_tokens, p_nonces) WITH ORDINALITY AS u (id, token, nonce, n)
        CROSS JOIN LATERAL (SELECT m.ctid AS place FROM {message} m WHERE m.queue = q.number AND m.id = u.id OFFSET 0) t
    ), gone AS MATERIALIZED (
        DELETE FROM {message} m USING found f
        WHERE m.ctid = f.place AND m.state + 0 = 2 AND m.token = f.token AND m.nonce = f.nonce
            AND (m.key IS NULL OR p_keyed AND NOT EXISTS (
                SELECT 1 FROM {message} h
                WHERE h.queue = q.number AND h.key = m.key AND h.key IS NOT NULL AND h.state = 3))
        RETURNING f.n, m.seq, m.id, m.key, m."group", m.rank, m.token, m.deliveries, m.attempts, m.worker,
            m.claimed_ms, m.size
    ), e AS (
        DELETE FROM {envelope} e USING gone g WHERE e.seq = g.seq
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            workers, runs, sizes)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'done', p_op,
            array_agg(g.id), CASE WHEN count(g.key) > 0 THEN array_agg(g.key) END,
            CASE WHEN count(g."group") > 0 THEN array_agg(g."group") END, array_agg(g.rank),
            array_agg(g.token), array_agg(g.deliveries), array_agg(g.attempts), array_agg(g.worker),
            array_agg(p_now - g.claimed_ms), array_agg(g.size)
        FROM gone g WHERE q.journal IN ('all', 'full') HAVING count(*) > 0
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, done, leased)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, count(*), -count(*) FROM gone HAVING count(*) > 0
    )
    SELECT array_agg(g.n) INTO v_places FROM gone g;
    RETURN coalesce(v_places, '{}');
END $body$;

-- One delivery, whose row the caller has locked and whose fence it has checked.
CREATE OR REPLACE FUNCTION {settle_one}(
    q {queue}, m {message}, p_now bigint, p_op text, p_outcome text, p_after bigint, p_reason text, p_error_type text,
    p_error text, p_result bytea, p_result_ttl bigint, OUT letter text, OUT fresh bigint
) LANGUAGE plpgsql AS $body$
DECLARE
    v_ready bigint := p_now + p_after;
    v_state smallint := (p_after > 0)::int;
    v_event text;
BEGIN
    fresh := 0;
    IF p_outcome = 'done' THEN
        letter := 'd';
        IF p_result IS NOT NULL THEN
            INSERT INTO {result} (queue, id, data, until_ms) VALUES (q.number, m.id, p_result, p_now + p_result_ttl)
            ON CONFLICT (queue, id) DO UPDATE SET data = excluded.data, until_ms = excluded.until_ms;
        END IF;
        fresh := {finish}(q, m, p_now, p_op, 'done');
        RETURN;
    END IF;
    IF m.cancel_requested THEN
        letter := 'c';
        fresh := {finish}(q, m, p_now, p_op, 'cancelled', p_outcome);
        RETURN;
    END IF;
    IF p_outcome IN ('retry', 'dead') THEN
        m.error_type := p_error_type;
        m.error := p_error;
    END IF;
    IF p_outcome = 'dead' THEN
        letter := 'x';
        m.reason := coalesce(p_reason, 'rejected');
        IF m.reason IN ('retries_exhausted', 'retry_policy_failed') THEN
            -- It was a failure of the handler that ended it, and the letter counts that one too.
            m.attempts := m.attempts + 1;
        END IF;
        fresh := {finish}(q, m, p_now, p_op, 'dead');
        PERFORM {trim_dead}(q, p_now);
        RETURN;
    ELSIF p_outcome = 'drop' THEN
        letter := 'p';
        fresh := {finish}(q, m, p_now, p_op, 'dropped', 'drop');
        RETURN;
    END IF;
    IF m.key IS NOT NULL AND EXISTS (
        SELECT 1 FROM {message} h WHERE h.queue = q.number AND h.key = m.key AND h.key IS NOT NULL AND h.state = 3)
    THEN
        letter := 'e';
        fresh := {finish}(q, m, p_now, p_op, 'replaced', p_outcome);
        RETURN;
    END IF;
    IF p_outcome = 'release' THEN
        letter := 'b';
        fresh := 1;
        m.deliveries := m.deliveries - 1;
        UPDATE {message} t SET state = 0, cause = 'released', ready_ms = p_now, position = p_now - 281474976710656,
            deliveries = m.deliveries
        WHERE t.queue = q.number AND t.id = m.id;
        INSERT INTO {tally} (seq, queue, minute, released, ready, leased)
        VALUES (nextval('{sequence}'), q.number, p_now / 60000, 1, 1, -1);
        PERFORM {note}(q, p_now, p_op, 'released', m, NULL, true);
        RETURN;
    END IF;
    fresh := 1 - v_state;
    IF p_outcome = 'retry' THEN
        letter := 'r';
        v_event := 'retried';
        m.attempts := m.attempts + 1;
    ELSE
        letter := 's';
        v_event := 'snoozed';
        m.deliveries := m.deliveries - 1;
    END IF;
    UPDATE {message} t SET state = v_state, cause = v_event, ready_ms = v_ready, position = nextval('{sequence}'),
        deliveries = m.deliveries, attempts = m.attempts, error_type = m.error_type, error = m.error
    WHERE t.queue = q.number AND t.id = m.id;
    INSERT INTO {tally} (seq, queue, minute, retried, snoozed, ready, delayed, leased)
    VALUES (
        nextval('{sequence}'), q.number, p_now / 60000, nullif((letter = 'r')::int, 0), nullif((letter = 's')::int, 0),
        1 - v_state, v_state, -1);
    PERFORM {note}(q, p_now, p_op, v_event, m, NULL, true, v_ready, p_reason, p_error_type);
END $body$;
