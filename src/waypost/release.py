"""The version of this release, for the command line and the records of workers."""

from __future__ import annotations

VERSION = "0.2.0.dev0"
