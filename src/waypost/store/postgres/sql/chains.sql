-- Chains, kept in the queue of their first message (`home`); messages that wait for chains; clients that wait for an end.
-- Touches: chain, member, blocker, waiter, ending, queue (read), message, sleeper, and what `end_message` touches.
-- Keeps: a chain changes only under the lock of its row, and a waiting message only under the lock of its own row; the
-- removal of the last blocker of a message makes the message claimable, once. Only steps of the same chain wait for
-- each other.
--
-- A followup is what an end causes in other rows. A verb gathers followups and applies them after its own work: so all
-- verbs lock chains in the same order, and a long series of messages that wait for each other is a loop, without
-- recursion.
-- Followups are JSON: {chain, member, begun, failed} for an end, to be counted in its chain; {queue, names} for
-- sleepers to wake.

-- The end of a message, as a followup for its chain.
CREATE OR REPLACE FUNCTION {end_followup}(p_chain text, p_member text, p_begun text[], p_failed text) RETURNS json
LANGUAGE sql IMMUTABLE AS $body$
    SELECT json_build_object('chain', p_chain, 'member', p_member, 'begun', p_begun, 'failed', p_failed)
$body$;

-- The waiters to wake, as followups; empty if there are no names.
CREATE OR REPLACE FUNCTION {wake_followup}(p_queue text, p_names text[]) RETURNS json[] LANGUAGE sql IMMUTABLE AS $body$
    SELECT CASE WHEN cardinality(p_names) > 0
        THEN ARRAY[json_build_object('queue', p_queue, 'names', p_names)] ELSE '{}'::json[] END
$body$;

-- What a settlement forwards, as names of messages.
CREATE OR REPLACE FUNCTION {continuation_names}(p_sources integer[], p_queues text[], p_envelopes bytea[], p_source bigint)
RETURNS text[] LANGUAGE sql IMMUTABLE AS $body$
    SELECT array_agg(u.queue || '/' || convert_from(substr(u.data, 2, {ID_CHARACTERS}), 'UTF8'))
    FROM unnest(p_sources, p_queues, p_envelopes) AS u (source, queue, data) WHERE u.source = p_source
$body$;

-- Begin the chains of drafts that were stored. If a forwarded message was not stored because its key is in use, its
-- branch of the chain ends: the message that has the key is not of this chain. Returns followups.
CREATE OR REPLACE FUNCTION {begin_chains}(
    q {queue}, p_now bigint, p_ids text[], p_acts text[], p_chains text[], p_forwarded boolean[]
) RETURNS json[] LANGUAGE plpgsql AS $body$
DECLARE
    v_followups json[];
BEGIN
    WITH begun AS (
        INSERT INTO {chain} (queue, id, until_ms)
        SELECT q.number, u.id, {NO_END_MS} FROM unnest(p_ids, p_acts, p_chains) AS u (id, act, chain)
        WHERE u.act IN ('new', 'park', 'replace') AND u.chain = q.name || '/' || u.id
        ON CONFLICT (queue, id) DO NOTHING RETURNING id
    )
    INSERT INTO {member} (queue, chain, name, count) SELECT q.number, b.id, q.name || '/' || b.id, 1 FROM begun b;
    SELECT array_agg({end_followup}(u.chain, q.name || '/' || u.id, NULL, 'duplicate')) INTO v_followups
    FROM unnest(p_ids, p_acts, p_chains, p_forwarded) AS u (id, act, chain, forwarded)
    WHERE u.forwarded AND u.chain IS NOT NULL AND u.act IN ('duplicate', 'conflict');
    RETURN coalesce(v_followups, '{}');
END $body$;

-- The place of a chain: the number of its queue, null if there is none, and the id of its first message.
CREATE OR REPLACE FUNCTION {find_chain}(p_chain text, OUT home integer, OUT first text) LANGUAGE plpgsql AS $body$
BEGIN
    first := substring(p_chain FROM '[^/]*$');
    SELECT q.number INTO home FROM {queue} q WHERE q.name = left(p_chain, -length(first) - 1);
