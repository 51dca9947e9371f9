-- Small functions that the verbs share. Functions that read a table are in PL/pgSQL, which caches their plans for the
-- session.
-- Touches: queue (read; a new row for a new queue), operation, total and tally (read).

-- Return whether a journal level keeps an event.
CREATE OR REPLACE FUNCTION {journal_keeps}(p_level text, p_event text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $body$
    SELECT p_level IN ('all', 'full') OR p_level = 'failures' AND p_event IN (
        'retried', 'expired', 'dead', 'dropped', 'cancelled', 'dead_trimmed', 'trimmed', 'configured', 'paused',
        'resumed', 'skipped')
$body$;

-- Store time in milliseconds. Tests pass their own.
CREATE OR REPLACE FUNCTION {clock}(p_clock bigint) RETURNS bigint LANGUAGE sql VOLATILE AS $body$
    SELECT coalesce(p_clock, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)
$body$;

-- The row of a name; it is created if there is none. The name becomes a queue only when something is added to it: see
-- `make_queue`.
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

-- For a transaction of the caller that reads by an old snapshot: fail, as any write in such a transaction does, if the
-- settings of the queue have changed since the snapshot. The lock is released at once, so that changes of the settings
-- do not wait for the transaction; such a change notices the transaction by its shared removal lock.
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

-- Make a name a queue, because something is added to it. If another transaction is doing so, this one does not wait for
-- it.
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

-- An operation is passed as two parameters: its number, and `p_session`, which consists of the session (8 bytes), the
-- mark (8), the stamp (8) and, for a claim, the nonce of this attempt (12).
CREATE OR REPLACE FUNCTION {operation_id}(p_session bytea, p_number bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $body$
    SELECT encode(substr(p_session, 1, {SESSION_BYTES}), 'hex') || '.' || p_number
$body$;

CREATE OR REPLACE FUNCTION {stamp}(p_session bytea) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT ('x' || encode(substr(p_session, {STAMP_AT}, {STAMP_BYTES}), 'hex'))::bit(64)::bigint
$body$;

-- The first result of an operation, null if the operation is new. An operation whose result may have been deleted is
-- refused: see repeats.py. The stored result begins with the mark of the operation, as 16 hexadecimal digits.
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

-- Store the result of an operation. If the same operation has finished on another connection meanwhile, this step is
-- rolled back and repeated, and then finds the first result. Returns whether this step must do maintenance (`tidy`).
CREATE OR REPLACE FUNCTION {store_result}(
    p_queue integer, p_session bytea, p_number bigint, p_until_ms bigint, p_result text
) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    -- Kept longer than a repeat is accepted, by the time that a stamp may be in the future.
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

-- Return whether a step must do maintenance: one step in 64, chosen by transaction number, and each step that finds
-- many counts to fold. Only some steps check for many counts, chosen by transaction number or by operation number: a
-- client whose transaction numbers never match has operation numbers that do.
CREATE OR REPLACE FUNCTION {tidy_is_due}(p_queue integer, p_number bigint) RETURNS boolean LANGUAGE plpgsql AS $body$
DECLARE
    v_xid bigint := pg_current_xact_id()::text::bigint;
BEGIN
    RETURN v_xid % 64 = 0 OR (v_xid % 16 = 8 OR p_number % 16 = 8) AND {many_counts}(p_queue);
END $body$;

-- The same for a step that leaves rows to fold or sweep for each of `p_count` messages: the more messages, the more
-- likely is maintenance.
CREATE OR REPLACE FUNCTION {tidy_is_due_for}(p_queue integer, p_count bigint) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    RETURN p_count > 1 AND (random() * 64 < p_count OR {many_counts}(p_queue));
END $body$;

-- Return whether a queue has more than 64 rows of counts that are not folded.
CREATE OR REPLACE FUNCTION {many_counts}(p_queue integer) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    RETURN EXISTS (SELECT 1 FROM {tally} t WHERE t.queue = p_queue OFFSET 64 LIMIT 1);
END $body$;

-- Return whether it has more than `p_most` of these rows.
CREATE OR REPLACE FUNCTION {counts_exceed}(p_queue integer, p_most bigint) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    RETURN EXISTS (SELECT 1 FROM {tally} t WHERE t.queue = p_queue OFFSET p_most LIMIT 1);
END $body$;

-- How many messages are in each state: folded counts plus those not folded yet, of one moment.
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

-- Count the messages that exceed `max_pending` among those stored without a check of it. `p_queues` has the queue of
-- each message. No lock is taken, since a settle holds locks of its messages: steps that overlap count by the depth
-- that each of them sees.
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

-- The floor: all tokens given by claims are above it. It is raised after each start of the server. A claim that is lost
-- with the server's memory gave a token above the floor of its time, so raising the floor ensures that no later claim
-- gives that token again. Using the clock makes the floor greater than any floor of a server from which an older backup
-- or a replica was taken. One claim raises the floor, and the others wait here.
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
        -- It must be on the disk before a token above it is visible, whatever the server's default is.
        IF current_setting('synchronous_commit') = 'off' THEN
            PERFORM set_config('synchronous_commit', 'local', true);
        END IF;
    END IF;
    RETURN v_floor;
END $body$;

-- The time until a moment; null if there is none.
CREATE OR REPLACE FUNCTION {ms_until}(p_at bigint, p_now bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN p_at IS NOT NULL THEN greatest(p_at - p_now, 0) END
$body$;
