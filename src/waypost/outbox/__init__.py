"""The outbox: publishing in the caller's own transaction, and sending queues on to other systems."""