END $body$;

-- Block messages that were stored and wait for chains; each pair of an id and a chain is one wait. A chain that has
-- ended does not block; a chain that failed or is unknown makes the messages that wait for it dead. Returns followups.
CREATE OR REPLACE FUNCTION {block_messages}(q {queue}, p_now bigint, p_ids text[], p_chains text[]) RETURNS json[]
LANGUAGE plpgsql AS $body$
DECLARE
    c {chain};
    m {message};
    v record;
    v_place record;
    v_broken text[] := array_fill(NULL::text, ARRAY[cardinality(p_ids)]);
    v_followups json[] := '{}';
BEGIN
    -- If the chain is about to end, this waits for that end; a later end finds the wait.
    FOR v IN
        SELECT u.id, u.chain, u.n FROM unnest(p_ids, p_chains) WITH ORDINALITY AS u (id, chain, n) ORDER BY u.chain, u.n
    LOOP
        v_place := {find_chain}(v.chain);
        SELECT * INTO c FROM {chain} t
        WHERE t.queue = v_place.home AND t.id = v_place.first
            AND (t.until_ms > p_now OR (t.open > 0 AND t.failed IS NULL)) FOR SHARE;
        IF NOT FOUND THEN
            v_broken[v.n] := 'unknown chain';
        ELSIF c.failed IS NOT NULL THEN
            v_broken[v.n] := c.failed;
        ELSIF c.open > 0 THEN
            INSERT INTO {blocker} (home, chain, queue, id) VALUES (c.queue, c.id, q.number, v.id)
            ON CONFLICT (home, chain, queue, id) DO NOTHING;
        END IF;
    END LOOP;
    FOR v IN
        SELECT w.id, min(w.n) FILTER (WHERE w.failed IS NOT NULL) AS broken
        FROM unnest(p_ids, v_broken) WITH ORDINALITY AS w (id, failed, n) GROUP BY w.id ORDER BY min(w.n)
    LOOP
        SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = v.id AND t.state + 0 = {WAITING};
        IF NOT FOUND THEN
            CONTINUE;
        ELSIF v.broken IS NOT NULL THEN
            v_followups := v_followups || {bury_blocked}(q, m, p_now, p_chains[v.broken], v_broken[v.broken]);
        ELSIF NOT EXISTS (SELECT 1 FROM {blocker} b WHERE b.queue = q.number AND b.id = v.id) THEN
            v_followups := v_followups || {unblock_message}(q, m, p_now);
        END IF;
    END LOOP;
    RETURN v_followups;
END $body$;

-- Make a message that waited claimable, or a timer if its due time is in the future. Returns followups.
CREATE OR REPLACE FUNCTION {unblock_message}(q {queue}, m {message}, p_now bigint) RETURNS json[] LANGUAGE plpgsql AS $body$
DECLARE
    v_due bigint := {next_due}(q.number);
    -- Without a delay: now, even if the clock was set back since the publish.
    v_ready bigint := CASE WHEN m.ready_ms = m.published_ms THEN p_now ELSE greatest(m.ready_ms, p_now) END;
    v_state smallint := (v_ready > p_now)::int;
BEGIN
    UPDATE {message} t SET state = v_state, ready_ms = v_ready, position = nextval('{sequence}')
    WHERE t.queue = q.number AND t.id = m.id;
    PERFORM {count_move}(q.number, p_now, {WAITING}::smallint, v_state);
    IF m.group_rank IS NOT NULL THEN
        PERFORM {change_group}(q.number, m."group", {WAITING}::smallint, v_state);
    END IF;
    PERFORM {write_event}(q, p_now, NULL, 'promoted', m, 'unblocked');
    PERFORM {add_side_effect}(q.name, 'promoted', 'unblocked', ARRAY[m.id], ARRAY[m.token]);
    RETURN {wake_followup}(q.name, {wake}(q, p_now, CASE WHEN v_state = {READY} OR v_due IS NULL OR v_ready < v_due THEN 1 ELSE 0 END));
