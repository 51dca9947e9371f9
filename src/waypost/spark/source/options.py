"""The options of the source, parsed and validated in one place. Spark passes them as strings, in any case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import cast, get_args

import msgspec

from waypost.checks import check_queue
from waypost.errors import ConfigurationError, InvalidInput
from waypost.policy import Unique
from waypost.redaction import find_redact
from waypost.spark.source.bodies import NanRule
from waypost.spark.source.credentials import Place
from waypost.spark.source.diverting import check_folder
from waypost.spark.source.tables import KINDS
from waypost.store.bulk.tables import Table

READ_OPTIONS = frozenset(
    (
        "url", "urlenv", "urlfile", "passwordenv", "passwordfile", "namespace", "queue", "kind", "numpartitions",
        "startingoffsets", "maxrowsperbatch", "failondataloss", "reader", "offsets",
    )
)  # fmt: skip
WRITE_OPTIONS = frozenset(
    (
        "url", "urlenv", "urlfile", "passwordenv", "passwordfile", "namespace", "queue", "writeid", "onconflict",
        "unique", "window", "blockseconds", "bodyformat", "redact", "nan", "oninvalid", "invalidpath", "countspath",
    )
)  # fmt: skip
#: What Spark itself adds to the options of some reads and writes.
SPARK_OPTIONS = frozenset(("path", "checkpointlocation", "__partition_columns", "queryname"))
#: Also the most connections that one read has open at once: each part is read through one.
PARTITIONS_DEFAULT = 4
PARTITIONS_MAX = 1024


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What is read, from where, and how."""

    place: Place
    kind: str
    #: None: all queues of the store.
    queues: tuple[str, ...] | None
    partitions: int = PARTITIONS_DEFAULT
    start: str | int = "earliest"
    max_rows: int | None = None
    fail_on_data_loss: bool = True
    #: The name of a registered reader: the journal keeps what it has not read.
    reader: str | None = None
    #: A batch read of exactly these events: by queue, behind which number and up to which.
    offsets: dict[str, tuple[int, int]] | None = None

    @property
    def follows_journal(self) -> bool:
        """Whether rows come from the journal, by numbers of events."""
        return self.kind in ("journal", "messages")

    @property
    def table(self) -> Table:
        """The table that is read."""
        return KINDS[self.kind]


def _refuse_unknown(options: Mapping[str, str], known: frozenset[str]) -> None:
    unknown = [name for name in options if name.lower() not in known | SPARK_OPTIONS]
    if unknown:
        raise ConfigurationError(f"unknown options: {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a read."""
    _refuse_unknown(options, READ_OPTIONS)
    kind = options.get("kind", "journal").lower()
    if kind not in KINDS:
        raise ConfigurationError(f"kind is one of {', '.join(KINDS)}, not {kind!r}")
    names = [name.strip() for name in options.get("queue", "").split(",") if name.strip()]
    return ReadOptions(
        Place.of(options),
        kind,
        tuple(check_queue(name) for name in dict.fromkeys(names)) or None,
        _number(options, "numPartitions", PARTITIONS_DEFAULT, PARTITIONS_MAX),
        _start(options.get("startingOffsets", "earliest")),
        _number(options, "maxRowsPerBatch", 0, 10**12) or None,
        _flag(options, "failOnDataLoss", True),
        options.get("reader"),
        _offsets(options.get("offsets")),
    )


def _number(options: Mapping[str, str], name: str, default: int, largest: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        number = 0
    if not 1 <= number <= largest:
        raise ConfigurationError(f"{name} is a whole number from 1 to {largest:,}, not {value!r}")
    return number


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name, str(default)).lower()
    if value not in ("true", "false"):
        raise ConfigurationError(f"{name} is true or false, not {value!r}")
    return value == "true"


def _offsets(value: str | None) -> dict[str, tuple[int, int]] | None:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=dict[str, tuple[int, int]])
    except msgspec.MsgspecError:
        raise ConfigurationError(
            f'offsets are numbers of events by queue, as {{"orders": [0, 120]}}, not {value!r}'
        ) from None


