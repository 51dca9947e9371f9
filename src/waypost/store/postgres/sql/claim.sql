-- Claim: promote messages that are due, reclaim expired leases, lease the first messages, and return when to claim
-- again.
-- Touches: queue (read), message, entry, tally, rate, sleeper, operation, and what `end_message` and `apply_followups`
-- touch.
-- Keeps: a message is leased to one claim (SKIP LOCKED under the lock of its row); a token only grows; with
-- `max_running`, `rate` or groups, claims of one queue wait for each other, so that together they never exceed a limit
-- or break an order.
-- The rows are leases in order; the last row has only `head`, which ends with the sleepers to wake and the side
-- effects, if there are any; a repeat returns them too.
-- Row locks are no stronger than the change needs: so a message for whose end a client is about to wait is not skipped.
-- A claim does not wait for the disk: if it is lost with the server's memory, the message is ready again, the settle of
-- its worker finds another nonce, and its token is not given again, since the floor of tokens has been raised by then.
-- A claim does wait for the disk where a loss would cause more: without a lease (at most once), with a limit that
-- counts leased messages, when it raised the floor, or when it put the journal in order, since what a reader has read
-- must not change.

CREATE OR REPLACE FUNCTION {claim}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_limit bigint, p_worker text,
    p_sleeper text, p_replay boolean, p_poll_soon bigint, p_bytes bigint
) RETURNS TABLE (
    head text, id text, token bigint, deliveries integer, attempts integer, rank smallint, key text, "group" text,
    published_ms bigint, ready_ms bigint, claimed_ms bigint, lease_end_ms bigint, data bytea, chain text
) LANGUAGE plpgsql {settings} AS $body$
#variable_conflict use_column
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_op text := {operation_id}(p_session, p_number);
    v_nonce bytea := substr(p_session, {NONCE_AT}, {NONCE_BYTES});
    v_first text;
    v_room bigint := p_limit;
    v_leased bigint := 0;
    v_buried bigint := 0;
    v_tried bigint;
    v_seen bigint;
    v_places tid[];
    v_size bigint;
    v_left bigint := p_bytes;
    v_more boolean := false;
    v_ranked boolean := false;
    v_unfolded boolean := false;
    v_goes_on boolean := false;
    v_group_rate bigint;
    v_chosen record;
    v_missed text[];
    v_skipped bigint := 0;
    v_due bigint;
    v_end bigint;
    v_lapse bigint;
    v_lapsed boolean := false;
    v_rate bigint;
    v_tidy boolean;
    v_floor bigint;
    v_waits boolean := false;
    v_buried_now record;
    v_one record;
    v_followups json[] := '{}';
    v_ids text[];
    v_ends json[];
    v_wakes json[] := '{}';
    v_side_effects json;
    v_extra text;
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open_queue}(p_queue);
    END IF;
    v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
    IF v_first IS NOT NULL THEN
        -- Concurrent repeats wait for each other: otherwise one would search for leases by a nonce that another has
        -- replaced.
        SELECT substr(o.result, {RESULT_AT}) INTO v_first FROM {operation} o
        WHERE o.queue = q.number AND o.session = substr(p_session, 1, {SESSION_BYTES}) AND o.slot = p_number % {REPLAY_MAX} FOR UPDATE;
        -- The leases get the nonce of this attempt: the first reply may have reached another process.
        v_extra := nullif(substr(v_first, {NONCE_DIGITS} + 1), '');
        UPDATE {operation} o SET result = left(o.result, {MARK_DIGITS}) || encode(v_nonce, 'hex') || substr(v_first, {NONCE_DIGITS} + 1)
        WHERE o.queue = q.number AND o.session = substr(p_session, 1, {SESSION_BYTES}) AND o.slot = p_number % {REPLAY_MAX};
        RETURN QUERY
            WITH armed AS (
                UPDATE {message} m SET lease_end_ms = v_now + m.lease_ms, nonce = v_nonce
                WHERE m.queue = q.number AND m.state = {LEASED} AND m.nonce = decode(left(v_first, {NONCE_DIGITS}), 'hex') RETURNING m.*
            )
            SELECT NULL::text, m.id, m.token, m.deliveries, m.attempts, m.rank, coalesce(m.key, m.freed_key), m."group",
                m.published_ms, m.ready_ms, m.claimed_ms, m.lease_end_ms, m.data, m.chain
            FROM armed m ORDER BY m.rank, m.position, m.id;
        v_more := FOUND;
        p_replay := true;
    ELSE
        -- Stored first: a repeat on another connection then waits for this step, or this step is rolled back because of
        -- the other.
        v_tidy := {store_result}(q.number, p_session, p_number, v_now + p_ttl, encode(v_nonce, 'hex'));
    END IF;
    -- One statement: the overhead of a statement is greater than the cost of what a claim of one message reads here.
    SELECT
        (SELECT m.ready_ms FROM {message} m WHERE m.queue = q.number AND m.state = {DELAYED} ORDER BY m.ready_ms LIMIT 1),
        (SELECT m.lease_end_ms FROM {message} m
            WHERE m.queue = q.number AND m.state = {LEASED} ORDER BY m.lease_end_ms LIMIT 1),
        (SELECT s.floor FROM {server} s WHERE s.started = pg_postmaster_start_time() AND s.place = '{server}'::regclass),
        (SELECT m.expires_ms FROM {message} m
            WHERE m.queue = q.number AND m.expires_ms IS NOT NULL AND m.state <> {LEASED} AND m.state < {DEAD}
            ORDER BY m.expires_ms LIMIT 1)
    INTO v_due, v_end, v_floor, v_lapse;
    IF NOT p_replay THEN
        IF p_sleeper IS NOT NULL THEN
            UPDATE {sleeper} s SET awake = true WHERE s.queue = q.number AND s.name = p_sleeper AND NOT s.awake;
        END IF;
        IF NOT q.paused THEN
            IF q.claim_mode > 0 OR q.conversion IS NOT NULL THEN
                PERFORM pg_advisory_xact_lock({lock_key}('running'), q.number);
                v_now := {clock}(p_clock);
                SELECT * INTO q FROM {queue} t WHERE t.number = q.number;
                IF q.conversion IS NOT NULL THEN
                    v_extra := q.conversion::text;
                    q := {convert_queue}(q, {CONVERT_MAX});
                    v_goes_on := q.conversion::text <> v_extra AND NOT q.conversion ? 'waits';
                    v_extra := NULL;
                    v_waits := true;
                END IF;
                IF q.claim_mode > 0 THEN
                    PERFORM {end_limits}(q, v_now);
                END IF;
            END IF;
            IF v_due <= v_now THEN
                PERFORM {promote}(q, v_now, v_op);
            END IF;
            IF q.lease_ms IS NOT NULL AND (v_end > v_now + q.lease_ms OR v_tidy) THEN
                v_end := least(v_end, {cap_leases}(q, v_now));
            END IF;
            IF v_end <= v_now THEN
                v_followups := {reclaim}(q, v_now, v_op);
            END IF;
            -- Reclaimed messages can be past their expiry, too.
            IF v_lapse <= v_now OR v_end <= v_now THEN
                v_followups := v_followups || ({lapse}(q, v_now, v_op)).followups;
                v_lapsed := true;
            END IF;
            IF q.max_running IS NOT NULL OR q.rate_count IS NOT NULL THEN
                PERFORM pg_advisory_xact_lock({lock_key}('running'), q.number);
                -- Other claims ran while this one waited for the lock: times in `rate` must not decrease unless the
                -- clock does.
                v_now := {clock}(p_clock);
                SELECT r.room, r.next_rate_ms INTO v_room, v_rate FROM {claim_room}(q, v_now, p_limit) r;
            END IF;
            IF v_floor IS NULL AND v_room > 0 THEN
                v_floor := {raise_floor}();
                v_waits := true;
            END IF;
            LOOP
                EXIT WHEN v_leased >= v_room OR v_more;
                v_tried := v_room - v_leased;
                v_seen := 1;
                IF q.claim_mode > 0 THEN
                    v_unfolded := {fold_groups}(q, v_now, {FOLDED_MAX});
                    -- The more groups cannot hand out a message, the more groups are read at a time.
                    v_chosen := {choose_messages}(q, v_now, v_tried, v_leased, v_left, v_missed, least(v_skipped * 8, 64));
                    v_skipped := v_skipped + v_chosen.skipped;
                    v_missed := v_missed || v_chosen.missed;
                    v_places := v_chosen.places;
                    v_size := v_chosen.size;
                    v_more := v_chosen.more;
                    v_waits := v_waits OR v_chosen.limited;
                ELSIF v_tried > 1 THEN
                    -- Estimate from the size of the first message how many fit: messages that are locked but not leased
                    -- would be skipped by other claims.
                    SELECT count(*), least(v_tried, greatest(1, v_left / greatest(1, (array_agg(f.size))[1])))
                    INTO v_seen, v_tried FROM (
                        SELECT length(m.data) AS size FROM {message} m WHERE m.queue = q.number AND m.state = {READY}
                        ORDER BY m.rank, m.position, m.id LIMIT 2) f;
                    EXIT WHEN v_seen = 0;
                END IF;
                IF v_seen = 1 AND v_leased = 0 AND q.lease_ms IS NOT NULL AND q.claim_mode = 0 THEN
                    -- The only message, as on a queue whose workers keep up: statements for one message take a fraction
                    -- of the time of the statements for many, and have the same effect.
                    UPDATE {message} m SET state = {LEASED}, token = greatest(m.token, v_floor) + 1, claims = m.claims + 1,
                        deliveries = m.deliveries + 1, nonce = v_nonce, worker = p_worker, claimed_ms = v_now,
                        lease_end_ms = v_now + q.lease_ms, lease_ms = q.lease_ms,
                        key = CASE WHEN m.key_mode = {UNTIL_CLAIMED} THEN NULL ELSE m.key END,
                        freed_key = CASE WHEN m.key_mode = {UNTIL_CLAIMED} THEN coalesce(m.key, m.freed_key) END
                    FROM (
                        SELECT o.ctid AS place FROM {message} o WHERE o.queue = q.number AND o.state = {READY}
                            AND (o.expires_ms IS NULL OR o.expires_ms > v_now)
                        ORDER BY o.rank, o.position, o.id LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED) c
                    WHERE m.ctid = c.place AND (q.max_deliveries IS NULL OR m.deliveries < q.max_deliveries)
                    RETURNING m.id, m.token, m.claims, m.deliveries, m.attempts, m.rank, coalesce(m.key, m.freed_key) AS key,
                        m."group", m.published_ms, m.ready_ms, m.cause, length(m.data)::bigint AS size, m.data, m.chain, m.group_rank, m.ctid AS place INTO v_one;
                    IF FOUND THEN
                        IF v_one.group_rank IS NOT NULL THEN
                            PERFORM {change_claimed}(q, ARRAY[v_one.place]);
                        END IF;
                        IF q.journal IN ('all', 'full') THEN
                            INSERT INTO {entry} (
                                queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens,
                                deliveries, attempts, workers, causes, waits, sizes, chains, claims)
                            VALUES (
                                q.number, 1, pg_current_xact_id()::text::bigint, nextval('{sequence}'), v_now, 'claimed', v_op,
                                ARRAY[v_one.id], CASE WHEN v_one.key IS NOT NULL THEN ARRAY[v_one.key] END,
                                CASE WHEN v_one."group" IS NOT NULL THEN ARRAY[v_one."group"] END, ARRAY[v_one.rank],
                                ARRAY[v_one.token], ARRAY[v_one.deliveries], ARRAY[v_one.attempts], ARRAY[p_worker],
                                CASE WHEN v_one.cause IS NOT NULL THEN ARRAY[v_one.cause] END,
                                ARRAY[v_now - v_one.ready_ms], ARRAY[v_one.size],
                                CASE WHEN v_one.chain IS NOT NULL THEN ARRAY[v_one.chain] END,
                                CASE WHEN v_floor > 0 THEN ARRAY[v_one.claims] END);
                        END IF;
                        INSERT INTO {tally} (
                            seq, queue, minute, claims, first_claims, again_expired, again_released, again_retried,
                            again_snoozed, again_redriven, ready, leased, wait_ms, wait_ms_max)
                        VALUES (
                            nextval('{sequence}'), q.number, v_now / 60000, 1, (v_one.claims = 1)::int,
                            CASE WHEN v_one.claims > 1 AND v_one.cause = 'expired' THEN 1 END,
                            CASE WHEN v_one.claims > 1 AND v_one.cause = 'released' THEN 1 END,
                            CASE WHEN v_one.claims > 1 AND v_one.cause = 'retried' THEN 1 END,
                            CASE WHEN v_one.claims > 1 AND v_one.cause = 'snoozed' THEN 1 END,
                            CASE WHEN v_one.claims > 1 AND v_one.cause = 'redriven' THEN 1 END,
                            -1, 1, greatest(0, v_now - v_one.ready_ms), greatest(0, v_now - v_one.ready_ms));
                        id := v_one.id;
                        token := v_one.token;
                        deliveries := v_one.deliveries;
                        attempts := v_one.attempts;
                        rank := v_one.rank;
                        key := v_one.key;
                        "group" := v_one."group";
                        published_ms := v_one.published_ms;
                        ready_ms := v_one.ready_ms;
                        claimed_ms := v_now;
                        lease_end_ms := v_now + q.lease_ms;
                        data := v_one.data;
                        chain := v_one.chain;
                        RETURN NEXT;
                        v_leased := 1;
                        EXIT;
                    END IF;
                    -- Another claim has locked it, or it is over its limit of deliveries.
                END IF;
                IF q.claim_mode = 0 THEN
                    -- A message over its limit of deliveries is not leased and does not count against the limits of
                    -- this claim.
                    SELECT count(*), array_agg(f.place) FILTER (WHERE f.good AND NOT f.over),
                        coalesce(sum(f.size) FILTER (WHERE f.good AND NOT f.over), 0),
                        coalesce(bool_or(f.good AND f.over), false), coalesce(bool_or(f.ranked), false)
                    INTO v_seen, v_places, v_size, v_more, v_ranked FROM (
                        SELECT c.place, c.good, c.size, c.ranked,
                            sum(c.size) FILTER (WHERE c.good) OVER w > v_left
                                AND v_leased + count(*) FILTER (WHERE c.good) OVER w > 1 AS over
                        FROM (
                            SELECT m.ctid AS place, length(m.data) AS size,
                                q.max_deliveries IS NULL OR m.deliveries < q.max_deliveries AS good,
                                m.group_rank IS NOT NULL AS ranked
                            FROM {message} m WHERE m.queue = q.number AND m.state = {READY}
                                AND (m.expires_ms IS NULL OR m.expires_ms > v_now)
                            ORDER BY m.rank, m.position, m.id LIMIT v_tried FOR NO KEY UPDATE SKIP LOCKED) c
                        WINDOW w AS (ROWS UNBOUNDED PRECEDING)) f;
                    IF v_ranked THEN
                        PERFORM {change_claimed}(q, v_places);
                    END IF;
                END IF;
                v_left := v_left - v_size;
                v_leased := v_leased + coalesce(cardinality(v_places), 0);
                -- One statement, whatever the number of messages.
                IF v_places IS NULL THEN
                    NULL;
                ELSIF q.lease_ms IS NULL THEN
                    SELECT array_agg(c.id),
                        array_agg({end_followup}(c.chain, q.name || '/' || c.id, NULL, NULL)) FILTER (WHERE c.chain IS NOT NULL)
                    INTO v_ids, v_ends FROM (
                        SELECT m.id, m.chain FROM unnest(v_places) AS u (place) JOIN {message} m ON m.ctid = u.place) c;
                    RETURN QUERY SELECT * FROM {claim_without_lease}(q, v_now, v_op, p_worker, v_ids);
                    v_followups := v_followups || {wake_followup}(q.name, {end_waits}(q, v_now, v_ids, ARRAY['done']))
                        || coalesce(v_ends, '{}');
                ELSE
                    RETURN QUERY
                    WITH chosen AS MATERIALIZED (
                        SELECT u.place, u.n FROM unnest(v_places) WITH ORDINALITY AS u (place, n)
                    ), leased AS MATERIALIZED (
                        UPDATE {message} m SET state = {LEASED}, token = greatest(m.token, v_floor) + 1,
                            claims = m.claims + 1, deliveries = m.deliveries + 1, nonce = v_nonce, worker = p_worker,
                            claimed_ms = v_now, lease_end_ms = v_now + q.lease_ms, lease_ms = q.lease_ms,
                            key = CASE WHEN m.key_mode = {UNTIL_CLAIMED} THEN NULL ELSE m.key END,
                            freed_key = CASE WHEN m.key_mode = {UNTIL_CLAIMED} THEN coalesce(m.key, m.freed_key) END
                        FROM chosen c
                        WHERE m.ctid = c.place
                        RETURNING c.n, m.id, m.token, m.claims, m.deliveries, m.attempts, m.rank,
                            coalesce(m.key, m.freed_key) AS key, m."group", m.published_ms, m.ready_ms, m.cause, length(m.data) AS size, m.data, m.chain
                    ), s AS MATERIALIZED (
                        SELECT count(*) AS count, count(l.key) AS keyed, count(l."group") AS grouped,
                            count(l.cause) AS caused, count(l.chain) AS chained, min(l.rank) AS rank, max(l.rank) AS rank_max,
                            min(l.token) AS token, max(l.token) AS token_max, min(l.claims) AS claim,
                            max(l.claims) AS claim_max, max(l.deliveries) AS delivery, max(l.attempts) AS attempt,
                            min(l.ready_ms) AS ready, max(l.ready_ms) AS ready_max,
                            min(l.size) AS size, max(l.size) AS size_max, sum(greatest(0, v_now - l.ready_ms))::bigint AS wait
                        FROM leased l HAVING count(*) > 0
                    ), j AS (
                        -- A value that is the same for all messages is written once, and not aggregated.
                        INSERT INTO {entry} (
                            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens,
                            deliveries, attempts, workers, causes, waits, sizes, chains, claims)
                        SELECT q.number, s.count, pg_current_xact_id()::text::bigint, nextval('{sequence}'), v_now,
                            'claimed', v_op, (SELECT array_agg(l.id) FROM leased l),
                            CASE WHEN s.keyed > 0 THEN (SELECT array_agg(l.key) FROM leased l) END,
                            CASE WHEN s.grouped > 0 THEN (SELECT array_agg(l."group") FROM leased l) END,
                            CASE WHEN s.rank = s.rank_max THEN ARRAY[s.rank]
                                ELSE (SELECT array_agg(l.rank) FROM leased l) END,
                            CASE WHEN s.token = s.token_max THEN ARRAY[s.token]
                                ELSE (SELECT array_agg(l.token) FROM leased l) END,
                            CASE WHEN s.delivery = 1 THEN '{1}'
                                ELSE (SELECT array_agg(l.deliveries) FROM leased l) END,
                            CASE WHEN s.attempt = 0 THEN '{0}' ELSE (SELECT array_agg(l.attempts) FROM leased l) END,
                            ARRAY[p_worker],
                            CASE WHEN s.caused > 0 THEN (SELECT array_agg(l.cause) FROM leased l) END,
                            CASE WHEN s.ready = s.ready_max THEN ARRAY[v_now - s.ready]
                                ELSE (SELECT array_agg(v_now - l.ready_ms) FROM leased l) END,
                            CASE WHEN s.size = s.size_max THEN ARRAY[s.size::bigint]
                                ELSE (SELECT array_agg(l.size::bigint) FROM leased l) END,
                            CASE WHEN s.chained > 0 THEN (SELECT array_agg(l.chain) FROM leased l) END,
                            CASE WHEN v_floor = 0 THEN NULL WHEN s.claim = s.claim_max THEN ARRAY[s.claim]
                                ELSE (SELECT array_agg(l.claims) FROM leased l) END
                        FROM s WHERE q.journal IN ('all', 'full')
                    ), t AS (
                        INSERT INTO {tally} (
                            seq, queue, minute, claims, first_claims, again_expired, again_released, again_retried,
                            again_snoozed, again_redriven, ready, leased, wait_ms, wait_ms_max)
                        SELECT nextval('{sequence}'), q.number, v_now / 60000, s.count,
                            CASE WHEN s.claim_max = 1 THEN s.count ELSE a.first END, a.expired, a.released, a.retried,
                            a.snoozed, a.redriven, -s.count, s.count, s.wait, greatest(0, v_now - s.ready)
                        FROM s LEFT JOIN LATERAL (
                            SELECT count(*) FILTER (WHERE l.claims = 1) AS first,
                                nullif(count(*) FILTER (WHERE l.claims > 1 AND l.cause = 'expired'), 0) AS expired,
                                nullif(count(*) FILTER (WHERE l.claims > 1 AND l.cause = 'released'), 0) AS released,
                                nullif(count(*) FILTER (WHERE l.claims > 1 AND l.cause = 'retried'), 0) AS retried,
                                nullif(count(*) FILTER (WHERE l.claims > 1 AND l.cause = 'snoozed'), 0) AS snoozed,
                                nullif(count(*) FILTER (WHERE l.claims > 1 AND l.cause = 'redriven'), 0) AS redriven
                            FROM leased l WHERE s.claim_max > 1) a ON true
                    )
                    SELECT NULL::text, l.id, l.token, l.deliveries, l.attempts, l.rank, l.key, l."group",
                        l.published_ms, l.ready_ms, v_now, v_now + q.lease_ms, l.data, l.chain
                    FROM leased l ORDER BY l.n;
                END IF;
                EXIT WHEN v_leased >= v_room OR v_more;
                IF q.claim_mode > 0 THEN
                    IF v_chosen.exhausted IS NOT NULL THEN
                        v_ids := v_chosen.exhausted[:{BURY_MAX} - v_buried];
                        v_followups := v_followups || {bury_messages}(q, v_now, v_op, v_ids);
                        v_buried := v_buried + cardinality(v_ids);
                        EXIT WHEN v_buried >= {BURY_MAX};
                    ELSE
                        EXIT WHEN NOT v_chosen.again AND NOT v_unfolded;
                    END IF;
                    IF v_skipped >= {GROUPS_SKIPPED_MAX} THEN
                        v_goes_on := true;
                        EXIT;
                    END IF;
                    CONTINUE;
                END IF;
                CONTINUE WHEN v_seen = v_tried AND cardinality(v_places) = v_seen;
                -- Messages over their limit of deliveries precede the others: make them dead, then choose again.
                EXIT WHEN q.max_deliveries IS NULL;
                SELECT b.buried, b.followups INTO v_buried_now FROM {bury_exhausted}(q, v_now, v_op, {BURY_MAX} - v_buried) b;
                v_buried := v_buried + v_buried_now.buried;
                v_followups := v_followups || v_buried_now.followups;
                EXIT WHEN v_buried_now.buried = 0;
            END LOOP;
            IF v_leased > 0 AND (
                q.lease_ms IS NULL OR q.max_running IS NOT NULL OR q.rate_count IS NOT NULL OR q.claim_mode = {MODE_ORDERED}
                OR q.group_max_running IS NOT NULL OR q.group_rate_count IS NOT NULL)
            THEN
                v_waits := true;
            END IF;
            IF q.claim_mode > 0 THEN
                v_group_rate := {next_group_rate}(q.number, v_now);
            END IF;
            -- The next claim continues the conversion or the choice by groups.
            IF v_goes_on AND v_leased = 0 THEN
                v_group_rate := 0;
            ELSIF v_goes_on THEN
                v_more := true;
            END IF;
            IF v_leased > 0 AND q.rate_count IS NOT NULL THEN
                INSERT INTO {rate} AS r (queue, at_ms, count) VALUES (q.number, v_now, v_leased)
                ON CONFLICT (queue, at_ms) DO UPDATE SET count = r.count + excluded.count;
                SELECT CASE WHEN q.rate_count <= sum(r.count) THEN min(r.at_ms) + q.rate_per_ms - v_now END
                INTO v_rate FROM {rate} r WHERE r.queue = q.number;
            END IF;
        ELSIF v_lapse <= v_now THEN
            v_followups := ({lapse}(q, v_now, v_op)).followups;
            v_lapsed := true;
        END IF;
        IF q.dead_max IS NOT NULL OR q.dead_keep_ms IS NOT NULL THEN
            PERFORM {trim_dead}(q, v_now);
        END IF;
        -- It leased all messages that there were, and has capacity for more. A claim with limit 0 only removes the
        -- registration of the sleeper.
        IF v_leased < p_limit AND NOT v_more AND p_sleeper IS NOT NULL THEN
            INSERT INTO {sleeper} (queue, name, until_ms, awake) VALUES (q.number, p_sleeper, v_now + {SLEEPER_TTL_MS}, false)
            ON CONFLICT (queue, name) DO UPDATE SET until_ms = excluded.until_ms, awake = false;
        END IF;
        IF p_poll_soon IS NOT NULL THEN
            PERFORM {announce_poll}(q.number, p_worker, v_now, CASE WHEN v_leased < p_limit AND NOT v_more THEN p_poll_soon ELSE 0 END);
        END IF;
        IF cardinality(v_followups) > 0 THEN
            v_wakes := {apply_followups}(v_now, v_followups);
        END IF;
        IF v_due <= v_now OR v_end <= v_now OR v_lapsed OR cardinality(v_followups) > 0 OR v_buried > 0 OR q.dead_max IS NOT NULL
            OR q.dead_keep_ms IS NOT NULL
        THEN
            v_side_effects := {take_side_effects}();
            IF v_side_effects IS NOT NULL OR cardinality(v_wakes) > 0 THEN
                v_extra := json_build_array(v_wakes, coalesce(v_side_effects, '[]'))::text;
                UPDATE {operation} o SET result = left(o.result, {MARK_DIGITS} + {NONCE_DIGITS}) || v_extra
                WHERE o.queue = q.number AND o.session = substr(p_session, 1, {SESSION_BYTES}) AND o.slot = p_number % {REPLAY_MAX};
            END IF;
        END IF;
        IF v_lapse IS NOT NULL OR v_lapsed THEN
            v_lapse := {next_lapse}(q.number);
        END IF;
        IF v_due <= v_now OR v_end <= v_now OR v_lapsed OR cardinality(v_followups) > 0 THEN
            v_due := {next_due}(q.number);
            v_end := {next_lease}(q.number);
        ELSIF v_leased > 0 THEN
            -- Computed without a query: the first entries of the index are those of deleted rows that a vacuum has not
            -- removed yet.
            v_end := least(v_end, v_now + q.lease_ms);
        END IF;
        -- The messages may have been published one by one, in transactions that do no maintenance.
        -- Maintenance delays the handlers of the messages that a claim returns, so a claim of a few messages leaves it
        -- to the next settle, unless more than 512 rows of counts have accumulated.
        IF v_leased = 0 AND v_tidy OR v_leased >= 8 AND (v_tidy OR {many_counts}(q.number))
            OR v_tidy AND {counts_exceed}(q.number, 512)
        THEN
            PERFORM {tidy}(q, v_now);
        ELSIF NOT v_waits THEN
            -- For this transaction only: a SET of the function would end before the commit.
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
    END IF;
    RETURN QUERY SELECT
        json_build_array(
            {ms_until}(least(v_due, v_lapse), v_now), {ms_until}(v_end, v_now), coalesce(v_rate, v_group_rate), q.paused, q.lease_ms, v_more,
            v_extra::json, q.group_mode > 0)::text,
        NULL::text, NULL::bigint, NULL::integer, NULL::integer, NULL::smallint, NULL::text, NULL::text, NULL::bigint,
        NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::text;