END $body$;

-- Make a message dead that waited for a chain which failed. Returns followups.
CREATE OR REPLACE FUNCTION {bury_blocked}(q {queue}, m {message}, p_now bigint, p_chain text, p_failed text)
RETURNS json[] LANGUAGE plpgsql AS $body$
DECLARE
    v_followups json[];
BEGIN
    m.reason := 'blocker_failed';
    m.error_type := 'ChainFailed';
    m.error := 'chain ' || p_chain || ': ' || p_failed;
    v_followups := ({end_message}(q, m, p_now, NULL, 'dead')).followups;
    PERFORM {trim_dead}(q, p_now);
    RETURN v_followups;
END $body$;

-- The followups of the end of a message, for its chain and its waiters. The row of the message must be changed before:
-- a client that begins to wait at this moment is then either found here, or sees the end.
CREATE OR REPLACE FUNCTION {end_followups}(q {queue}, m {message}, p_now bigint, p_end text, p_begun text[]) RETURNS json[]
LANGUAGE plpgsql AS $body$
DECLARE
    v_followups json[] := {wake_followup}(q.name, {end_waits}(q, p_now, ARRAY[m.id], ARRAY[p_end]));
BEGIN
    IF m.state = {WAITING} AND m.key IS NULL THEN
        DELETE FROM {blocker} b WHERE b.queue = q.number AND b.id = m.id;
    END IF;
    IF m.chain IS NOT NULL THEN
        v_followups := v_followups || {end_followup}(
            m.chain, q.name || '/' || m.id, p_begun, CASE WHEN p_end <> 'done' THEN coalesce(m.reason, p_end) END);
    END IF;
    RETURN v_followups;
END $body$;

-- Remove the waiters of these ends, and return the names of the waiters that have not expired. If `p_ends` is given,
-- the kinds of end are stored, one for all or one for each; how a chain ended is in its own row.
CREATE OR REPLACE FUNCTION {end_waits}(q {queue}, p_now bigint, p_ids text[], p_ends text[]) RETURNS text[]
LANGUAGE plpgsql AS $body$
DECLARE
    v_names text[];
BEGIN
    IF NOT EXISTS (SELECT 1 FROM {waiter} w WHERE w.queue = q.number) THEN
        RETURN '{}';
    END IF;
    WITH gone AS MATERIALIZED (
        DELETE FROM {waiter} w WHERE w.queue = q.number AND w.id = ANY (p_ids) RETURNING w.id, w.name, w.until_ms
    ), e AS (
        INSERT INTO {ending} (queue, id, how, until_ms)
        SELECT q.number, g.id, coalesce(p_ends[array_position(p_ids, g.id)], p_ends[1]), p_now + {ENDED_TTL_MS}
        FROM (SELECT DISTINCT g.id FROM gone g) g WHERE p_ends IS NOT NULL
        ON CONFLICT (queue, id) DO UPDATE SET how = excluded.how, until_ms = excluded.until_ms
    )
    SELECT coalesce(array_agg(DISTINCT g.name) FILTER (WHERE g.until_ms > p_now), '{}') INTO v_names FROM gone g;
    IF cardinality(v_names) > 0 THEN
        PERFORM {notify}(q.name, v_names);
    END IF;
    RETURN v_names;
END $body$;

-- Apply followups, and the followups that these cause. Returns pairs of a queue and the names to wake there.
CREATE OR REPLACE FUNCTION {apply_followups}(p_now bigint, p_followups json[]) RETURNS json[] LANGUAGE plpgsql AS $body$
DECLARE
    v_item json;
    v_next json[];
    v_wakes json[] := '{}';
