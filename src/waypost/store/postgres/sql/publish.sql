-- Publish a batch, once per operation, within the queue's `max_pending`.
-- Touches: queue (read), operation, sleeper, and what `accept`, `end_message` and `apply_followups` touch.
-- Keeps: with `max_pending`, publishers of one queue wait for each other, so that together they never exceed it.
-- Without `p_ttl` it is a part of the caller's own transaction: the operation cannot be repeated; no maintenance is
-- done, since its locks would be held until the transaction ends; a full queue is returned as a reply (F) and not
-- raised, since an error would abort the transaction; the sleepers to wake are chosen at its commit. With `p_ttl` 0 it
-- is a part of another function here: the same, but a full queue is raised, and sleepers are chosen as that function
-- does.

CREATE OR REPLACE FUNCTION {publish}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_envelopes bytea[],
    p_priorities smallint[], p_groups text[], p_delays bigint[], p_ats bigint[], p_copies bytea[], p_keys text[],
    p_windows bigint[], p_rules text[], p_forwarded boolean[], p_chains text[] DEFAULT NULL,
    p_places integer[] DEFAULT NULL, p_afters text[] DEFAULT NULL, p_capped boolean[] DEFAULT NULL,
    p_expires bigint[] DEFAULT NULL, p_modes smallint[] DEFAULT NULL
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_first text;
    v_due bigint;
    v_pending bigint;
    v_over bigint;
    v_timers boolean := p_delays IS NOT NULL OR p_ats IS NOT NULL OR p_rules IS NOT NULL OR p_forwarded IS NOT NULL;
    v_done record;
    v_wake text[];
    m {message};
    v_dropped bigint := 0;
    v_ended record;
    v_tidy boolean := false;
    v_more json[] := '{}';
    v_lapsed record;
