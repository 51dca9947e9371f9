"""Spark jobs of this release and of the next one read the same of a store on which both work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.upgrade.fleet import Fleet
from tests.upgrade.next_release import NEXT_RELEASE, build
from waypost.release import VERSION
from waypost.store.postgres import migrate
from waypost.testing.bench import fresh_namespace

pytestmark = pytest.mark.xdist_group("spark")
READER = Path(__file__).parent / "spark_reader.py"
#: What a client of a release does to a store. Messages with headers get a newer envelope in the next release.
MIX = """
from waypost import Waypost
with Waypost({url!r}, namespace={namespace!r}) as post:
    post.configure("orders", journal="full")
    for number in range(20):
        body = f"{name}:{{number}}"
        headers = {{"number": body}} if number >= 18 else None
        post.publish("orders", body, key=body, headers=headers, delay=3600 if number == 17 else None)
    for number in range(6):
        with post.receive("orders") as message:
            if number == 5:
                message.dead("planted")
"""


def mix(fleet: Fleet, release: str, name: str) -> None:
    """Publish and settle with a client of a release."""
    code, printed = fleet.run(release, "-c", MIX.format(url=fleet.url, namespace=fleet.namespace, name=name))
    assert code == 0, printed


def read(fleets: list[Fleet], release: str) -> list[dict[str, Any]]:
    """Read the stores with Spark in the environment of a release."""
    places = [part for fleet in fleets for part in (fleet.url, fleet.namespace)]
    code, printed = fleets[0].run(release, str(READER), *places)
    assert code == 0, printed
    found = json.loads(printed.splitlines()[-1])
    assert found["release"] == (NEXT_RELEASE if release == "next" else VERSION)
    stores: list[dict[str, Any]] = found["read"]
    return stores


@pytest.mark.timeout(600)
@pytest.mark.promise("STORE-7", "SPARK-1")
@pytest.mark.parametrize("stores", [("sqlite",), ("valkey", "postgres")], ids="-".join)
def test_spark_reads_the_same_in_both_releases(
    stores: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = build(tmp_path / "next")
    fleets = []
    for store in stores:
        in_file = store == "sqlite"
        url = f"sqlite:///{tmp_path / 'store.db'}" if in_file else str(request.getfixturevalue(f"{store}_url"))
        fleet = Fleet(url, fresh_namespace(), tmp_path, source)
        if store == "postgres":
            migrate(url, namespace=fleet.namespace)
        mix(fleet, "this", "before")
        assert fleet.migrate("next")[0] == 0
        mix(fleet, "next", "next")
        mix(fleet, "this", "beside")
        fleets.append(fleet)
    for old, new in zip(read(fleets, "this"), read(fleets, "next"), strict=True):
        assert old["journal"] == new["journal"]
        assert [number for number, *_ in old["journal"]] == list(range(1, len(old["journal"]) + 1))
        assert (len(old["messages"]), len(old["ready"]), len(old["dead"])) == (60, 60 - 3 - 18, 3)
        for kind, unreadable in (("messages", 2), ("ready", 2), ("dead", 0)):
            assert all(text is not None for _, _, _, text, _ in new[kind])
            # This release passes newer envelopes on as they are, without a content type and a text.
            newer = {row[0] for row in old[kind] if row[2] is None}
            assert len(newer) == unreadable
            readable = [[*row[:2], None, None, row[4]] if row[0] in newer else row for row in new[kind]]
            assert readable == old[kind]
