-- Store drafts in one queue: the part that publishes and continuations share. An envelope has its id in bytes 2-25.
-- Touches: message, window, arrival, entry, tally, and what `end_message`, `begin_chains` and `block_messages` touch.
-- Keeps: a key has at most one owner and one parked generation, under any interleaving: the unique index decides which
-- message is first, and an owner changes only under the lock of its row. Keys are locked in order, so that steps do not
-- deadlock.
--
-- letters: q queued, d delayed, u duplicate, c conflict, e extended, r replaced, E parked by extend. `others` has an id
-- where the result is a message other than the draft. `capped_groups` has the group of each draft that counts against
-- the limit of a group. `fresh` is how many messages became claimable, `added` how many count against `max_pending`,
-- `passing` how many were stored without a check of it (forwarded by a settle, and not among `p_capped`), `followups`
-- what the caller must pass to `apply_followups`. The draft at `p_places[i]` waits for the chain `p_afters[i]`.

CREATE OR REPLACE FUNCTION {accept}(
    q {queue}, p_now bigint, p_op text, p_envelopes bytea[], p_priorities smallint[], p_groups text[],
        p_delays bigint[],
    p_ats bigint[], p_copies bytea[], p_keys text[], p_windows bigint[], p_rules text[], p_forwarded boolean[],
    p_chains text[], p_places integer[], p_afters text[], p_capped boolean[],
    OUT letters text, OUT others text[], OUT fresh bigint, OUT added bigint, OUT first_seq bigint, OUT followups json[],
    OUT passing bigint, OUT capped_groups text[]
) LANGUAGE plpgsql AS $body$
DECLARE
    v_groups bigint;
BEGIN
    IF p_keys IS NOT NULL OR p_forwarded IS NOT NULL OR p_chains IS NOT NULL OR p_afters IS NOT NULL THEN
        SELECT * INTO letters, others, fresh, added, first_seq, followups, passing, capped_groups FROM {accept_keyed}(
            q, p_now, p_op, p_envelopes, p_priorities, p_groups, p_delays, p_ats, p_copies, p_keys, p_windows, p_rules,
            p_forwarded, p_chains, p_places, p_afters, p_capped);
        RETURN;
    END IF;
    followups := '{}';
    passing := 0;
    WITH d AS MATERIALIZED (
        SELECT nextval('{sequence}') AS seq, u.data, convert_from(substr(u.data, 2, {ID_CHARACTERS}), 'UTF8') AS id,
            ({PRIORITY_MAX} - coalesce(u.priority, {PRIORITY_DEFAULT}))::smallint AS rank, u."group", coalesce(u.at, p_now + coalesce(u.delay,
                0)) AS due,
            u.copy
        FROM unnest(p_envelopes, p_priorities, p_groups, p_delays, p_ats, p_copies)
            AS u (data, priority, "group", delay, at, copy)
    ), m AS (
        INSERT INTO {message} (seq, position, ready_ms, published_ms, queue, state, rank, id, "group", group_rank, data)
        SELECT d.seq, d.seq, greatest(d.due, p_now), p_now, q.number, (d.due > p_now)::int, d.rank, d.id, d."group",
            {group_rank}(q.group_mode, d."group", d.rank), d.data
        FROM d
    ), j AS (
        -- PostgreSQL computes an aggregate even if CASE does not use it, so rarely needed aggregates are subqueries.
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, groups, ranks, tokens, deliveries, attempts, dues,
                sizes,
            bodies)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'published', p_op,
            array_agg(d.id), CASE WHEN p_groups IS NOT NULL THEN (SELECT array_agg(d."group") FROM d) END,
            CASE WHEN p_priorities IS NULL THEN '{{RANK_DEFAULT}}' ELSE (SELECT array_agg(d.rank) FROM d) END, '{0}', '{0}', '{0}',
            CASE WHEN p_delays IS NOT NULL OR p_ats IS NOT NULL
                THEN (SELECT array_agg(CASE WHEN d.due > p_now THEN d.due END) FROM d) END,
            CASE WHEN min(length(d.data)) = max(length(d.data)) THEN ARRAY[min(length(d.data))]
                ELSE (SELECT array_agg(length(d.data)) FROM d) END,
            CASE WHEN q.journal = 'full' THEN (SELECT array_agg(coalesce(d.copy, d.data)) FROM d) END
        FROM d WHERE q.journal IN ('all', 'full') HAVING count(*) > 0
    )
    SELECT CASE WHEN p_delays IS NULL AND p_ats IS NULL THEN repeat('q', count(*)::int)
            ELSE (SELECT string_agg(CASE WHEN d.due > p_now THEN 'd' ELSE 'q' END, '' ORDER BY d.seq) FROM d) END,
        count(*) FILTER (WHERE d.due <= p_now), count(*), min(d.seq)
    INTO letters, fresh, added, first_seq FROM d;
    INSERT INTO {tally} (seq, queue, minute, published, ready, delayed)
    VALUES (first_seq, q.number, p_now / 60000, added, fresh, nullif(added - fresh, 0));
    IF q.group_mode > 0 THEN
        IF p_groups IS NOT NULL AND p_delays IS NULL AND p_ats IS NULL AND array_position(p_groups, NULL) IS NULL THEN
            v_groups := {change_groups}(q.number, p_groups, {JOINS}::smallint, 1, 0, 0);
            fresh := CASE WHEN q.group_mode < {MODE_ORDERED} THEN added ELSE v_groups END;
        ELSE
            fresh := {add_to_groups}(q, p_now, array_fill('new'::text, ARRAY[added::int]), NULL, p_groups, p_delays, p_ats);
        END IF;
        capped_groups := p_groups;
    END IF;