END $body$;

-- How many messages of a claim are delivered for the first time, and the causes of the other deliveries.
CREATE OR REPLACE FUNCTION {count_redeliveries}(
    p_claims bigint[], p_causes text[], p_claims_max bigint, OUT first bigint, OUT expired bigint, OUT released bigint,
    OUT retried bigint, OUT snoozed bigint, OUT redriven bigint
) LANGUAGE plpgsql IMMUTABLE AS $body$
BEGIN
    IF p_claims_max = 1 THEN
        first := cardinality(p_claims);
        RETURN;
    END IF;
    SELECT count(*) FILTER (WHERE u.claims = 1),
        nullif(count(*) FILTER (WHERE u.claims > 1 AND u.cause = 'expired'), 0),
        nullif(count(*) FILTER (WHERE u.claims > 1 AND u.cause = 'released'), 0),
        nullif(count(*) FILTER (WHERE u.claims > 1 AND u.cause = 'retried'), 0),
        nullif(count(*) FILTER (WHERE u.claims > 1 AND u.cause = 'snoozed'), 0),
        nullif(count(*) FILTER (WHERE u.claims > 1 AND u.cause = 'redriven'), 0)
    INTO first, expired, released, retried, snoozed, redriven FROM unnest(p_claims, p_causes) AS u (claims, cause);
