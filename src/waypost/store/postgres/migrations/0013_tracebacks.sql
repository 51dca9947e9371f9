-- Whether error texts are stored without tracebacks.
ALTER TABLE {queue} ADD COLUMN no_tracebacks boolean NOT NULL DEFAULT false;