END $body$;

-- Count stored drafts in their groups. Returns how many sleepers to wake for them: an ordered group hands out one
-- message at a time, however many became ready.
CREATE OR REPLACE FUNCTION {add_to_groups}(
    q {queue}, p_now bigint, p_acts text[], p_states smallint[], p_groups text[], p_delays bigint[], p_ats bigint[]
) RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_ready text[];
    v_later text[];
BEGIN
    SELECT array_agg(s.name) FILTER (WHERE s.ready), array_agg(s.name) FILTER (WHERE NOT s.ready) INTO v_ready, v_later FROM (
        SELECT u."group" AS name, u.state IS DISTINCT FROM {WAITING} AND coalesce(u.at, p_now + coalesce(u.delay, 0)) <= p_now AS ready
        FROM unnest(p_acts, p_states, p_groups, p_delays, p_ats) AS u (act, state, "group", delay, at)
        WHERE u.act IN ('new', 'park', 'replace')) s;
    IF v_ready IS NOT NULL THEN
        PERFORM {change_groups}(q.number, v_ready, {JOINS}::smallint, 1, 0, 0);
    END IF;
    IF v_later IS NOT NULL THEN
        PERFORM {change_groups}(q.number, v_later, 0::smallint, 0, 0, 1);
    END IF;
    IF q.group_mode < {MODE_ORDERED} THEN
        RETURN coalesce(cardinality(v_ready), 0);
    END IF;
    RETURN (SELECT count(DISTINCT u.name) + count(*) FILTER (WHERE u.name IS NULL) FROM unnest(v_ready) AS u (name));
END $body$;

CREATE OR REPLACE FUNCTION {accept_keyed}(
    q {queue}, p_now bigint, p_op text, p_envelopes bytea[], p_priorities smallint[], p_groups text[],
        p_delays bigint[],
    p_ats bigint[], p_copies bytea[], p_keys text[], p_windows bigint[], p_rules text[], p_forwarded boolean[],
    p_chains text[], p_places integer[], p_afters text[], p_capped boolean[],
    OUT letters text, OUT others text[], OUT fresh bigint, OUT added bigint, OUT first_seq bigint, OUT followups json[],
    OUT passing bigint, OUT capped_groups text[]
) LANGUAGE plpgsql AS $body$
DECLARE
    n integer := cardinality(p_envelopes);
    v_ids text[];
    v_seqs bigint[];
    v_acts text[] := array_fill(NULL::text, ARRAY[n]);
    v_states smallint[] := array_fill(NULL::smallint, ARRAY[n]);
    v_fresh text[];
    v_count bigint;
    v_extended bigint;
    -- Those that replace a message of another group.
    v_moves boolean[] := array_fill(false, ARRAY[n]);
    r record;
    i integer;
