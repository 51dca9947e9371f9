-- Settle deliveries, once per operation; messages that a done message forwards are stored in the same transaction.
-- Touches: queue (read), message, result, completed, window, entry, tally, sleeper, operation, and what `end_message`,
-- `accept` and `apply_followups` touch.
-- Keeps: a settle with a stale token or nonce changes nothing and returns lost (l).
-- Without `p_ttl` it is a part of the caller's own transaction: the operation cannot be repeated, no maintenance is
-- done, and the sleepers to wake are chosen at the commit.
-- `p_next_claim` is the limit of a claim in the same transaction: that many fewer sleepers are woken, since that claim
-- takes the messages.
-- The envelopes of forwarded messages may be followed, in the same order, by what the journal stores in place of each.
-- letters: d done, r retried, s snoozed, x dead, p dropped, b released, c cancelled, e replaced, l lost.

CREATE OR REPLACE FUNCTION {settle}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_ids text[], p_tokens bigint[],
    p_nonces bytea[], p_outcomes text[], p_afters bigint[], p_reasons text[], p_error_types text[], p_errors text[],
    p_results bytea[], p_result_ttls bigint[], p_sources integer[], p_then_queues text[], p_then_envelopes bytea[],
    p_then_keys text[], p_then_delays bigint[], p_then_priorities smallint[], p_then_groups text[],
    p_then_chains text[] DEFAULT NULL, p_then_expires bigint[] DEFAULT NULL, p_next_claim bigint DEFAULT 0
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    target {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_first text;
    v_due bigint;
    v_fresh bigint := 0;
    v_timer bigint := 0;
    v_gone text[] := '{}';
    v_letters text[] := array_fill('l'::text, ARRAY[cardinality(p_ids)]);
    v_wakes json[] := '{}';
    v_item record;
    v_sent record;
    v_settled record;
    v_before bigint;
    v_names text[];
    v_followups json[] := '{}';
    v_arrived json[];
    v_transferred bigint := 0;
    v_passing bigint;
    v_seq bigint;
    v_lapsed record;
    -- The queue of each message that was forwarded to a queue with `max_pending`.
    v_capped integer[] := '{}';
    v_tidy boolean;
    -- The groups of messages that are no longer leased, and the ordered groups among them with a message that is ready
    -- again.
    v_groups text[];
    v_fresh_groups text[];
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
    IF q.no_tracebacks AND p_errors IS NOT NULL THEN
        p_errors := ARRAY(
            SELECT split_part(u.error, chr({TRACEBACK_MARK}), 1) FROM unnest(p_errors) WITH ORDINALITY AS u (error, n)
            ORDER BY u.n);
    END IF;
    IF p_outcomes IS NULL AND q.completed_max = 0 THEN
        SELECT d.ids, d.groups INTO v_gone, v_groups FROM {settle_done}(q, v_now, v_op, p_ids, p_tokens, p_nonces, false) d;
    END IF;
    IF cardinality(v_gone) = cardinality(p_ids) THEN
        v_letters := NULL;
    ELSE
        v_due := {next_due}(q.number);
        -- All steps lock messages in one order; here they are then settled in the order of the call.
        PERFORM 1 FROM {message} t
        WHERE t.queue = q.number AND t.id = ANY (p_ids) ORDER BY t.id FOR UPDATE;
        IF p_outcomes IS NOT NULL AND q."order" IS NOT NULL AND q.conversion ? 'after' THEN
            -- One that is tried again keeps a place before those that are ready, and holds its group. The lock is that of a
            -- publish: if the settings change meanwhile, there is one more pass.
            PERFORM pg_advisory_xact_lock_shared({lock_key}('removal'), hashtext(p_queue));
            PERFORM {convert_messages}(t, p_ids, NULL) FROM {queue} t WHERE t.number = q.number AND t."order" IS NOT NULL;
        END IF;
        IF p_outcomes IS NULL AND q.completed_max = 0 THEN
            SELECT v_gone || d.ids, v_groups || d.groups INTO v_gone, v_groups
            FROM {settle_done}(q, v_now, v_op, p_ids, p_tokens, p_nonces, true) d;
            -- An id that occurs twice was settled by the first of them.
            SELECT array_agg(CASE WHEN u.nth = 1 AND g.ids ? u.id THEN 'd' ELSE 'l' END ORDER BY u.n) INTO v_letters
            FROM (SELECT jsonb_object(v_gone, v_gone) AS ids) g, (
                SELECT o.id, o.n, row_number() OVER (PARTITION BY o.id ORDER BY o.n) AS nth
                FROM unnest(p_ids) WITH ORDINALITY AS o (id, n)) u;
        ELSIF (SELECT count(DISTINCT u.id) = count(*) FROM unnest(p_ids) AS u (id)) THEN
            SELECT * INTO v_settled FROM {settle_back}(
                q, v_now, v_op, p_ids, p_tokens, p_nonces, p_outcomes, p_afters, p_reasons, p_error_types, p_errors);
            v_fresh := v_settled.fresh;
            v_groups := v_groups || v_settled.groups;
            v_fresh_groups := v_settled.fresh_groups;
            FOR i IN 1 .. cardinality(v_settled.places) LOOP
                v_letters[v_settled.places[i]] := v_settled.letters[i];
            END LOOP;
            SELECT * INTO v_settled FROM {settle_end}(
                q, v_now, v_op, p_ids, p_tokens, p_nonces, p_outcomes, p_reasons, p_error_types, p_errors, p_results,
                p_result_ttls, p_sources);
            v_groups := v_groups || v_settled.groups;
            FOR i IN 1 .. cardinality(v_settled.places) LOOP
                v_letters[v_settled.places[i]] := v_settled.letters[i];
            END LOOP;
        END IF;
        FOR v_item IN
            SELECT u.* FROM unnest(p_ids, p_tokens, p_nonces, p_outcomes, p_afters, p_reasons, p_error_types, p_errors,
                p_results, p_result_ttls, v_letters) WITH ORDINALITY
                AS u (id, token, nonce, outcome, after, reason, error_type, error, result, result_ttl, letter, n)
            WHERE u.letter = 'l' ORDER BY u.n
        LOOP
            SELECT * INTO m FROM {message} t
            WHERE t.queue = q.number AND t.id = v_item.id AND t.state = {LEASED} AND t.token = coalesce(v_item.token, p_tokens[1])
                AND t.nonce = coalesce(v_item.nonce, p_nonces[1]) FOR UPDATE;
            CONTINUE WHEN NOT FOUND;
            IF m.group_rank IS NOT NULL THEN
                v_groups := v_groups || m."group";
            END IF;
            SELECT * INTO v_settled
            FROM {settle_one}(
                q, m, v_now, v_op, coalesce(v_item.outcome, 'done'), coalesce(v_item.after, 0), v_item.reason,
                v_item.error_type, v_item.error, v_item.result, v_item.result_ttl,
                CASE WHEN m.chain IS NOT NULL AND p_sources IS NOT NULL
                    THEN {continuation_names}(p_sources, p_then_queues, p_then_envelopes, v_item.n) END);
            v_followups := v_followups || v_settled.followups;
            v_letters[v_item.n] := v_settled.letter;
            v_fresh := v_fresh + v_settled.fresh;
            IF m.group_rank IS NOT NULL AND v_settled.fresh > 0 THEN
                v_fresh_groups := v_fresh_groups || m."group";
            END IF;
            CONTINUE WHEN p_sources IS NULL OR v_letters[v_item.n] <> 'd';
            FOR v_sent IN
                SELECT u.* FROM unnest(p_sources, p_then_queues, p_then_envelopes, p_then_keys, p_then_delays,
                    p_then_priorities, p_then_groups, p_then_chains, p_then_expires) WITH ORDINALITY
                    AS u (source, queue, data, key, delay, priority, "group", chain, expires, n)
                WHERE u.source = v_item.n ORDER BY u.n
            LOOP
                v_transferred := v_transferred + 1;
                PERFORM pg_advisory_xact_lock_shared({lock_key}('removal'), hashtext(v_sent.queue));
                target := {open_queue}(v_sent.queue);
                IF NOT target.made THEN
                    target := {make_queue}(target);
                END IF;
                v_before := {next_due}(target.number);
                v_lapsed := NULL;
                IF v_sent.key IS NOT NULL AND {next_lapse}(target.number) <= v_now THEN
                    v_lapsed := {lapse_keys}(target, v_now, v_op, ARRAY[v_sent.key]);
                END IF;
                SELECT a.fresh, a.followups, a.passing, a.first_seq INTO v_sent.n, v_arrived, v_passing, v_seq FROM {accept}(
                    target, v_now, v_op, ARRAY[v_sent.data], ARRAY[v_sent.priority], ARRAY[v_sent."group"],
                    ARRAY[v_sent.delay], NULL, ARRAY[p_then_envelopes[cardinality(p_sources) + v_sent.n]],
                    ARRAY[v_sent.key], NULL, NULL, ARRAY[true],
                    CASE WHEN v_sent.chain IS NOT NULL THEN ARRAY[v_sent.chain] END, NULL, NULL, NULL) a;
                IF v_sent.expires IS NOT NULL THEN
                    PERFORM {set_expiries}(target, v_now, v_seq, ARRAY[v_sent.data], ARRAY[v_sent.expires]);
                END IF;
                IF v_lapsed IS NOT NULL THEN
                    v_followups := v_followups || v_lapsed.followups;
                    v_sent.n := v_sent.n + v_lapsed.fresh;
                END IF;
                v_followups := v_followups || v_arrived;
                IF v_passing > 0 AND target.max_pending IS NOT NULL THEN
                    v_capped := v_capped || target.number;
                END IF;
                IF target.number = q.number THEN
                    v_fresh := v_fresh + v_sent.n;
                    CONTINUE;
                END IF;
                v_names := {wake}(target, v_now, v_sent.n + coalesce(
                    ({next_due}(target.number) < coalesce(v_before, 9223372036854775807))::int, 0), p_ttl IS NULL);
                IF cardinality(v_names) > 0 THEN
                    v_wakes := v_wakes || json_build_array(target.name, v_names);
                END IF;
            END LOOP;
        END LOOP;
        IF cardinality(v_capped) > 0 THEN
            PERFORM {count_over_cap}(v_now, v_capped);
        END IF;
        IF v_transferred > 0 THEN
            INSERT INTO {tally} (seq, queue, minute, transferred)
            VALUES (nextval('{sequence}'), q.number, v_now / 60000, v_transferred);
        END IF;
        v_timer := coalesce(({next_due}(q.number) < coalesce(v_due, 9223372036854775807))::int, 0);
    END IF;
    IF q.max_running IS NOT NULL THEN
        -- A slot of `max_running` that became free: wake a sleeper, if a message waits for the slot.
        v_fresh := v_fresh + least(
            cardinality(p_ids), greatest(0, (SELECT h.ready FROM {state_counts}(q.number) h) - coalesce(v_fresh, 0)));
    END IF;
    IF coalesce(v_fresh, 0) + cardinality(v_groups) > p_next_claim THEN
        -- Wake one also for each group that can continue. An ordered group hands out one message, however many are
        -- ready again.
        v_fresh := coalesce(v_fresh, 0) + {count_freed}(q, v_now, ARRAY(
            SELECT u.name FROM unnest(v_groups) AS u (name) WHERE u.name <> ALL (coalesce(v_fresh_groups, '{}'))));
    END IF;
    v_fresh := greatest(0, v_fresh - p_next_claim) + v_timer;
    IF v_fresh > 0 THEN
        v_names := {wake}(q, v_now, v_fresh, p_ttl IS NULL);
        IF cardinality(v_names) > 0 THEN
            v_wakes := v_wakes || json_build_array(q.name, v_names);
        END IF;
    END IF;
    -- Checked after the ends: a client that begins to wait at this moment either waits for the lock of a message that
    -- ends, or is found here.
    IF EXISTS (SELECT 1 FROM {waiter} w WHERE w.queue = q.number) THEN
        SELECT {end_waits}(q, v_now, array_agg(u.id), array_agg(
            CASE u.letter WHEN 'x' THEN 'dead' WHEN 'p' THEN 'dropped' ELSE 'done' END))
        INTO v_names FROM unnest(p_ids, v_letters) AS u (id, letter) WHERE coalesce(u.letter, 'd') IN ('d', 'x', 'p');
        IF cardinality(v_names) > 0 THEN
            v_wakes := v_wakes || json_build_array(q.name, v_names);
        END IF;
    END IF;
    IF cardinality(v_followups) > 0 THEN
        v_wakes := v_wakes || {apply_followups}(v_now, v_followups);
    END IF;
    IF v_letters IS NULL THEN
        v_first := json_build_array('', v_wakes)::text;
    ELSE
        v_first := json_build_array(array_to_string(v_letters, ''), v_wakes, {take_side_effects}())::text;
    END IF;
    IF coalesce(p_ttl, 0) > 0 THEN
        v_tidy := {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first);
        IF v_tidy OR v_letters IS NOT NULL AND {tidy_is_due_for}(q.number, cardinality(p_ids)) THEN
            PERFORM {tidy}(q, v_now);
        END IF;
    END IF;
    RETURN v_first;
END $body$;

-- A settle and then a claim of the same queue, each with its own operation, in one transaction: one round trip and one
-- wait for the disk, where the next message of a group waits for the end of the previous one. The rows are those of the
-- claim; the last row has the reply of the settle in place of an id.
CREATE OR REPLACE FUNCTION {settle_and_claim}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_limit bigint, p_worker text,
    p_sleeper text, p_replay boolean, p_poll_soon bigint, p_bytes bigint,
    p_settle_session bytea, p_settle_number bigint, p_ids text[], p_tokens bigint[], p_nonces bytea[], p_outcomes text[],
    p_afters bigint[], p_reasons text[], p_error_types text[], p_errors text[], p_results bytea[], p_result_ttls bigint[],
    p_sources integer[], p_then_queues text[], p_then_envelopes bytea[], p_then_keys text[], p_then_delays bigint[],
    p_then_priorities smallint[], p_then_groups text[], p_then_chains text[] DEFAULT NULL,
    p_then_expires bigint[] DEFAULT NULL
) RETURNS TABLE (
    head text, id text, token bigint, deliveries integer, attempts integer, rank smallint, key text, "group" text,
    published_ms bigint, ready_ms bigint, claimed_ms bigint, lease_end_ms bigint, data bytea, chain text
) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
DECLARE
    v_commit text := current_setting('synchronous_commit');
    v_settled text;