BEGIN
    WHILE cardinality(p_followups) > 0 LOOP
        v_next := '{}';
        FOR v_item IN
            SELECT u.one FROM unnest(p_followups) WITH ORDINALITY AS u (one, n) ORDER BY u.one ->> 'chain', u.n
        LOOP
            IF v_item ->> 'chain' IS NULL THEN
                v_wakes := v_wakes || json_build_array(v_item -> 'queue', v_item -> 'names');
            ELSE
                v_next := v_next || {count_end}(p_now, v_item ->> 'chain', v_item ->> 'member', ARRAY(
                    SELECT b.name FROM json_array_elements_text(
                        CASE WHEN v_item ->> 'begun' IS NOT NULL THEN v_item -> 'begun' ELSE '[]' END) AS b (name)),
                    v_item ->> 'failed');
            END IF;
        END LOOP;
        p_followups := v_next;
    END LOOP;
    RETURN v_wakes;
END $body$;

-- Count an end in its chain. Ended messages and forwarded messages are counted by name, and a count of zero is deleted:
-- when no count is left, or a message failed, the chain is finished and all its waiters are woken. Returns followups.
CREATE OR REPLACE FUNCTION {count_end}(p_now bigint, p_chain text, p_member text, p_begun text[], p_failed text)
RETURNS json[] LANGUAGE plpgsql AS $body$
DECLARE
    c {chain};
    q {queue};
    m {message};
    v record;
    v_place record := {find_chain}(p_chain);
    v_count integer;
    v_followups json[];
BEGIN
    SELECT * INTO c FROM {chain} t
    WHERE t.queue = v_place.home AND t.id = v_place.first
        AND (t.until_ms > p_now OR (t.open > 0 AND t.failed IS NULL)) FOR UPDATE;
    IF NOT FOUND OR c.failed IS NOT NULL OR c.open = 0 THEN
        RETURN '{}';
    END IF;
    FOR v IN SELECT p_member AS name, -1 AS change UNION ALL SELECT b.name, 1 FROM unnest(p_begun) AS b (name) LOOP
        DELETE FROM {member} t
        WHERE t.queue = c.queue AND t.chain = c.id AND t.name = v.name AND t.count = -v.change;
        IF FOUND THEN
            c.open := c.open - 1;
            CONTINUE;
        END IF;
        INSERT INTO {member} AS t (queue, chain, name, count) VALUES (c.queue, c.id, v.name, v.change)
        ON CONFLICT (queue, chain, name) DO UPDATE SET count = t.count + excluded.count RETURNING t.count INTO v_count;
        c.open := c.open + (v_count = v.change)::int;
    END LOOP;
    IF p_failed IS NULL AND c.open > 0 THEN
        UPDATE {chain} t SET open = c.open, last = p_member, until_ms = {NO_END_MS}
        WHERE t.queue = c.queue AND t.id = c.id;
        RETURN '{}';
    END IF;
    UPDATE {chain} t SET open = c.open, last = p_member, until_ms = p_now + {ENDED_TTL_MS}, failed = p_failed,
        failed_member = CASE WHEN p_failed IS NOT NULL THEN p_member END
    WHERE t.queue = c.queue AND t.id = c.id;
    SELECT * INTO q FROM {queue} t WHERE t.number = c.queue;
    v_followups := {wake_followup}(q.name, {end_waits}(q, p_now, ARRAY['chain/' || c.id], NULL));
    FOR v IN SELECT b.queue, b.id FROM {blocker} b WHERE b.home = c.queue AND b.chain = c.id ORDER BY b.queue, b.id LOOP
        -- Under the lock of the message: if two chains end at the same time, the second finds that it is the last
        -- blocker.
        SELECT * INTO m FROM {message} t WHERE t.queue = v.queue AND t.id = v.id AND t.state + 0 = {WAITING} FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        SELECT * INTO q FROM {queue} t WHERE t.number = v.queue;
        DELETE FROM {blocker} b WHERE b.home = c.queue AND b.chain = c.id AND b.queue = v.queue AND b.id = v.id;
        IF p_failed IS NOT NULL THEN
            v_followups := v_followups || {bury_blocked}(q, m, p_now, p_chain, p_failed);
        ELSIF NOT EXISTS (SELECT 1 FROM {blocker} b WHERE b.queue = v.queue AND b.id = v.id) THEN
            v_followups := v_followups || {unblock_message}(q, m, p_now);
        END IF;
    END LOOP;
    RETURN v_followups;
