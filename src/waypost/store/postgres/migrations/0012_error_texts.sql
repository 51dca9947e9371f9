-- The beginning of the error text of the events "retried" and "dead"; null for all other events.
ALTER TABLE {entry} ADD COLUMN errors text[];
-- Whether the web page hides the bodies of a queue from all users.
ALTER TABLE {queue} ADD COLUMN hide_bodies boolean NOT NULL DEFAULT false;
