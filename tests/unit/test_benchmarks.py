"""The benchmarks measure what they claim: environments of peers, slots, turns, and waypost by the protocol of peers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.core import importing
from benchmarks.measure import Report
from benchmarks.peers import protocol, registry, setup
from benchmarks.peers.harness import (
    Contestant,
    Times,
    TurnFailed,
    drain,
    latencies,
    latenesses,
    percentile,
    running,
    slot_file,
    together,
    work,
)
from benchmarks.peers.hosts import Host, host
from benchmarks.peers.registry import PEERS, Peer, peer
from benchmarks.peers.turns import Turns
from tests.waiting import until

EXACT = re.compile(r"^[a-z0-9-]+==\d+(\.\d+)+$")
OURS = Contestant("waypost", 200)


def names(peers: tuple[Peer, ...]) -> list[str]:
    return [one.name for one in peers]


@pytest.fixture
def no_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(setup, "ENVIRONMENTS", tmp_path)
    return tmp_path


@pytest.fixture
def folder() -> Iterator[Host]:
    with host("sqlite") as found:
        yield found


# ---- the core ------------------------------------------------------------------------------------------------


@pytest.mark.promise("FACE-5")
def test_an_import_is_measured_beside_a_bare_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(as_json=True)
    importing(report, interpreters=1)
    found = [(figure["name"], figure["peer"]) for figure in report.figures]
    both = [(name, peer) for name in ("import", "import-cpu") for peer in ("waypost", "raw")]
    assert set(found) == {*both, ("import-over-raw", "waypost"), ("import-cpu-over-raw", "waypost")}
    assert all(figure["unit"] == "ms" and figure["value"] for figure in report.figures)


# ---- the peers and their environments --------------------------------------------------------------------


@pytest.mark.parametrize("one", PEERS, ids=names(PEERS))
def test_a_peer_has_exact_versions_and_a_program(one: Peer) -> None:
    assert [requirement for requirement in one.requirements if not EXACT.match(requirement)] == []
    assert one.program.is_file()


def test_programs_of_peers_do_not_import_waypost() -> None:
    """They run in environments where it is not installed."""
    programs = [one.program for one in PEERS if one.language == "python"]
    for path in [*programs, Path(protocol.__file__)]:
        modules = {
            node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert not [module for module in modules if module.split(".")[0] == "waypost"], path
        assert {module for module in modules if module.startswith("benchmarks")} <= {"benchmarks.peers.protocol"}, path


def test_without_npm_its_peers_are_named_and_nothing_is_left_behind(
    no_environments: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(no_environments))
    assert setup.main(["bullmq", "graphile-worker"]) == 1
    output = capsys.readouterr()
    assert "bullmq" in output.out
    assert "node and npm are needed" in output.out
    assert "not measured beside waypost until they are set up: bullmq, graphile-worker" in output.err
    assert [path.name for path in no_environments.iterdir() if path.is_dir()] == []


def test_an_environment_that_is_there_is_not_made_again(no_environments: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(no_environments))
    one = peer("bullmq")
    one.folder.mkdir()
    one.stamp.write_text(one.mark)
    assert one.is_ready
    assert setup.set_up(one) is None


def test_other_versions_need_another_environment(no_environments: Path) -> None:
    one = peer("bullmq")
    one.folder.mkdir()
    one.stamp.write_text(one.mark)
    assert not replace(one, requirements=("bullmq==1.0.0",)).is_ready


def test_an_unknown_peer_is_an_error_that_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.main(["unknown"]) == 2
    assert "there is no peer 'unknown': dramatiq, " in capsys.readouterr().err


# ---- slots -----------------------------------------------------------------------------------------------------------


def test_the_first_start_of_a_handler_counts() -> None:
    with slot_file(3) as times:
        started = protocol.recorder(str(times.path), "monotonic")
        started(1)
        first = times.read()
        started(1)
        assert times.read() == first
        assert [bool(one) for one in first] == [False, True, False]


def test_times_are_complete_when_every_message_has_one() -> None:
    with slot_file(3) as times:
        started = protocol.recorder(str(times.path), "wall")
        assert not times.have_begun()
        for number in (2, 0):
            started(number)
            assert times.have_begun()
            assert not times.are_complete()
        started(1)
        assert times.are_complete()
        assert times.filled() == 3


def test_a_slot_file_is_removed_after_its_turn() -> None:
    with slot_file(1) as times:
        assert isinstance(times, Times)
        assert times.path.exists()
    assert not times.path.exists()


def test_a_percentile_is_a_value_that_was_seen() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (51.0, 100.0, 7.0)


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    seen: list[tuple[str, int]] = []
    with Turns(quick=False) as turns:
        entries = turns.ours(["sqlite"], 1) + turns.ours(["sqlite"], 2)
        results = turns.take(entries, 2, lambda contestant, place: seen.append((contestant.name, contestant.count)))
    assert seen == [("waypost", 1), ("waypost", 2), ("waypost", 2), ("waypost", 1)]
    assert [len(figures) for figures in results.values()] == [2, 2]


def test_a_contender_that_fails_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(contestant: Contestant, place: Host) -> int:
        if contestant.count == 1:
            raise TurnFailed("broken ended with 1: the reason")
        return contestant.count

    with Turns(quick=False) as turns:
        results = turns.take(turns.ours(["sqlite"], 1, "broken") + turns.ours(["sqlite"], 2), 3, measure)
    assert list(results.values()) == [[2, 2, 2]]
    output = capsys.readouterr().err
    assert output.count("the reason") == 1
    assert "not measured: waypost (failed)" in output


def test_a_peer_without_an_environment_is_left_out_with_a_line(
    no_environments: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Turns(quick=True) as turns:
        assert turns.theirs("dramatiq", "pgqueuer") == []
    output = capsys.readouterr().err
    assert "dramatiq is left out" in output
    assert "not measured: dramatiq (not set up), pgqueuer (not set up)" in output


def test_only_the_requested_store_is_measured() -> None:
    with Turns(quick=False, only="sqlite") as turns:
        assert [entry.store for entry in turns.ours(("valkey", "sqlite"), 1)] == ["sqlite"]
        assert turns.theirs("dramatiq") == []
    assert turns.left_out == {}


# ---- waypost by the protocol, in processes of its own ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tasks", "threads"])
def test_publishes_at_the_same_time_are_timed_in_their_own_program(folder: Host, kind: str) -> None:
    found = together(replace(OURS, count=400), folder, kind)
    assert found.rate > 0
    assert found.cpu_us > 0
    assert found.server_cpu_us == 0


def test_the_processor_time_of_a_server_includes_the_processes_that_it_started() -> None:
    assert protocol.server_seconds(0) == 0
    child = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        assert until(lambda: protocol.server_seconds(child.pid) > 0.05, "a busy process")
        assert until(lambda: protocol.server_seconds(os.getpid()) > protocol.server_seconds(child.pid), "its parent")
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("variant", ["", "batch", "once"])
def test_a_drain_handles_every_message(folder: Host, variant: str) -> None:
    drained = drain(replace(OURS, variant=variant), folder)
    assert drained.rate > 0
    assert drained.cpu_us >= 0


def test_latency_is_measured_for_each_message_but_the_first(folder: Host) -> None:
    waited = latencies(OURS, folder, rate=100.0, seconds=1.0)
    assert len(waited) == 100
    assert min(waited) > 0


def test_waypost_timers_are_never_early(folder: Host) -> None:
    late = latenesses(OURS, folder, count=50, span=0.5, lead=0.5)
    assert len(late) == 50
    assert min(late) >= 0


def test_the_output_of_a_program_that_ends_too_soon_is_reported(folder: Host) -> None:
    def turn() -> None:
        with slot_file(1) as times, running(OURS, *work(OURS, "no-such-scheme://", times)) as worker:
            worker.wait_for(times)

    with pytest.raises(TurnFailed, match=r"(?s)waypost ended with 1: .*no-such-scheme"):
        turn()
