"""The conformance suite on every store of `conftest.STORES`, in both colours."""

from __future__ import annotations

from waypost.testing.conformance import *  # noqa: F403
