-- The beginning of the error's text of retried and dead; null for every other event.
ALTER TABLE {entry} ADD COLUMN errors text[];
-- Whether web pages show the bodies of a queue to no user.
ALTER TABLE {queue} ADD COLUMN hide_bodies boolean NOT NULL DEFAULT false;
