-- Maintenance that some steps do in addition to their work, for their own queue: fold counts, put the journal in order
-- and enforce its limit, delete expired rows, rotate the slices of the journal. Touches: tally, total, minute, mark,
-- entry and its slices, slice, turn, kept, window, result, arrival, sleeper, waiter, ending, chain, member, operation,
-- and the changes of groups.
-- Keeps: bounded work; no step waits for another.

CREATE OR REPLACE FUNCTION {tidy}(q {queue}, p_now bigint) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    IF pg_try_advisory_xact_lock({lock_key}('tally'), q.number) THEN
        PERFORM {fold}(q.number, p_now);
    END IF;
    IF pg_try_advisory_xact_lock({lock_key}('journal'), q.number) THEN
        PERFORM {order_journal}(q, p_now, 64);
    END IF;
    IF q.group_mode > 0 AND q.conversion IS NULL AND pg_try_advisory_xact_lock({lock_key}('running'), q.number) THEN
        PERFORM {fold_groups}(t, p_now, {FOLDED_MAX}) FROM {queue} t WHERE t.number = q.number;
    END IF;
    PERFORM {sweep}(q.number, p_now);
    -- Done last: a slice that is truncated stays locked until the commit, so no other work may follow.
    PERFORM {rotate_journal}(p_now, pg_current_xact_id()::text::bigint / 64);
END $body$;