def _start(value: str) -> str | int:
    """Where to begin: `earliest`, `latest`, or a time as milliseconds since 1970."""
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        at = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigurationError(
            f"startingOffsets is earliest, latest or a time such as 2026-03-01T12:00:00Z, not {value!r}"
        ) from None
    if at.tzinfo is None:
        raise ConfigurationError(
            f"startingOffsets {value!r} has no time zone: end it with Z or an offset such as +01:00"
        )
    return int(at.timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where rows are published, and what makes two of them the same."""

    place: Place
    queue: str
    #: Names one write, so that its repetition is known as such. None: each write is its own.
    write_id: str | None
    on_conflict: str
    window_ms: int
    #: How long a writer waits for room in a queue that has `max_pending`.
    block_seconds: float
    #: Whether a body that is text is a JSON text.
    is_json: bool = False
    #: The redact hook for the journal, as `module:function`; each task imports it.
    redact: str | None = None
    #: What becomes of NaN and infinity in a body, which JSON does not have.
    nan: NanRule = "fail"
    #: Where rows that cannot be published are put. None: the first one ends the write.
    invalid_path: str | None = None
    #: Where the counts of each write are put, as JSON.
    counts_path: str | None = None
    #: How long a message has its key.
    unique: Unique = "live"


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """The options of a write."""
    _refuse_unknown(options, WRITE_OPTIONS)
    queue = options.get("queue")
    if not queue:
        raise ConfigurationError("the option queue is missing: name the queue to which the rows are published")
    conflict = options.get("onConflict", "keep").lower()
    if conflict not in ("keep", "replace", "extend"):
        raise ConfigurationError(f"onConflict is keep, replace or extend, not {conflict!r}")
    unique = options.get("unique", "live").lower()
    if unique not in get_args(Unique):
        raise ConfigurationError(f"unique is live, until_claimed or live_or_dead, not {unique!r}")
    window_ms = round(_seconds(options, "window", 0) * 1000)
    if unique == "until_claimed" and window_ms:
        raise ConfigurationError(
            "window and unique=until_claimed exclude each other: a window keeps the key in use after the claim"
        )
    body_format = options.get("bodyFormat", "auto").lower()
    if body_format not in ("auto", "json"):
        raise ConfigurationError(
            f"bodyFormat is auto (text stays text, structs become JSON) or json (text is JSON), not {body_format!r}"
        )
    nan = options.get("nan", "fail").lower()
    if nan not in ("fail", "null", "string"):
        raise ConfigurationError(
            f"nan is fail, null or string (what becomes of NaN and infinity, which JSON does not have), not {nan!r}"
        )
    return WriteOptions(
        Place.of(options),
        check_queue(queue),
        options.get("writeId"),
        conflict,
        window_ms,
        _seconds(options, "blockSeconds", 60),
        body_format == "json",
        _redact(options.get("redact")),
        cast("NanRule", nan),
        _invalid_path(options),
        _folder(options, "countsPath"),
        cast("Unique", unique),
    )


def _folder(options: Mapping[str, str], name: str) -> str | None:
    path = options.get(name)
    return None if path is None else check_folder(name, path)


def _invalid_path(options: Mapping[str, str]) -> str | None:
    """Return where invalid rows are put, None if they end the write."""
    rule, path = options.get("onInvalid", "fail").lower(), _folder(options, "invalidPath")
    if rule not in ("fail", "divert"):
        raise ConfigurationError(f"onInvalid is fail or divert, not {rule!r}")
    if rule == "divert" and not path:
        raise ConfigurationError("onInvalid is divert: name the folder for such rows with the option invalidPath")
    if rule == "fail" and path is not None:
        raise ConfigurationError("invalidPath is for onInvalid=divert: set that too, or leave invalidPath out")
    return path


def _redact(name: str | None) -> str | None:
    """The name of a redact hook that can be imported here, so that a wrong one is an error before any task runs."""
    if name is not None:
        find_redact(name)
    return name


def _seconds(options: Mapping[str, str], name: str, default: float) -> float:
    value = options.get(name)
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1
    if not 0 <= seconds <= 1e9:
        raise InvalidInput(f"{name} is a number of seconds, not {value!r}")
    return seconds
