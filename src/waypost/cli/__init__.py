"""The `waypost` command: `main` parses the arguments, `commands/` has one file for each command."""