END $body$;

-- The state of a message; the client `p_waiter` is woken when it ends. The lock that is taken conflicts only with an
-- end: a claim does not wait for it.
CREATE OR REPLACE FUNCTION {watch}(p_queue text, p_clock bigint, p_id text, p_waiter text, p_ttl bigint) RETURNS TABLE (
    state smallint, how text, reason text, error_type text, error text, data bytea
) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    m {message};
    v_queue integer := (SELECT q.number FROM {queue} q WHERE q.name = p_queue);
    v_now bigint := {clock}(p_clock);
BEGIN
    IF p_waiter IS NULL THEN
        SELECT * INTO m FROM {message} t WHERE t.queue = v_queue AND t.id = p_id;
    ELSE
        SELECT * INTO m FROM {message} t WHERE t.queue = v_queue AND t.id = p_id FOR KEY SHARE;
    END IF;
    IF m.state = {DEAD} THEN
        RETURN QUERY SELECT m.state, 'dead', m.reason, m.error_type, m.error, NULL::bytea;
    ELSIF m.state IS NOT NULL THEN
        IF p_waiter IS NOT NULL THEN
            INSERT INTO {waiter} (queue, id, name, until_ms) VALUES (v_queue, p_id, p_waiter, v_now + p_ttl)
            ON CONFLICT (queue, id, name) DO UPDATE SET until_ms = excluded.until_ms;
        END IF;
        RETURN QUERY SELECT m.state, NULL::text, NULL::text, NULL::text, NULL::text, NULL::bytea;
    ELSE
        RETURN QUERY SELECT NULL::smallint, 'done', NULL::text, NULL::text, NULL::text, r.data FROM {result} r
            WHERE r.queue = v_queue AND r.id = p_id AND r.until_ms > v_now;
        IF NOT FOUND THEN
            RETURN QUERY SELECT NULL::smallint, e.how, NULL::text, NULL::text, NULL::text, NULL::bytea FROM {ending} e
                WHERE e.queue = v_queue AND e.id = p_id AND e.until_ms > v_now;
        END IF;
    END IF;
END $body$;

-- The state of a chain, no row if it is unknown; the client `p_waiter` is woken when it is finished.
CREATE OR REPLACE FUNCTION {watch_chain}(p_queue text, p_clock bigint, p_id text, p_waiter text, p_ttl bigint)
RETURNS TABLE (open integer, failed_member text, failed text, last text) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    c {chain};
    v_queue integer := (SELECT q.number FROM {queue} q WHERE q.name = p_queue);
    v_now bigint := {clock}(p_clock);
BEGIN
    IF p_waiter IS NULL THEN
        SELECT * INTO c FROM {chain} t
        WHERE t.queue = v_queue AND t.id = p_id AND (t.until_ms > v_now OR (t.open > 0 AND t.failed IS NULL));
    ELSE
        -- If the chain is about to end, this waits for it: the end is then either returned here, or finds the waiter.
        SELECT * INTO c FROM {chain} t
        WHERE t.queue = v_queue AND t.id = p_id AND (t.until_ms > v_now OR (t.open > 0 AND t.failed IS NULL)) FOR SHARE;
    END IF;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF p_waiter IS NOT NULL AND c.failed IS NULL AND c.open > 0 THEN
        INSERT INTO {waiter} (queue, id, name, until_ms) VALUES (v_queue, 'chain/' || p_id, p_waiter, v_now + p_ttl)
        ON CONFLICT (queue, id, name) DO UPDATE SET until_ms = excluded.until_ms;
    END IF;
    RETURN QUERY SELECT c.open, c.failed_member, c.failed, c.last;