BEGIN
    SELECT array_agg(convert_from(substr(u.data, 2, {ID_CHARACTERS}), 'UTF8')), array_agg(nextval('{sequence}'))
    INTO v_ids, v_seqs FROM unnest(p_envelopes) AS u (data);
    others := v_ids;
    first_seq := v_seqs[1];
    fresh := 0;
    followups := '{}';
    FOREACH i IN ARRAY coalesce(p_places, '{}') LOOP
        v_states[i] := {WAITING};
    END LOOP;
    IF p_forwarded IS NOT NULL THEN
        WITH arrived AS (
            INSERT INTO {arrival} AS a (queue, id, until_ms)
            SELECT q.number, u.id, p_now + {ARRIVAL_TTL_MS} FROM unnest(v_ids, p_forwarded) AS u (id, forwarded)
            WHERE u.forwarded
                AND NOT EXISTS (SELECT 1 FROM {message} m WHERE m.queue = q.number AND m.id = u.id)
            ORDER BY u.id
            ON CONFLICT (queue, id) DO UPDATE SET until_ms = excluded.until_ms WHERE a.until_ms <= p_now
            RETURNING a.id
        )
        SELECT coalesce(array_agg(a.id), '{}') INTO v_fresh FROM arrived a;
        FOR i IN 1 .. n LOOP
            IF p_forwarded[i] AND NOT v_ids[i] = ANY (v_fresh) THEN
                v_acts[i] := 'arrived';
            END IF;
        END LOOP;
    END IF;

    -- The first message in the unique index of owners has the key.
    WITH inserted AS (
        INSERT INTO {message} (
            seq, position, ready_ms, published_ms, queue, state, rank, id, key, "group", chain, data, group_rank)
        SELECT u.seq, u.seq, greatest(coalesce(u.at, p_now + coalesce(u.delay, 0)), p_now), p_now, q.number,
            coalesce(u.state, (coalesce(u.at, p_now + coalesce(u.delay, 0)) > p_now)::int), {PRIORITY_MAX} - coalesce(u.priority, {PRIORITY_DEFAULT}),
            u.id, u.key, u."group", u.chain, u.data,
            {group_rank}(q.group_mode, u."group", ({PRIORITY_MAX} - coalesce(u.priority, {PRIORITY_DEFAULT}))::smallint)
        FROM unnest(v_ids, v_seqs, v_acts, v_states, p_envelopes, p_keys, p_priorities, p_groups, p_delays, p_ats,
            p_chains)
            AS u (id, seq, act, state, data, key, priority, "group", delay, at, chain)
        WHERE u.act IS NULL ORDER BY u.key, u.seq
        ON CONFLICT DO NOTHING RETURNING seq
    )
    SELECT count(*) INTO v_count FROM inserted;
    IF v_count = n THEN
        v_acts := array_fill('new'::text, ARRAY[n]);
    ELSE
        SELECT array_agg(coalesce(u.act, CASE WHEN EXISTS (
            SELECT 1 FROM {message} m WHERE m.queue = q.number AND m.id = u.id
                AND m.seq = u.seq) THEN 'new' END) ORDER BY u.n)
        INTO v_acts FROM unnest(v_ids, v_seqs, v_acts) WITH ORDINALITY AS u (id, seq, act, n);
    END IF;
    -- A key may be in use although its message has ended. This is checked after the insert, which blocks other
    -- publishers of the key.
    FOR r IN
        SELECT u.n, u.id, w.message_id FROM unnest(v_ids, p_keys, v_acts) WITH ORDINALITY AS u (id, key, act, n)
        CROSS JOIN LATERAL (
            SELECT t.message_id FROM {window} t
            WHERE t.queue = q.number AND t.key = u.key AND t.until_ms + 0 > p_now OFFSET 0) w
        WHERE u.act = 'new' AND w.message_id <> u.id
    LOOP
        DELETE FROM {message} m WHERE m.queue = q.number AND m.id = r.id;
        v_acts[r.n] := CASE WHEN coalesce(p_rules[r.n], 'keep') = 'error' THEN 'conflict' ELSE 'duplicate' END;
        others[r.n] := r.message_id;
    END LOOP;
    -- The most common conflict rule, `keep`, changes nothing, so it needs no lock.
    IF 'keep' = ANY (coalesce(p_rules, ARRAY['keep'])) AND array_position(v_acts, NULL) IS NOT NULL THEN
        FOR r IN
            SELECT u.n, coalesce(h.id, o.id) AS id
            FROM unnest(p_keys, v_acts, p_rules) WITH ORDINALITY AS u (key, act, rule, n)
            CROSS JOIN LATERAL (
                SELECT t.id FROM {message} t
                WHERE t.queue = q.number AND t.key = u.key AND t.key IS NOT NULL AND t.state < {WAITING} OFFSET 0) o
            LEFT JOIN LATERAL (
                SELECT t.id FROM {message} t
                WHERE t.queue = q.number AND t.key = u.key AND t.key IS NOT NULL AND t.state = {WAITING} OFFSET 0) h ON true
            WHERE u.act IS NULL AND coalesce(u.rule, 'keep') = 'keep'
        LOOP
            v_acts[r.n] := 'duplicate';
            others[r.n] := r.id;
        END LOOP;
    END IF;
    FOR i IN
        SELECT u.n FROM unnest(v_acts, p_keys) WITH ORDINALITY AS u (act, key, n) WHERE u.act IS NULL ORDER BY u.key
    LOOP
        SELECT * INTO r
        FROM {accept_conflict}(
            q, p_now, p_op, v_ids[i], v_seqs[i], p_envelopes[i], p_keys[i], coalesce(p_rules[i], 'keep'),
            coalesce(p_ats[i], p_now + coalesce(p_delays[i], 0)), coalesce(p_priorities[i], {PRIORITY_DEFAULT}::smallint), p_groups[i],
            p_chains[i]);
        v_acts[i] := r.act;
        others[i] := r.other;
        v_states[i] := r.state;
        v_moves[i] := r.moves;
        fresh := fresh + r.fresh;
        followups := followups || r.followups;
    END LOOP;
    v_extended := fresh;

    WITH d AS MATERIALIZED (
        SELECT u.*, coalesce(u.at, p_now + coalesce(u.delay, 0)) AS due
        FROM unnest(v_ids, v_seqs, v_acts, v_states, p_envelopes, p_keys, p_priorities, p_groups, p_delays, p_ats,
            p_copies,
            p_windows, p_forwarded, p_rules, others, p_chains, p_capped) WITH ORDINALITY
            AS u (id, seq, act, state, data, key, priority, "group", delay, at, copy, span, forwarded, rule, other,
                chain, capped, n)
    ), stored AS MATERIALIZED (
        SELECT d.*, CASE WHEN d.state = {WAITING} THEN {WAITING} WHEN d.due > p_now THEN {DELAYED} ELSE {READY} END AS placed
        FROM d WHERE d.act IN ('new', 'park', 'replace')
    ), w AS (
        INSERT INTO {window} AS w (queue, key, message_id, until_ms)
        SELECT q.number, s.key, s.id, p_now + s.span FROM stored s WHERE s.span > 0 AND s.key IS NOT NULL ORDER BY s.key
        ON CONFLICT (queue, key) DO UPDATE SET message_id = excluded.message_id, until_ms = excluded.until_ms
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
                dues,
            causes, sizes, bodies, chains)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'published', p_op,
            array_agg(s.id), array_agg(s.key), array_agg(s."group"), array_agg(({PRIORITY_MAX} - coalesce(s.priority, {PRIORITY_DEFAULT}))::smallint),
            '{0}', '{0}', '{0}', array_agg(CASE WHEN s.due > p_now THEN s.due END),
            array_agg(CASE WHEN s.act = 'park' THEN 'parked' WHEN s.act = 'replace' THEN 'replace'
                WHEN s.state = {WAITING} THEN 'blocked' WHEN s.forwarded THEN 'forwarded' END),
            array_agg(length(s.data)), CASE WHEN q.journal = 'full' THEN array_agg(coalesce(s.copy, s.data)) END,
            CASE WHEN p_chains IS NOT NULL THEN array_agg(s.chain) END
        FROM stored s WHERE q.journal IN ('all', 'full') HAVING count(*) > 0
    ), k AS (
        INSERT INTO {entry} (queue, count, xid, seq, at_ms, event, operation, ids, keys)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'duplicate', p_op,
            array_agg(d.other), array_agg(d.key)
        FROM d WHERE d.act IN ('duplicate', 'conflict', 'arrived') AND q.journal IN ('all', 'full') HAVING count(*) > 0
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, published, duplicates, ready, delayed, waiting)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, nullif(count(s.id), 0), nullif(count(*) FILTER (
                WHERE d.act IN ('duplicate', 'conflict', 'arrived')), 0),
            count(*) FILTER (WHERE s.placed = {READY}), count(*) FILTER (WHERE s.placed = {DELAYED}),
                count(*) FILTER (WHERE s.placed = {WAITING})
        FROM d LEFT JOIN LATERAL (
            SELECT d.id, CASE WHEN d.state = {WAITING} THEN {WAITING} WHEN d.due > p_now THEN {DELAYED} ELSE {READY} END AS placed
            WHERE d.act IN ('new', 'park', 'replace')) s ON true
    )
    SELECT string_agg(CASE d.act
            WHEN 'park' THEN CASE d.rule WHEN 'replace' THEN 'r' ELSE 'E' END
            WHEN 'replace' THEN 'r' WHEN 'extend' THEN 'e' WHEN 'conflict' THEN 'c' WHEN 'new' THEN
                CASE WHEN d.due > p_now THEN 'd' ELSE 'q' END
            ELSE 'u' END, '' ORDER BY d.n),
        fresh + count(*) FILTER (WHERE d.act IN ('new', 'replace') AND d.state IS DISTINCT FROM {WAITING} AND d.due <= p_now),
        count(*) FILTER (WHERE d.act IN ('new', 'park') AND (NOT coalesce(d.forwarded, false) OR coalesce(d.capped, false))),
        count(*) FILTER (WHERE d.act IN ('new', 'park') AND d.forwarded AND NOT coalesce(d.capped, false))
    INTO letters, fresh, added, passing FROM d;
    IF q.group_mode > 0 THEN
        fresh := v_extended + {add_to_groups}(q, p_now, v_acts, v_states, p_groups, p_delays, p_ats);
        SELECT array_agg(u."group") INTO capped_groups
        FROM unnest(v_acts, p_groups, p_forwarded, p_capped, v_moves) AS u (act, "group", forwarded, capped, moves)
        WHERE (u.act IN ('new', 'park') OR u.moves) AND (NOT coalesce(u.forwarded, false) OR coalesce(u.capped, false));
    END IF;
    IF p_chains IS NOT NULL THEN
        followups := followups || {begin_chains}(q, p_now, v_ids, v_acts, p_chains, p_forwarded);
    END IF;
    IF p_afters IS NOT NULL THEN
        followups := followups || {block_messages}(
            q, p_now, (SELECT array_agg(v_ids[u.place] ORDER BY u.n) FROM unnest(p_places) WITH ORDINALITY AS u (place, n)),
            p_afters);
    END IF;
