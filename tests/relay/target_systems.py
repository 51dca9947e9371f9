"""The target systems of relays behind one interface: their URL, what has arrived, and taking them down and back up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import redis

from tests.servers.nats import JetStreamServer
from tests.servers.rabbitmq import RabbitServer
from tests.waiting import WAIT_SECONDS_MAX
from waypost import Waypost
from waypost.testing.servers import EmbeddedServer, ValkeyServer

ROOT = Path(__file__).parents[2]


class Arrival(NamedTuple):
    """A message as a consumer of the target reads it."""

    id: str
    body: bytes
    headers: dict[str, str]
    key: str | None = None


class TargetSystem:
    """A system behind a server. Each name in it is a place of its own."""

    server: EmbeddedServer

    def url(self, name: str) -> str:
        """Return the URL for `to=`; create the stream, topic or queue if needed."""
        raise NotImplementedError

    def arrivals(self, name: str) -> list[Arrival]:
        """Return all messages that it has, in order."""
        raise NotImplementedError

    def take_down(self) -> None:
        """Make the system unreachable at once."""
        self.server.kill()

    def bring_back(self) -> None:
        """Make it reachable again, with everything that it confirmed."""
        self.server.start()

    def __enter__(self) -> Self:
        self.server.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.server.stop()


class Streams(TargetSystem):
    """A stream of Valkey."""

    def __init__(self) -> None:
        self.server = ValkeyServer(appendonly=True)

    def url(self, name: str) -> str:
        return f"{self.server.url.replace('://', '+stream://')}/{name}"

    def arrivals(self, name: str) -> list[Arrival]:
        with redis.Redis(port=self.server.port, password=self.server.password) as client:
            entries: Any = client.xrange(name)
        return [
            Arrival(
                fields[b"id"].decode(), fields[b"body"], msgspec.json.decode(fields[b"headers"], type=dict[str, str]),
                fields[b"key"].decode() if b"key" in fields else None,
            )
            for _, fields in entries
        ]  # fmt: skip


class Store(TargetSystem):
    """Another waypost store, on Valkey."""

    def __init__(self) -> None:
        self.server = ValkeyServer(appendonly=True)

    def url(self, name: str) -> str:
        return f"{self.server.url}#{name}"

    def arrivals(self, name: str) -> list[Arrival]:
        with Waypost(self.server.url) as post:
            return [
                Arrival(message.id, message.open().data, message.headers, message.key)
                for message in post.messages(name, state="ready")
            ]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a new event loop."""
    return asyncio.run(coroutine)


class Nats(TargetSystem):
    """A stream of NATS JetStream."""

    def __init__(self) -> None:
        self.server = JetStreamServer()
        self._made: set[str] = set()

    def url(self, name: str, **limits: Any) -> str:
        if name not in self._made:
            self._made.add(name)
            run(self._make(name, limits))
        return f"{self.server.url}/{name}"

    async def _make(self, name: str, limits: dict[str, Any]) -> None:
        import nats

        client = await nats.connect(self.server.url)
        await client.jetstream().add_stream(name=name, subjects=[name], **limits)
        await client.close()

    def arrivals(self, name: str) -> list[Arrival]:
        found: list[Arrival] = run(self._read(name))
        return found

    async def _read(self, name: str) -> list[Arrival]:
        import nats

        client = await nats.connect(self.server.url)
        stream = client.jetstream()
        count = (await stream.stream_info(name)).state.messages
        found: list[Arrival] = []
        reader = await stream.subscribe(name, ordered_consumer=True)
        while len(found) < count:
            message = await reader.next_msg(timeout=WAIT_SECONDS_MAX)
            headers = dict(message.headers or {})
            found.append(Arrival(headers["waypost-id"], message.data, headers, headers.get("waypost-key")))
        await client.close()
        return found


