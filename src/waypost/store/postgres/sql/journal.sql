-- The journal for its readers. Touches: entry (read), mark, kept, reader, and what `order_journal` and `rotate_journal`
-- touch.
-- Keeps: numbers begin with 1 and have no gap; the number of an event never changes; no event gets a number while a
-- transaction that could precede it is open. Readers of one queue wait for each other here, writers do not wait.

CREATE OR REPLACE FUNCTION {open_journal}(p_queue text, p_clock bigint, OUT q {queue}, OUT first bigint, OUT last bigint)
LANGUAGE plpgsql AS $body$
BEGIN
    SELECT * INTO q FROM {queue} t WHERE t.name = p_queue;
    first := 1;
    last := 0;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock({lock_key}('journal'), q.number);
    PERFORM {order_journal}(q, {clock}(p_clock), 100000);
    first := coalesce((SELECT k.first FROM {kept} k WHERE k.queue = q.number), 1);
    last := coalesce((SELECT m.number FROM {mark} m WHERE m.queue = q.number ORDER BY m.number DESC LIMIT 1), 0);
END $body$;

-- Entries with events after `p_after`, each with the number of events before it. The first row has only `head`.
CREATE OR REPLACE FUNCTION {journal}(p_queue text, p_clock bigint, p_after bigint, p_limit bigint)
RETURNS TABLE (head text, before bigint, entry {entry}) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    v record;
    v_mark {mark};
    v_last {mark};
    v_after bigint;
BEGIN
    SELECT * INTO v FROM {open_journal}(p_queue, p_clock);
    v_after := greatest(p_after, v.first - 1);
    SELECT * INTO v_mark FROM {mark} m
    WHERE m.queue = (v.q).number AND m.number <= v_after ORDER BY m.number DESC LIMIT 1;
    IF NOT FOUND THEN
        v_mark := ((v.q).number, 0, 0, 0);
    END IF;
    SELECT * INTO v_last FROM {mark} m WHERE m.queue = (v.q).number ORDER BY m.number DESC LIMIT 1;
    RETURN QUERY SELECT json_build_array(v.first, v.last)::text, NULL::bigint, NULL::{entry};
    RETURN QUERY
        WITH counted AS MATERIALIZED (
            SELECT o.xid, o.seq, o.count, v_mark.number + (sum(o.count) OVER (ORDER BY o.xid,
                o.seq))::bigint - o.count AS before
            FROM (
                SELECT t.xid, t.seq, t.count FROM {entry} t
                WHERE t.queue = (v.q).number AND (t.xid, t.seq) > (v_mark.xid, v_mark.seq)
                    AND (t.xid, t.seq) <= (v_last.xid, v_last.seq)
                ORDER BY t.xid, t.seq LIMIT 64 + p_limit
            ) o
        )
        -- OFFSET 0 makes the planner find each entry by its place. A plan that was made while the journal is empty may
        -- join in the other order, and then reads the whole journal for each entry of a page.
        SELECT NULL::text, c.before, e.whole FROM counted c
        CROSS JOIN LATERAL (
            SELECT t AS whole FROM {entry} t
            WHERE t.queue = (v.q).number AND t.xid = c.xid AND t.seq = c.seq OFFSET 0
        ) e
        WHERE c.before + c.count > v_after AND c.before < v_after + p_limit
        ORDER BY c.before;
END $body$;

-- The entries that contain one message. Entries of a single message are found by an index, entries of many are scanned.
CREATE OR REPLACE FUNCTION {trace}(p_queue text, p_clock bigint, p_id text)
RETURNS TABLE (head text, before bigint, entry {entry}) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    v record;
    v_last {mark};
    v_gone record;