END $body$;

-- Claim at most once: the messages are deleted by this claim, which notifies their chains and waiters.
CREATE OR REPLACE FUNCTION {claim_without_lease}(q {queue}, p_now bigint, p_op text, p_worker text, p_ids text[]) RETURNS TABLE (
    head text, id text, token bigint, deliveries integer, attempts integer, rank smallint, key text, "group" text,
    published_ms bigint, ready_ms bigint, claimed_ms bigint, lease_end_ms bigint, data bytea, chain text
) LANGUAGE plpgsql AS $body$
#variable_conflict use_column
DECLARE
    v_floor bigint := (SELECT s.floor FROM {server} s);
BEGIN
    RETURN QUERY
    WITH taken AS MATERIALIZED (
        DELETE FROM {message} m USING unnest(p_ids) WITH ORDINALITY AS u (id, n) WHERE m.queue = q.number AND m.id = u.id
        RETURNING u.n, m.id, greatest(m.token, v_floor) + 1 AS token, m.claims + 1 AS claims,
            m.deliveries + 1 AS deliveries, m.attempts, m.rank, coalesce(m.key, m.freed_key) AS key, m."group", m.published_ms, m.ready_ms, m.cause, m.cancel_requested, m.reason, m.error_type, m.error, m.data,
            m.chain
    ), c AS (
        INSERT INTO {completed}
        SELECT nextval('{sequence}'), q.number, l.id, l.key, l."group", l.rank, l.token, l.deliveries, l.attempts,
            l.published_ms, l.ready_ms, l.cancel_requested, p_now, l.reason, l.error_type, l.error, l.data
        FROM (SELECT * FROM taken o ORDER BY o.n) l WHERE q.completed_max > 0
    ), s AS MATERIALIZED (
        SELECT count(*) AS count, array_agg(l.id) AS ids, array_agg(l.key) AS keys, array_agg(l."group") AS groups,
            array_agg(l.rank) AS ranks, array_agg(l.token) AS tokens, array_agg(l.claims) AS claims,
            max(l.claims) AS claim_max,
            array_agg(l.deliveries) AS deliveries, array_agg(l.attempts) AS attempts, array_agg(l.cause) AS causes,
            array_agg(p_now - l.ready_ms) AS waits, array_agg(length(l.data)) AS sizes,
            sum(greatest(0, p_now - l.ready_ms))::bigint AS wait, greatest(0, p_now - min(l.ready_ms)) AS wait_max,
            CASE WHEN count(l.chain) > 0 THEN array_agg(l.chain) END AS chains
        FROM taken l HAVING count(*) > 0
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            workers, causes, waits, sizes, chains, claims)
        SELECT q.number, s.count, pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, e.event, p_op,
            s.ids, s.keys, s.groups, s.ranks, s.tokens, s.deliveries, s.attempts,
            CASE e.event WHEN 'claimed' THEN ARRAY[p_worker] END,
            CASE e.event WHEN 'claimed' THEN s.causes ELSE ARRAY['at_most_once'] END,
            CASE e.event WHEN 'claimed' THEN s.waits END, s.sizes, s.chains, CASE WHEN v_floor > 0 THEN s.claims END
        FROM s CROSS JOIN unnest(ARRAY['claimed', 'done']) AS e (event) WHERE q.journal IN ('all', 'full')
    ), t AS (
        INSERT INTO {tally} (
            seq, queue, minute, claims, first_claims, again_expired, again_released, again_retried, again_snoozed,
            again_redriven, ready, done, wait_ms, wait_ms_max)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, s.count, a.first, a.expired, a.released, a.retried,
            a.snoozed, a.redriven, -s.count, s.count, s.wait, s.wait_max
        FROM s CROSS JOIN LATERAL {count_redeliveries}(s.claims, s.causes, s.claim_max) a
    )
    SELECT NULL::text, l.id, l.token, l.deliveries, l.attempts, l.rank, l.key, l."group", l.published_ms, l.ready_ms,
        p_now, NULL::bigint, l.data, l.chain
    FROM taken l ORDER BY l.n;
    IF q.completed_max > 0 THEN
        PERFORM {trim_completed}(q.number, q.completed_max, {RECLAIM_MAX} + cardinality(p_ids));
    END IF;