class Rabbit(TargetSystem):
    """A durable queue of RabbitMQ."""

    server: RabbitServer

    def __init__(self) -> None:
        self.server = RabbitServer()
        self._made: set[str] = set()

    def take_down(self) -> None:
        self.server.halt()

    def url(self, name: str) -> str:
        if name not in self._made:
            self._made.add(name)
            run(self._make(name))
        return f"{self.server.url}?routing_key={name}"

    async def _make(self, name: str) -> None:
        import aio_pika

        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue(name, durable=True)

    def arrivals(self, name: str) -> list[Arrival]:
        found: list[Arrival] = run(self._read(name))
        return found

    async def _read(self, name: str) -> list[Arrival]:
        import aio_pika

        found: list[Arrival] = []
        async with await aio_pika.connect(self.server.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(name, durable=True, passive=True)
            # Nothing is settled, so it goes back when the connection ends.
            while (message := await queue.get(fail=False)) is not None:
                headers = {name: str(value) for name, value in message.headers.items()}
                found.append(Arrival(str(message.message_id), message.body, headers, message.routing_key))
        return found


class RabbitKilled(Rabbit):
    """The same, ended by SIGKILL. Queues are declared and on its disk before that; confirmed messages must survive."""

    def url(self, name: str) -> str:
        is_new = name not in self._made
        url = super().url(name)
        if is_new:
            self.server.halt()
            self.server.start()
        return url

    def take_down(self) -> None:
        self.server.kill()


class Kafka(TargetSystem):
    """A topic of librdkafka's mock cluster."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.servers = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.relay.kafka_cluster"], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.servers = self._process.stdout.readline().strip()
        assert self.servers
        return self

    def __exit__(self, *ended: object) -> None:
        assert self._process is not None
        self.bring_back()
        self._process.communicate()

    def url(self, name: str) -> str:
        return f"kafka://{self.servers}/{name}"

    def take_down(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def bring_back(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def arrivals(self, name: str) -> list[Arrival]:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

        consumer = Consumer(
            {"bootstrap.servers": self.servers, "group.id": "reader", "enable.partition.eof": True, "check.crcs": True}
        )
        found: list[Arrival] = []
        try:
            partitions = consumer.list_topics(name, timeout=WAIT_SECONDS_MAX).topics[name].partitions
            consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for number in partitions])
            ended: set[int] = set()
            while len(ended) < len(partitions):
                message: Any = consumer.poll(WAIT_SECONDS_MAX)
                assert message is not None
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    ended.add(message.partition())
                    continue
                headers = {name: value.decode() for name, value in message.headers()}
                key = message.key()
                found.append(
                    Arrival(headers["waypost-id"], message.value(), headers, None if key is None else key.decode())
                )
        finally:
            consumer.close()
        return found


class Lake(TargetSystem):
    """A folder of Parquet files, taken down like a disk that is unmounted."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="lake-")
        self.folder = Path(self._directory.name) / "lake"

    def __enter__(self) -> Self:
        self.folder.mkdir()
        return self

    def __exit__(self, *ended: object) -> None:
        self._directory.cleanup()

    def url(self, name: str) -> str:
        (self.folder / name).mkdir(exist_ok=True)
        return f"lake://{self.folder / name}"

    def take_down(self) -> None:
        self.folder.rename(self.folder.with_name("away"))

    def bring_back(self) -> None:
        self.folder.with_name("away").rename(self.folder)

    def arrivals(self, name: str) -> list[Arrival]:
        import pyarrow.parquet as parquet

        return [
            Arrival(row["id"], row["body"], dict(row["headers"]), row["key"])
            for file in sorted((self.folder / name).glob("date=*/*.parquet"))
            for row in parquet.ParquetFile(file).read().to_pylist()
        ]


SYSTEMS: dict[str, Callable[[], TargetSystem]] = {
    "stream": Streams, "store": Store, "nats": Nats, "rabbitmq": Rabbit, "kafka": Kafka,
    "lake": Lake,
}  # fmt: skip
