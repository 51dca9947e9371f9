"""What-if: the history of a queue under other settings, many of them side by side.

    from waypost.spark.insight.simulate import simulate

    answer = simulate("lake", "orders", workers=[4, 8, 16], lease=[30, 60])
    answer.fit.text         # model p95 41 s, observed 39 s
    answer.outcomes

With a Spark session each task serves a part of the scenarios; without one they are served here, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import msgspec

from waypost.errors import InvalidInput
from waypost.policy import PolicyRecord
from waypost.spark.insight.lake_history import SERVING, Window, changed_ms, read_changes, read_history
from waypost.spark.insight.whatif import (
    Answer,
    Outcome,
    Scenario,
    answer,
    check_fit,
    check_scenario,
    check_types,
    parse_traffic,
    run_scenario,
)
from waypost.spark.lake.lake import Lake
from waypost.spark.source.bulk import open_bulk
from waypost.spark.source.credentials import Place

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark.sql import SparkSession

    from waypost.spark.insight.history import History

#: The most scenarios of one call.
SCENARIOS_MAX: Final = 1_000


def simulate(
    lake: Lake | str,
    queue: str,
    *,
    workers: Iterable[int | None] = (),
    concurrency: Iterable[int | None] = (),
    lease: Iterable[float] = (),
    retry: Iterable[str] = (),
    traffic: Iterable[str] = (),
    max_running: Iterable[int] = (),
    rate: Iterable[str] = (),
    target: str | None = None,
    policy: PolicyRecord | None = None,
    since_ms: int = 0,
    until_ms: int = 2**53,
    spark: SparkSession | None = None,
) -> Answer:
    """Serve the recorded history of a queue under every combination of these settings.

    First the history is served under its own settings: if the model does not fit, the answer has no outcomes. `policy`
    is that of the queue; by default it is read from the store of the lake. A history begins at the last change of a
    setting that waits depend on. With `target` ("p95 wait < 5s") the fewest workers are found that reach it.
    """
    place = Lake(lake) if isinstance(lake, str) else lake
    scenarios = combine(
        workers=workers, concurrency=concurrency, lease=lease, retry=retry, traffic=traffic, max_running=max_running,
        rate=rate, target=target,
    )  # fmt: skip
    known = read_policy(place, queue) if policy is None else policy
    since = max(since_ms, changed_ms(read_changes(place, queue), SERVING))
    window = Window(queue, since, until_ms)
    history = read_history(place, window, known)
    fit = check_fit(history)
    if not fit.is_good:
        return answer(history, {}, fit)
    for one in scenarios:
        check_types(history, parse_traffic(one.traffic))
    if spark is None or len(scenarios) == 1:
        return answer(history, dict(serve_here(history, scenarios)), fit)
    return answer(history, serve_as_tasks(spark, place, window, known, scenarios), fit)


def combine(*, target: str | None = None, **given: Iterable[Any]) -> list[Scenario]:
    """Return a scenario for each combination of settings."""
    values = {name: list(found) for name, found in given.items()}
    settings = [name for name in ("lease", "max_running", "rate") if values[name]]
    grid = product(
        values["workers"] or [None], values["concurrency"] or [None], values["retry"] or [None],
        values["traffic"] or ["1x"], product(*(values[name] for name in settings)),
    )  # fmt: skip
    found = [
        check_scenario(Scenario(workers, concurrency, dict(zip(settings, policy, strict=True)), retry, traffic, target))
        for workers, concurrency, retry, traffic, policy in grid
    ]
    if len(found) > SCENARIOS_MAX:
        raise InvalidInput(f"these are {len(found):,} combinations of settings; at most {SCENARIOS_MAX:,} are served")
    return found


def place_of(lake: Lake) -> Place:
    """Return the store that a lake is made from."""
    source = lake.state.source
    if source is None:
        raise InvalidInput(f"the lake {lake.files.address} has no store: run `waypost pipeline run` first")
    return Place(url=source.url, url_env=source.url_env, namespace=source.namespace)


def read_policy(lake: Lake, queue: str, place: Place | None = None) -> PolicyRecord:
    """Return the settings of a queue, from the store of a lake."""
    with open_bulk(place or place_of(lake)) as bulk:
        return bulk.run(bulk.store.policy(queue))


def serve_here(history: History, scenarios: Sequence[Scenario]) -> Iterator[tuple[int, Outcome]]:
    """Serve scenarios one after the other."""
    for number, scenario in enumerate(scenarios):
        yield number, run_scenario(history, scenario)


# ---- as tasks of Spark --------------------------------------------------------------------------------------


class Work(msgspec.Struct, frozen=True):
    """What a task needs: it reads the history by itself, so that no row travels through the driver."""

    root: str
    window: Window
    policy: PolicyRecord
    #: The scenarios of one task, each with its place among all.
    scenarios: tuple[tuple[int, Scenario], ...]


def serve_work(work: Work) -> Iterator[tuple[int, Outcome]]:
    """Serve the scenarios of a task."""
    history = read_history(Lake(work.root), work.window, work.policy)
    for number, scenario in work.scenarios:
        yield number, run_scenario(history, scenario)


def serve_as_tasks(
    spark: SparkSession, lake: Lake, window: Window, policy: PolicyRecord, scenarios: Sequence[Scenario]
) -> dict[int, Outcome]:
    """Serve scenarios side by side, as many tasks as run at the same time."""
    from waypost.spark.insight.tasks import run_tasks
    from waypost.spark.session import parallelism

    numbered = list(enumerate(scenarios))
    count = min(len(numbered), max(1, parallelism(spark)))
    works = [Work(lake.files.address, window, policy, tuple(numbered[part::count])) for part in range(count)]
    found = run_tasks(spark, [msgspec.json.encode(work) for work in works])
    return dict(one for rows in found for one in msgspec.json.decode(rows, type=list[tuple[int, Outcome]]))


def describe(scenario: Scenario) -> str:
    """Return what a scenario changes, in a few characters."""
    parts = [f"{scenario.workers} workers"] if scenario.workers is not None else []
    parts += [f"concurrency {scenario.concurrency}"] if scenario.concurrency is not None else []
    parts += [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in scenario.policy.items()
    ]
    parts += [f"retry {scenario.retry}"] if scenario.retry is not None else []
    parts += [f"traffic {scenario.traffic}"] if scenario.traffic != "1x" else []
    return ", ".join(parts) or "as it is"
