-- Remove a queue that is empty, and delete names that are no queues.
-- Touches: all tables of a queue.
-- Keeps: nothing is removed while anything is left in the queue. A step that adds a message to a queue takes its
-- removal lock, shared, before it reads the queue's row, and holds it until the end of the transaction: so either it
-- precedes the removal, which then finds the message or the lock, or it follows the removal and creates the queue
-- again.
-- What remains of a removed queue: its row; one mark and the first number of the journal, so that its numbers continue;
-- and rows that expire: results of operations and arrivals, since these operations may still be repeated.

CREATE OR REPLACE FUNCTION {remove}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_stamp bigint := {stamp}(p_session);
    v_left jsonb;
BEGIN
    BEGIN
        SELECT * INTO q FROM {queue} t WHERE t.name = p_queue FOR UPDATE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN '[true, {"transactions": 1}, false, false]';
    END;
    IF q.removed_mark = substr(p_session, {MARK_AT}, {MARK_BYTES}) THEN
        RETURN json_build_array(true, '{}'::json, q.made, false)::text;
    ELSIF v_stamp < v_now - p_ttl THEN
        RAISE EXCEPTION '%', v_now USING ERRCODE = 'WPOLD';
    END IF;
    PERFORM {check_removal}(q.removed_ms, v_stamp, v_now);
    IF q.number IS NULL THEN
        RETURN '[false, {}, false, false]';
    END IF;
    IF NOT pg_try_advisory_xact_lock({lock_key}('removal'), hashtext(p_queue)) THEN
        RETURN json_build_array(q.made, '{"transactions": 1}'::json, false, false)::text;
    END IF;
    v_left := {count_left}(q.number);
    IF v_left <> '{}' OR NOT q.made THEN
        RETURN json_build_array(q.made, v_left, false, false)::text;
    END IF;
    PERFORM pg_advisory_xact_lock({lock_key}('journal'), q.number);
    IF {remove_history}(q.number, 16384) THEN
        RETURN '[true, {}, false, true]';
    END IF;
    PERFORM {clear_queue}(q.number);
    UPDATE {queue} t SET made = false, removed_ms = v_now, removed_mark = substr(p_session, {MARK_AT}, {MARK_BYTES}),
        removed_until = v_now + {REMOVED_TTL_MS}, paused = DEFAULT, lease_ms = DEFAULT, max_deliveries = DEFAULT,
        max_pending = DEFAULT, overload = DEFAULT, max_running = DEFAULT, rate_count = DEFAULT, rate_per_ms = DEFAULT,
        journal = DEFAULT, journal_max = DEFAULT, dead_max = DEFAULT, dead_keep_ms = DEFAULT, completed_max = DEFAULT,
        changes = DEFAULT, hide_bodies = DEFAULT, no_tracebacks = DEFAULT, "order" = DEFAULT, on_failure = DEFAULT,
        fair = DEFAULT, group_max_running = DEFAULT, group_rate_count = DEFAULT, group_rate_per_ms = DEFAULT,
        group_max_pending = DEFAULT, group_mode = DEFAULT, claim_mode = DEFAULT, conversion = DEFAULT, group_capped = DEFAULT,
        group_limited = DEFAULT
    WHERE t.number = q.number;
    PERFORM {sweep_names}(v_now);
    RETURN '[true, {}, false, false]';
END $body$;

-- Delete the oldest part of a queue's journal and finished messages, up to `p_limit` rows of each, so that no step of a
-- removal takes long. Returns whether there is more; false also means that there were fewer rows and nothing was
-- deleted.
CREATE OR REPLACE FUNCTION {remove_history}(p_queue integer, p_limit integer) RETURNS boolean LANGUAGE plpgsql AS $body$
DECLARE
    v_bound bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    v_base {mark};
    v_place record;
BEGIN
    -- Only entries that can have a number: no later entry can precede them.
    SELECT e.xid, e.seq INTO v_place FROM {entry} e WHERE e.queue = p_queue AND e.xid < v_bound
    ORDER BY e.xid, e.seq OFFSET p_limit - 1 LIMIT 1;
    IF FOUND THEN
        SELECT * INTO v_base FROM {mark} m
        WHERE m.queue = p_queue AND m.number < (SELECT k.first FROM {kept} k WHERE k.queue = p_queue)
        ORDER BY m.number DESC LIMIT 1;
        WITH gone AS MATERIALIZED (
            DELETE FROM {entry} e WHERE e.queue = p_queue AND (e.xid, e.seq) <= (v_place.xid, v_place.seq)
            RETURNING e.xid, e.seq, e.count
        )
        SELECT coalesce(v_base.number, 0) + coalesce(sum(g.count), 0) INTO v_base.number FROM gone g
        WHERE (g.xid, g.seq) > (coalesce(v_base.xid, 0), coalesce(v_base.seq, 0));
        DELETE FROM {mark} m WHERE m.queue = p_queue AND m.number <= v_base.number;
        INSERT INTO {mark} VALUES (p_queue, v_base.number, v_place.xid, v_place.seq);
        INSERT INTO {kept} AS k VALUES (p_queue, v_base.number + 1)
        ON CONFLICT (queue) DO UPDATE SET first = excluded.first WHERE k.first < excluded.first;
        RETURN true;
    END IF;
    RETURN EXISTS (SELECT 1 FROM {completed} c WHERE c.queue = p_queue OFFSET p_limit)
        AND {trim_completed}(p_queue, 0, p_limit) > 0;