END $body$;

-- Bury messages over their limit of deliveries that precede all other messages. `buried` is 0 when the first message is
-- within the limit.
CREATE OR REPLACE FUNCTION {bury_exhausted}(
    q {queue}, p_now bigint, p_op text, p_limit bigint, OUT buried integer, OUT followups json[]
) LANGUAGE plpgsql AS $body$
DECLARE
    m {message};
BEGIN
    buried := 0;
    followups := '{}';
    FOR m IN
        SELECT * FROM {message} t WHERE t.queue = q.number AND t.state = {READY} ORDER BY t.rank, t.position, t.id
        LIMIT p_limit FOR NO KEY UPDATE SKIP LOCKED
    LOOP
        EXIT WHEN m.deliveries < q.max_deliveries;
        -- Lock against a client that has just begun to wait for the message: the end must find it.
        PERFORM 1 FROM {message} t WHERE t.queue = q.number AND t.id = m.id FOR UPDATE;
        m.reason := 'max_deliveries';
        followups := followups || ({end_message}(q, m, p_now, p_op, 'dead')).followups;
        PERFORM {trim_dead}(q, p_now);
        buried := buried + 1;
    END LOOP;
END $body$;

-- The same for messages that a choice by groups has found and locked.
CREATE OR REPLACE FUNCTION {bury_messages}(q {queue}, p_now bigint, p_op text, p_ids text[]) RETURNS json[]
LANGUAGE plpgsql AS $body$
DECLARE
    m {message};
    v_id text;
    v_followups json[] := '{}';