END $body$;

-- Set for how long messages keep their keys. The messages were stored by this step, with numbers from `p_first` on.
CREATE OR REPLACE FUNCTION {set_key_modes}(q {queue}, p_first bigint, p_envelopes bytea[], p_modes smallint[]) RETURNS void
LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {message} m SET key_mode = u.mode FROM unnest(p_envelopes, p_modes) AS u (data, mode)
    WHERE u.mode > 0 AND m.queue = q.number AND m.id = convert_from(substr(u.data, 2, {ID_CHARACTERS}), 'UTF8')
        AND m.seq >= p_first;
END $body$;

-- Store a draft whose key is or was in use; what happens is decided under the lock of the owner's row. `moves`: the draft
-- replaces a message of another group.
CREATE OR REPLACE FUNCTION {accept_conflict}(
    q {queue}, p_now bigint, p_op text, p_id text, p_seq bigint, p_data bytea, p_key text, p_rule text, p_due bigint,
    p_priority smallint, p_group text, p_chain text, OUT act text, OUT other text, OUT state smallint, OUT fresh bigint,
    OUT followups json[], OUT moves boolean
) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
DECLARE
    o {message};
    h {message};
    v_ready bigint := greatest(p_due, p_now);
    v_state smallint := (p_due > p_now)::int;
    v_placed boolean;
    v_seq bigint;
