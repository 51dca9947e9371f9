"""Stores over TLS: the certificate of the server is checked, and a worker runs as over a plain connection."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.certificates import Certificates, make_certificates
from waypost import AsyncWaypost, Waypost
from waypost.errors import StoreUnavailable
from waypost.store.postgres import migrate
from waypost.testing.postgres import PostgresServer, give_to_server_user
from waypost.testing.servers import ValkeyServer

pytestmark = [pytest.mark.promise("STORE-5"), pytest.mark.xdist_group("tls")]


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    # Not under pytest's own folder, which only this user may enter: the server may run as another one.
    with tempfile.TemporaryDirectory(prefix="wp-certificates-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield make_certificates(folder)


@contextlib.contextmanager
def tls_in_front_of(port: int, certificates: Certificates) -> Iterator[int]:
    """A port with TLS before a server without it: the Valkey of the wheel is built without."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.certificate, certificates.key)
    loop = asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def start() -> asyncio.Server:
        return await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)

    async def stop(server: asyncio.Server) -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        yield server.sockets[0].getsockname()[1]
        asyncio.run_coroutine_threadsafe(stop(server), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def check_both_clients(url: str) -> None:
    """Publish and handle with each client over this URL."""
    done: list[Any] = []
    with Waypost(url) as post:
        post.handler("orders")(done.append)
        post.publish("orders", 1)
        post.worker().run(until_empty=True, signals=False)

    async def awaited() -> None:
        async with AsyncWaypost(url) as post:

            @post.handler("mails")
            async def mail(body: int) -> None:
                done.append(body)

            await post.publish("mails", 2)
            await post.worker().run(until_empty=True, signals=False)

    asyncio.run(awaited())
    assert done == [1, 2]


def check_refused(url: str) -> None:
    with pytest.raises(StoreUnavailable):
        Waypost(url, start_timeout=20, retry_budget=0).open()


def test_valkey_over_tls(certificates: Certificates) -> None:
    with ValkeyServer(appendonly=True) as server, tls_in_front_of(server.port, certificates) as port:
        address = f"valkeys://:{server.password}@localhost:{port}"
        check_both_clients(f"{address}?ssl_ca_certs={certificates.authority}")
        check_refused(address)  # nobody that this machine trusts has signed the certificate


@pytest.mark.needs("postgresql-15")
def test_postgresql_over_tls_with_verify_full(certificates: Certificates, tmp_path: Path) -> None:
    give_to_server_user(certificates.key)
    with PostgresServer(
        release=15, ssl="on", ssl_cert_file=str(certificates.certificate), ssl_key_file=str(certificates.key)
    ) as server:
        address = server.url.replace("127.0.0.1", "localhost") + "?sslmode=verify-full"
        url = f"{address}&sslrootcert={certificates.authority}"
        migrate(url)
        check_both_clients(url)
        other = tmp_path / "other"
        other.mkdir()
        check_refused(f"{address}&sslrootcert={make_certificates(other).authority}")
