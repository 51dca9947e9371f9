"""A connection to NATS that fails leaves no socket open, neither that of wake-ups nor that of a relay."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable

import pytest

from tests.servers.nats import NatsServer
from waypost.outbox.relay.nats import NatsTarget
from waypost.wake.nats import NatsTransport


def open_transport(url: str) -> None:
    transport = NatsTransport(url, 5)
    try:
        transport.open()
    finally:
        transport.close()


def open_target(url: str) -> None:
    asyncio.run(NatsTarget(url, "orders").open())


@pytest.mark.promise("WAKE-3", "BOX-4")
@pytest.mark.parametrize("connect", [open_transport, open_target])
def test_a_refused_connection_keeps_no_socket_open(nats: NatsServer, connect: Callable[[str], None]) -> None:
    gc.collect()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(Exception, match=r"(?i)authorization"):
            connect(f"nats://127.0.0.1:{nats.port}")
        gc.collect()
    assert [str(one.message) for one in found if issubclass(one.category, ResourceWarning)] == []
