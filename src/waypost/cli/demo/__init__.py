"""What `waypost demo` and `make demo` share: output with times, and processes that end with the demo."""
