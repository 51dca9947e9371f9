-- Triggers: they call the functions of the newest version, which also serve the clients of the previous version.

DROP TRIGGER IF EXISTS {#tally_wake} ON {tally};
CREATE CONSTRAINT TRIGGER {#tally_wake} AFTER INSERT ON {tally} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.wake IS NOT NULL) EXECUTE FUNCTION {wake_at_commit}();
