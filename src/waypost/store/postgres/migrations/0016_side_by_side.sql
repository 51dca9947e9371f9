-- From this version on the names of functions include their version, so that the functions of two releases can exist
-- side by side. Functions without a version are removed: clients of older releases cannot continue after this
-- migration.

-- The versions whose functions exist: the names of the functions, when this version became the one in use, and the
-- script that creates its triggers and clock again when a later version is taken back.
CREATE TABLE {interface} (
    version integer PRIMARY KEY,
    functions text[] NOT NULL,
    made_ms bigint NOT NULL,
    restore text NOT NULL
);
-- When functions of an older version were called: some rows a minute, and none while only one version exists.
CREATE TABLE {used} (version integer NOT NULL, at_ms bigint NOT NULL);
CREATE INDEX {#used_at} ON {used} (version, at_ms);

DO $body$
DECLARE
    f regprocedure;
BEGIN
    FOR f IN SELECT p.oid FROM pg_proc p JOIN pg_class c ON c.relnamespace = p.pronamespace
        WHERE c.oid = '{queue}'::regclass AND p.proname = ANY (ARRAY(
            SELECT left(c.relname, -length('queue')) || n.name FROM unnest(ARRAY[
                'accept', 'accept_conflict', 'accept_keyed', 'add_change', 'add_side_effect', 'announce_poll',
                'apply_followups', 'begin_chains', 'block_messages', 'bury_blocked', 'bury_exhausted', 'cancel',
                'cap_leases', 'channel', 'check', 'check_counts', 'check_removal', 'choose_sleepers', 'claim',
                'claim_room', 'claim_without_lease', 'clear_queue', 'clock', 'configure', 'continuation_names',
                'count_end', 'count_left', 'count_move', 'count_over_cap', 'count_redeliveries', 'cut_journal',
                'elect', 'end_followup', 'end_followups', 'end_message', 'end_waits', 'extend', 'find_chain',
                'fire_schedule', 'first_result', 'fold', 'heartbeat', 'holders', 'journal', 'journal_forget',
                'journal_keeps', 'journal_reader', 'journal_trim', 'label_fires', 'links', 'lock_key', 'make_queue',
                'many_counts', 'merge_counts', 'move_kept', 'ms_until', 'next_due', 'next_lease', 'notify',
                'open_journal', 'open_queue', 'operation_id', 'order_journal', 'pause', 'policy', 'poll', 'promote',
                'publish', 'purge', 'raise_floor', 'reclaim', 'records', 'redrive', 'remove', 'remove_dead',
                'remove_history', 'remove_messages', 'remove_schedule', 'replace_dead', 'request_worker',
                'reschedule', 'resign', 'rotate_journal', 'save_record', 'save_schedule', 'schedules', 'settle',
                'settle_back', 'settle_done', 'settle_end', 'settle_one', 'slice_bytes', 'stamp', 'state_counts',
                'stats', 'store_result', 'sweep', 'sweep_chains', 'sweep_names', 'sweep_records',
                'take_side_effects', 'tidy', 'tidy_is_due', 'tidy_is_due_for', 'trace', 'trigger_schedule',
                'trim_completed', 'trim_dead', 'trimmed_to', 'unblock_message', 'unregister', 'wake',
                'wake_at_commit', 'wake_followup', 'watch', 'watch_chain', 'workers', 'write_event'
            ]) n (name)))
    LOOP
        EXECUTE format('DROP FUNCTION %s CASCADE', f);
    END LOOP;
END $body$;
