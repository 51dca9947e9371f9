-- How long a message has its key: 1 until it is claimed, 2 also while it is dead, null while it is unfinished. And the key that a
-- message gave up when it was claimed: `key` is null since then, until it is dead.
ALTER TABLE {message} ADD COLUMN key_mode smallint;
ALTER TABLE {message} ADD COLUMN freed_key text COLLATE "C";
