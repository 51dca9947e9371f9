-- Shared records. Touches: record. Keeps: a save changes only its own row, and only if the row has the expected
-- version; a save that inserts a row deletes the oldest of its kind that are too many or have expired, a bounded number
-- at a time, and never a row that is locked.
-- The version is no smaller than the store's time: so a record that was removed and created again has a greater
-- version.

CREATE OR REPLACE FUNCTION {save_record}(
    p_kind text, p_name text, p_clock bigint, p_data bytea, p_version bigint, p_ttl bigint, p_keep bigint,
    OUT o_now bigint, OUT o_saved boolean, OUT o_data bytea, OUT o_version bigint, OUT o_created bigint, OUT o_until bigint
) LANGUAGE plpgsql AS $body$
DECLARE
    r {record};
    v_live boolean;
BEGIN
    o_now := {clock}(p_clock);
    LOOP
        SELECT * INTO r FROM {record} t WHERE t.kind = p_kind AND t.name = p_name FOR UPDATE;
        v_live := FOUND AND (r.until_ms IS NULL OR r.until_ms > o_now);
        o_saved := v_live AND p_data IS NOT NULL AND r.data = p_data;
        IF NOT o_saved AND (p_version IS NULL OR p_version = CASE WHEN v_live THEN r.version ELSE 0 END) THEN
            IF p_data IS NULL THEN
                DELETE FROM {record} t WHERE t.kind = p_kind AND t.name = p_name;
                o_saved := v_live;
                RETURN;
            END IF;
            o_saved := true;
            IF r.kind IS NOT NULL THEN
                UPDATE {record} t SET data = p_data, until_ms = o_now + p_ttl,
                    version = CASE WHEN v_live THEN greatest(t.version + 1, o_now) ELSE o_now END,
                    created_ms = CASE WHEN v_live THEN t.created_ms ELSE o_now END
                WHERE t.kind = p_kind AND t.name = p_name RETURNING t.* INTO r;
            ELSE
                INSERT INTO {record} AS t (kind, name, data, version, created_ms, until_ms)
                VALUES (p_kind, p_name, p_data, o_now, o_now, o_now + p_ttl) ON CONFLICT DO NOTHING RETURNING t.* INTO r;
                -- Another client was faster: compare with what it saved.
                CONTINUE WHEN r.kind IS NULL;
            END IF;
            IF NOT v_live THEN
                PERFORM {sweep_records}(p_kind, o_now, p_keep);
            END IF;
            v_live := true;
        END IF;
        EXIT;
    END LOOP;
    IF v_live THEN
        o_data := r.data;
        o_version := r.version;
        o_created := r.created_ms;
        o_until := r.until_ms;
    END IF;
END $body$;

CREATE OR REPLACE FUNCTION {sweep_records}(p_kind text, p_now bigint, p_keep bigint) RETURNS void LANGUAGE sql AS $body$
    DELETE FROM {record} d WHERE d.kind = p_kind AND d.name IN (
        SELECT t.name FROM {record} t WHERE t.kind = p_kind AND t.name IN (
            SELECT o.name FROM (
                SELECT c.name, c.until_ms, row_number() OVER (ORDER BY c.created_ms, c.name) AS n FROM {record} c
                WHERE c.kind = p_kind ORDER BY c.created_ms, c.name LIMIT {RECORDS_SWEPT_MAX}) o
            WHERE o.n <= (SELECT count(*) FROM {record} a WHERE a.kind = p_kind) - p_keep OR o.until_ms <= p_now)
        FOR UPDATE SKIP LOCKED)
$body$;

-- The first row has only the store's time.
CREATE OR REPLACE FUNCTION {records}(
    p_kind text, p_clock bigint, p_names text[], p_created bigint, p_last text, p_limit bigint
) RETURNS TABLE (o_now bigint, o_name text, o_data bytea, o_version bigint, o_created bigint, o_until bigint)
LANGUAGE plpgsql AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
BEGIN
    RETURN QUERY SELECT v_now, NULL::text, NULL::bytea, NULL::bigint, NULL::bigint, NULL::bigint;
    IF p_names IS NOT NULL THEN
        RETURN QUERY SELECT v_now, t.name, t.data, t.version, t.created_ms, t.until_ms FROM {record} t
            WHERE t.kind = p_kind AND t.name = ANY (p_names) AND (t.until_ms IS NULL OR t.until_ms > v_now)
            ORDER BY t.created_ms DESC, t.name DESC;
    ELSE
        RETURN QUERY SELECT v_now, t.name, t.data, t.version, t.created_ms, t.until_ms FROM {record} t
            WHERE t.kind = p_kind AND (t.until_ms IS NULL OR t.until_ms > v_now)
                AND (p_created IS NULL OR (t.created_ms, t.name) < (p_created, p_last))
            ORDER BY t.created_ms DESC, t.name DESC LIMIT p_limit;
    END IF;
END $body$;
