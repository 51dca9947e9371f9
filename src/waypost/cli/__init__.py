"""The command line: `waypost worker module:post`."""
