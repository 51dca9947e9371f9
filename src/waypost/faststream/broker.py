"""`WaypostBroker`: FastStream on queues, timers and the outbox of waypost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Unpack

from faststream import AckPolicy
from faststream.message import gen_cor_id
from faststream.response import PublishType
from faststream.specification.schema.extra import Tag, TagDict

from waypost.client import AsyncWaypost, Waypost
from waypost.client.internals import store_answers
from waypost.client.options import PublishKeywords, PublishManyKeywords, QueueName
from waypost.errors import ConfigurationError, WaypostError
from waypost.faststream.internals import (
    EMPTY,
    BrokerConfig,
    BrokerMiddleware,
    BrokerUsecase,
    CodecProto,
    ContextRepo,
    CustomCallable,
    DefaultLoggerStorage,
    Dependant,
    FastDependsConfig,
    LoggerProto,
    SendableMessage,
    SerializerProto,
    UnderlyingDriverAnnotation,
    get_broker_logger,
    make_logger_state,
    serializer_of,
)
from waypost.faststream.message import WaypostMessage
from waypost.faststream.publishing import REQUEST_SECONDS, WaypostProducer, WaypostPublishCommand, split_options
from waypost.faststream.registrator import WaypostRegistrator
from waypost.faststream.specification import broker_specification
from waypost.faststream.workers import SubscriberWorkers
from waypost.message import StoredMessage, queue_name
from waypost.times import Duration
from waypost.values import CancelStatus, Published

MESSAGE_ID_CHARACTERS = 24


class WaypostLoggerStorage(DefaultLoggerStorage):
    """Makes the broker's logger: each line has the queue and the id of the message."""

    def __init__(self) -> None:
        super().__init__()
        self._longest = 4
        self.logger_log_level = logging.INFO

    def set_level(self, level: int) -> None:
        """Log from this level on."""
        self.logger_log_level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Make room for the names of its queues."""
        self._longest = max(self._longest, len(params.get("queue", "")))

    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        """Return the logger, made at the first call."""
        logger = self._get_logger_ref()
        if logger is None:
            logger = get_broker_logger(
                name="waypost",
                default_context={"queue": "", "message_id": ""},
                message_id_ln=MESSAGE_ID_CHARACTERS,
                fmt=f"%(asctime)s %(levelname)-8s - %(queue)-{self._longest}s | %(message_id)-24s - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(logger)
        return logger


@dataclass(kw_only=True)
class WaypostBrokerConfig(BrokerConfig):
    """What subscribers and publishers find in their broker."""

    client: AsyncWaypost
    workers: SubscriberWorkers


class WaypostBroker(WaypostRegistrator, BrokerUsecase[Any, AsyncWaypost, WaypostBrokerConfig]):
    """A FastStream broker whose messages are in a store of waypost.

    `store` is a URL (`valkey://…`, `postgresql://…`, `sqlite:///…`, `memory://`), an `AsyncWaypost`, or what that takes
    as `client=`: a client of redis-py, a pool of psycopg, an engine of SQLAlchemy. What is handed in stays yours and is
    not closed; give an `AsyncWaypost` for options other than `namespace`. Subscribers that start together share one
    worker, which also fires schedules. The other options are those of FastStream's own brokers.

        broker = WaypostBroker("valkey://127.0.0.1:6379")
        app = FastStream(broker)

        @broker.subscriber("orders", concurrency=50, retry=Exponential(attempts=5))
        @broker.publisher("receipts")
        async def charge(order: Order) -> Receipt: ...
    """

    def __init__(
        self,
        store: str | AsyncWaypost | object,
        *,
        namespace: str = "wp",
        graceful_timeout: float | None = 15.0,
        ack_policy: AckPolicy = EMPTY,
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any]] = (),
        routers: Sequence[WaypostRegistrator] = (),
        logger: LoggerProto | None = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: SerializerProto | None = EMPTY,
        provider: Any = None,
        context: ContextRepo | None = None,
        id_generator: Any = gen_cor_id,
        description: str | None = None,
        tags: Iterable[Tag | TagDict] = (),
        specification_url: str | None = None,
    ) -> None:
        client, self._owns_client = _client_of(store, namespace)
        self._store_url = _url_of(store)
        super().__init__(
            config=WaypostBrokerConfig(
                client=client,
                workers=SubscriberWorkers(),
                producer=WaypostProducer(client, parser, decoder),
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=make_logger_state(logger=logger, log_level=log_level, default_storage_cls=WaypostLoggerStorage),
                fd_config=_dependencies_config(apply_types, serializer, provider, context),
                broker_dependencies=dependencies,
                graceful_timeout=graceful_timeout,
                ack_policy=ack_policy,
                id_generator=id_generator,
                extra_context={"broker": self},
                default_driver_annotations=_driver_annotations(),
            ),
            specification=broker_specification(
                client,
                specification_url or (store if isinstance(store, str) else None),
                description=description,
                tags=tags,
            ),
            routers=routers,
        )
        self._configure_producer()

    @property
    def client(self) -> AsyncWaypost:
        """The client behind this broker: for dead letters, schedules, statistics and all that FastStream has not."""
        client: AsyncWaypost = self.config.broker_config.client
        return client

    # ---- start and stop ------------------------------------------------------------------------------------

    def _configure_producer(self) -> None:
        """Let the producer encode as this broker does. A broker publishes without a start too."""
        config = self.config.broker_config
        config.producer.connect(serializer_of(config.fd_config), config.broker_codec)

    def _update_fd_config(self, config: FastDependsConfig) -> None:
        super()._update_fd_config(config)
        self._configure_producer()

    async def _connect(self) -> AsyncWaypost:
        self._configure_producer()
        return await self.client.open()

    async def start(self) -> None:
        """Connect and start all subscribers."""
        await self.connect()
        workers = self.config.broker_config.workers
        with workers.together() as subscribers:
            await super().start()
        await workers.start(subscribers, self.client)

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop all subscribers, giving handlers `graceful_timeout` to end, and disconnect."""
        config = self.config.broker_config
        try:
            await config.workers.stop_all(config.graceful_timeout or 0.0)
        finally:
            try:
                await super().stop(exc_type, exc_val, exc_tb)
            finally:
                self._connection = None
                if self._owns_client:
                    await self.client.close()

    async def ping(self, timeout: float | None = 3.0) -> bool:
        """Whether the store answers within `timeout`, and the subscribers consume."""
        try:
            async with asyncio.timeout(timeout):
                await store_answers(self.client)
        except (TimeoutError, WaypostError):
            return False
        workers: SubscriberWorkers = self.config.broker_config.workers
        return workers.are_healthy

    async def validate_schema(self) -> None:
        """Compare the tables of a PostgreSQL store with those of this release. Nothing is changed.

        Raises `ConfigurationError` that names what differs. For a broker that was given an `AsyncWaypost` only the
        version is compared, and a store of another kind has no tables.
        """
        if self._store_url is None or not self._store_url.startswith(("postgresql:", "postgres:")):
            await self.client.open()  # every client compares the version when it connects
            return
        from waypost.store.postgres import drift

        differences = await asyncio.to_thread(drift, self._store_url, self.client.store.namespace)
        if differences:
            raise ConfigurationError("; ".join(differences))

    # ---- publishing ----------------------------------------------------------------------------------------

    async def publish(
        self, message: SendableMessage = None, queue: QueueName = "", **options: Unpack[PublishKeywords]
    ) -> Published:
        """Publish a message and return its id and what happened to it.

        The options are those of `AsyncWaypost.publish`: `delay`, `at`, `expires`, `key`, `on_conflict`, `priority`,
        `headers`, `correlation_id`, `reply_to`, `retry`, `timeout`, and `transaction`, a session or connection that the
        message becomes a part of.
        """
        cmd = self._command([message], queue, options, PublishType.PUBLISH)
        published: Published = await self._basic_publish(cmd, producer=self.config.producer)
        return published

    async def publish_batch(
        self, *messages: SendableMessage, queue: QueueName, **options: Unpack[PublishManyKeywords]
    ) -> list[Published]:
        """Publish many messages with the same options, in one flush or in the caller's `transaction`."""
        if not messages:
            return []
        cmd = self._command(messages, queue, options, PublishType.PUBLISH)
        published: list[Published] = await self._basic_publish_batch(cmd, producer=self.config.producer)
        return published

    async def request(  # type: ignore[override]
        self,
        message: SendableMessage = None,
        queue: QueueName = "",
        *,
        timeout: Duration = REQUEST_SECONDS,
        **options: Any,
    ) -> WaypostMessage:
        """Publish a message and return what its handler returned. Raises `WaitTimeout` after `timeout` (30 s).

        If the message can no longer be handled, `MessageDead` or `MessageRemoved` is raised at once.
        """
        cmd = self._command([message], queue, options, PublishType.REQUEST)
        cmd.timeout = timeout
        reply: WaypostMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply

    def _command(
        self, messages: Sequence[Any], queue: QueueName, options: Any, kind: PublishType
    ) -> WaypostPublishCommand:
        own, rest = split_options(options)
        correlation_id = own.pop("correlation_id") or self.config.id_generator()
        return WaypostPublishCommand(
            *messages, queue=queue_name(queue), options=rest, _publish_type=kind, correlation_id=correlation_id, **own
        )

    # ---- timers --------------------------------------------------------------------------------------------

    async def cancel(
        self,
        queue: QueueName | Published,
        id: str | None = None,
        *,
        key: str | None = None,
        transaction: object = None,
    ) -> CancelStatus:
        """Cancel a message by its id or key: `cancelled`, `requested` (it is running), `finished` or `unknown`.

        With `transaction`, a session or connection of yours, it is cancelled if and only if that commits.
        """
        if not self.config.broker_config.producer.uses_transactions:
            transaction = None
        return await self.client.cancel(queue, id, key=key, transaction=transaction)

    async def cancel_all(self, queue: QueueName) -> int:
        """Cancel all timers of a queue that are not due yet, and return how many there were."""
        return await self.client.purge(queue, "delayed")

    async def has(self, queue: QueueName, key: str) -> bool:
        """Whether there is an unfinished message with this key."""
        return bool(await self.client.find_key(key, queue))

    async def timers(self, queue: QueueName, before: datetime | None = None) -> list[StoredMessage[Any]]:
        """Return the timers of a queue that are not due yet, or those due before a moment, by their due time."""
        return [stored async for stored in self.client.timers(queue, before)]


