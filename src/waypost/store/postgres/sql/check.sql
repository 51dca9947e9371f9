-- Find damaged rows of a queue, 500 in each call, and repair them with `p_mend`. Touches: queue (read), message, entry,
-- tally. Keeps: a message that no claim can reach becomes the first of its priority; at the end the counts equal those
-- of the rows, and the ledger balances; all repairs are journalled.
-- The reply: the number of rows checked, [kind, id, what was found, what was done] for each damaged row, and the id to
-- continue from or null.

CREATE OR REPLACE FUNCTION {check}(p_queue text, p_clock bigint, p_after text, p_mend boolean) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    m {message};
    v_now bigint := {clock}(p_clock);
    v_found json[] := '{}';
    v_count bigint := 0;
    v_last text;
    v_what text;
    v_done text;
    v_ready integer := 0;
    r record;
BEGIN
    SELECT * INTO q FROM {queue} t WHERE t.name = p_queue;
    IF NOT FOUND THEN
        RETURN json_build_array(0, v_found, NULL)::text;
    END IF;
    FOR r IN
        SELECT t.id, t.state, t.rank, t.lease_end_ms, t.lease_ms, t.nonce, t.ended_ms, t.reason,
            t.group_rank IS NOT NULL AS ranked
        FROM {message} t
        WHERE t.queue = q.number AND t.id > coalesce(p_after, '') ORDER BY t.id LIMIT 500
    LOOP
        v_count := v_count + 1;
        v_last := r.id;
        v_done := NULL;
        v_what := CASE
            WHEN r.state NOT BETWEEN {READY} AND {DEAD} THEN 'its state is ' || r.state || ', so no claim can reach it'
            WHEN r.rank NOT BETWEEN 0 AND {PRIORITY_MAX} THEN 'its priority is ' || {PRIORITY_MAX} - r.rank
            WHEN r.state = {LEASED} AND (r.lease_end_ms IS NULL OR r.lease_ms IS NULL OR r.nonce IS NULL)
                THEN 'it is leased, and its lease has no end or no holder'
            WHEN r.state = {DEAD} AND (r.ended_ms IS NULL OR r.reason IS NULL)
                THEN 'it is a dead letter without a reason or a time'
        END;
        CONTINUE WHEN v_what IS NULL;
        IF p_mend THEN
            -- Read it again: it may have changed since the page was read.
            SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = r.id AND t.state = r.state FOR UPDATE;
            CONTINUE WHEN NOT FOUND;
            IF m.state = {DEAD} THEN
                UPDATE {message} t SET ended_ms = coalesce(t.ended_ms, v_now), reason = coalesce(t.reason, 'unknown'),
                    rank = CASE WHEN t.rank BETWEEN 0 AND {PRIORITY_MAX} THEN t.rank ELSE {RANK_DEFAULT} END
                WHERE t.queue = q.number AND t.id = m.id;
                v_done := 'a dead letter with a reason and a time';
            ELSE
                UPDATE {message} t SET state = {READY}, position = v_now - {HEAD_OFFSET}, ready_ms = v_now, keeps_place = NULL,
                    group_rank = {group_rank}(q.group_mode, t."group", CASE WHEN t.rank BETWEEN 0 AND {PRIORITY_MAX} THEN t.rank ELSE {RANK_DEFAULT}::smallint END),
                    rank = CASE WHEN t.rank BETWEEN 0 AND {PRIORITY_MAX} THEN t.rank ELSE {RANK_DEFAULT} END, nonce = NULL, worker = NULL,
                    claimed_ms = NULL, lease_end_ms = NULL, lease_ms = NULL, cancel_requested = false,
                    cause = CASE WHEN t.claims = 0 THEN NULL
                        WHEN t.cause IN ('expired', 'released', 'retried', 'snoozed', 'redriven') AND m.state <> {LEASED}
                        THEN t.cause ELSE 'expired' END,
                    key = CASE WHEN t.key IS NOT NULL AND NOT EXISTS (
                        SELECT 1 FROM {message} o WHERE o.queue = q.number AND o.key = t.key AND o.key IS NOT NULL
                            AND o.state < {WAITING} AND o.id <> t.id) THEN t.key END
                WHERE t.queue = q.number AND t.id = m.id RETURNING * INTO m;
                PERFORM {write_event}(q, v_now, NULL, 'promoted', m, 'mended');
                IF r.state BETWEEN {READY} AND {WAITING} THEN
                    PERFORM {count_move}(q.number, v_now, r.state, {READY}::smallint);
                END IF;
                IF q.group_mode > 0 THEN
                    -- A message whose state does not exist was counted as ready before, so it is counted as ready here.
                    PERFORM {change_group}(
                        q.number, m."group", CASE WHEN r.state BETWEEN {READY} AND {WAITING} THEN CASE WHEN r.ranked THEN r.state END
                            WHEN r.ranked THEN {READY} END::smallint, {READY}::smallint);
                END IF;
                v_ready := v_ready + 1;
                v_done := 'ready at the head of its priority';
            END IF;
            PERFORM {write_event}(
                q, v_now, NULL, 'configured', NULL,
                'mended ' || CASE WHEN r.state NOT BETWEEN {READY} AND {DEAD} THEN 'stranded ' ELSE 'unreadable ' END || m.id || ': '
                || v_done);
        END IF;
        v_found := v_found || json_build_array(
            CASE WHEN r.state NOT BETWEEN {READY} AND {DEAD} THEN 'stranded' ELSE 'unreadable' END, r.id, v_what, v_done);
    END LOOP;
    IF q.group_mode > 0 AND q.conversion IS NULL AND q.claim_mode = q.group_mode THEN
        FOR r IN
            SELECT t.id FROM {message} t
            WHERE t.queue = q.number AND t.id > coalesce(p_after, '') AND t.id <= v_last AND t.state + 0 BETWEEN {READY} AND {WAITING}
                AND t.group_rank IS DISTINCT FROM {group_rank}(q.group_mode, t."group", t.rank)
            ORDER BY t.id
        LOOP
            v_done := NULL;
            IF p_mend THEN
                PERFORM {convert_messages}(q, ARRAY[r.id], NULL);
                v_ready := v_ready + 1;
                v_done := 'put into its group';
                PERFORM {write_event}(q, v_now, NULL, 'configured', NULL, 'mended misplaced ' || r.id || ': ' || v_done);
            END IF;
            v_found := v_found || json_build_array('misplaced', r.id, 'it has no place in its group, so no claim can reach it', v_done);
        END LOOP;
    END IF;
    IF v_count < 500 THEN
        v_last := NULL;
        v_found := v_found || {check_counts}(q, v_now, p_mend);
        IF q.group_mode > 0 THEN
            r := {check_groups}(q.name, v_now, p_mend);
            v_found := v_found || r.damages;
            v_ready := v_ready + r.fresh;
        END IF;
    END IF;
    IF v_ready > 0 THEN
        PERFORM {wake}(q, v_now, v_ready);
    END IF;
    RETURN json_build_array(v_count, v_found, v_last)::text;