BEGIN
    -- The lock is taken first, as in a claim: if it were taken after the row locks of a settle, two steps could wait
    -- for each other.
    PERFORM pg_advisory_xact_lock({lock_key}('running'), q.number) FROM {queue} q WHERE q.name = p_queue AND q.claim_mode > 0;
    v_settled := {settle}(
        p_queue, p_clock, p_settle_session, p_settle_number, p_ttl, p_ids, p_tokens, p_nonces, p_outcomes, p_afters, p_reasons,
        p_error_types, p_errors, p_results, p_result_ttls, p_sources, p_then_queues, p_then_envelopes, p_then_keys,
        p_then_delays, p_then_priorities, p_then_groups, p_then_chains, p_then_expires, p_limit);
    RETURN QUERY SELECT c.head, CASE WHEN c.head IS NULL THEN c.id ELSE v_settled END, c.token, c.deliveries, c.attempts, c.rank,
        c.key, c."group", c.published_ms, c.ready_ms, c.claimed_ms, c.lease_end_ms, c.data, c.chain
    FROM {claim}(
        p_queue, p_clock, p_session, p_number, p_ttl, p_limit, p_worker, p_sleeper, p_replay, p_poll_soon, p_bytes) c;
    IF current_setting('synchronous_commit') = 'off' THEN
        -- A claim need not wait for the disk, a settle does.
        PERFORM set_config('synchronous_commit', v_commit, true);
    END IF;
