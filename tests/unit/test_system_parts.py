"""System programs that tests use: installed by root, listed for other users, and never omitted silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import system_parts

ROOT = Path(__file__).parents[2]
PROBE = """
import pytest

@pytest.mark.needs("pgbouncer")
def test_with_it():
    assert True

def test_without_it():
    assert True
"""
#: Run the tests of a file as if pgbouncer were not there.
WITHOUT = (
    "import sys, pytest; from scripts import system_parts; system_parts.PARTS['pgbouncer'] = ('/nowhere/pgbouncer',); "
    "sys.exit(pytest.main(['-q', '-p', 'tests.conftest', '-p', 'no:cacheprovider', sys.argv[1]]))"
)


def run_without(tmp_path: Path, text: str = PROBE, **environment: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "test_probe.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
        env={name: value for name, value in os.environ.items() if name != "REQUIRE_ALL"} | environment,
    )  # fmt: skip


def test_a_test_whose_program_is_missing_is_listed_at_the_end_and_the_others_run(tmp_path: Path) -> None:
    ran = run_without(tmp_path)
    assert ran.returncode == 0, ran.stdout
    assert "1 passed, 1 skipped" in ran.stdout
    assert (
        "NOT RUN: 1 tests, need pgbouncer\nas root: apt-get install -y --no-install-recommends pgbouncer" in ran.stdout
    )


def test_a_missing_program_is_a_failure_when_all_are_required(tmp_path: Path) -> None:
    ran = run_without(tmp_path, REQUIRE_ALL="1")
    assert ran.returncode == 1, ran.stdout
    assert "NOT RUN: 1 tests, need pgbouncer" in ran.stdout


def test_a_program_that_is_not_on_the_list_is_an_error(tmp_path: Path) -> None:
    ran = run_without(tmp_path, PROBE.replace("pgbouncer", "rabbitmq"))
    assert ran.returncode != 0
    assert "which scripts/system_parts.py does not know" in ran.stdout + ran.stderr


def test_a_user_who_is_not_root_gets_one_line_and_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_parts, "PARTS", {"pgbouncer": ("/nowhere/pgbouncer",)})
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("subprocess.run", lambda *command, **options: pytest.fail("it ran something"))
    assert system_parts.main() == 0
    assert capsys.readouterr().out == (
        "system: some tests will not run without pgbouncer: apt-get install -y --no-install-recommends pgbouncer\n"
    )


def test_nothing_is_printed_when_no_program_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(system_parts, "PARTS", {"python": (sys.executable,)})
    assert system_parts.main() == 0
    assert capsys.readouterr().out == ""