END $body$;

-- Compare the counts with the rows, at one moment; correct them with `p_mend`.
CREATE OR REPLACE FUNCTION {check_counts}(q {queue}, p_now bigint, p_mend boolean) RETURNS json[]
LANGUAGE plpgsql AS $body$
DECLARE
    c record;
    v_balance bigint;
    v_what text := '';
BEGIN
    -- One statement, so one snapshot: a step's rows and its counts are in it together, or not at all.
    WITH counted AS (
        SELECT t.ready, t.delayed, t.leased, t.waiting, t.dead_kept, t.published, t.redriven, t.done, t.dead,
            t.dropped, t.cancelled, t.replaced
        FROM {total} t WHERE t.queue = q.number
        UNION ALL
        SELECT t.ready, t.delayed, t.leased, t.waiting, t.dead_kept, t.published, t.redriven, t.done, t.dead,
            t.dropped, t.cancelled, t.replaced
        FROM {tally} t WHERE t.queue = q.number
    ), sums AS (
        SELECT coalesce(sum(t.ready), 0)::bigint AS ready, coalesce(sum(t.delayed), 0)::bigint AS delayed,
            coalesce(sum(t.leased), 0)::bigint AS leased, coalesce(sum(t.waiting), 0)::bigint AS waiting,
            coalesce(sum(t.dead_kept), 0)::bigint AS dead_kept,
            (coalesce(sum(t.published), 0) + coalesce(sum(t.redriven), 0) - coalesce(sum(t.done), 0)
                - coalesce(sum(t.dead), 0) - coalesce(sum(t.dropped), 0) - coalesce(sum(t.cancelled), 0)
                - coalesce(sum(t.replaced), 0))::bigint AS live
        FROM counted t
    ), stored AS (
        SELECT count(*) FILTER (WHERE t.state = {READY}) AS ready, count(*) FILTER (WHERE t.state = {DELAYED}) AS delayed,
            count(*) FILTER (WHERE t.state = {LEASED}) AS leased, count(*) FILTER (WHERE t.state = {WAITING}) AS waiting,
            count(*) FILTER (WHERE t.state = {DEAD}) AS dead_kept
        FROM {message} t WHERE t.queue = q.number
    )
    SELECT o.ready - s.ready AS ready, o.delayed - s.delayed AS delayed, o.leased - s.leased AS leased,
        o.waiting - s.waiting AS waiting, o.dead_kept - s.dead_kept AS dead_kept,
        s.live - o.ready - o.delayed - o.leased - o.waiting AS balance
    INTO c FROM sums s CROSS JOIN stored o;
    IF (c.ready, c.delayed, c.leased, c.waiting, c.dead_kept, c.balance) = (0, 0, 0, 0, 0, 0) THEN
        RETURN '{}';
    END IF;
    v_what := format(
        'counts are off: ready %s, delayed %s, leased %s, waiting %s, dead %s, and the ledger by %s', -c.ready,
        -c.delayed, -c.leased, -c.waiting, -c.dead_kept, c.balance);
    IF p_mend THEN
        INSERT INTO {tally} (seq, queue, minute, ready, delayed, leased, waiting, dead_kept, dropped, published)
        VALUES (
            nextval('{sequence}'), q.number, p_now / 60000, c.ready, c.delayed, c.leased, c.waiting, c.dead_kept,
            CASE WHEN c.balance > 0 THEN c.balance END, CASE WHEN c.balance < 0 THEN -c.balance END);
        PERFORM {write_event}(q, p_now, NULL, 'configured', NULL, 'mended counters: ' || v_what);
    END IF;
    RETURN ARRAY[json_build_array('counters', NULL, v_what, CASE WHEN p_mend THEN 'counted anew' END)];
END $body$;
