-- Messages that lapse: messages that were not claimed before their expiry end as dropped, with cause lapsed.
-- Touches: message, and what `end_message` touches.
-- Keeps: a leased message does not lapse; when it returns to the queue, it is in the index again. The caller must call
-- `apply_followups`.

CREATE OR REPLACE FUNCTION {next_lapse}(p_queue integer) RETURNS bigint LANGUAGE plpgsql AS $body$
BEGIN
    RETURN (
        SELECT m.expires_ms FROM {message} m
        WHERE m.queue = p_queue AND m.expires_ms IS NOT NULL AND m.state <> {LEASED} AND m.state < {DEAD}
        ORDER BY m.expires_ms LIMIT 1);
END $body$;

-- End messages that have lapsed, the earliest first, a bounded number. `fresh` is how many sleepers to wake for groups
-- that can continue.
CREATE OR REPLACE FUNCTION {lapse}(q {queue}, p_now bigint, p_op text, OUT fresh bigint, OUT followups json[])
LANGUAGE plpgsql AS $body$
DECLARE
    m {message};
    v_ended record;
BEGIN
    fresh := 0;
    followups := '{}';
    FOR m IN
        SELECT t.* FROM (
            SELECT o.* FROM {message} o
            WHERE o.queue = q.number AND o.expires_ms IS NOT NULL AND o.state <> {LEASED} AND o.state < {DEAD} AND o.expires_ms <= p_now
            ORDER BY o.expires_ms LIMIT {LAPSE_MAX} FOR UPDATE SKIP LOCKED) t
        ORDER BY t.expires_ms, t.id
    LOOP
        v_ended := {end_message}(q, m, p_now, p_op, 'dropped', 'lapsed');
        fresh := fresh + v_ended.fresh;
        followups := followups || v_ended.followups;
    END LOOP;
END $body$;

-- The same for the messages with certain keys: a message that has lapsed must not block its key for the next message.
CREATE OR REPLACE FUNCTION {lapse_keys}(q {queue}, p_now bigint, p_op text, p_keys text[], OUT fresh bigint, OUT followups json[])
LANGUAGE plpgsql AS $body$
DECLARE
    m {message};
    v_ended record;
BEGIN
    fresh := 0;
    followups := '{}';
    FOR m IN
        SELECT t.* FROM (
            SELECT o.* FROM {message} o
            WHERE o.queue = q.number AND o.expires_ms IS NOT NULL AND o.state <> {LEASED} AND o.state < {DEAD} AND o.expires_ms <= p_now
                AND o.key = ANY (p_keys)
            FOR UPDATE) t
        ORDER BY t.expires_ms, t.id
    LOOP
        v_ended := {end_message}(q, m, p_now, p_op, 'dropped', 'lapsed');
        fresh := fresh + v_ended.fresh;
        followups := followups || v_ended.followups;
    END LOOP;
END $body$;

-- Set the expiry of messages that this step has stored, with numbers from `p_first` on. A negative expiry is a time
-- from now on.
CREATE OR REPLACE FUNCTION {set_expiries}(q {queue}, p_now bigint, p_first bigint, p_envelopes bytea[], p_expires bigint[])
RETURNS void LANGUAGE plpgsql AS $body$
BEGIN
    UPDATE {message} m SET expires_ms = CASE WHEN u.expires < 0 THEN p_now - u.expires ELSE u.expires END
    FROM unnest(p_envelopes, p_expires) AS u (data, expires)
    WHERE u.expires IS NOT NULL AND m.queue = q.number AND m.id = convert_from(substr(u.data, 2, {ID_CHARACTERS}), 'UTF8')
        AND m.seq >= p_first;
END $body$;