BEGIN
    FOREACH v_id IN ARRAY p_ids LOOP
        SELECT * INTO m FROM {message} t WHERE t.queue = q.number AND t.id = v_id FOR UPDATE;
        m.reason := 'max_deliveries';
        v_followups := v_followups || ({end_message}(q, m, p_now, p_op, 'dead')).followups;
        PERFORM {trim_dead}(q, p_now);
    END LOOP;
    RETURN v_followups;
END $body$;

-- Make messages ready that are due, in the order of their due times.
CREATE OR REPLACE FUNCTION {promote}(q {queue}, p_now bigint, p_op text) RETURNS void LANGUAGE plpgsql AS $body$
DECLARE
    v_ids text[];
    v_tokens bigint[];
    v_groups text[];
BEGIN
    WITH chosen AS MATERIALIZED (
        SELECT m.ctid AS place, m.ready_ms, m.id FROM {message} m
        WHERE m.queue = q.number AND m.state = {DELAYED} AND m.ready_ms <= p_now
        ORDER BY m.ready_ms, m.id LIMIT {PROMOTE_MAX} FOR NO KEY UPDATE SKIP LOCKED
    ), placed AS MATERIALIZED (
        SELECT c.place, nextval('{sequence}') AS position FROM chosen c
    ), promoted AS (
        UPDATE {message} m SET state = {READY}, keeps_place = NULL,
            position = CASE WHEN m.keeps_place IS NULL THEN p.position ELSE m.position END
        FROM placed p WHERE m.ctid = p.place
        RETURNING m.id, coalesce(m.key, m.freed_key) AS key, m."group", m.rank, m.token, m.claims, m.deliveries, m.attempts,
            m.data, m.chain, m.group_rank
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            causes, sizes, chains, claims)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'promoted', p_op,
            array_agg(m.id), array_agg(m.key), array_agg(m."group"), array_agg(m.rank), array_agg(m.token),
            array_agg(m.deliveries), array_agg(m.attempts), ARRAY['due'], array_agg(length(m.data)),
            CASE WHEN count(m.chain) > 0 THEN array_agg(m.chain) END,
            CASE WHEN max(m.token - m.claims) > 0 THEN array_agg(m.claims) END
        FROM promoted m WHERE q.journal IN ('all', 'full') HAVING count(*) > 0
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, ready, delayed)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, count(*), -count(*) FROM promoted HAVING count(*) > 0
    )
    SELECT array_agg(m.id), array_agg(m.token), array_agg(m."group") FILTER (WHERE m.group_rank IS NOT NULL)
    INTO v_ids, v_tokens, v_groups FROM promoted m;
    IF v_groups IS NOT NULL THEN
        PERFORM {change_groups}(q.number, v_groups, {JOINS}::smallint, 1, 0, -1);
    END IF;
    PERFORM {add_side_effect}(q.name, 'promoted', 'due', v_ids, v_tokens);