BEGIN
    SELECT * INTO v FROM {open_journal}(p_queue, p_clock);
    v_gone := {trimmed_to}((v.q).number);
    SELECT * INTO v_last FROM {mark} m WHERE m.queue = (v.q).number ORDER BY m.number DESC LIMIT 1;
    RETURN QUERY SELECT json_build_array(v.first, v.last)::text, NULL::bigint, NULL::{entry};
    RETURN QUERY
        WITH found AS MATERIALIZED (
            SELECT t.xid, t.seq FROM {entry} t
            WHERE t.queue = (v.q).number AND t.count = 1 AND t.ids IS NOT NULL AND t.ids[1] = p_id
            UNION ALL
            SELECT t.xid, t.seq FROM {entry} t
            WHERE t.queue = (v.q).number AND (t.xid, t.seq) > (v_gone.xid, v_gone.seq) AND t.count > 1
                AND p_id = ANY (t.ids)
        )
        SELECT NULL::text, n.number, e.whole FROM found f
        CROSS JOIN LATERAL (
            SELECT t AS whole FROM {entry} t
            WHERE t.queue = (v.q).number AND t.xid = f.xid AND t.seq = f.seq OFFSET 0
        ) e
        CROSS JOIN LATERAL (
            SELECT coalesce(max(m.number), 0) + coalesce((
                SELECT sum(o.count) FROM {entry} o
                WHERE o.queue = (v.q).number AND (o.xid, o.seq) < (f.xid, f.seq)
                    AND (o.xid, o.seq) > (coalesce(max(m.xid), 0), coalesce(max(m.seq), 0))), 0)::bigint AS number
            FROM (
                SELECT k.number, k.xid, k.seq FROM {mark} k
                WHERE k.queue = (v.q).number AND (k.xid, k.seq) < (f.xid, f.seq) ORDER BY k.number DESC LIMIT 1) m
        ) n
        WHERE (f.xid, f.seq) > (v_gone.xid, v_gone.seq) AND (f.xid, f.seq) <= (v_last.xid, v_last.seq)
        ORDER BY n.number;
END $body$;

CREATE OR REPLACE FUNCTION {journal_reader}(p_queue text, p_clock bigint, p_name text, p_to bigint) RETURNS bigint
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v record;
    v_place bigint;
    q {queue};
BEGIN
    PERFORM pg_advisory_xact_lock_shared({lock_key}('removal'), hashtext(p_queue));
    q := {open_queue}(p_queue);
    IF NOT q.made THEN
        PERFORM {make_queue}(q);
    END IF;
    SELECT * INTO v FROM {open_journal}(p_queue, p_clock);
    SELECT r.read_to INTO v_place FROM {reader} r WHERE r.queue = (v.q).number AND r.name = p_name;
    v_place := coalesce(v_place, v.first - 1);
    IF p_to IS NOT NULL THEN
        v_place := greatest(v_place, least(p_to, v.last));
    END IF;
    INSERT INTO {reader} (queue, name, read_to) VALUES ((v.q).number, p_name, v_place)
    ON CONFLICT (queue, name) DO UPDATE SET read_to = excluded.read_to;
    RETURN v_place;
END $body$;

CREATE OR REPLACE FUNCTION {journal_forget}(p_queue text, p_name text) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    DELETE FROM {reader} r USING {queue} q WHERE q.name = p_queue AND r.queue = q.number AND r.name = p_name;
    RETURN FOUND;
END $body$;

-- Delete events up to a number, but none that a registered reader has not read. Returns the number of the first event
-- kept.
CREATE OR REPLACE FUNCTION {journal_trim}(p_queue text, p_clock bigint, p_to bigint) RETURNS bigint
LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v record;
    v_first bigint;
BEGIN
    PERFORM {open_queue}(p_queue);
    SELECT * INTO v FROM {open_journal}(p_queue, p_clock);
    v_first := 1 + least(
        p_to, v.last, (SELECT min(r.read_to) FROM {reader} r WHERE r.queue = (v.q).number));
    IF v_first > v.first THEN
        PERFORM {cut_journal}((v.q).number, v_first);
        -- The caller wants to free space: maintain every slice once.
        PERFORM {rotate_journal}({clock}(p_clock), s.n) FROM generate_series(0, 7) s (n);
    END IF;
    RETURN greatest(v_first, v.first);
END $body$;
