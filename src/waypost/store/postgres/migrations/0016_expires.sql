-- When a message lapses unless it is claimed before; null if it never lapses. The index has only messages that can
-- lapse now: ready, delayed and waiting ones.
ALTER TABLE {message} ADD COLUMN expires_ms bigint;
CREATE INDEX {#message_expires} ON {message} (queue, expires_ms) WHERE expires_ms IS NOT NULL AND state <> 2 AND state < 4;
