-- Renew leases, once per operation. Touches: queue (read), message (only the end of the lease), operation.
-- Keeps: a renewal with a stale token or nonce changes nothing and returns lost. letters: o ok, c cancel, l lost.
-- A renewal that is lost with the server's memory causes at worst a redelivery, which the token fences, so it does not
-- wait for the disk, unless the queue has a limit: the redelivery would exceed it.

CREATE OR REPLACE FUNCTION {extend}(
    p_queue text, p_clock bigint, p_session bytea, p_number bigint, p_ttl bigint, p_ids text[], p_tokens bigint[],
    p_nonces bytea[]
) RETURNS text LANGUAGE plpgsql {settings} AS $body$
DECLARE
    q {queue};
    v_now bigint := {clock}(p_clock);
    v_first text;
    v_held text[];
BEGIN
    SELECT * INTO q FROM {queue} WHERE name = p_queue;
    IF NOT FOUND THEN
        q := {open_queue}(p_queue);
    END IF;
    v_first := {first_result}(q.number, q.removed_ms, p_session, p_number, v_now, p_ttl);
    IF v_first IS NOT NULL THEN
        RETURN v_first;
    END IF;
    PERFORM 1 FROM {message} m
    WHERE m.queue = q.number AND m.id = ANY (p_ids) ORDER BY m.id FOR UPDATE;
    SELECT string_agg(CASE WHEN m.id IS NULL THEN 'l' WHEN m.cancel_requested THEN 'c' ELSE 'o' END, '' ORDER BY u.n),
        array_agg(m.id)
    INTO v_first, v_held
    FROM unnest(p_ids, p_tokens, p_nonces) WITH ORDINALITY AS u (id, token, nonce, n)
    LEFT JOIN LATERAL (SELECT t.* FROM {message} t WHERE t.queue = q.number AND t.id = u.id OFFSET 0) m
        ON m.state = {LEASED} AND m.token = coalesce(u.token, p_tokens[1]) AND m.nonce = coalesce(u.nonce, p_nonces[1]);
    -- The lease length of its claim: its worker renews by that length, whatever the queue's lease is now.
    UPDATE {message} m SET lease_end_ms = v_now + m.lease_ms WHERE m.queue = q.number AND m.id = ANY (v_held);
    IF {store_result}(q.number, p_session, p_number, v_now + p_ttl, v_first) THEN
        PERFORM {tidy}(q, v_now);
    ELSIF q.max_running IS NULL AND q.rate_count IS NULL AND q.claim_mode = 0 THEN
        -- For this transaction only: a SET of the function would end before the commit. A step that put the journal in
        -- order waits for the disk: what a reader has read must not change.
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN v_first;
END $body$;
