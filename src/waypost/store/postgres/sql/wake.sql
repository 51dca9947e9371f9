-- Choose the sleepers to wake for the messages that a step made claimable, and notify them with the commit. Touches:
-- sleeper, and tally where the step is a part of the caller's own transaction.
-- Keeps: a sleeper is named once; publishers do not wait for each other here; without sleepers nothing is sent.

-- The channel of a queue. The name of a channel can have 63 bytes.
CREATE OR REPLACE FUNCTION {channel}(p_queue text) RETURNS text LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN octet_length(c.name) <= {CHANNEL_BYTES_MAX} THEN c.name
        ELSE 'waypost:' || left(encode(sha256(convert_to(c.name, 'UTF8')), 'hex'), {CHANNEL_HASH_DIGITS}) END
    FROM (SELECT trim(both '"' FROM '{#ready}') || ':' || p_queue AS name) c
$body$;

-- In a part of the caller's own transaction (`p_in_transaction`, or the setting for functions without that parameter)
-- no sleeper is marked as awake yet: a row that is locked until that transaction ends would block its worker, and the
-- sleeper may be awake by then. The number of sleepers to wake is stored, and the names that only the client can notify
-- are returned.
CREATE OR REPLACE FUNCTION {wake}(q {queue}, p_now bigint, p_count bigint, p_in_transaction boolean DEFAULT false) RETURNS text[]
LANGUAGE plpgsql AS $body$
DECLARE
    v_sleeping boolean;
    v_recent boolean;
    v_poll_soon boolean;
    v_names text[];
    v_again text[];
BEGIN
    IF coalesce(p_count, 0) <= 0 THEN
        RETURN '{}';
    END IF;
    IF p_in_transaction OR current_setting('waypost.in_transaction', true) = 'on' THEN
        INSERT INTO {tally} (seq, queue, minute, wake) VALUES (nextval('{sequence}'), q.number, p_now / 60000, p_count);
        RETURN ARRAY(
            SELECT s.name FROM {sleeper} s
            WHERE s.queue = q.number AND NOT s.awake AND s.until_ms > p_now AND s.name !~ '^[@~]'
            ORDER BY s.until_ms DESC, s.name DESC LIMIT p_count);
    END IF;
    IF q.paused THEN
        RETURN '{}';
    END IF;
    -- Inline and not a function, since every publish runs it; on a busy queue nothing else is done.
    SELECT bool_or(NOT s.awake) FILTER (WHERE s.name NOT LIKE '~%'),
        bool_or(s.woken_ms > p_now - 250) FILTER (WHERE s.name NOT LIKE '~%'),
        bool_or(s.name LIKE '~%' AND s.until_ms <= p_now + {POLL_SOON_MS_MAX})
    INTO v_sleeping, v_recent, v_poll_soon FROM {sleeper} s
    WHERE s.queue = q.number AND s.until_ms > p_now;
    -- A worker that polls soon finds a few messages without a notification.
    IF NOT (v_sleeping OR v_recent) OR (p_count <= {POLL_SOON_MESSAGES_MAX} AND v_poll_soon) THEN
        RETURN '{}';
    END IF;
    SELECT s.names, s.again INTO v_names, v_again FROM {choose_sleepers}(q, p_now, p_count, false, v_sleeping) s;
    IF cardinality(v_names) + cardinality(v_again) > 0 THEN
        PERFORM {notify}(q.name, v_names || v_again);
    END IF;
    RETURN v_names;
END $body$;

