"""The option `wake`: which values it accepts, which it refuses, and the channel of each store without it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from waypost import AsyncWaypost, Waypost
from waypost.errors import ConfigurationError, InvalidUrl
from waypost.testing.servers import ValkeyServer


@pytest.mark.promise("WAKE-4")
@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("memory://", "local"),
        ("sqlite:///orders.db", "local"),
        ("valkey://127.0.0.1:6379", "valkey"),
        ("valkey+sentinel://127.0.0.1:26379/orders", "valkey"),
        ("valkey+cluster://127.0.0.1:6379", "valkey"),
        ("postgresql://127.0.0.1/orders", "postgres"),
    ],
)
def test_every_store_has_its_own_channel(url: str, kind: str) -> None:
    assert Waypost(url).wakeups.kind == kind
    assert Waypost(url, wake="poll").wakeups.kind == "poll"
    assert Waypost(url, wake="nats://127.0.0.1").wakeups.kind == "nats"


@pytest.mark.promise("WAKE-4", "SEE-6")
@pytest.mark.parametrize("wake", ["", "always", "http://127.0.0.1", "sqlite:///orders.db", "postgresql+psycopg://h/d"])
def test_an_unknown_channel_is_refused(wake: str) -> None:
    with pytest.raises(InvalidUrl, match="wake="):
        Waypost("memory://", wake=wake)


@pytest.mark.promise("WAKE-4", "SEE-6")
@pytest.mark.parametrize("wake", [5, object(), ["valkey://127.0.0.1"]])
def test_an_object_that_is_no_channel_is_refused(wake: Any) -> None:
    with pytest.raises(ConfigurationError, match="wake="):
        Waypost("memory://", wake=wake)


@pytest.mark.promise("SEE-6")
@pytest.mark.parametrize("wake", ["nats://user:s3cret@", "nats://user:s3cret@host:port", "valkey://u:s3cret@h:port"])
def test_a_bad_url_is_refused_without_its_secrets(wake: str) -> None:
    with pytest.raises(InvalidUrl) as refused:
        Waypost("memory://", wake=wake)
    assert "s3cret" not in str(refused.value)


@pytest.mark.promise("WAKE-3")
def test_clients_of_one_place_share_a_channel_and_others_do_not(tmp_path: Path) -> None:
    def channel(url: str, **options: Any) -> Any:
        return Waypost(url, **options).wakeups.channel

    first = Waypost("valkey://127.0.0.1:6379")
    assert channel("valkey://127.0.0.1:6379", namespace="other") is first.wakeups.channel
    assert channel("memory://", wake="valkey://127.0.0.1:6379") is first.wakeups.channel
    assert channel("valkey://127.0.0.1:6380") is not first.wakeups.channel
    file = Waypost(f"sqlite:///{tmp_path / 'a.db'}")
    assert channel(f"sqlite:///{tmp_path / 'x' / '..' / 'a.db'}") is file.wakeups.channel
    named = Waypost("memory://shared-channel")
    assert channel("memory://shared-channel") is named.wakeups.channel
    assert channel("memory://") is not named.wakeups.channel


@pytest.mark.promise("FACE-5", "WAKE-4")
def test_a_channel_without_its_driver_names_the_package_to_install() -> None:
    script = (
        "import sys; sys.modules['nats'] = None\n"
        "from waypost import Waypost\n"
        "from waypost.errors import MissingExtra\n"
        "try:\n    Waypost('memory://', wake='nats://127.0.0.1')\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert "waypost[nats]" in done.stdout


@pytest.mark.promise("STORE-5", "WAKE-3")
@pytest.mark.parametrize("resp", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_a_client_on_the_callers_connection_is_woken_too(
    valkey: ValkeyServer, namespace: str, resp: int, decode: bool
) -> None:
    import redis

    started: list[int] = []
    client = redis.Redis(port=valkey.port, password=valkey.password, protocol=resp, decode_responses=decode)
    with client, Waypost(client=client, namespace=namespace) as post:

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            assert until(lambda: post.stats("orders").sleepers == 1, "a sleeper")
            post.publish("orders", 1)
            assert until(lambda: started == [1], "the start")


@pytest.mark.promise("STORE-5", "WAKE-3")
def test_an_async_client_on_the_callers_connection_is_woken_too(valkey: ValkeyServer, namespace: str) -> None:
    import redis.asyncio

    async def scenario() -> None:
        client = redis.asyncio.Redis(port=valkey.port, password=valkey.password)
        async with client, AsyncWaypost(client=client, namespace=namespace) as post:
            waiting = asyncio.create_task(_received(post))
            while (await post.stats("orders")).sleepers == 0:  # noqa: ASYNC110 - the store does not ring
                await asyncio.sleep(0.005)
            await post.publish("orders", "hello")
            assert await asyncio.wait_for(waiting, 20) == "hello"
            assert post.wakeups.state == "working"

    asyncio.run(scenario())


async def _received(post: AsyncWaypost) -> Any:
    async with post.receive("orders", wait=60) as message:
        assert message is not None
        return message.body


@pytest.mark.promise("STORE-1", "WAKE-4")
def test_a_user_without_channel_rights_publishes_and_one_with_them_is_woken(
    valkey: ValkeyServer, namespace: str
) -> None:
    from tests.servers.valkey_setups import client_of

    with client_of(valkey) as client:
        client.acl_setuser("mute", enabled=True, nopass=True, keys=["*"], categories=["+@all"], reset_channels=True)
        client.execute_command("ACL", "SETUSER", "hearing", "on", "nopass", "~*", f"&{{{namespace}:*", "+@all")
    mute, hearing = (valkey.url.replace("://", f"://{user}:any@") for user in ("mute", "hearing"))
    started: list[int] = []
    with Waypost(hearing, namespace=namespace) as post, Waypost(mute, namespace=namespace) as silent:

        @post.handler("orders")
        async def handle(body: int) -> None:
            started.append(body)

        with post.worker():
            assert until(lambda: post.stats("orders").sleepers == 1, "a sleeper")
            assert silent.publish("orders", 1).status == "queued"
            # No worker could be notified: the safety poll finds it.
            assert until(lambda: started == [1], "the start")
            post.publish("orders", 2)
            assert until(lambda: started == [1, 2], "the start")
