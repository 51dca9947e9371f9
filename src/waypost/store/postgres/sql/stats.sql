-- The figures of a queue, as one JSON object. Touches: queue, message, total, tally, minute, sleeper, reader (all
-- read), and what `order_journal` touches. Keeps: all counts are of one moment.

CREATE OR REPLACE FUNCTION {stats}(p_queue text, p_clock bigint, p_minutes bigint) RETURNS text
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v record;
    v_number integer;
    v_now bigint := {clock}(p_clock);
    v_counts json;
    v_minutes json;
BEGIN
    SELECT * INTO v FROM {open_journal}(p_queue, p_clock);
    v_number := (v.q).number;
    WITH steps AS MATERIALIZED (
        SELECT * FROM {tally} t WHERE t.queue = v_number
    ), counts AS (
        SELECT
            t.ready, t.delayed, t.leased, t.waiting, t.dead_kept, t.published, t.redriven, t.done, t.dead, t.dropped,
            t.cancelled, t.replaced, t.claims, t.first_claims, t.again_expired, t.again_released, t.again_retried,
            t.again_snoozed, t.again_redriven, t.expired, t.released, t.retried, t.snoozed, t.duplicates, t.transferred,
            t.over_cap
        FROM {total} t WHERE t.queue = v_number
        UNION ALL
        SELECT
            t.ready, t.delayed, t.leased, t.waiting, t.dead_kept, t.published, t.redriven, t.done, t.dead, t.dropped,
            t.cancelled, t.replaced, t.claims, t.first_claims, t.again_expired, t.again_released, t.again_retried,
            t.again_snoozed, t.again_redriven, t.expired, t.released, t.retried, t.snoozed, t.duplicates, t.transferred,
            t.over_cap
        FROM steps t
    ), sums AS (
        SELECT
            coalesce(sum(t.ready), 0) AS ready, coalesce(sum(t.delayed), 0) AS delayed,
            coalesce(sum(t.leased), 0) AS leased, coalesce(sum(t.waiting), 0) AS waiting,
            coalesce(sum(t.dead_kept), 0) AS dead_kept, coalesce(sum(t.published), 0) AS published,
            coalesce(sum(t.redriven), 0) AS redriven, coalesce(sum(t.done), 0) AS done,
            coalesce(sum(t.dead), 0) AS dead, coalesce(sum(t.dropped), 0) AS dropped,
            coalesce(sum(t.cancelled), 0) AS cancelled, coalesce(sum(t.replaced), 0) AS replaced,
            coalesce(sum(t.claims), 0) AS claims, coalesce(sum(t.first_claims), 0) AS first_claims,
            coalesce(sum(t.again_expired), 0) AS again_expired, coalesce(sum(t.again_released), 0) AS again_released,
            coalesce(sum(t.again_retried), 0) AS again_retried, coalesce(sum(t.again_snoozed), 0) AS again_snoozed,
            coalesce(sum(t.again_redriven), 0) AS again_redriven, coalesce(sum(t.expired), 0) AS expired,
            coalesce(sum(t.released), 0) AS released, coalesce(sum(t.retried), 0) AS retried,
            coalesce(sum(t.snoozed), 0) AS snoozed, coalesce(sum(t.duplicates), 0) AS duplicates,
            coalesce(sum(t.transferred), 0) AS transferred, coalesce(sum(t.over_cap), 0) AS over_cap
        FROM counts t
    ), lately AS (
        SELECT t.minute,
            t.published, t.duplicates, t.claims, t.done, t.retried, t.dead, t.expired, t.dropped, t.redriven, t.cancelled,
            t.replaced, t.runs, t.wait_ms, t.wait_ms_max, t.run_ms, t.run_ms_max, t.runs IS NOT NULL AS complete
        FROM {minute} t WHERE t.queue = v_number
        UNION ALL
        SELECT t.minute,
            t.published, t.duplicates, t.claims, t.done, t.retried, t.dead, t.expired, t.dropped, t.redriven, t.cancelled,
            t.replaced, t.runs, t.wait_ms, t.wait_ms_max, t.run_ms, t.run_ms_max, true
        FROM steps t
    ), minutes AS (
        SELECT t.minute,
            coalesce(sum(t.published), 0) AS published, coalesce(sum(t.duplicates), 0) AS duplicates,
            coalesce(sum(t.claims), 0) AS claims, coalesce(sum(t.done), 0) AS done,
            coalesce(sum(t.retried), 0) AS retried, coalesce(sum(t.dead), 0) AS dead,
            coalesce(sum(t.expired), 0) AS expired, coalesce(sum(t.dropped), 0) AS dropped,
            CASE WHEN bool_and(t.complete) THEN coalesce(sum(t.redriven), 0) END AS redriven,
            CASE WHEN bool_and(t.complete) THEN coalesce(sum(t.cancelled), 0) END AS cancelled,
            CASE WHEN bool_and(t.complete) THEN coalesce(sum(t.replaced), 0) END AS replaced,
            CASE WHEN bool_and(t.complete) THEN coalesce(sum(t.runs), 0) END AS runs,
            CASE WHEN bool_and(t.complete) THEN coalesce(sum(t.wait_ms), 0) END AS wait_ms,
            CASE WHEN bool_and(t.complete) THEN coalesce(max(t.wait_ms_max), 0) END AS wait_ms_max,
            CASE WHEN bool_and(t.complete) THEN coalesce(sum(t.run_ms), 0) END AS run_ms,
            CASE WHEN bool_and(t.complete) THEN coalesce(max(t.run_ms_max), 0) END AS run_ms_max
        FROM lately t
        WHERE t.minute > v_now / 60000 - least(p_minutes, {MINUTES_KEPT})
        GROUP BY t.minute
        HAVING coalesce(
            sum(t.published), sum(t.duplicates), sum(t.claims), sum(t.done), sum(t.retried), sum(t.dead),
            sum(t.expired), sum(t.dropped), sum(t.redriven), sum(t.cancelled), sum(t.replaced), sum(t.runs)) IS NOT NULL
        ORDER BY t.minute
    )
    SELECT (SELECT to_json(s) FROM sums s), (SELECT json_agg(m) FROM minutes m) INTO v_counts, v_minutes;
    RETURN json_build_object(
        'now', v_now,
        'paused', coalesce((v.q).paused, false),
        'counts', v_counts,
        'minutes', v_minutes,
        'oldest_ready', (
            SELECT max(v_now - h.ready_ms) FROM generate_series(0, {PRIORITY_MAX}) AS ranks (rank), LATERAL (
                (SELECT m.ready_ms FROM {message} m
                WHERE m.queue = v_number AND m.state = {READY} AND m.rank = ranks.rank AND m.position < 0
                ORDER BY m.position, m.id LIMIT CASE WHEN (v.q)."order" IS NULL THEN 1 ELSE {OLDEST_READ_MAX} END)
                UNION ALL
                (SELECT m.ready_ms FROM {message} m
                WHERE m.queue = v_number AND m.state = {READY} AND m.rank = ranks.rank AND m.position >= 0
                ORDER BY m.position, m.id LIMIT CASE WHEN (v.q)."order" IS NULL THEN 1 ELSE {OLDEST_READ_MAX} END)) h),
        'oldest_leased', (
            SELECT max(v_now - m.claimed_ms) FROM {message} m WHERE m.queue = v_number AND m.state = {LEASED}),
        'next_due', {ms_until}({next_due}(v_number), v_now),
        'next_lease', {ms_until}({next_lease}(v_number), v_now),
        'sleepers', (
            SELECT count(*) FROM {sleeper} s WHERE s.queue = v_number AND NOT s.awake AND s.until_ms > v_now),
        'first', v.first,
        'last', v.last,
        'changes', (
            SELECT jsonb_agg(c.change ORDER BY c.n) FROM jsonb_array_elements((v.q).changes) WITH ORDINALITY AS c (change, n)
            WHERE (c.change ->> 0)::bigint / 60000 > v_now / 60000 - p_minutes),
        'readers', (SELECT coalesce(json_object_agg(r.name, r.read_to), '{}') FROM {reader} r WHERE r.queue = v_number)
    )::text;
END $body$;

-- The unfinished messages of a key, by queue: the owner of the key, then the next generation.
CREATE OR REPLACE FUNCTION {holders}(p_queues text[], p_key text) RETURNS text LANGUAGE plpgsql {settings} AS $body$
BEGIN
    RETURN (
        SELECT json_agg(json_build_array(q.name, m.id) ORDER BY m.state = {WAITING})
        FROM unnest(p_queues) AS n (name) CROSS JOIN LATERAL (
            SELECT t.number, t.name FROM {queue} t WHERE t.name = n.name OFFSET 0) q
        CROSS JOIN LATERAL (
            SELECT t.id, t.state FROM {message} t
            WHERE t.queue = q.number AND t.key = p_key AND t.key IS NOT NULL AND t.state < {WAITING}
            UNION ALL
            SELECT t.id, t.state FROM {message} t
            WHERE t.queue = q.number AND t.key = p_key AND t.key IS NOT NULL AND t.state = {WAITING}) m);
END $body$;