END $body$;

-- Settle plain dones in bulk: messages that leave no result and belong to no chain. Returns their ids, and the groups
-- of the messages that count in a group. A message with a key may have a next generation; only the lock of its row
-- prevents that one is parked now: so messages with keys are settled second, after they are locked.
CREATE OR REPLACE FUNCTION {settle_done}(
    q {queue}, p_now bigint, p_op text, p_ids text[], p_tokens bigint[], p_nonces bytea[], p_keyed boolean, OUT ids text[],
    OUT groups text[]
) LANGUAGE plpgsql AS $body$
DECLARE
    -- A list with one element holds for all messages.
    v_token bigint := CASE WHEN cardinality(p_tokens) = 1 THEN p_tokens[1] END;
    v_nonce bytea := CASE WHEN cardinality(p_nonces) = 1 THEN p_nonces[1] END;
BEGIN
    -- The state is compared by an expression that matches no partial index, so that the index of ids is used.
    WITH gone AS MATERIALIZED (
        DELETE FROM {message} m
        WHERE m.queue = q.number AND m.id = ANY (p_ids) AND m.state + 0 = {LEASED} AND m.chain IS NULL
            AND m.token = coalesce(v_token, p_tokens[array_position(p_ids, m.id)])
            AND m.nonce = coalesce(v_nonce, p_nonces[array_position(p_ids, m.id)])
            AND (m.key IS NULL OR p_keyed AND NOT EXISTS (
                SELECT 1 FROM {message} h
                WHERE h.queue = q.number AND h.key = m.key AND h.key IS NOT NULL AND h.state = {WAITING}))
        RETURNING m.id, coalesce(m.key, m.freed_key) AS key, m."group", m.rank, m.token, m.claims, m.deliveries, m.attempts,
            m.worker, m.claimed_ms, length(m.data) AS size, m.group_rank
    ), s AS MATERIALIZED (
        SELECT count(*) AS count, array_agg(g.id) AS ids, count(g.key) AS keyed, count(g."group") AS grouped,
            count(g.group_rank) AS ranked,
            min(g.rank) AS rank, max(g.rank) AS rank_max, min(g.token) AS token, max(g.token) AS token_max,
            min(g.claims) AS claim, max(g.claims) AS claim_max, max(g.deliveries) AS delivery,
            max(g.attempts) AS attempt, min(g.worker) AS worker, max(g.worker) AS worker_max,
            min(g.claimed_ms) AS claimed, max(g.claimed_ms) AS claimed_max, min(g.size) AS size,
            max(g.size) AS size_max, sum(greatest(0, p_now - g.claimed_ms))::bigint AS run
        FROM gone g HAVING count(*) > 0
    ), j AS (
        -- A value that is the same for all messages is written once, and not aggregated.
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            workers, runs, sizes, claims)
        SELECT q.number, s.count, pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'done', p_op,
            s.ids, CASE WHEN s.keyed > 0 THEN (SELECT array_agg(g.key) FROM gone g) END,
            CASE WHEN s.grouped > 0 THEN (SELECT array_agg(g."group") FROM gone g) END,
            CASE WHEN s.rank = s.rank_max THEN ARRAY[s.rank] ELSE (SELECT array_agg(g.rank) FROM gone g) END,
            CASE WHEN s.token = s.token_max THEN ARRAY[s.token] ELSE (SELECT array_agg(g.token) FROM gone g) END,
            CASE WHEN s.delivery = 1 THEN '{1}' ELSE (SELECT array_agg(g.deliveries) FROM gone g) END,
            CASE WHEN s.attempt = 0 THEN '{0}' ELSE (SELECT array_agg(g.attempts) FROM gone g) END,
            CASE WHEN s.worker = s.worker_max THEN ARRAY[s.worker]
                ELSE (SELECT array_agg(g.worker) FROM gone g) END,
            CASE WHEN s.claimed = s.claimed_max THEN ARRAY[p_now - s.claimed]
                ELSE (SELECT array_agg(p_now - g.claimed_ms) FROM gone g) END,
            CASE WHEN s.size = s.size_max THEN ARRAY[s.size::bigint]
                ELSE (SELECT array_agg(g.size::bigint) FROM gone g) END,
            CASE WHEN s.claim = s.token AND s.claim_max = s.token_max THEN NULL
                WHEN s.claim = s.claim_max THEN ARRAY[s.claim] ELSE (SELECT array_agg(g.claims) FROM gone g) END
        FROM s WHERE q.journal IN ('all', 'full')
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, done, leased, runs, run_ms, run_ms_max)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, s.count, -s.count, s.count, s.run,
            greatest(0, p_now - s.claimed)
        FROM s
    )
    SELECT s.ids, CASE WHEN s.ranked > 0 THEN (SELECT array_agg(g."group") FROM gone g WHERE g.group_rank IS NOT NULL) END
    INTO ids, groups FROM s;
    ids := coalesce(ids, '{}');
    IF groups IS NOT NULL THEN
        PERFORM {change_groups}(q.number, groups, {JOINS_IF_LIMITED}::smallint, 0, -1, 0);
    END IF;
