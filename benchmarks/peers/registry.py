"""The peers: the store of each, exact versions, and its program."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
#: The folder of their environments. Not under version control.
ENVIRONMENTS = ROOT / ".bench"

UVLOOP = "uvloop==0.22.1"
REDIS = ("redis==7.1.0", "hiredis==3.3.0")
FASTSTREAM = "faststream==0.7.8"


@dataclass(frozen=True, slots=True)
class Peer:
    """Another queue, and how its program is started."""

    name: str
    store: Literal["valkey", "postgres"]
    #: Exact versions, `name==version`. What these need in turn is for pip or npm to find.
    requirements: tuple[str, ...]
    language: Literal["python", "node"] = "python"
    #: How many messages a drain has: about a second's work, so that start and end do not count.
    drain_count: int = 5_000

    @property
    def folder(self) -> Path:
        """Its environment."""
        return ENVIRONMENTS / self.name

    @property
    def stamp(self) -> Path:
        """The file that a completed set-up writes last."""
        return self.folder / "ready"

    @property
    def program(self) -> Path:
        """Its program file."""
        suffix = "py" if self.language == "python" else "mjs"
        return Path(__file__).parent / f"{self.name.replace('-', '_')}_peer.{suffix}"

    @property
    def is_ready(self) -> bool:
        """Return whether its environment exists, with the versions listed here."""
        try:
            return self.stamp.read_text() == self.mark
        except OSError:
            return False

    @property
    def mark(self) -> str:
        """Return everything that its environment depends on."""
        # An environment of Python depends on its path: one that was moved must be made again.
        return "\n".join((*self.requirements, str(self.folder), sys.version))

    def command(self) -> list[str]:
        """Return the command line of its program, for the root of the project."""
        if self.language == "node":
            return ["node", str(self.program)]
        return [str(self.folder / "bin" / "python"), "-m", f"benchmarks.peers.{self.program.stem}"]


PEERS = (
    Peer("dramatiq", "valkey", ("dramatiq==2.2.1", *REDIS)),
    Peer("taskiq", "valkey", ("taskiq==0.13.0", "taskiq-redis==1.2.4", "redis==8.1.0", "hiredis==3.3.0", UVLOOP)),
    Peer("bullmq", "valkey", ("bullmq==6.7.0", "ioredis==5.11.1"), "node", drain_count=20_000),
    Peer("arq", "valkey", ("arq==0.28.0", "redis==5.3.1", "hiredis==3.3.0", UVLOOP), drain_count=2_500),
    Peer("faststream", "valkey", (FASTSTREAM, *REDIS, UVLOOP), drain_count=50_000),
    Peer("huey", "valkey", ("huey==3.5.4", *REDIS)),
    Peer("celery", "valkey", ("celery==5.7.0", "packaging==25.0", *REDIS), drain_count=2_500),
    Peer("faststream-redis-timers", "valkey", ("faststream-redis-timers==0.5.4", FASTSTREAM, *REDIS, UVLOOP)),
    Peer("pgqueuer", "postgres", ("pgqueuer==1.6.0", "asyncpg==0.31.0", UVLOOP), drain_count=20_000),
    Peer("graphile-worker", "postgres", ("graphile-worker==0.18.0",), "node", drain_count=40_000),
    Peer("faststream-outbox", "postgres", ("faststream-outbox==0.19.0", FASTSTREAM, "asyncpg==0.31.0", UVLOOP)),
    Peer("procrastinate", "postgres", ("procrastinate==3.10.0", "psycopg==3.3.8", "psycopg-binary==3.3.8")),
)


def peer(name: str) -> Peer:
    """Return the peer of this name."""
    for found in PEERS:
        if found.name == name:
            return found
    raise LookupError(f"there is no peer {name!r}: {', '.join(known.name for known in PEERS)}")


def environment(chosen: Peer) -> dict[str, str]:
    """Return the variables for its program: ours without those that point Python to our own environment."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if chosen.language == "node":
        variables["BENCH_MODULES"] = str(chosen.folder)
    return variables
