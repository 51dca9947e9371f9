"""One file for each command: `add` declares its arguments, `run` does it and returns the exit code."""
