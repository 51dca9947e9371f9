"""For tests of waypost and of programs that use it: a client for tests, a manual clock, real servers, a suite.

    TestPost, AsyncTestPost     clients for tests of programs: virtual time, handlers that run in the test
    clock         a store clock that moves only when a test advances it
    servers       real Valkey and Redis servers from wheels, started and stopped with a `with` block
    postgres      the same for PostgreSQL
    conformance   what a store must do, as tests that read as a specification
    machine       random programs on two stores at once, compared after every step
    plugin        for tests of a store: the `promise` mark and the fixtures of the suite

Importing this package loads nothing of the above: pytest and Hypothesis are needed only where they are used. The
fixtures for programs (`waypost_post`, `waypost_valkey_url`, …) are in the package `pytest_waypost`, which pytest loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waypost.testing.inline import Handled
    from waypost.testing.post import AsyncTestPost, PublishedMessage, TestPost

__all__ = ["AsyncTestPost", "Handled", "PublishedMessage", "TestPost"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from waypost.testing import post

    return getattr(post, name)
