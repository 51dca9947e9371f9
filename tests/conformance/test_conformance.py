"""The conformance suite on every store of `conftest.STORES`, sync and async."""

from __future__ import annotations

from waypost.testing.conformance import *  # noqa: F403