END $body$;

-- A lease that ends later than now plus its own length was given before the clock was set back: shorten it to its
-- length from now. Returns the first end of the changed leases.
CREATE OR REPLACE FUNCTION {cap_leases}(q {queue}, p_now bigint) RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_end bigint;
BEGIN
    WITH chosen AS MATERIALIZED (
        SELECT m.ctid AS place FROM {message} m
        WHERE m.queue = q.number AND m.state = {LEASED} AND m.lease_end_ms > p_now + q.lease_ms
            AND m.lease_end_ms > p_now + m.lease_ms
        LIMIT {RECLAIM_MAX} FOR NO KEY UPDATE SKIP LOCKED
    ), capped AS (
        UPDATE {message} m SET lease_end_ms = p_now + m.lease_ms FROM chosen c WHERE m.ctid = c.place
        RETURNING m.lease_end_ms
    )
    SELECT min(c.lease_end_ms) INTO v_end FROM capped c;
    RETURN v_end;
END $body$;

-- Make messages with expired leases the first of their priority, unless a cancel was requested or the next generation
-- of their key waits.
CREATE OR REPLACE FUNCTION {reclaim}(q {queue}, p_now bigint, p_op text) RETURNS json[] LANGUAGE plpgsql AS $body$
DECLARE
    v_followups json[] := '{}';
    v_ids text[];
    v_back text[];
    v_tokens bigint[];
    v_groups text[];
    m {message};