def _client_of(store: str | AsyncWaypost | object, namespace: str) -> tuple[AsyncWaypost, bool]:
    """Return the client, and whether it is the broker's own."""
    if isinstance(store, AsyncWaypost):
        if namespace != "wp":
            raise ConfigurationError("namespace= belongs to the client: AsyncWaypost(url, namespace=…)")
        return store, False
    if isinstance(store, Waypost):
        raise ConfigurationError("FastStream runs on an event loop: give an AsyncWaypost, not a Waypost")
    if isinstance(store, str):
        return AsyncWaypost(store, namespace=namespace), True
    return AsyncWaypost(client=store, namespace=namespace), True


def _url_of(store: object) -> str | None:
    """Return the URL of a store that is a URL, or an engine of SQLAlchemy."""
    if isinstance(store, str):
        return store
    url = getattr(store, "url", None)
    if not hasattr(url, "render_as_string"):
        return None
    scheme, _, rest = url.render_as_string(hide_password=False).partition("://")  # type: ignore[union-attr]
    return f"{scheme.partition('+')[0]}://{rest}"


def _driver_annotations() -> dict[Any, Any]:
    """Return which annotation injects what: FastStream names it to those who use the class itself."""
    from waypost.faststream import annotations

    classes = {"WaypostMessage": WaypostMessage, "WaypostBroker": WaypostBroker, "Client": AsyncWaypost}
    return {
        kind: UnderlyingDriverAnnotation(type_hint=getattr(annotations, name), module=annotations.__name__, name=name)
        for name, kind in classes.items()
    }


def _dependencies_config(
    apply_types: bool, serializer: SerializerProto | None, provider: Any, context: ContextRepo | None
) -> FastDependsConfig:
    from fast_depends import dependency_provider

    return FastDependsConfig(
        use_fastdepends=apply_types,
        serializer=serializer,
        provider=provider or dependency_provider,
        context=context or ContextRepo(),
    )
