-- How long a message keeps its key: 1 until it is claimed, 2 until it ends and also while it is dead, null until it
-- ends. `freed_key` is the key that a message gave up when it was claimed: from then on `key` is null, until the
-- message is dead.
ALTER TABLE {message} ADD COLUMN key_mode smallint;
ALTER TABLE {message} ADD COLUMN freed_key text COLLATE "C";