BEGIN
    SELECT array_agg(e.id) INTO v_ids FROM (
        SELECT t.id FROM {message} t WHERE t.queue = q.number AND t.state = {LEASED} AND t.lease_end_ms <= p_now
        ORDER BY t.lease_end_ms, t.id LIMIT {RECLAIM_MAX} FOR NO KEY UPDATE SKIP LOCKED) e;
    IF v_ids IS NULL THEN
        RETURN v_followups;
    END IF;
    WITH ended AS MATERIALIZED (
        SELECT t.place FROM unnest(v_ids) AS u (id) CROSS JOIN LATERAL (
            SELECT o.ctid AS place FROM {message} o
            WHERE o.queue = q.number AND o.id = u.id AND NOT o.cancel_requested
                AND (o.key IS NULL OR NOT EXISTS (
                    SELECT 1 FROM {message} h
                    WHERE h.queue = q.number AND h.key = o.key AND h.key IS NOT NULL AND h.state = {WAITING})) OFFSET 0) t
    ), back AS MATERIALIZED (
        UPDATE {message} t
        SET state = {READY}, cause = 'expired', ready_ms = t.lease_end_ms,
            position = CASE WHEN t.group_rank = {RANK_ORDERED} THEN t.position ELSE t.lease_end_ms - {HEAD_OFFSET} END
        FROM ended e WHERE t.ctid = e.place
        RETURNING t.id, coalesce(t.key, t.freed_key) AS key, t."group", t.rank, t.token, t.claims, t.deliveries, t.attempts,
            t.worker, t.claimed_ms,
            length(t.data) AS size, t.chain, t.group_rank
    ), j AS (
        INSERT INTO {entry} (
            queue, count, xid, seq, at_ms, event, operation, ids, keys, groups, ranks, tokens, deliveries, attempts,
            workers, runs, sizes, chains, claims)
        SELECT q.number, count(*), pg_current_xact_id()::text::bigint, nextval('{sequence}'), p_now, 'expired', p_op,
            array_agg(b.id), array_agg(b.key), array_agg(b."group"), array_agg(b.rank), array_agg(b.token),
            array_agg(b.deliveries), array_agg(b.attempts), array_agg(b.worker), array_agg(p_now - b.claimed_ms),
            array_agg(b.size), CASE WHEN count(b.chain) > 0 THEN array_agg(b.chain) END,
            CASE WHEN max(b.token - b.claims) > 0 THEN array_agg(b.claims) END
        FROM back b WHERE q.journal <> 'off' HAVING count(*) > 0
    ), t AS (
        INSERT INTO {tally} (seq, queue, minute, expired, ready, leased)
        SELECT nextval('{sequence}'), q.number, p_now / 60000, count(*), count(*), -count(*)
        FROM back HAVING count(*) > 0
    )
    SELECT array_agg(b.id), array_agg(b.token), array_agg(b."group") FILTER (WHERE b.group_rank IS NOT NULL)
    INTO v_back, v_tokens, v_groups FROM back b;
    IF v_groups IS NOT NULL THEN
        PERFORM {change_groups}(q.number, v_groups, {JOINS}::smallint, 1, -1, 0);
    END IF;
    PERFORM {add_side_effect}(q.name, 'expired', NULL, v_back, v_tokens);
    IF cardinality(v_back) = cardinality(v_ids) THEN
        RETURN v_followups;
    END IF;
    FOR m IN
        SELECT t.* FROM unnest(v_ids) WITH ORDINALITY AS u (id, n) CROSS JOIN LATERAL (
            SELECT * FROM {message} o WHERE o.queue = q.number AND o.id = u.id OFFSET 0) t
        WHERE t.state = {LEASED} ORDER BY u.n
    LOOP
        v_followups := v_followups || ({end_message}(
            q, m, p_now, p_op, CASE WHEN m.cancel_requested THEN 'cancelled' ELSE 'replaced' END, 'expired')).followups;
    END LOOP;
    RETURN v_followups;
