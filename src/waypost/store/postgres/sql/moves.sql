-- State changes of a message: its end, the release of its key, its entry in the journal, and the side effects of a
-- step.
-- Touches: message, completed, window, entry, tally, and what `end_followups` touches. Keeps: the ledger, the journal
-- and the keys are updated with every change in the same transaction; the owner and the next generation of a key change
-- only under the lock of the owner's row.

-- Record a side effect of a step (see `SideEffect` in values.py) for its reply. Side effects are collected in a setting
-- of the transaction, one line of JSON each, since the functions between the verb and this one differ from verb to
-- verb.
CREATE OR REPLACE FUNCTION {add_side_effect}(p_queue text, p_event text, p_reason text, p_ids text[], p_tokens bigint[])
RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    IF cardinality(p_ids) > 0 THEN
        PERFORM set_config(
            'waypost.side_effects', coalesce(current_setting('waypost.side_effects', true), '')
                || json_build_array(p_queue, p_event, p_reason, p_ids, p_tokens) || E'\n', true);
    END IF;
END $body$;

-- Return the recorded side effects and clear them: one each for the first messages of an event, and one with the number
-- of the others; null if there are none.
CREATE OR REPLACE FUNCTION {take_side_effects}() RETURNS json LANGUAGE plpgsql AS $body$
DECLARE
    v_lines text := current_setting('waypost.side_effects', true);
BEGIN
    IF coalesce(v_lines, '') = '' THEN
        RETURN NULL;
    END IF;
    PERFORM set_config('waypost.side_effects', '', true);
    RETURN (
        WITH changed AS MATERIALIZED (
            SELECT l.line ->> 0 AS queue, l.line ->> 1 AS event, l.line ->> 2 AS reason, i.id,
                (l.line -> 4 ->> (i.n - 1)::int)::bigint AS token, l.n AS line, i.n,
                row_number() OVER (PARTITION BY l.line ->> 0, l.line ->> 1 ORDER BY l.n, i.n) AS place
            FROM (
                SELECT u.line::json AS line, u.n
                FROM unnest(string_to_array(rtrim(v_lines, E'\n'), E'\n')) WITH ORDINALITY AS u (line, n)) l
            CROSS JOIN LATERAL json_array_elements_text(l.line -> 3) WITH ORDINALITY AS i (id, n)
        )
        SELECT json_agg(o.one ORDER BY o.line, o.n) FROM (
            SELECT json_build_array(c.queue, c.event, c.id, c.token, c.reason) AS one, c.line, c.n
            FROM changed c WHERE c.place <= {SIDE_EFFECTS_MAX}
            UNION ALL
            SELECT json_build_array(c.queue, c.event, NULL, NULL, c.reason, count(*)), max(c.line), max(c.n)
            FROM changed c WHERE c.place > {SIDE_EFFECTS_MAX} GROUP BY c.queue, c.event, c.reason) o);
END $body$;

-- Write one event of one message to the journal; `m.id` is null for an event of the queue itself.
CREATE OR REPLACE FUNCTION {write_event}(
    q {queue}, p_now bigint, p_op text, p_event text, m {message}, p_cause text DEFAULT NULL,
    p_run boolean DEFAULT false, p_due bigint DEFAULT NULL, p_reason text DEFAULT NULL,
    p_error_type text DEFAULT NULL
) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    IF NOT {journal_keeps}(q.journal, p_event) THEN
        RETURN;
    END IF;
    INSERT INTO {entry} (
        queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
        workers, dues, causes, reasons, error_types, runs, sizes, chains, claims, errors
    ) VALUES (
        q.number, 1, pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, p_event, p_op,
        CASE WHEN m.id IS NOT NULL THEN ARRAY[m.id] END, CASE WHEN coalesce(m.key, m.freed_key) IS NOT NULL THEN ARRAY[coalesce(m.key, m.freed_key)] END,
        CASE WHEN m."group" IS NOT NULL THEN ARRAY[m."group"] END,
        CASE WHEN m.rank IS NOT NULL THEN ARRAY[m.rank] END,
        CASE WHEN m.token IS NOT NULL THEN ARRAY[m.token] END,
        CASE WHEN m.deliveries IS NOT NULL THEN ARRAY[m.deliveries] END,
        CASE WHEN m.attempts IS NOT NULL THEN ARRAY[m.attempts] END,
        CASE WHEN p_run THEN ARRAY[m.worker] END,
        CASE WHEN p_due IS NOT NULL THEN ARRAY[p_due] END, CASE WHEN p_cause IS NOT NULL THEN ARRAY[p_cause] END,
        CASE WHEN p_reason IS NOT NULL THEN ARRAY[p_reason] END,
        CASE WHEN p_error_type IS NOT NULL THEN ARRAY[p_error_type] END,
        CASE WHEN p_run THEN ARRAY[p_now - m.claimed_ms] END,
        CASE WHEN m.data IS NOT NULL THEN ARRAY[length(m.data)] END,
        CASE WHEN m.chain IS NOT NULL THEN ARRAY[m.chain] END,
        CASE WHEN m.token <> m.claims THEN ARRAY[m.claims] END,
        CASE WHEN p_event IN ('retried', 'dead') AND m.error <> '' THEN ARRAY[nullif(left(split_part(m.error, chr({TRACEBACK_MARK}), 1), {JOURNAL_ERROR_CHARACTERS_MAX}), '')] END
    );
