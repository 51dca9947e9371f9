-- Small parts that the verbs share. What reads a table is in PL/pgSQL, whose plans are kept for the session.
-- Touches: queue (read, a new row for a new queue), operation, total and tally (read).

-- Which events a journal level keeps.
CREATE OR REPLACE FUNCTION {journal_keeps}(p_level text, p_event text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $body$
    SELECT p_level IN ('all', 'full') OR p_level = 'failures' AND p_event IN (
        'retried', 'expired', 'dead', 'dropped', 'cancelled', 'dead_trimmed', 'trimmed', 'configured', 'paused',
        'resumed', 'skipped')
$body$;

-- Store time in milliseconds. Tests bring their own.
CREATE OR REPLACE FUNCTION {clock}(p_clock bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $body$
    SELECT coalesce(p_clock, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)
$body$;

-- The row of a name, made if there is none. It is a queue only when something is added to it: see `make_queue`.
CREATE OR REPLACE FUNCTION {open_queue}(p_queue text) RETURNS {queue} LANGUAGE plpgsql AS $body$
DECLARE
    q {queue};
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        INSERT INTO {queue} (name, made, removed_until) VALUES (p_queue, false, 0) ON CONFLICT DO NOTHING;
        SELECT * INTO q FROM {queue} WHERE name = p_queue;
    END IF;
    RETURN q;
END $body$;

-- In a transaction of the caller's that reads by an old snapshot: fail, as any write in such a transaction does, if the
-- settings of the queue have changed since. The lock is given up at once, so that no change waits for the transaction:
-- from now on a change knows of it by its lock against removal.
CREATE OR REPLACE FUNCTION {check_snapshot}(p_number bigint) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        BEGIN
            PERFORM FROM {queue} t WHERE t.number = p_number FOR SHARE;
            RAISE SQLSTATE 'WPUND';
        EXCEPTION WHEN SQLSTATE 'WPUND' THEN
            NULL;
        END;
    END IF;
END $body$;

-- Something is added to a name: from now on it is a queue. If another transaction is making it, this one does not wait.
CREATE OR REPLACE FUNCTION {make_queue}(q {queue}) RETURNS {queue} LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {queue} t SET made = true WHERE t.number = (
        SELECT o.number FROM {queue} o WHERE o.number = q.number FOR UPDATE SKIP LOCKED);
    q.made := true;
    RETURN q;
END $body$;

-- Refuse an operation that was first sent before a queue of this name was removed: see repeats.py.
CREATE OR REPLACE FUNCTION {check_removal}(p_removed bigint, p_stamp bigint, p_now bigint) RETURNS void
LANGUAGE plpgsql AS $body$
BEGIN
    IF p_stamp <= p_removed AND p_removed <= p_now + {STAMP_AHEAD_MS} THEN
        RAISE EXCEPTION '%', greatest(p_now, p_removed + 1) USING ERRCODE = 'WPGON';
    END IF;
END $body$;

-- An operation comes as two parameters: its number, and `p_session`, which is the session (8 bytes), the mark (8), the
-- stamp (8) and, of a claim, the nonce of this sending (12).
CREATE OR REPLACE FUNCTION {operation_id}(p_session bytea, p_number bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $body$
    SELECT encode(substr(p_session, 1, {SESSION_BYTES}), 'hex') || '.' || p_number
$body$;

CREATE OR REPLACE FUNCTION {stamp}(p_session bytea) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT ('x' || encode(substr(p_session, {STAMP_AT}, {STAMP_BYTES}), 'hex'))::bit(64)::bigint
$body$;

-- The first result of an operation, null if it is new. One that may be forgotten is refused: see repeats.py. Results are
-- kept behind the mark of their operation, as 16 hexadecimal digits.
CREATE OR REPLACE FUNCTION {first_result}(
    p_queue integer, p_removed bigint, p_session bytea, p_number bigint, p_now bigint, p_ttl bigint
) RETURNS text LANGUAGE plpgsql AS $body$
DECLARE
    v_stamp bigint := {stamp}(p_session);
    v_number bigint;
    v_result text;
BEGIN
    IF v_stamp < p_now - p_ttl THEN
        RAISE EXCEPTION '%', p_now USING ERRCODE = 'WPOLD';
    END IF;
    IF p_removed IS NOT NULL THEN
        PERFORM {check_removal}(p_removed, v_stamp, p_now);
    END IF;
    SELECT number, result INTO v_number, v_result
    FROM {operation} WHERE queue = p_queue AND session = substr(p_session, 1, {SESSION_BYTES}) AND slot = p_number % {REPLAY_MAX};
    IF v_number = p_number AND left(v_result, {MARK_DIGITS}) = encode(substr(p_session, {MARK_AT}, {MARK_BYTES}), 'hex') THEN
        RETURN substr(v_result, {RESULT_AT});
    ELSIF v_number > p_number THEN
        RAISE EXCEPTION 'too many came after it' USING ERRCODE = 'WPOLD';
    ELSIF v_stamp > p_now + {STAMP_AHEAD_MS} THEN
        RAISE EXCEPTION '%', p_now USING ERRCODE = 'WPOLD';
    ELSIF v_number = p_number THEN
        RAISE EXCEPTION 'this number belongs to another call' USING ERRCODE = 'WPSES';
    END IF;
    RETURN NULL;
END $body$;

-- Keep the result of an operation. If the same operation has finished on another connection meanwhile, this one is
-- undone and repeated, and then finds the first result. Returns whether this step is the one to tidy up.
CREATE OR REPLACE FUNCTION {store_result}(
    p_queue integer, p_session bytea, p_number bigint, p_until_ms bigint, p_result text
) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    -- Longer than a repeat is let through, by what a stamp may lie ahead.
    INSERT INTO {operation} AS o (queue, slot, session, number, until_ms, result)
    VALUES (
        p_queue, p_number % {REPLAY_MAX}, substr(p_session, 1, {SESSION_BYTES}), p_number, p_until_ms + {STAMP_AHEAD_MS},
        encode(substr(p_session, {MARK_AT}, {MARK_BYTES}), 'hex') || p_result)
    ON CONFLICT (queue, session, slot) DO UPDATE
        SET number = excluded.number, until_ms = excluded.until_ms, result = excluded.result
        WHERE o.number < excluded.number;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'this operation ran on another connection' USING ERRCODE = 'WPAGN';
    END IF;
    RETURN {tidy_is_due}(p_queue, p_number);
END $body$;

-- Whether a step is the one to tidy up: one in 64, chosen by transaction numbers, and one that finds a lot to do. Some steps
-- check that, chosen by two kinds of numbers: a client whose steps fall on the same ones of the first kind has others
-- of the second.
CREATE OR REPLACE FUNCTION {tidy_is_due}(p_queue integer, p_number bigint) RETURNS boolean LANGUAGE plpgsql AS $body$
DECLARE
    v_xid bigint := pg_current_xact_id()::text::bigint;
BEGIN
    RETURN v_xid % 64 = 0 OR (v_xid % 16 = 8 OR p_number % 16 = 8) AND {many_counts}(p_queue);
END $body$;

-- The same for a step that leaves something for each of `p_count` messages: it sees to it that as much is folded and swept.
CREATE OR REPLACE FUNCTION {tidy_is_due_for}(p_queue integer, p_count bigint) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    RETURN p_count > 1 AND (random() * 64 < p_count OR {many_counts}(p_queue));
END $body$;

-- Whether a queue has a lot of counts that are not folded.
CREATE OR REPLACE FUNCTION {many_counts}(p_queue integer) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    RETURN EXISTS (SELECT 1 FROM {tally} t WHERE t.queue = p_queue OFFSET 64 LIMIT 1);
END $body$;

-- Whether it has more of them than this.
CREATE OR REPLACE FUNCTION {counts_exceed}(p_queue integer, p_most bigint) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    RETURN EXISTS (SELECT 1 FROM {tally} t WHERE t.queue = p_queue OFFSET p_most LIMIT 1);
END $body$;

-- How many messages are in each state: what was folded, and what was not yet, as of one moment.
CREATE OR REPLACE FUNCTION {state_counts}(
    p_queue integer, OUT ready bigint, OUT delayed bigint, OUT leased bigint, OUT waiting bigint, OUT dead_kept bigint
) LANGUAGE plpgsql AS $body$
BEGIN
    SELECT coalesce(sum(c.ready), 0)::bigint, coalesce(sum(c.delayed), 0)::bigint, coalesce(sum(c.leased), 0)::bigint,
        coalesce(sum(c.waiting), 0)::bigint, coalesce(sum(c.dead_kept), 0)::bigint
    INTO ready, delayed, leased, waiting, dead_kept
    FROM (
        SELECT t.ready, t.delayed, t.leased, t.waiting, t.dead_kept FROM {total} t WHERE t.queue = p_queue
        UNION ALL
        SELECT t.ready, t.delayed, t.leased, t.waiting, t.dead_kept FROM {tally} t WHERE t.queue = p_queue
    ) c;
END $body$;

-- Count messages that were stored without regard to the cap, as far as they are past it. `p_queues` has the queue of each.
-- No lock is taken for it, since a settle holds its messages: where steps overlap, each counts by the depth that it sees.
CREATE OR REPLACE FUNCTION {count_over_cap}(p_now bigint, p_queues integer[]) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    INSERT INTO {tally} (seq, queue, minute, over_cap)
    SELECT nextval('{sequence}'), o.number, p_now / 60000, o.over FROM (
        SELECT q.number, least(u.added, h.ready + h.delayed + h.waiting - q.max_pending) AS over
        FROM (SELECT t.number, count(*) AS added FROM unnest(p_queues) AS t (number) GROUP BY t.number) u
        CROSS JOIN LATERAL (SELECT t.number, t.max_pending FROM {queue} t WHERE t.number = u.number OFFSET 0) q
        CROSS JOIN LATERAL {state_counts}(q.number) h) o
    WHERE o.over > 0;
END $body$;

-- The key of an advisory lock of one kind on one queue of this namespace.
CREATE OR REPLACE FUNCTION {lock_key}(p_kind text) RETURNS integer LANGUAGE sql IMMUTABLE AS $body$
    SELECT hashtext('{message}' || p_kind)
$body$;

CREATE OR REPLACE FUNCTION {next_due}(p_queue integer) RETURNS bigint LANGUAGE plpgsql AS $body$
BEGIN
    RETURN (SELECT m.ready_ms FROM {message} m WHERE m.queue = p_queue AND m.state = {DELAYED} ORDER BY m.ready_ms LIMIT 1);
END $body$;

CREATE OR REPLACE FUNCTION {next_lease}(p_queue integer) RETURNS bigint LANGUAGE plpgsql AS $body$
BEGIN
    RETURN (
        SELECT m.lease_end_ms FROM {message} m WHERE m.queue = p_queue AND m.state = {LEASED} ORDER BY m.lease_end_ms LIMIT 1);
END $body$;

-- What all tokens of claims are above, raised since the server has started anew. A claim that is lost with the server's memory
-- gave a token above the floor of its time, so that no claim afterwards gives it again. The clock makes it larger than any
-- floor that a server had from which an older backup or a replica was taken. One claim does it, and the others wait here.
CREATE OR REPLACE FUNCTION {raise_floor}() RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_floor bigint;
BEGIN
    PERFORM 1 FROM {epoch} FOR UPDATE;
    SELECT s.floor INTO v_floor FROM {server} s
    WHERE s.started = pg_postmaster_start_time() AND s.place = '{server}'::regclass;
    IF NOT FOUND THEN
        UPDATE {epoch} e
        SET floor = greatest(e.floor + 1000000, floor(extract(epoch FROM clock_timestamp()))::bigint * 1000000)
        RETURNING e.floor INTO v_floor;
        DELETE FROM {server};
        INSERT INTO {server} VALUES (pg_postmaster_start_time(), '{server}'::regclass, v_floor);
        -- It must be on the disk before a token above it is seen, whatever the server's default is.
        IF current_setting('synchronous_commit') = 'off' THEN
            PERFORM set_config('synchronous_commit', 'local', true);
        END IF;
    END IF;
    RETURN v_floor;
END $body$;

-- How long until a moment; null if there is none.
CREATE OR REPLACE FUNCTION {ms_until}(p_at bigint, p_now bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN p_at IS NOT NULL THEN greatest(p_at - p_now, 0) END
$body$;