END $body$;

-- How many messages may be leased now, and the time until the rate allows another one. Called under the lock of
-- `running`.
CREATE OR REPLACE FUNCTION {claim_room}(q {queue}, p_now bigint, p_limit bigint, OUT room bigint, OUT next_rate_ms bigint)
LANGUAGE plpgsql AS $body$
DECLARE
    v_allowed bigint;
BEGIN
    room := p_limit;
    IF q.max_running IS NOT NULL THEN
        room := least(room, greatest(0, q.max_running - (SELECT h.leased FROM {state_counts}(q.number) h)));
    END IF;
    IF q.rate_count IS NOT NULL THEN
        DELETE FROM {rate} r WHERE r.queue = q.number AND r.at_ms <= p_now - q.rate_per_ms;
        IF EXISTS (SELECT 1 FROM {rate} r WHERE r.queue = q.number AND r.at_ms > p_now) THEN
            -- The clock was set back. The whole window counts from now on, not only from when the clock has caught up.
            WITH gone AS (DELETE FROM {rate} r WHERE r.queue = q.number RETURNING r.count)
            SELECT sum(g.count) INTO v_allowed FROM gone g;
            INSERT INTO {rate} (queue, at_ms, count) VALUES (q.number, p_now, v_allowed);
        END IF;
        SELECT q.rate_count - coalesce(sum(r.count), 0),
            CASE WHEN q.rate_count <= coalesce(sum(r.count), 0) THEN min(r.at_ms) + q.rate_per_ms - p_now END
        INTO v_allowed, next_rate_ms FROM {rate} r WHERE r.queue = q.number;
        room := least(room, greatest(0, v_allowed));
    END IF;
END $body$;