-- Fold counts: add rows of `tally` to `total` and `minute`, and delete them. Only under the tally lock.
CREATE OR REPLACE FUNCTION {fold}(p_queue integer, p_now bigint) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    WITH chosen AS (
        SELECT t.ctid AS place FROM {tally} t WHERE t.queue = p_queue LIMIT 8192 FOR UPDATE SKIP LOCKED
    ), folded AS MATERIALIZED (
        DELETE FROM {tally} t USING chosen c WHERE t.ctid = c.place RETURNING t.*
    ), minutes AS (
        INSERT INTO {minute} AS m (
            queue, minute, published, duplicates, claims, done, retried, dead, expired, dropped, redriven, cancelled, replaced,
            runs, wait_ms, wait_ms_max, run_ms, run_ms_max)
        SELECT p_queue, f.minute, sum(f.published), sum(f.duplicates), sum(f.claims), sum(f.done), sum(f.retried),
            sum(f.dead), sum(f.expired), sum(f.dropped), coalesce(sum(f.redriven), 0), coalesce(sum(f.cancelled), 0),
            coalesce(sum(f.replaced), 0), coalesce(sum(f.runs), 0), coalesce(sum(f.wait_ms), 0),
            coalesce(max(f.wait_ms_max), 0), coalesce(sum(f.run_ms), 0), coalesce(max(f.run_ms_max), 0)
        FROM folded f GROUP BY f.minute
        HAVING coalesce(sum(f.published), sum(f.duplicates), sum(f.claims), sum(f.done), sum(f.retried), sum(f.dead),
            sum(f.expired), sum(f.dropped), sum(f.redriven), sum(f.cancelled), sum(f.replaced), sum(f.runs)) IS NOT NULL
        ON CONFLICT (queue, minute) DO UPDATE SET
            published = coalesce(m.published, 0) + coalesce(excluded.published, 0),
            duplicates = coalesce(m.duplicates, 0) + coalesce(excluded.duplicates, 0),
            claims = coalesce(m.claims, 0) + coalesce(excluded.claims, 0),
            done = coalesce(m.done, 0) + coalesce(excluded.done, 0),
            retried = coalesce(m.retried, 0) + coalesce(excluded.retried, 0),
            dead = coalesce(m.dead, 0) + coalesce(excluded.dead, 0),
            expired = coalesce(m.expired, 0) + coalesce(excluded.expired, 0),
            dropped = coalesce(m.dropped, 0) + coalesce(excluded.dropped, 0),
            -- Null stays null: a part of that minute was counted by a version without these columns.
            redriven = m.redriven + excluded.redriven, cancelled = m.cancelled + excluded.cancelled,
            replaced = m.replaced + excluded.replaced, runs = m.runs + excluded.runs,
            wait_ms = m.wait_ms + excluded.wait_ms,
            wait_ms_max = CASE WHEN m.runs IS NOT NULL THEN greatest(m.wait_ms_max, excluded.wait_ms_max) END,
            run_ms = m.run_ms + excluded.run_ms,
            run_ms_max = CASE WHEN m.runs IS NOT NULL THEN greatest(m.run_ms_max, excluded.run_ms_max) END
    )
    INSERT INTO {total} AS t
    SELECT p_queue, coalesce(sum(f.ready), 0), coalesce(sum(f.delayed), 0), coalesce(sum(f.leased), 0),
        coalesce(sum(f.waiting), 0), coalesce(sum(f.dead_kept), 0), coalesce(sum(f.published), 0),
        coalesce(sum(f.redriven), 0), coalesce(sum(f.done), 0), coalesce(sum(f.dead), 0), coalesce(sum(f.dropped), 0),
        coalesce(sum(f.cancelled), 0), coalesce(sum(f.replaced), 0), coalesce(sum(f.claims), 0),
        coalesce(sum(f.first_claims), 0), coalesce(sum(f.again_expired), 0), coalesce(sum(f.again_released), 0),
        coalesce(sum(f.again_retried), 0), coalesce(sum(f.again_snoozed), 0), coalesce(sum(f.again_redriven), 0),
        coalesce(sum(f.expired), 0), coalesce(sum(f.released), 0), coalesce(sum(f.retried), 0),
        coalesce(sum(f.snoozed), 0), coalesce(sum(f.duplicates), 0), coalesce(sum(f.transferred), 0),
        coalesce(sum(f.over_cap), 0)
    FROM folded f HAVING count(*) > 0
    ON CONFLICT (queue) DO UPDATE SET
        ready = t.ready + excluded.ready, delayed = t.delayed + excluded.delayed, leased = t.leased + excluded.leased,
        waiting = t.waiting + excluded.waiting, dead_kept = t.dead_kept + excluded.dead_kept,
        published = t.published + excluded.published, redriven = t.redriven + excluded.redriven,
        done = t.done + excluded.done, dead = t.dead + excluded.dead, dropped = t.dropped + excluded.dropped,
        cancelled = t.cancelled + excluded.cancelled, replaced = t.replaced + excluded.replaced,
        claims = t.claims + excluded.claims, first_claims = t.first_claims + excluded.first_claims,
        again_expired = t.again_expired + excluded.again_expired,
        again_released = t.again_released + excluded.again_released,
        again_retried = t.again_retried + excluded.again_retried,
        again_snoozed = t.again_snoozed + excluded.again_snoozed,
        again_redriven = t.again_redriven + excluded.again_redriven,
        expired = t.expired + excluded.expired, released = t.released + excluded.released,
        retried = t.retried + excluded.retried, snoozed = t.snoozed + excluded.snoozed,
        duplicates = t.duplicates + excluded.duplicates, transferred = t.transferred + excluded.transferred,
        over_cap = t.over_cap + excluded.over_cap;
    DELETE FROM {minute} m WHERE m.queue = p_queue AND m.minute <= p_now / 60000 - {MINUTES_KEPT};
END $body$;

-- The same without changing rows that other steps write, for the caller's own transaction: rows of `tally` are merged
-- into fewer rows, and only these are locked until that transaction ends.
CREATE OR REPLACE FUNCTION {merge_counts}(p_queue integer) RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    WITH chosen AS (
        SELECT t.ctid AS place FROM {tally} t WHERE t.queue = p_queue LIMIT 8192 FOR UPDATE SKIP LOCKED
    ), merged AS MATERIALIZED (
        DELETE FROM {tally} t USING chosen c WHERE t.ctid = c.place RETURNING t.*
    )
    INSERT INTO {tally} (
        seq, queue, minute, ready, delayed, leased, waiting, dead_kept, published, redriven, done, dead, dropped, cancelled,
        replaced, claims, first_claims, again_expired, again_released, again_retried, again_snoozed, again_redriven,
        expired, released, retried, snoozed, duplicates, transferred, over_cap, runs, wait_ms, wait_ms_max, run_ms,
        run_ms_max)
    SELECT nextval('{sequence}'), p_queue, m.minute, sum(m.ready), sum(m.delayed), sum(m.leased), sum(m.waiting),
        sum(m.dead_kept), sum(m.published), sum(m.redriven), sum(m.done), sum(m.dead), sum(m.dropped), sum(m.cancelled),
        sum(m.replaced), sum(m.claims), sum(m.first_claims), sum(m.again_expired), sum(m.again_released),
        sum(m.again_retried), sum(m.again_snoozed), sum(m.again_redriven), sum(m.expired), sum(m.released),
        sum(m.retried), sum(m.snoozed), sum(m.duplicates), sum(m.transferred), sum(m.over_cap), sum(m.runs),
        sum(m.wait_ms), max(m.wait_ms_max), sum(m.run_ms), max(m.run_ms_max)
    FROM merged m GROUP BY m.minute;
