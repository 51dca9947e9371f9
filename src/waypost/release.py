"""Which release this is: told by the command line, and by workers to the store."""

from __future__ import annotations

VERSION = "0.1.0"
