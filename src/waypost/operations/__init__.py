"""What the clients can do, as flows that do no I/O: `flow` runs them, the other modules are the operations."""