END $body$;

-- Give numbers to entries whose transactions have ended, as all older ones have: no later entry can precede them, so a
-- reader that continues after them misses nothing. A mark is written for each 64 entries, up to `p_marks` marks. Then
-- the limit of the journal is enforced. Only under the journal lock.
CREATE OR REPLACE FUNCTION {order_journal}(q {queue}, p_now bigint, p_marks integer) RETURNS void
LANGUAGE plpgsql AS $body$
DECLARE
    v_bound bigint := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    v_last {mark};
    v_counts bigint[];
    v_xids bigint[];
    v_seqs bigint[];
    v_first bigint;
    v_unread bigint;
BEGIN
    SELECT * INTO v_last FROM {mark} m WHERE m.queue = q.number ORDER BY m.number DESC LIMIT 1;
    IF NOT FOUND THEN
        v_last := (q.number, 0, 0, 0);
    END IF;
    FOR round IN 1 .. p_marks LOOP
        SELECT array_agg(e.count), array_agg(e.xid), array_agg(e.seq) INTO v_counts, v_xids, v_seqs
        FROM (
            SELECT e.count, e.xid, e.seq FROM {entry} e
            WHERE e.queue = q.number AND (e.xid, e.seq) > (v_last.xid, v_last.seq) AND e.xid < v_bound
            ORDER BY e.xid, e.seq LIMIT 64
        ) e;
        EXIT WHEN v_counts IS NULL;
        v_last.number := v_last.number + (SELECT sum(c) FROM unnest(v_counts) c);
        v_last.xid := v_xids[cardinality(v_xids)];
        v_last.seq := v_seqs[cardinality(v_seqs)];
        INSERT INTO {mark} VALUES (v_last.*);
        EXIT WHEN cardinality(v_counts) < 64;
    END LOOP;
    SELECT k.first INTO v_first FROM {kept} k WHERE k.queue = q.number;
    v_first := coalesce(v_first, 1);
    IF v_last.number - v_first + 1 >= q.journal_max + greatest({CHUNK_MESSAGES_MAX}, q.journal_max / {JOURNAL_SLACK_PART}) THEN
        SELECT min(r.read_to) + 1 INTO v_unread FROM {reader} r WHERE r.queue = q.number;
        PERFORM {cut_journal}(q.number, v_last.number - q.journal_max + 1);
        IF v_unread < v_last.number - q.journal_max + 1 AND {journal_keeps}(q.journal, 'trimmed') THEN
            v_unread := greatest(v_unread, v_first);
            -- It gets the next number, so it must sort after all entries that have one: directly after the last mark.
            INSERT INTO {entry} (queue, count, xid, seq, at_ms, event, causes, reasons, sizes)
            VALUES (
                q.number, 1, v_last.xid, greatest(v_last.seq, nextval('{sequence}')), p_now, 'trimmed',
                ARRAY['hard_cap'], ARRAY[v_unread || '-' || v_last.number - q.journal_max],
                ARRAY[v_last.number - q.journal_max + 1 - v_unread])
            RETURNING seq INTO v_last.seq;
            INSERT INTO {mark} VALUES (q.number, v_last.number + 1, v_last.xid, v_last.seq);
        END IF;
    END IF;
END $body$;