BEGIN
    -- The lock is taken before the row is read: see remove.sql.
    PERFORM pg_advisory_xact_lock_shared({lock_key}('removal'), hashtext(p_queue));
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open_queue}(p_queue);
    END IF;
    IF p_ttl IS NULL THEN
        PERFORM {check_snapshot}(q.number);
        PERFORM set_config('waypost.in_transaction', 'on', true);
    END IF;
    IF p_ttl IS NULL AND (q.max_pending IS NOT NULL OR q.group_capped) THEN
        IF q.overload = 'block' OR current_setting('transaction_isolation') <> 'read committed' THEN
            RETURN CASE q.overload WHEN 'block' THEN '["B", null, [], []]' ELSE '["I", null, [], []]' END;
        END IF;
        BEGIN
            RETURN {publish}(
                p_queue, p_clock, p_session, p_number, 0, p_envelopes, p_priorities, p_groups, p_delays, p_ats,
                p_copies, p_keys, p_windows, p_rules, p_forwarded, p_chains, p_places, p_afters, p_capped, p_expires,
                p_modes);
        EXCEPTION WHEN SQLSTATE 'WPFUL' THEN
            RETURN json_build_array('F', ARRAY[SQLERRM], '{}'::text[], '{}'::text[])::text;
        END;
    END IF;
    IF p_ttl > 0 THEN
        v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
        IF v_first IS NOT NULL THEN
            RETURN v_first;
        END IF;
    END IF;
    IF NOT q.made THEN
        q := {make_queue}(q);
    END IF;
    IF p_keys IS NOT NULL AND {next_lapse}(q.number) <= v_now THEN
        v_lapsed := {lapse_keys}(q, v_now, v_op, p_keys);
    END IF;
    IF q.max_pending IS NOT NULL OR q.group_capped THEN
        PERFORM pg_advisory_xact_lock({lock_key}('pending'), q.number);
        IF coalesce(p_ttl, 0) = 0 AND {many_counts}(q.number) THEN
            -- Each publish sums the rows of counts, and there may be no other step that folds them.
            PERFORM {merge_counts}(q.number);
        END IF;
        SELECT h.ready + h.delayed + h.waiting INTO v_pending FROM {state_counts}(q.number) h;
    END IF;
    IF v_timers THEN
        v_due := {next_due}(q.number);
    END IF;
    v_done := {accept}(
        q, v_now, v_op, p_envelopes, p_priorities, p_groups, p_delays, p_ats, p_copies, p_keys, p_windows, p_rules,
        p_forwarded, p_chains, p_places, p_afters, p_capped);
    IF p_expires IS NOT NULL THEN
        PERFORM {set_expiries}(q, v_now, v_done.first_seq, p_envelopes, p_expires);
    END IF;
    IF p_modes IS NOT NULL THEN
        PERFORM {set_key_modes}(q, v_done.first_seq, p_envelopes, p_modes);
    END IF;
    IF v_lapsed IS NOT NULL THEN
        v_done.followups := v_lapsed.followups || v_done.followups;
        v_done.fresh := v_done.fresh + v_lapsed.fresh;
    END IF;
    IF q.group_capped AND q.group_mode > 0 AND v_done.capped_groups IS NOT NULL THEN
        v_ended := {keep_group_caps}(q, v_now, v_op, v_done.first_seq, v_done.others, v_done.capped_groups);
        v_done.followups := v_done.followups || v_ended.followups;
        v_pending := v_pending - v_ended.dropped;
    END IF;
    IF q.max_pending IS NOT NULL AND v_done.added > 0 THEN
        -- After `max_pending` was lowered by much, it is reached in several steps, so that no publish has to drop most
        -- of a queue.
        v_over := least(v_pending + v_done.added - q.max_pending, v_done.added + {BURY_MAX});
        IF v_over > 0 AND q.overload = 'drop_oldest' THEN
            FOR m IN
                SELECT c.* FROM generate_series({PRIORITY_MAX}, 0, -1) AS ranks (rank), LATERAL (
                    SELECT t.* FROM {message} t
                    WHERE q.group_mode = 0 AND t.queue = q.number AND t.state = {READY} AND t.rank = ranks.rank AND t.seq < v_done.first_seq
                        AND (v_done.others IS NULL OR t.id <> ALL (v_done.others))
                    ORDER BY t.position, t.id LIMIT v_over FOR NO KEY UPDATE SKIP LOCKED) c
                LIMIT v_over
            LOOP
                v_done.followups := v_done.followups || ({end_message}(q, m, v_now, v_op, 'dropped', 'overload')).followups;
                v_dropped := v_dropped + 1;
            END LOOP;
            IF q.group_mode > 0 THEN
                v_ended := {drop_longest}(q, v_now, v_op, v_done.first_seq, v_done.others, v_over);
                v_done.followups := v_done.followups || v_ended.followups;
                v_dropped := v_ended.dropped;
            END IF;
        END IF;
        IF v_over > v_dropped THEN
            RAISE EXCEPTION '% %', v_pending, q.max_pending USING ERRCODE = 'WPFUL';
        END IF;
    END IF;
    IF v_done.passing > 0 AND q.max_pending IS NOT NULL THEN
        PERFORM {count_over_cap}(v_now, array_fill(q.number, ARRAY[v_done.passing::int]));
    END IF;
    IF v_timers THEN
        v_done.fresh := v_done.fresh + coalesce(({next_due}(q.number) < coalesce(v_due, 9223372036854775807))::int, 0);
    END IF;
    v_wake := {wake}(q, v_now, v_done.fresh);
    IF cardinality(v_done.followups) > 0 THEN
        v_more := {apply_followups}(v_now, v_done.followups);
    END IF;
    v_first := json_build_array(
        CASE WHEN v_done.letters = repeat('q', v_done.added::int) THEN '' ELSE v_done.letters END,
        CASE WHEN v_done.letters ~ '[uce]' THEN v_done.others END, v_wake, v_more, {take_side_effects}())::text;
    IF coalesce(p_ttl, 0) > 0 THEN
        v_tidy := {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first);
        IF v_tidy OR {tidy_is_due_for}(q.number, v_dropped + CASE WHEN v_timers OR p_keys IS NOT NULL OR p_chains IS NOT NULL
            THEN cardinality(p_envelopes) ELSE 0 END)
        THEN
            PERFORM {tidy}(q, v_now);
        END IF;
    END IF;
    RETURN v_first;
END $body$;

-- The same for one message that is ready at once and has no key, with as few statements as possible: for a caller that
-- publishes one by one, each statement costs as much as the insert itself.
CREATE OR REPLACE FUNCTION {publish}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_id text, p_envelope bytea,
    p_priority smallint, p_group text, p_copy bytea
) RETURNS text LANGUAGE plpgsql {few_settings} AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
    v_first text := '["", null, [], []]';
    v_in_time boolean := p_ttl IS NULL OR {stamp}(p_session) BETWEEN v_now - p_ttl AND v_now + {STAMP_AHEAD_MS};
    -- The lock is tried before the row is read: see remove.sql. If it is not free, the general function waits for it.
    v_free boolean := pg_try_advisory_xact_lock_shared({lock_key}('removal'), hashtext(p_queue));
    v record;