-- The same at the commit of the caller's own transaction, for each step of it that needs a sleeper: all changes are
-- known by now, and rows that are locked here are locked only for a moment. An error would roll back that transaction,
-- so nothing is done that could fail: if the transaction has an old snapshot, all sleepers are notified.
CREATE OR REPLACE FUNCTION {wake_at_commit}() RETURNS trigger LANGUAGE plpgsql {few_settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    v_sleeping boolean;
    v_recent boolean;
    v_poll_soon boolean;
    v_names text[];
    v_again text[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        SELECT * INTO q FROM {queue} t WHERE t.number = NEW.queue;
        PERFORM {notify}(q.name, '{*}');
        RETURN NULL;
    END IF;
    SELECT bool_or(NOT s.awake) FILTER (WHERE s.name NOT LIKE '~%'),
        bool_or(s.woken_ms > v_now - 250) FILTER (WHERE s.name NOT LIKE '~%'),
        bool_or(s.name LIKE '~%' AND s.until_ms <= v_now + {POLL_SOON_MS_MAX})
    INTO v_sleeping, v_recent, v_poll_soon FROM {sleeper} s
    WHERE s.queue = NEW.queue AND s.until_ms > v_now;
    IF NOT (v_sleeping OR v_recent) OR (NEW.wake <= {POLL_SOON_MESSAGES_MAX} AND v_poll_soon) THEN
        RETURN NULL;
    END IF;
    SELECT * INTO q FROM {queue} t WHERE t.number = NEW.queue AND NOT t.paused;
    IF FOUND THEN
        SELECT s.names, s.again INTO v_names, v_again FROM {choose_sleepers}(q, v_now, NEW.wake, true, v_sleeping) s;
        IF cardinality(v_names) + cardinality(v_again) > 0 THEN
            PERFORM {notify}(q.name, v_names || v_again);
        END IF;
    END IF;
    RETURN NULL;
END $body$;

-- Notify the sleepers whose names begin with @: they listen on this channel. The client notifies the others, in another
-- way.
CREATE OR REPLACE FUNCTION {notify}(p_queue text, p_names text[]) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_here text[];
BEGIN
    SELECT array_agg(n.name) INTO v_here FROM unnest(p_names) AS n (name) WHERE n.name ~ '^[@*]';
    -- A payload can have 8,000 bytes, and a name a little more than 128.
    FOR i IN 1 .. coalesce(cardinality(v_here), 0) BY 50 LOOP
        PERFORM pg_notify({channel}(p_queue), array_to_string(v_here[i : i + 49], E'\n'));
    END LOOP;
END $body$;

-- Choose sleepers, the last to fall asleep first. At the commit of the caller's own transaction (`p_in_transaction`) no
-- client receives the names, so only sleepers that listen on the channel are chosen. `again` are workers that may be
-- falling asleep at this moment, in a step that cannot see the messages of this one: they were woken just now, or their
-- own claim has locked their row. They are notified to poll once more, but only if too few sleepers were found.
-- `p_sleeping`: whether a worker sleeps; null: unknown.
CREATE OR REPLACE FUNCTION {choose_sleepers}(
    q {queue}, p_now bigint, p_count bigint, p_in_transaction boolean, p_sleeping boolean, OUT names text[], OUT again text[]
) LANGUAGE plpgsql AS $body$
BEGIN
    names := '{}';
    again := '{}';
    IF p_sleeping IS NULL THEN
        -- The list of sleepers was lost: all workers are woken, once. The first step does it for all.
        IF pg_try_advisory_xact_lock({lock_key}('sleeper'), q.number) THEN
            INSERT INTO {sleeper} AS s (queue, name, until_ms, awake) VALUES (q.number, '', p_now + {SLEEPER_TTL_MS}, true)
            ON CONFLICT (queue, name) DO UPDATE SET until_ms = excluded.until_ms WHERE s.until_ms <= p_now;
            names := CASE WHEN FOUND THEN '{*}'::text[] ELSE '{}' END;
        END IF;
        RETURN;
    END IF;
    IF p_sleeping THEN
        WITH chosen AS (
            SELECT s.name, s.until_ms FROM {sleeper} s
            WHERE s.queue = q.number AND NOT s.awake AND s.until_ms > p_now AND (s.name LIKE '@%' OR NOT p_in_transaction)
            ORDER BY s.until_ms DESC, s.name DESC LIMIT p_count FOR UPDATE SKIP LOCKED
        ), woken AS (
            UPDATE {sleeper} s SET awake = true, woken_ms = p_now FROM chosen c
            WHERE s.queue = q.number AND s.name = c.name
            RETURNING c.name, c.until_ms
        )
        SELECT coalesce(array_agg(w.name ORDER BY w.until_ms DESC, w.name DESC), '{}') INTO names FROM woken w;
    END IF;
    IF cardinality(names) < p_count THEN
        again := ARRAY(
            SELECT s.name FROM {sleeper} s
            WHERE s.queue = q.number AND s.until_ms > p_now AND s.name LIKE '@%' AND s.name <> ALL (names)
                AND (NOT s.awake OR s.woken_ms > p_now - 250)
            ORDER BY s.until_ms DESC LIMIT p_count - cardinality(names));
    END IF;
END $body$;

-- Record that a worker polls again within `p_ms` milliseconds; 0 expires the record. Each worker has a row of its own,
-- named ~worker.
CREATE OR REPLACE FUNCTION {announce_poll}(p_queue integer, p_worker text, p_now bigint, p_ms bigint) RETURNS void
LANGUAGE plpgsql AS $body$
BEGIN
    IF p_ms > 0 THEN
        INSERT INTO {sleeper} (queue, name, until_ms, awake)
        VALUES (p_queue, '~' || p_worker, p_now + least(p_ms, {POLL_SOON_MS_MAX}), true)
        ON CONFLICT (queue, name) DO UPDATE SET until_ms = excluded.until_ms;
    ELSE
        UPDATE {sleeper} s SET until_ms = p_now
        WHERE s.queue = p_queue AND s.name = '~' || p_worker AND s.until_ms > p_now;
    END IF;
END $body$;