-- Cut the journal before a number: from now on no reader finds entries whose events are all before it. Entries in
-- slices are deleted with their slice; marks and entries in `rest` are deleted now, a bounded number of them.
CREATE OR REPLACE FUNCTION {cut_journal}(p_queue integer, p_first bigint) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_mark {mark};
BEGIN
    INSERT INTO {kept} AS k VALUES (p_queue, p_first)
    ON CONFLICT (queue) DO UPDATE SET first = excluded.first WHERE k.first < excluded.first;
    SELECT * INTO v_mark FROM {mark} m WHERE m.queue = p_queue AND m.number < p_first ORDER BY m.number DESC LIMIT 1;
    IF FOUND THEN
        DELETE FROM {rest} e WHERE e.ctid IN (
            SELECT o.ctid FROM {rest} o WHERE o.queue = p_queue AND (o.xid, o.seq) <= (v_mark.xid, v_mark.seq)
            ORDER BY o.xid, o.seq LIMIT 16384);
        DELETE FROM {mark} m WHERE m.queue = p_queue AND m.number < v_mark.number;
    END IF;
END $body$;

-- The place up to which the entries of a queue are cut; all zero if none is.
CREATE OR REPLACE FUNCTION {trimmed_to}(p_queue integer, OUT xid bigint, OUT seq bigint) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
BEGIN
    SELECT m.xid, m.seq INTO xid, seq FROM {mark} m
    WHERE m.queue = p_queue AND m.number < (SELECT k.first FROM {kept} k WHERE k.queue = p_queue)
    ORDER BY m.number DESC LIMIT 1;
    xid := coalesce(xid, 0);
    seq := coalesce(seq, 0);
END $body$;

-- How many entries of a slice are still needed, but at most one more than `p_most`; with `p_move` they are moved to
-- `rest`. It steps from queue to queue by the index, so that trimmed entries are not read.
CREATE OR REPLACE FUNCTION {move_kept}(p_slice smallint, p_most integer, p_move boolean) RETURNS integer
LANGUAGE plpgsql AS $body$
DECLARE
    v_queue integer := 0;
    v_place record;
    v_found integer;
    v_wanted integer := 0;
BEGIN
    LOOP
        SELECT e.queue INTO v_queue FROM {entry} e
        WHERE e.slice = p_slice AND e.queue > v_queue ORDER BY e.queue LIMIT 1;
        EXIT WHEN NOT FOUND OR v_wanted > p_most;
        v_place := {trimmed_to}(v_queue);
        IF p_move THEN
            UPDATE {entry} e SET slice = -1
            WHERE e.slice = p_slice AND e.queue = v_queue AND (e.xid, e.seq) > (v_place.xid, v_place.seq);
            GET DIAGNOSTICS v_found = ROW_COUNT;
        ELSE
            SELECT count(*) INTO v_found FROM (
                SELECT 1 FROM {entry} e
                WHERE e.slice = p_slice AND e.queue = v_queue AND (e.xid, e.seq) > (v_place.xid, v_place.seq)
                LIMIT p_most - v_wanted + 1) w;
        END IF;
        v_wanted := v_wanted + v_found;
    END LOOP;
    RETURN v_wanted;
END $body$;

-- The size at which a slice is full; a quarter of the whole journal if that is more.
CREATE OR REPLACE FUNCTION {slice_bytes}() RETURNS bigint LANGUAGE sql IMMUTABLE AS $body$
    SELECT 16777216::bigint
$body$;

-- Maintain one slice. The one that is being filled: if it is full and another is empty, the other one is filled from
-- now on; if none is empty it grows further. Another one: if all of its events are forgotten except a few, these are
-- moved to `rest`, and a minute later, when no snapshot can show the slice as it was before, it is truncated. If a
-- transaction uses the slice at that moment, this does not wait for it: it is tried again later.
CREATE OR REPLACE FUNCTION {rotate_journal}(p_now bigint, p_which bigint) RETURNS void LANGUAGE plpgsql {settings} AS $body$
DECLARE
    v_tables regclass[] := ARRAY[
        '{entry_a}', '{entry_b}', '{entry_c}', '{entry_d}', '{entry_e}', '{entry_f}', '{entry_g}', '{entry_h}'];
    v_current integer := pg_sequence_last_value('{turn}');
    v_slice smallint := p_which % 8;
    v_bytes bigint := pg_table_size(v_tables[v_slice + 1]);
    v_moved_ms bigint;
    v_wanted integer;