END $body$;

-- The relations of a message to chains: its own chain, the chains that it waits for, the state of the chain that it
-- began, the open members of that chain, and the messages that wait for that chain.
CREATE OR REPLACE FUNCTION {links}(p_queue text, p_clock bigint, p_id text) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    c {chain};
    v_queue integer := (SELECT q.number FROM {queue} q WHERE q.name = p_queue);
    v_now bigint := {clock}(p_clock);
    v_chain text;
    v_found boolean;
    v_blockers text[];
    v_members text[];
    v_watchers text[];
BEGIN
    SELECT t.chain INTO v_chain FROM {message} t WHERE t.queue = v_queue AND t.id = p_id;
    IF FOUND THEN
        SELECT array_agg(l.name ORDER BY l.name) INTO v_blockers FROM (
            SELECT h.name || '/' || b.chain AS name FROM {blocker} b JOIN {queue} h ON h.number = b.home
            WHERE b.queue = v_queue AND b.id = p_id LIMIT {LINKS_MAX}) l;
    END IF;
    SELECT * INTO c FROM {chain} t
    WHERE t.queue = v_queue AND t.id = p_id AND (t.until_ms > v_now OR (t.open > 0 AND t.failed IS NULL));
    v_found := FOUND;
    IF v_found THEN
        SELECT array_agg(l.name) INTO v_members FROM (
            SELECT t.name FROM {member} t WHERE t.queue = v_queue AND t.chain = p_id AND t.count > 0
            ORDER BY t.name LIMIT {LINKS_MAX}) l;
        SELECT array_agg(l.name ORDER BY l.name) INTO v_watchers FROM (
            SELECT w.name || '/' || b.id AS name FROM {blocker} b JOIN {queue} w ON w.number = b.queue
            WHERE b.home = v_queue AND b.chain = p_id LIMIT {LINKS_MAX}) l;
    END IF;
    RETURN json_build_array(
        v_chain, coalesce(v_blockers, '{}'),
        CASE WHEN v_found THEN json_build_array(c.open, c.failed_member, c.failed, c.last) END,
        coalesce(v_members, '{}'), coalesce(v_watchers, '{}'))::text;
END $body$;

-- Delete chains that ended a while ago, with their members: a bounded number of both, and a chain after its members.
CREATE OR REPLACE FUNCTION {sweep_chains}(p_now bigint) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    c {chain};
    v_left integer := 2048;
    v_gone integer;
BEGIN
    FOR c IN
        SELECT * FROM {chain} t WHERE t.until_ms <= p_now ORDER BY t.until_ms LIMIT 1024 FOR UPDATE SKIP LOCKED
    LOOP
        IF c.open > 0 AND c.failed IS NULL THEN
            -- The previous release gave unfinished chains an expiry: a client may be waiting for this one.
            UPDATE {chain} t SET until_ms = {NO_END_MS} WHERE t.queue = c.queue AND t.id = c.id;
            CONTINUE;
        END IF;
        IF c.open > 0 THEN
            DELETE FROM {member} t WHERE t.ctid IN (
                SELECT o.ctid FROM {member} o WHERE o.queue = c.queue AND o.chain = c.id LIMIT v_left);
            GET DIAGNOSTICS v_gone = ROW_COUNT;
            v_left := v_left - v_gone;
            EXIT WHEN v_left <= 0;
        END IF;
        DELETE FROM {chain} t WHERE t.queue = c.queue AND t.id = c.id;
    END LOOP;
END $body$;