END $body$;

-- Count a message that moves from state `p_from` to state `p_to`; null means outside of the queue.
CREATE OR REPLACE FUNCTION {count_move}(p_queue integer, p_now bigint, p_from smallint, p_to smallint) RETURNS void
LANGUAGE plpgsql AS $body$
BEGIN
    INSERT INTO {tally} (seq, queue, minute, ready, delayed, leased, waiting, dead_kept)
    SELECT nextval('{sequence}'), p_queue, p_now / 60000,
        coalesce((p_to = 0)::int, 0) - coalesce((p_from = 0)::int, 0),
        coalesce((p_to = 1)::int, 0) - coalesce((p_from = 1)::int, 0),
        coalesce((p_to = 2)::int, 0) - coalesce((p_from = 2)::int, 0),
        coalesce((p_to = 3)::int, 0) - coalesce((p_from = 3)::int, 0),
        coalesce((p_to = 4)::int, 0) - coalesce((p_from = 4)::int, 0);
END $body$;

-- End a message: count and journal the end, and release its key or pass it to the next generation. The caller holds the
-- lock of its row. `p_begun` are the messages that it forwarded. Returns how many messages became claimable, and the
-- followups that the caller must pass to `apply_followups` after its own work.
CREATE OR REPLACE FUNCTION {end_message}(
    q {queue}, m {message}, p_now bigint, p_op text, p_end text, p_cause text DEFAULT NULL,
    p_begun text[] DEFAULT NULL, OUT fresh integer, OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    h {message};
    v_ready bigint;
    -- The delivery ended by its outcome; see MINUTE_COUNTERS in values.py.
    v_run bigint := CASE WHEN m.state = {LEASED} AND coalesce(p_cause, '') NOT IN ('expired', 'release')
        THEN greatest(0, p_now - m.claimed_ms) END;
BEGIN
    PERFORM {write_event}(
        q, p_now, p_op, p_end, m, p_cause, m.state = {LEASED}, NULL, CASE WHEN p_end = 'dead' THEN m.reason END,
        CASE WHEN p_end = 'dead' THEN m.error_type END);
    -- The same rule as `is_side_effect` in values.py.
    IF p_end = 'dead' AND m.state <> {LEASED} OR p_cause IN ('overload', 'expired', 'publish', 'parked', 'lapsed') THEN
        PERFORM {add_side_effect}(
            q.name, p_end, CASE WHEN p_end = 'dead' THEN m.reason ELSE p_cause END, ARRAY[m.id], ARRAY[m.token]);
    END IF;
    INSERT INTO {tally} (
        seq, queue, minute, ready, delayed, leased, waiting, dead_kept, done, dead, dropped, cancelled, replaced, runs,
        run_ms, run_ms_max)
    VALUES (
        nextval('{sequence}'), q.number, p_now / 60000, -nullif((m.state = {READY})::int, 0),
        -nullif((m.state = {DELAYED})::int, 0), -nullif((m.state = {LEASED})::int, 0), -nullif((m.state = {WAITING})::int, 0),
        nullif((p_end = 'dead')::int - (m.state = {DEAD})::int, 0), nullif((p_end = 'done')::int, 0),
        nullif((p_end = 'dead')::int, 0), nullif((p_end = 'dropped')::int, 0), nullif((p_end = 'cancelled')::int, 0),
        nullif((p_end = 'replaced')::int, 0), CASE WHEN v_run IS NOT NULL THEN 1 END, v_run, v_run);
    IF p_end = 'dead' THEN
        UPDATE {message} t SET state = {DEAD}, ended_ms = p_now, reason = m.reason, error_type = m.error_type,
            error = m.error, attempts = m.attempts, keeps_place = NULL, key = coalesce(t.key, t.freed_key), freed_key = NULL
        WHERE t.queue = q.number AND t.id = m.id;
    ELSE
        DELETE FROM {message} t WHERE t.queue = q.number AND t.id = m.id;
        IF p_end = 'done' AND q.completed_max > 0 THEN
            INSERT INTO {completed} VALUES (
                nextval('{sequence}'), q.number, m.id, coalesce(m.key, m.freed_key), m."group", m.rank, m.token,
                m.deliveries, m.attempts, m.published_ms, m.ready_ms, m.cancel_requested, p_now, m.reason, m.error_type, m.error, m.data);
            PERFORM {trim_completed}(q.number, q.completed_max, {RECLAIM_MAX});
        END IF;
    END IF;
    fresh := 0;
    IF m.group_rank IS NOT NULL THEN
        PERFORM {change_group}(q.number, m."group", m.state, NULL, m.keeps_place);
        -- While the user's transaction was open, claims skipped the group because its first message was locked.
        IF m.keeps_place OR m.group_rank = {RANK_ORDERED} AND m.state = {READY}
            AND current_setting('waypost.in_transaction', true) = 'on'
        THEN
            fresh := {count_freed}(q, p_now, ARRAY[m."group"]);
        END IF;
    END IF;
    followups := {end_followups}(q, m, p_now, p_end, p_begun);
    IF m.key IS NULL THEN
        RETURN;
    END IF;
    IF p_end <> 'done' THEN
        DELETE FROM {window} w WHERE w.queue = q.number AND w.key = m.key AND w.message_id = m.id;
    END IF;
    IF m.state >= {WAITING} THEN
        RETURN;
    END IF;
    SELECT * INTO h FROM {message} t
    WHERE t.queue = q.number AND t.key = m.key AND t.key IS NOT NULL AND t.state = {WAITING} FOR UPDATE;
    IF NOT FOUND THEN
        IF p_end = 'dead' AND m.key_mode = {LIVE_OR_DEAD} THEN
            PERFORM {keep_keys}(q.number, ARRAY[m.id]);
        END IF;
        RETURN;
    END IF;
    -- Without a delay: now, even if the clock was set back since the publish.
    v_ready := CASE WHEN h.ready_ms = h.published_ms THEN p_now ELSE greatest(h.ready_ms, p_now) END;
    UPDATE {message} t
    SET state = CASE WHEN v_ready > p_now THEN {DELAYED} ELSE {READY} END, ready_ms = v_ready, position = nextval('{sequence}')
    WHERE t.queue = q.number AND t.id = h.id;
    PERFORM {count_move}(q.number, p_now, 3::smallint, (CASE WHEN v_ready > p_now THEN 1 ELSE 0 END)::smallint);
    IF h.group_rank IS NOT NULL THEN
        PERFORM {change_group}(
            q.number, h."group", {WAITING}::smallint, (CASE WHEN v_ready > p_now THEN {DELAYED} ELSE {READY} END)::smallint);
    END IF;
    PERFORM {write_event}(q, p_now, p_op, 'promoted', h, 'unparked');
    PERFORM {add_side_effect}(q.name, 'promoted', 'unparked', ARRAY[h.id], ARRAY[h.token]);
    fresh := fresh + (v_ready <= p_now)::int;
END $body$;

-- Keep the keys of these dead letters in use: like the window of a finished message, but without an end.
CREATE OR REPLACE FUNCTION {keep_keys}(p_queue integer, p_ids text[]) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    INSERT INTO {window} (queue, key, message_id, until_ms)
    SELECT p_queue, m.key, m.id, {NO_END_MS} FROM {message} m
    WHERE m.queue = p_queue AND m.id = ANY (p_ids) AND m.key IS NOT NULL ORDER BY m.key
    ON CONFLICT (queue, key) DO UPDATE SET message_id = excluded.message_id, until_ms = excluded.until_ms;
END $body$;

-- Delete finished messages beyond the limit, oldest first, a bounded number at a time. Returns how many were deleted.
CREATE OR REPLACE FUNCTION {trim_completed}(p_queue integer, p_keep bigint, p_limit bigint) RETURNS bigint
LANGUAGE plpgsql AS $body$
DECLARE
    v_gone bigint;
BEGIN
    WITH surplus AS (
        SELECT c.number FROM {completed} c WHERE c.queue = p_queue ORDER BY c.number DESC OFFSET p_keep
    ), oldest AS (
        SELECT s.number FROM surplus s ORDER BY s.number LIMIT p_limit
    ), gone AS (
        DELETE FROM {completed} c USING oldest o WHERE c.queue = p_queue AND c.number = o.number RETURNING 1
    )
    SELECT count(*) INTO v_gone FROM gone;
    RETURN v_gone;
END $body$;

-- Delete dead letters that are too many or too old, a bounded number at a time. Returns how many were deleted.
CREATE OR REPLACE FUNCTION {trim_dead}(q {queue}, p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_surplus bigint := 0;
    v_old bigint := 0;
BEGIN
    IF q.dead_max IS NOT NULL THEN
        v_surplus := greatest(0, (SELECT h.dead_kept FROM {state_counts}(q.number) h) - q.dead_max);
    END IF;
    IF q.dead_keep_ms IS NOT NULL THEN
        SELECT count(*) INTO v_old FROM (
            SELECT 1 FROM {message} t WHERE t.queue = q.number AND t.state = {DEAD} AND t.ended_ms <= p_now - q.dead_keep_ms
            LIMIT {RECLAIM_MAX}) o;
    END IF;
    IF greatest(v_surplus, v_old) = 0 THEN
        RETURN 0;
    END IF;
    RETURN {remove_dead}(
        q, p_now, NULL, CASE WHEN v_surplus > 0 THEN 'dead_max' ELSE 'dead_keep' END,
        least({RECLAIM_MAX}, greatest(v_surplus, v_old)), NULL);
END $body$;

-- Delete the oldest dead letters, or the ones with certain ids, in one statement. Returns how many were deleted.
CREATE OR REPLACE FUNCTION {remove_dead}(q {queue}, p_now bigint, p_op text, p_cause text, p_limit bigint, p_ids text[])
RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_places tid[];
    v_ids text[];
    v_tokens bigint[];
    v_keys text[];
BEGIN
    IF p_ids IS NULL THEN
        SELECT array_agg(c.place) INTO v_places FROM (
            SELECT t.ctid AS place FROM {message} t WHERE t.queue = q.number AND t.state = {DEAD}
            ORDER BY t.ended_ms, t.id LIMIT p_limit FOR UPDATE SKIP LOCKED) c;
    ELSE
        SELECT array_agg(c.place) INTO v_places FROM (
            SELECT t.ctid AS place FROM {message} t
            WHERE t.queue = q.number AND t.id = ANY (p_ids) AND t.state + 0 = {DEAD}
            ORDER BY t.id LIMIT p_limit FOR UPDATE SKIP LOCKED) c;
    END IF;
    WITH chosen AS MATERIALIZED (
        SELECT unnest(v_places) AS place
    ), gone AS MATERIALIZED (
        DELETE FROM {message} m USING chosen c WHERE m.ctid = c.place
        RETURNING m.id, m.key, m."group", m.rank, m.token, m.claims, m.deliveries, m.attempts, m.ended_ms,
            length(m.data) AS size, m.chain, m.key_mode
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            causes, sizes, chains, claims)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'dead_trimmed',
            p_op, array_agg(g.id), array_agg(g.key), array_agg(g."group"), array_agg(g.rank), array_agg(g.token),
            array_agg(g.deliveries), array_agg(g.attempts), ARRAY[p_cause], array_agg(g.size),
            CASE WHEN count(g.chain) > 0 THEN array_agg(g.chain) END,
            CASE WHEN max(g.token - g.claims) > 0 THEN array_agg(g.claims) END
        FROM (SELECT * FROM gone g ORDER BY g.ended_ms, g.id) g WHERE q.journal <> 'off' HAVING count(*) > 0
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, dead_kept)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, -count(*) FROM gone HAVING count(*) > 0
    )
    SELECT array_agg(g.id), array_agg(g.token), array_agg(g.key) FILTER (WHERE g.key_mode = {LIVE_OR_DEAD})
    INTO v_ids, v_tokens, v_keys FROM (SELECT * FROM gone g ORDER BY g.ended_ms, g.id) g;
    IF v_keys IS NOT NULL THEN
        DELETE FROM {window} w WHERE w.queue = q.number AND w.key = ANY (v_keys) AND w.message_id = ANY (v_ids);
    END IF;
    IF p_cause NOT IN ('purge', 'edited') THEN
        PERFORM {add_side_effect}(q.name, 'dead_trimmed', p_cause, v_ids, v_tokens);
    END IF;
    RETURN coalesce(cardinality(v_ids), 0);
END $body$;