BEGIN
    SELECT t.number, t.journal, t.max_pending, t.group_mode, NOT t.group_capped AND t.made AND (
            t.removed_ms IS NULL OR p_ttl IS NULL OR {stamp}(p_session) > t.removed_ms) AND v_free AS plain, nextval('{sequence}') AS seq, pg_current_xact_id()::text::bigint AS xid,
        CASE WHEN p_ttl IS NOT NULL AND NOT t.paused THEN (
            SELECT coalesce(bool_or(NOT s.awake OR s.woken_ms > v_now - 250), true) FROM {sleeper} s
            WHERE s.queue = t.number AND s.until_ms > v_now AND s.name NOT LIKE '~%') END AS wake
    INTO v FROM {queue} t WHERE t.name = p_queue;
    IF p_ttl IS NOT NULL AND v.max_pending IS NULL AND v_in_time AND v.plain THEN
        -- Stored first: a repeat finds it and writes nothing else, or waits here for an earlier one that is not
        -- committed.
        INSERT INTO {operation} AS o (queue, slot, session, number, until_ms, result)
        SELECT v.number, p_number % {REPLAY_MAX}, substr(p_session, 1, {SESSION_BYTES}), p_number, v_now + p_ttl + {STAMP_AHEAD_MS},
            encode(substr(p_session, {MARK_AT}, {MARK_BYTES}), 'hex') || v_first
        WHERE v.number IS NOT NULL
        ON CONFLICT (queue, session, slot) DO UPDATE
            SET number = excluded.number, until_ms = excluded.until_ms, result = excluded.result
            WHERE o.number < excluded.number;
    END IF;
    IF NOT FOUND OR v.max_pending IS NOT NULL OR NOT v_in_time OR NOT v.plain
        OR p_ttl IS NULL AND current_setting('transaction_isolation') <> 'read committed'
    THEN
        -- Use the general function for: a queue that does not exist yet, a queue with `max_pending`, a repeated
        -- operation, an operation that must be refused, and a transaction with an old snapshot.
        RETURN {publish}(
            p_queue, p_clock, p_session, p_number, p_ttl, ARRAY[p_envelope], ARRAY[p_priority], ARRAY[p_group], NULL,
            NULL, ARRAY[p_copy], NULL, NULL, NULL, NULL);
    END IF;
    INSERT INTO {message} (seq, position, ready_ms, published_ms, queue, state, rank, id, "group", group_rank, data)
    VALUES (
        v.seq, v.seq, v_now, v_now, v.number, {READY}, {PRIORITY_MAX} - p_priority, p_id, p_group,
        {group_rank}(v.group_mode, p_group, ({PRIORITY_MAX} - p_priority)::smallint), p_envelope);
    IF v.group_mode > 0 THEN
        INSERT INTO {group_change} (seq, queue, joins, names, ready, running, later)
        VALUES (v.seq, v.number, {JOINS}, ARRAY[coalesce(p_group, '')], '{1}', '{0}', '{0}');
    END IF;
    INSERT INTO {tally} (seq, queue, minute, published, ready, wake)
    VALUES (v.seq, v.number, v_now / 60000, 1, 1, CASE WHEN p_ttl IS NULL THEN 1 END);
    IF v.journal IN ('all', 'full') THEN
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, groups, ranks, tokens, deliveries, attempts, sizes,
            bodies)
        VALUES (
            v.number, 1, v.xid, v.seq, v_now, 'published', {operation_id}(p_session, p_number), ARRAY[p_id],
            CASE WHEN p_group IS NOT NULL THEN ARRAY[p_group] END, ARRAY[{PRIORITY_MAX} - p_priority], '{0}', '{0}', '{0}',
            ARRAY[length(p_envelope)],
            CASE WHEN v.journal = 'full' THEN ARRAY[coalesce(p_copy, p_envelope)] END);
    END IF;
    IF v.wake THEN
        SELECT json_build_array('', NULL, {wake}(t, v_now, 1), '{}'::text[])::text INTO v_first
        FROM {queue} t WHERE t.number = v.number;
        UPDATE {operation} o SET result = left(o.result, {MARK_DIGITS}) || v_first
        WHERE o.queue = v.number AND o.session = substr(p_session, 1, {SESSION_BYTES}) AND o.slot = p_number % {REPLAY_MAX};
    END IF;
    -- Maintenance delays the handler of a message that wakes a worker, so such a publish leaves it to the next settle,
    -- unless more than 512 rows of counts have accumulated.
    IF p_ttl IS NOT NULL AND (v.xid % 64 = 0 AND v.wake IS NOT TRUE OR (v.xid % 16 = 8 OR p_number % 16 = 8)
        AND {counts_exceed}(v.number, CASE WHEN v.wake THEN 512 ELSE 64 END))
    THEN
        PERFORM {tidy}(t, v_now) FROM {queue} t WHERE t.number = v.number;
    END IF;
    RETURN v_first;
END $body$;
