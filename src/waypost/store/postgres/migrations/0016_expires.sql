-- When a message lapses unless it is claimed before; null of one that does not. Only messages that can lapse now are in the
-- index: those that are ready, delayed or waiting.
ALTER TABLE {message} ADD COLUMN expires_ms bigint;
CREATE INDEX {#message_expires} ON {message} (queue, expires_ms) WHERE expires_ms IS NOT NULL AND state <> 2 AND state < 4;