END $body$;

-- Settle deliveries whose messages return to the queue: retried, snoozed, released. The caller holds the locks of their
-- rows; messages for which a cancel was requested or the next generation of their key waits are settled by the caller.
CREATE OR REPLACE FUNCTION {settle_back}(
    q {queue}, p_now bigint, p_op text, p_ids text[], p_tokens bigint[], p_nonces bytea[], p_outcomes text[],
    p_afters bigint[], p_reasons text[], p_error_types text[], p_errors text[],
    OUT places bigint[], OUT letters text[], OUT fresh bigint, OUT groups text[], OUT fresh_groups text[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v_ready text[];
    v_later text[];
BEGIN
    WITH wanted AS MATERIALIZED (
        SELECT u.n, u.outcome, CASE u.outcome WHEN 'release' THEN 0 ELSE u.after END AS after, u.reason, u.error_type,
            u.error, nextval('{sequence}') AS position, t.place
        FROM unnest(p_ids, p_tokens, p_nonces, p_outcomes, p_afters, p_reasons, p_error_types, p_errors) WITH ORDINALITY
            AS u (id, token, nonce, outcome, after, reason, error_type, error, n)
        CROSS JOIN LATERAL (
            SELECT m.ctid AS place FROM {message} m
            WHERE m.queue = q.number AND m.id = u.id AND m.state + 0 = {LEASED} AND m.token = coalesce(u.token, p_tokens[1])
                AND m.nonce = coalesce(u.nonce, p_nonces[1]) AND NOT m.cancel_requested
                AND (m.key IS NULL OR NOT EXISTS (
                    SELECT 1 FROM {message} h
                    WHERE h.queue = q.number AND h.key = m.key AND h.key IS NOT NULL AND h.state = {WAITING})) OFFSET 0) t
        WHERE u.outcome IN ('retry', 'snooze', 'release')
    ), back AS MATERIALIZED (
        UPDATE {message} m SET state = (w.after > 0)::int, ready_ms = p_now + w.after,
            cause = CASE w.outcome WHEN 'retry' THEN 'retried' WHEN 'snooze' THEN 'snoozed' ELSE 'released' END,
            position = CASE WHEN m.group_rank = {RANK_ORDERED} THEN m.position
                WHEN w.outcome = 'release' THEN p_now - {HEAD_OFFSET} ELSE w.position END,
            keeps_place = CASE WHEN m.group_rank = {RANK_ORDERED} AND w.after > 0 THEN true END,
            deliveries = m.deliveries - (w.outcome <> 'retry')::int, attempts = m.attempts + (w.outcome = 'retry')::int,
            error_type = CASE w.outcome WHEN 'retry' THEN w.error_type ELSE m.error_type END,
            error = CASE w.outcome WHEN 'retry' THEN w.error ELSE m.error END
        FROM wanted w WHERE m.ctid = w.place
        RETURNING w.n, w.reason, w.error_type, w.error, m.id, coalesce(m.key, m.freed_key) AS key, m."group", m.rank,
            m.token, m.claims, m.deliveries, m.attempts, m.worker, m.claimed_ms, m.cause, m.ready_ms, m.state, length(m.data) AS size, m.chain, m.group_rank
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            workers, dues, reasons, error_types, runs, sizes, chains, claims, errors)
        SELECT q.number, s.count, pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, e.event, p_op,
            s.ids, s.keys, s.groups, s.ranks, s.tokens, s.deliveries, s.attempts, s.workers,
            CASE WHEN e.event <> 'released' THEN s.dues END, CASE WHEN e.event <> 'released' THEN s.reasons END,
            CASE WHEN e.event <> 'released' THEN s.error_types END, s.runs, s.sizes, s.chains, s.claims,
            CASE WHEN e.event = 'retried' THEN s.errors END
        FROM unnest(ARRAY['retried', 'snoozed', 'released']) AS e (event) CROSS JOIN LATERAL (
            SELECT count(*) AS count, array_agg(b.id) AS ids, array_agg(b.key) AS keys, array_agg(b."group") AS groups,
                array_agg(b.rank) AS ranks, array_agg(b.token) AS tokens, array_agg(b.deliveries) AS deliveries,
                array_agg(b.attempts) AS attempts, array_agg(b.worker) AS workers, array_agg(b.ready_ms) AS dues,
                array_agg(b.reason) AS reasons, array_agg(b.error_type) AS error_types,
                array_agg(p_now - b.claimed_ms) AS runs, array_agg(b.size) AS sizes,
                CASE WHEN count(b.chain) > 0 THEN array_agg(b.chain) END AS chains,
                CASE WHEN max(b.token - b.claims) > 0 THEN array_agg(b.claims) END AS claims,
                CASE WHEN count(nullif(b.error, '')) > 0
                    THEN array_agg(nullif(left(split_part(b.error, chr({TRACEBACK_MARK}), 1), {JOURNAL_ERROR_CHARACTERS_MAX}), '')) END AS errors
            FROM back b WHERE b.cause = e.event HAVING count(*) > 0) s
        WHERE {journal_keeps}(q.journal, e.event)
    ), t AS (
        INSERT INTO {tally} (
            seq, queue, minute, retried, snoozed, released, ready, delayed, leased, runs, run_ms, run_ms_max)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, nullif(count(*) FILTER (WHERE b.cause = 'retried'), 0),
            nullif(count(*) FILTER (WHERE b.cause = 'snoozed'), 0),
            nullif(count(*) FILTER (WHERE b.cause = 'released'), 0),
            count(*) FILTER (WHERE b.state = {READY}), count(*) FILTER (WHERE b.state = {DELAYED}), -count(*),
            nullif(count(*) FILTER (WHERE b.cause <> 'released'), 0),
            sum(greatest(0, p_now - b.claimed_ms)) FILTER (WHERE b.cause <> 'released'),
            max(greatest(0, p_now - b.claimed_ms)) FILTER (WHERE b.cause <> 'released')
        FROM back b HAVING count(*) > 0
    )
    SELECT coalesce(array_agg(b.n), '{}'), array_agg(CASE b.cause WHEN 'retried' THEN 'r' WHEN 'snoozed' THEN 's'
            ELSE 'b' END), count(*) FILTER (WHERE b.state = {READY}),
        array_agg(b."group") FILTER (WHERE b.state = {READY} AND b.group_rank IS NOT NULL),
        array_agg(b."group") FILTER (WHERE b.state = {DELAYED} AND b.group_rank IS NOT NULL)
    INTO places, letters, fresh, v_ready, v_later FROM back b;
    IF v_ready IS NOT NULL THEN
        PERFORM {change_groups}(q.number, v_ready, {JOINS}::smallint, 1, -1, 0);
        IF q.group_mode = {MODE_ORDERED} THEN
            SELECT array_agg(DISTINCT u.name) FILTER (WHERE u.name IS NOT NULL),
                fresh - count(*) + count(DISTINCT u.name) + count(*) FILTER (WHERE u.name IS NULL)
            INTO fresh_groups, fresh FROM unnest(v_ready) AS u (name);
        END IF;
    END IF;
    IF v_later IS NOT NULL THEN
        PERFORM {change_groups}(q.number, v_later, {JOINS_IF_LIMITED}::smallint, 0, -1, 1);
    END IF;
    groups := v_ready || v_later;
END $body$;

-- Settle deliveries that end: done with a result or kept for later, dead, dropped. The caller holds the locks; messages
-- that forward others or belong to a chain are settled by the caller, too.
CREATE OR REPLACE FUNCTION {settle_end}(
    q {queue}, p_now bigint, p_op text, p_ids text[], p_tokens bigint[], p_nonces bytea[], p_outcomes text[],
    p_reasons text[], p_error_types text[], p_errors text[], p_results bytea[], p_result_ttls bigint[],
    p_sources integer[], OUT places bigint[], OUT letters text[], OUT groups text[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v_keys text[];
    v_ids text[];
    v_kept text[];
    v_dead bigint;
BEGIN
    WITH wanted AS MATERIALIZED (
        SELECT u.n, coalesce(u.outcome, 'done') AS outcome, coalesce(u.reason, 'rejected') AS reason, u.error_type,
            u.error, u.result, u.result_ttl, t.place
        FROM unnest(p_ids, p_tokens, p_nonces, p_outcomes, p_reasons, p_error_types, p_errors, p_results,
            p_result_ttls) WITH ORDINALITY
            AS u (id, token, nonce, outcome, reason, error_type, error, result, result_ttl, n)
        CROSS JOIN LATERAL (
            SELECT m.ctid AS place FROM {message} m
            WHERE m.queue = q.number AND m.id = u.id AND m.state + 0 = {LEASED} AND m.token = coalesce(u.token, p_tokens[1])
                AND m.nonce = coalesce(u.nonce, p_nonces[1]) AND m.chain IS NULL
                AND (NOT m.cancel_requested OR coalesce(u.outcome, 'done') = 'done')
                AND (m.key IS NULL OR NOT EXISTS (
                    SELECT 1 FROM {message} h
                    WHERE h.queue = q.number AND h.key = m.key AND h.key IS NOT NULL AND h.state = {WAITING})) OFFSET 0) t
        WHERE coalesce(u.outcome, 'done') IN ('done', 'dead', 'drop')
            AND (p_sources IS NULL OR u.n <> ALL (p_sources))
    ), buried AS (
        UPDATE {message} m SET state = {DEAD}, ended_ms = p_now, reason = w.reason, error_type = w.error_type,
            error = w.error, key = coalesce(m.key, m.freed_key), freed_key = NULL,
            attempts = m.attempts + (w.reason IN ('retries_exhausted', 'retry_policy_failed'))::int
        FROM wanted w WHERE m.ctid = w.place AND w.outcome = 'dead'
        RETURNING w.n, 'dead' AS event, w.result, w.result_ttl, m.id, m.key, m."group", m.rank, m.token, m.claims,
            m.deliveries, m.attempts, m.worker, m.claimed_ms, m.published_ms, m.ready_ms, m.cancel_requested, m.reason,
            m.error_type, m.error, m.data, m.group_rank, m.key_mode
    ), removed AS (
        DELETE FROM {message} m USING wanted w WHERE m.ctid = w.place AND w.outcome <> 'dead'
        RETURNING w.n, CASE w.outcome WHEN 'drop' THEN 'dropped' ELSE 'done' END AS event, w.result, w.result_ttl,
            m.id, coalesce(m.key, m.freed_key), m."group", m.rank, m.token, m.claims, m.deliveries, m.attempts, m.worker,
            m.claimed_ms, m.published_ms, m.ready_ms, m.cancel_requested, m.reason, m.error_type, m.error, m.data,
            m.group_rank, m.key_mode
    ), ended AS MATERIALIZED (
        SELECT * FROM buried UNION ALL SELECT * FROM removed
    ), r AS (
        INSERT INTO {result} (queue, id, data, until_ms)
        SELECT q.number, e.id, e.result, p_now + e.result_ttl FROM ended e
        WHERE e.event = 'done' AND e.result IS NOT NULL
        ON CONFLICT (queue, id) DO UPDATE SET data = excluded.data, until_ms = excluded.until_ms
    ), c AS (
        INSERT INTO {completed}
        SELECT nextval('{sequence}'), q.number, e.id, e.key, e."group", e.rank, e.token, e.deliveries, e.attempts,
            e.published_ms, e.ready_ms, e.cancel_requested, p_now, e.reason, e.error_type, e.error, e.data
        FROM (SELECT * FROM ended o ORDER BY o.n) e WHERE e.event = 'done' AND q.completed_max > 0
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            workers, causes, reasons, error_types, runs, sizes, claims, errors)
        SELECT q.number, s.count, pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, k.event, p_op,
            s.ids, s.keys, s.groups, s.ranks, s.tokens, s.deliveries, s.attempts, s.workers,
            CASE WHEN k.event = 'dropped' THEN ARRAY['drop'] END, CASE WHEN k.event = 'dead' THEN s.reasons END,
            CASE WHEN k.event = 'dead' THEN s.error_types END, s.runs, s.sizes, s.claims, s.errors
        FROM unnest(ARRAY['done', 'dead', 'dropped']) AS k (event) CROSS JOIN LATERAL (
            SELECT count(*) AS count, array_agg(e.id) AS ids, array_agg(e.key) AS keys, array_agg(e."group") AS groups,
                array_agg(e.rank) AS ranks, array_agg(e.token) AS tokens, array_agg(e.deliveries) AS deliveries,
                array_agg(e.attempts) AS attempts, array_agg(e.worker) AS workers, array_agg(e.reason) AS reasons,
                array_agg(e.error_type) AS error_types, array_agg(p_now - e.claimed_ms) AS runs,
                array_agg(length(e.data)) AS sizes,
                CASE WHEN max(e.token - e.claims) > 0 THEN array_agg(e.claims) END AS claims,
                CASE WHEN k.event = 'dead' AND count(nullif(e.error, '')) > 0
                    THEN array_agg(nullif(left(split_part(e.error, chr({TRACEBACK_MARK}), 1), {JOURNAL_ERROR_CHARACTERS_MAX}), '')) END AS errors
            FROM ended e WHERE e.event = k.event HAVING count(*) > 0) s
        WHERE {journal_keeps}(q.journal, k.event)
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, done, dead, dropped, dead_kept, leased, runs, run_ms, run_ms_max)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, nullif(count(*) FILTER (WHERE e.event = 'done'), 0),
            nullif(count(*) FILTER (WHERE e.event = 'dead'), 0), nullif(count(*) FILTER (WHERE e.event = 'dropped'), 0),
            nullif(count(*) FILTER (WHERE e.event = 'dead'), 0), -count(*), count(*),
            sum(greatest(0, p_now - e.claimed_ms)), max(greatest(0, p_now - e.claimed_ms))
        FROM ended e HAVING count(*) > 0
    )
    SELECT coalesce(array_agg(e.n), '{}'),
        array_agg(CASE e.event WHEN 'done' THEN 'd' WHEN 'dead' THEN 'x' ELSE 'p' END),
        array_agg(e.key) FILTER (WHERE e.key IS NOT NULL AND e.event <> 'done'),
        array_agg(e.id) FILTER (WHERE e.key IS NOT NULL AND e.event <> 'done'),
        count(*) FILTER (WHERE e.event = 'dead'), array_agg(e."group") FILTER (WHERE e.group_rank IS NOT NULL),
        array_agg(e.id) FILTER (WHERE e.event = 'dead' AND e.key_mode = {LIVE_OR_DEAD})
    INTO places, letters, v_keys, v_ids, v_dead, groups, v_kept FROM ended e;
    IF groups IS NOT NULL THEN
        PERFORM {change_groups}(q.number, groups, {JOINS_IF_LIMITED}::smallint, 0, -1, 0);
    END IF;
    IF v_keys IS NOT NULL THEN
        DELETE FROM {window} w WHERE w.queue = q.number AND w.key = ANY (v_keys) AND w.message_id = ANY (v_ids);
    END IF;
    IF v_kept IS NOT NULL THEN
        PERFORM {keep_keys}(q.number, v_kept);
    END IF;
    IF q.completed_max > 0 THEN
        PERFORM {trim_completed}(q.number, q.completed_max, {RECLAIM_MAX} + cardinality(places));
    END IF;
    WHILE v_dead > 0 LOOP
        EXIT WHEN {trim_dead}(q, p_now) = 0;
        v_dead := v_dead - {RECLAIM_MAX};
    END LOOP;
END $body$;

-- Settle one delivery; the caller has locked its row and checked its token and nonce.
CREATE OR REPLACE FUNCTION {settle_one}(
    q {queue}, m {message}, p_now bigint, p_op text, p_outcome text, p_after bigint, p_reason text, p_error_type text,
    p_error text, p_result bytea, p_result_ttl bigint, p_begun text[], OUT letter text, OUT fresh bigint,
    OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v_ready bigint := p_now + p_after;
    v_state smallint := (p_after > 0)::int;
    v_event text;
BEGIN
    fresh := 0;
    followups := '{}';
    IF p_outcome = 'done' THEN
        letter := 'd';
        IF p_result IS NOT NULL THEN
            INSERT INTO {result} (queue, id, data, until_ms) VALUES (q.number, m.id, p_result, p_now + p_result_ttl)
            ON CONFLICT (queue, id) DO UPDATE SET data = excluded.data, until_ms = excluded.until_ms;
        END IF;
        SELECT f.fresh, f.followups INTO fresh, followups FROM {end_message}(q, m, p_now, p_op, 'done', NULL, p_begun) f;
        RETURN;
    END IF;
    IF m.cancel_requested THEN
        letter := 'c';
        SELECT f.fresh, f.followups INTO fresh, followups FROM {end_message}(q, m, p_now, p_op, 'cancelled', p_outcome) f;
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
            -- A failure of the handler ended it, and the dead letter counts that failure, too.
            m.attempts := m.attempts + 1;
        END IF;
        SELECT f.fresh, f.followups INTO fresh, followups FROM {end_message}(q, m, p_now, p_op, 'dead') f;
        PERFORM {trim_dead}(q, p_now);
        RETURN;
    ELSIF p_outcome = 'drop' THEN
        letter := 'p';
        SELECT f.fresh, f.followups INTO fresh, followups FROM {end_message}(q, m, p_now, p_op, 'dropped', 'drop') f;
        RETURN;
    END IF;
    IF m.key IS NOT NULL AND EXISTS (
        SELECT 1 FROM {message} h WHERE h.queue = q.number AND h.key = m.key AND h.key IS NOT NULL AND h.state = {WAITING})
    THEN
        letter := 'e';
        SELECT f.fresh, f.followups INTO fresh, followups FROM {end_message}(q, m, p_now, p_op, 'replaced', p_outcome) f;
        RETURN;
    END IF;
    IF p_outcome = 'release' THEN
        letter := 'b';
        fresh := 1;
        m.deliveries := m.deliveries - 1;
        UPDATE {message} t SET state = {READY}, cause = 'released', ready_ms = p_now,
            position = CASE WHEN t.group_rank = {RANK_ORDERED} THEN t.position ELSE p_now - {HEAD_OFFSET} END,
            deliveries = m.deliveries
        WHERE t.queue = q.number AND t.id = m.id;
        IF m.group_rank IS NOT NULL THEN
            PERFORM {change_group}(q.number, m."group", {LEASED}::smallint, {READY}::smallint);
        END IF;
        INSERT INTO {tally} (seq, queue, minute, released, ready, leased)
        VALUES (nextval('{sequence}'), q.number, p_now / 60000, 1, 1, -1);
        PERFORM {write_event}(q, p_now, p_op, 'released', m, NULL, true);
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
    UPDATE {message} t SET state = v_state, cause = v_event, ready_ms = v_ready,
        position = CASE WHEN t.group_rank = {RANK_ORDERED} THEN t.position ELSE nextval('{sequence}') END,
        keeps_place = CASE WHEN t.group_rank = {RANK_ORDERED} AND v_state = {DELAYED} THEN true END,
        deliveries = m.deliveries, attempts = m.attempts, error_type = m.error_type, error = m.error
    WHERE t.queue = q.number AND t.id = m.id;
    IF m.group_rank IS NOT NULL THEN
        PERFORM {change_group}(q.number, m."group", {LEASED}::smallint, v_state);
    END IF;
    INSERT INTO {tally} (seq, queue, minute, retried, snoozed, ready, delayed, leased, runs, run_ms, run_ms_max)
    VALUES (
        nextval('{sequence}'), q.number, p_now / 60000, nullif((letter = 'r')::int, 0), nullif((letter = 's')::int, 0),
        1 - v_state, v_state, -1, 1, greatest(0, p_now - m.claimed_ms), greatest(0, p_now - m.claimed_ms));
    PERFORM {write_event}(q, p_now, p_op, v_event, m, NULL, true, v_ready, p_reason, p_error_type);
END $body$;
