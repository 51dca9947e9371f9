-- The list of workers. Touches: worker. Keeps: a worker writes only its own row; each heartbeat deletes a bounded
-- number of expired rows, and never a row that is locked; at most `p_max` rows remain.
-- A heartbeat that is lost with the server's memory is followed by the next one, so it does not wait for the disk.

CREATE OR REPLACE FUNCTION {heartbeat}(p_name text, p_clock bigint, p_ttl bigint, p_record bytea, p_max bigint)
RETURNS bigint LANGUAGE plpgsql AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
BEGIN
    -- For this transaction only: a SET of the function would end before the commit.
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE {worker} w SET record = p_record, at_ms = v_now, until_ms = v_now + p_ttl WHERE w.name = p_name;
    IF NOT FOUND THEN
        INSERT INTO {worker} (name, record, at_ms, until_ms) VALUES (p_name, p_record, v_now, v_now + p_ttl)
        ON CONFLICT (name) DO UPDATE
            SET record = excluded.record, at_ms = excluded.at_ms, until_ms = excluded.until_ms;
        -- Only a new row can exceed the limit.
        DELETE FROM {worker} WHERE name IN (
            SELECT w.name FROM {worker} w WHERE w.name <> p_name ORDER BY w.until_ms, w.name
            LIMIT greatest(0, (SELECT count(*) FROM {worker}) - p_max) FOR UPDATE SKIP LOCKED);
    END IF;
    DELETE FROM {worker} WHERE name IN (
        SELECT w.name FROM {worker} w WHERE w.until_ms <= v_now ORDER BY w.until_ms LIMIT {WORKERS_SWEPT_MAX} FOR UPDATE SKIP LOCKED);
    RETURN v_now;
END $body$;

CREATE OR REPLACE FUNCTION {unregister}(p_name text) RETURNS boolean LANGUAGE plpgsql AS $body$
BEGIN
    DELETE FROM {worker} WHERE name = p_name;
    RETURN FOUND;
END $body$;

CREATE OR REPLACE FUNCTION {workers}(p_clock bigint, p_max bigint)
RETURNS TABLE (name text, record bytea, at_ms bigint, until_ms bigint, request text, request_ms bigint)
LANGUAGE sql AS $body$
    SELECT w.name, w.record, w.at_ms, w.until_ms, w.request, w.request_ms
    FROM {worker} w WHERE w.until_ms > {clock}(p_clock) ORDER BY w.name LIMIT p_max
$body$;

-- Store a request for a worker, which reads it with its next heartbeat. Returns whether there is such a worker.
CREATE OR REPLACE FUNCTION {request_worker}(p_name text, p_clock bigint, p_request text) RETURNS boolean
LANGUAGE plpgsql AS $body$
DECLARE
    v_now bigint := {clock}(p_clock);
BEGIN
    UPDATE {worker} w SET request = p_request, request_ms = v_now WHERE w.name = p_name AND w.until_ms > v_now;
    RETURN FOUND;
END $body$;