BEGIN
    -- A table without rows still has a page or two.
    IF v_bytes <= 16384 OR NOT pg_try_advisory_xact_lock({lock_key}('slice'), 0) THEN
        RETURN;
    END IF;
    IF v_slice = v_current THEN
        IF v_bytes >= {slice_bytes}()
            AND v_bytes >= (SELECT sum(pg_table_size(t)) / 4 FROM unnest(v_tables) t)
        THEN
            PERFORM setval('{turn}', s.n) FROM generate_series(0, 7) s (n)
            WHERE pg_table_size(v_tables[s.n + 1]) <= 16384 ORDER BY (s.n - v_current + 8) % 8 LIMIT 1;
        END IF;
        RETURN;
    END IF;
    SELECT s.moved_ms INTO v_moved_ms FROM {slice} s WHERE s.number = v_slice;
    IF v_moved_ms IS NULL THEN
        v_wanted := {move_kept}(v_slice, 512, false);
        -- At most 512, and at most an eighth of the entries: with large bodies a slice has only few entries.
        IF v_wanted <= 512 AND v_wanted * 8 <= (
            SELECT count(*) FROM (SELECT 1 FROM {entry} e WHERE e.slice = v_slice LIMIT 4096) o)
        THEN
            PERFORM {move_kept}(v_slice, 512, true);
            UPDATE {slice} s SET moved_ms = p_now WHERE s.number = v_slice;
        END IF;
    ELSIF p_now - v_moved_ms >= 60000 THEN
        BEGIN
            EXECUTE 'LOCK TABLE ' || v_tables[v_slice + 1] || ' IN ACCESS EXCLUSIVE MODE NOWAIT';
            -- From now on no step writes to it; until now a slow transaction may have.
            IF {move_kept}(v_slice, 0, false) = 0 THEN
                EXECUTE 'TRUNCATE TABLE ' || v_tables[v_slice + 1];
            END IF;
            UPDATE {slice} s SET moved_ms = NULL WHERE s.number = v_slice;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END IF;
END $body$;
-- Delete expired rows. Results of operations have no index on their expiry, so that storing one never changes an index:
-- a few pages are searched each time, other pages the next time.
CREATE OR REPLACE FUNCTION {sweep}(p_queue integer, p_now bigint) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_pages bigint := pg_relation_size('{operation}') / 8192;
    v_from bigint;
BEGIN
    DELETE FROM {window} t WHERE t.ctid IN (
        SELECT o.ctid FROM {window} o WHERE o.until_ms <= p_now ORDER BY o.until_ms LIMIT 2048 FOR UPDATE SKIP LOCKED);
    DELETE FROM {result} t WHERE t.ctid IN (
        SELECT o.ctid FROM {result} o WHERE o.until_ms <= p_now ORDER BY o.until_ms LIMIT 2048 FOR UPDATE SKIP LOCKED);
    DELETE FROM {arrival} t WHERE t.ctid IN (
        SELECT o.ctid FROM {arrival} o WHERE o.until_ms <= p_now ORDER BY o.until_ms LIMIT 2048 FOR UPDATE SKIP LOCKED);
    DELETE FROM {sleeper} t WHERE t.ctid IN (
        SELECT o.ctid FROM {sleeper} o WHERE o.queue = p_queue AND o.until_ms <= p_now ORDER BY o.until_ms LIMIT 256
        FOR UPDATE SKIP LOCKED);
    DELETE FROM {waiter} t WHERE t.ctid IN (
        SELECT o.ctid FROM {waiter} o WHERE o.until_ms <= p_now ORDER BY o.until_ms LIMIT 2048 FOR UPDATE SKIP LOCKED);
    DELETE FROM {ending} t WHERE t.ctid IN (
        SELECT o.ctid FROM {ending} o WHERE o.until_ms <= p_now ORDER BY o.until_ms LIMIT 2048 FOR UPDATE SKIP LOCKED);
    PERFORM {sweep_chains}(p_now);
    IF v_pages > 0 THEN
        v_from := pg_current_xact_id()::text::bigint / 64 * 32 % v_pages;
        EXECUTE format(
            'DELETE FROM {operation} t WHERE t.ctid IN (SELECT o.ctid FROM {operation} o '
            'WHERE o.ctid >= %L::tid AND o.ctid < %L::tid AND o.until_ms < $1 FOR UPDATE SKIP LOCKED)',
            '(' || v_from || ',0)', '(' || v_from + 32 || ',0)') USING p_now;
    END IF;
END $body$;