BEGIN
    fresh := 0;
    followups := '{}';
    moves := false;
    LOOP
        SELECT * INTO o FROM {message} m
        WHERE m.queue = q.number AND m.key = p_key AND m.key IS NOT NULL AND m.state < {WAITING} FOR UPDATE;
        EXIT WHEN FOUND;
        -- The owner has ended meanwhile, so the key may be free.
        v_seq := NULL;
        INSERT INTO {message} (
            seq, position, ready_ms, published_ms, queue, state, rank, id, key, "group", chain, data, group_rank)
        VALUES (
            p_seq, p_seq, v_ready, p_now, q.number, v_state, {PRIORITY_MAX} - p_priority, p_id, p_key, p_group, p_chain, p_data,
            {group_rank}(q.group_mode, p_group, ({PRIORITY_MAX} - p_priority)::smallint))
        ON CONFLICT DO NOTHING RETURNING seq INTO v_seq;
        IF v_seq IS NOT NULL THEN
            act := 'new';
            other := p_id;
            SELECT w.message_id, CASE WHEN p_rule = 'error' THEN 'conflict' ELSE 'duplicate' END INTO other, act
            FROM {window} w WHERE w.queue = q.number AND w.key = p_key AND w.until_ms > p_now;
            IF FOUND THEN
                DELETE FROM {message} m WHERE m.queue = q.number AND m.id = p_id;
            ELSE
                act := 'new';
                other := p_id;
            END IF;
            RETURN;
        END IF;
        IF EXISTS (SELECT 1 FROM {message} m WHERE m.queue = q.number AND m.id = p_id) THEN
            -- The conflict is not about the key, so a repeat would fail again.
            RAISE EXCEPTION '%', p_id USING ERRCODE = 'WPKNW';
        END IF;
    END LOOP;
    SELECT * INTO h FROM {message} m
    WHERE m.queue = q.number AND m.key = p_key AND m.key IS NOT NULL AND m.state = {WAITING} FOR UPDATE;
    other := coalesce(h.id, o.id);
    IF p_rule IN ('keep', 'error') THEN
        act := CASE p_rule WHEN 'error' THEN 'conflict' ELSE 'duplicate' END;
        RETURN;
    END IF;
    IF h.id IS NULL AND o.state = {LEASED} THEN
        act := 'park';
        state := {WAITING};
    ELSIF p_rule = 'extend' THEN
        act := 'extend';
        IF h.id IS NOT NULL THEN
            o := h;
            UPDATE {message} m SET ready_ms = CASE WHEN p_due > p_now THEN p_due ELSE m.published_ms END
            WHERE m.queue = q.number AND m.id = h.id;
        ELSE
            -- In an ordered group a message that was claimed before keeps its place, unless it was delayed when the queue
            -- became ordered: then it has no place.
            v_placed := coalesce(
                o.group_rank = {RANK_ORDERED} AND o.cause IN ('expired', 'released', 'retried', 'snoozed')
                AND (o.state = {READY} OR o.keeps_place IS NOT NULL), false);
            UPDATE {message} m SET ready_ms = v_ready, state = v_state,
                position = CASE WHEN v_state = {READY} AND NOT v_placed THEN p_seq ELSE m.position END,
                keeps_place = CASE WHEN v_state = {DELAYED} AND v_placed THEN coalesce(m.keeps_place, false) END
            WHERE m.queue = q.number AND m.id = o.id;
            PERFORM {count_move}(q.number, p_now, o.state, v_state);
            IF o.group_rank IS NOT NULL THEN
                PERFORM {change_group}(q.number, o."group", o.state, v_state);
            END IF;
            fresh := 1 - v_state;
        END IF;
        PERFORM {write_event}(q, p_now, p_op, 'postponed', o, NULL, false, v_ready);
        RETURN;
    ELSIF p_id IN (o.id, h.id) THEN
        RAISE EXCEPTION '%', p_id USING ERRCODE = 'WPKNW';
    ELSE
        act := 'replace';
        moves := p_group IS DISTINCT FROM CASE WHEN h.id IS NOT NULL THEN h."group" ELSE o."group" END;
        IF h.id IS NOT NULL THEN
            state := {WAITING};
            followups := ({end_message}(q, h, p_now, p_op, 'replaced', 'publish')).followups;
        ELSE
            state := v_state;
            followups := ({end_message}(q, o, p_now, p_op, 'replaced', 'publish')).followups;
        END IF;
    END IF;
    other := p_id;
    INSERT INTO {message} (
        seq, position, ready_ms, published_ms, queue, state, rank, id, key, "group", chain, data, group_rank)
    VALUES (
        p_seq, p_seq, v_ready, p_now, q.number, state, {PRIORITY_MAX} - p_priority, p_id, p_key, p_group, p_chain, p_data,
        {group_rank}(q.group_mode, p_group, ({PRIORITY_MAX} - p_priority)::smallint));
END $body$;
