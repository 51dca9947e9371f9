-- Whether errors are kept without the tracebacks behind their texts.
ALTER TABLE {queue} ADD COLUMN no_tracebacks boolean NOT NULL DEFAULT false;
