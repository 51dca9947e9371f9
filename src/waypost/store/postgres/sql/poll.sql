-- Poll: whether a claim of any of these queues may return messages, for a worker that has nothing to do in them. The
-- same step renews the registrations of the worker's sleepers, and stores its heartbeat and its candidacy as leader.
-- Touches: queue, message, sleeper, and what `heartbeat`, `elect` and `tidy` touch.
-- Keeps: no step waits for another; a sleeper that another step is waking is not renewed here. It does not wait for the
-- disk, unless it put a journal in order: what a reader has read must not change.
-- The reply is the store's time; the leader; for each queue whether it needs a claim, the time until the next due time
-- (or until the rate of a group allows its next message) and until the next lease end, and the length of leases; and
-- what was requested of the worker, and when.

CREATE OR REPLACE FUNCTION {poll}(
    p_clock bigint, p_queues text[], p_sleepers text[], p_name text, p_record bytea, p_ttl bigint, p_max bigint,
    p_role text, p_role_ttl bigint
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_elected json;
    v_found json;
    v_chance bigint;
    v_leader {leader};
    v_requested json;
    v_commit text := current_setting('synchronous_commit');
BEGIN
    SELECT json_agg(json_build_array(
            coalesce(f.due <= v_now, false) OR coalesce(f.ends <= v_now, false)
            -- A claim shortens leases that were given before the clock was set back.
            OR coalesce(f.ends > v_now + q.lease_ms, false)
            OR (NOT coalesce(q.paused, true)
                AND CASE WHEN q.claim_mode > 0 THEN
                    EXISTS (SELECT 1 FROM {group} g WHERE g.queue = q.number AND g.in_line)
                    OR EXISTS (SELECT 1 FROM {group_change} g WHERE g.queue = q.number)
                    OR coalesce(f.rate = 0, false)
                ELSE EXISTS (SELECT 1 FROM {message} m WHERE m.queue = q.number AND m.state = {READY}) END)
            OR (u.sleeper IS NOT NULL AND (s.until_ms IS NULL OR s.awake OR s.until_ms <= v_now))
            OR (q.dead_keep_ms IS NOT NULL AND EXISTS (
                SELECT 1 FROM {message} m
                WHERE m.queue = q.number AND m.state = {DEAD} AND m.ended_ms <= v_now - q.dead_keep_ms)),
            least({ms_until}(f.due, v_now), f.rate), {ms_until}(f.ends, v_now),
            CASE WHEN q.number IS NULL THEN {DEFAULT_LEASE_MS} ELSE q.lease_ms END) ORDER BY u.place)
    INTO v_found
    FROM unnest(p_queues, p_sleepers) WITH ORDINALITY AS u (queue, sleeper, place)
    LEFT JOIN {queue} q ON q.name = u.queue
    LEFT JOIN {sleeper} s ON s.queue = q.number AND s.name = u.sleeper
    LEFT JOIN LATERAL (
        -- A paused queue hands out no messages, but its messages lapse.
        SELECT least(CASE WHEN NOT q.paused THEN {next_due}(q.number) END, {next_lapse}(q.number)) AS due,
            CASE WHEN NOT q.paused THEN {next_lease}(q.number) END AS ends,
            CASE WHEN NOT q.paused AND q.claim_mode > 0 THEN {next_group_rate}(q.number, v_now) END AS rate
        WHERE q.number IS NOT NULL) f ON true;
    -- Renew registrations of which half of the time is over. Each worker renews its own, so they do not wait for each
    -- other.
    UPDATE {sleeper} s SET until_ms = v_now + {SLEEPER_TTL_MS} FROM (
        SELECT o.ctid AS place FROM unnest(p_queues, p_sleepers) AS u (queue, sleeper)
        CROSS JOIN LATERAL (SELECT t.number FROM {queue} t WHERE t.name = u.queue) q
        JOIN {sleeper} o ON o.queue = q.number AND o.name = u.sleeper
        WHERE NOT o.awake AND o.until_ms > v_now AND o.until_ms < v_now + {SLEEPER_RENEW_MS}
        FOR NO KEY UPDATE OF o SKIP LOCKED) c
    WHERE s.ctid = c.place;
    IF p_name IS NOT NULL THEN
        PERFORM {heartbeat}(p_name, v_now, p_ttl, p_record, p_max);
        SELECT json_build_array(w.request, w.request_ms) INTO v_requested FROM {worker} w
        WHERE w.name = p_name AND w.request IS NOT NULL;
    END IF;
    IF p_role IS NOT NULL THEN
        SELECT * INTO v_leader FROM {leader} t WHERE t.role = p_role;
        IF v_leader.name NOT IN ('', p_name) AND v_leader.until_ms BETWEEN v_now + 1 AND v_now + 4 * p_role_ttl THEN
            -- Usually another worker leads: then nothing is locked.
            v_elected := json_build_array(v_leader.name, v_leader.token, v_leader.until_ms - v_now);
        ELSE
            v_elected := {elect}(p_role, v_now, p_name, p_role_ttl)::json;
        END IF;
    END IF;
    -- Claims do maintenance for their own queue, and an idle queue has no claims.
    v_chance := pg_current_xact_id()::text::bigint;
    IF v_chance % 16 = 0 AND cardinality(p_queues) > 0 THEN
        SELECT * INTO q FROM {queue} t WHERE t.name = p_queues[1 + (v_chance / 16) % cardinality(p_queues)];
        IF FOUND THEN
            PERFORM {tidy}(q, v_now);
            PERFORM set_config('synchronous_commit', v_commit, true);
            RETURN json_build_array(v_now, v_elected, coalesce(v_found, '[]'::json), v_requested)::text;
        END IF;
    END IF;
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN json_build_array(v_now, v_elected, coalesce(v_found, '[]'::json), v_requested)::text;
END $body$;