END $body$;

-- What prevents the removal of a queue, with the number of each.
CREATE OR REPLACE FUNCTION {count_left}(p_queue integer) RETURNS jsonb LANGUAGE plpgsql AS $body$
DECLARE
    v record;
    v_stored bigint;
BEGIN
    SELECT h.*,
        (SELECT count(*) FROM {schedule} s WHERE s.queue = p_queue) AS schedules,
        (SELECT count(*) FROM {chain} c WHERE c.queue = p_queue AND c.open > 0 AND c.failed IS NULL) AS chains,
        (SELECT count(*) FROM {reader} r WHERE r.queue = p_queue) AS readers
    INTO v FROM {state_counts}(p_queue) h;
    -- Rows that are not in the counts; beyond 1,000 the exact number does not matter.
    SELECT count(*) INTO v_stored FROM (SELECT 1 FROM {message} m WHERE m.queue = p_queue LIMIT 1000) o;
    RETURN coalesce(
        (SELECT jsonb_object_agg(c.name, c.count) FROM (VALUES
            ('ready', v.ready), ('delayed', v.delayed), ('waiting', v.waiting), ('leased', v.leased),
            ('dead', v.dead_kept), ('schedules', v.schedules), ('chains', v.chains), ('readers', v.readers),
            ('damaged', greatest(v_stored - v.ready - v.delayed - v.waiting - v.leased - v.dead_kept, 0))
        ) AS c (name, count) WHERE c.count <> 0), '{}');
END $body$;

-- Delete everything of a queue except its row and the rows that expire. The numbers of its journal continue.
CREATE OR REPLACE FUNCTION {clear_queue}(p_queue integer) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_last bigint;
BEGIN
    SELECT m.number INTO v_last FROM {mark} m WHERE m.queue = p_queue ORDER BY m.number DESC LIMIT 1;
    v_last := coalesce(v_last, 0) + coalesce((
        SELECT sum(e.count) FROM {entry} e WHERE e.queue = p_queue AND (e.xid, e.seq) > (
            SELECT coalesce(max(m.xid), 0), coalesce(max(m.seq), 0) FROM (
                SELECT k.xid, k.seq FROM {mark} k WHERE k.queue = p_queue ORDER BY k.number DESC LIMIT 1) m)), 0);
    DELETE FROM {entry} t WHERE t.queue = p_queue;
    DELETE FROM {mark} t WHERE t.queue = p_queue;
    DELETE FROM {kept} t WHERE t.queue = p_queue;
    IF v_last > 0 THEN
        INSERT INTO {mark} VALUES (p_queue, v_last, 0, 0);
        INSERT INTO {kept} VALUES (p_queue, v_last + 1);
    END IF;
    DELETE FROM {tally} t WHERE t.queue = p_queue;
    DELETE FROM {total} t WHERE t.queue = p_queue;
    DELETE FROM {minute} t WHERE t.queue = p_queue;
    DELETE FROM {completed} t WHERE t.queue = p_queue;
    DELETE FROM {reader} t WHERE t.queue = p_queue;
    DELETE FROM {window} t WHERE t.queue = p_queue;
    DELETE FROM {result} t WHERE t.queue = p_queue;
    DELETE FROM {sleeper} t WHERE t.queue = p_queue;
    DELETE FROM {rate} t WHERE t.queue = p_queue;
    DELETE FROM {schedule} t WHERE t.queue = p_queue;
    DELETE FROM {chain} t WHERE t.queue = p_queue;
    DELETE FROM {member} t WHERE t.queue = p_queue;
    DELETE FROM {blocker} t WHERE t.home = p_queue;
    DELETE FROM {waiter} t WHERE t.queue = p_queue;
    DELETE FROM {ending} t WHERE t.queue = p_queue;
    DELETE FROM {group} t WHERE t.queue = p_queue;
    DELETE FROM {group_change} t WHERE t.queue = p_queue;
    DELETE FROM {group_turn} t WHERE t.queue = p_queue;
END $body$;

-- Delete names that are no queues and for which nothing must be remembered any longer.
CREATE OR REPLACE FUNCTION {sweep_names}(p_now bigint) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    q {queue};
BEGIN
    FOR q IN
        SELECT * FROM {queue} t WHERE NOT t.made AND t.removed_until <= p_now
            AND NOT EXISTS (SELECT 1 FROM {message} m WHERE m.queue = t.number)
            AND NOT EXISTS (SELECT 1 FROM {sleeper} s WHERE s.queue = t.number AND s.until_ms > p_now)
            AND NOT EXISTS (SELECT 1 FROM {operation} o WHERE o.queue = t.number AND o.until_ms > p_now)
        LIMIT 16 FOR UPDATE SKIP LOCKED
    LOOP
        CONTINUE WHEN NOT pg_try_advisory_xact_lock({lock_key}('removal'), hashtext(q.name));
        PERFORM {clear_queue}(q.number);
        DELETE FROM {mark} t WHERE t.queue = q.number;
        DELETE FROM {kept} t WHERE t.queue = q.number;
        DELETE FROM {operation} t WHERE t.queue = q.number;
        DELETE FROM {arrival} t WHERE t.queue = q.number;
        DELETE FROM {queue} t WHERE t.number = q.number;
    END LOOP;
END $body$;
