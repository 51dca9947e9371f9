"""A test that hangs is ended and named, however it hangs, and the tests after it run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANGING = """
import signal
import threading

import pytest

pytestmark = pytest.mark.xdist_group("one")

@pytest.fixture
def stuck_at_the_end():
    yield
    threading.Event().wait()

def test_waits():
    threading.Event().wait()

def test_cannot_be_interrupted():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()

def test_fails_and_its_fixture_waits(stuck_at_the_end):
    assert False

def test_is_fine():
    assert True
"""
DYING = """
import os
import signal

import pytest

@pytest.mark.parametrize("number", range(30))
def test_number(number):
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
"""
LEAVING = """
import threading

def test_does_not_end_its_thread():
    threading.Thread(target=threading.Event().wait).start()
"""
GROUPED = """
import os
from pathlib import Path

import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_of_a_group(number, request):
    Path(request.config.rootpath, f"pid-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(8))
def test_of_none(number):
    assert True
"""


def run(tmp_path: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "test_probe.py"
    path.write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    return subprocess.run(
        [*command, *options, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
    )


def test_a_test_that_hangs_fails_and_the_next_ones_run(tmp_path: Path) -> None:
    limits = ("-o", "timeout=1", "-o", "faulthandler_timeout=3")
    ran = run(tmp_path, HANGING, *limits, "-n", "1", "--dist", "loadgroup")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    # The test whose fixture hangs fails twice: by itself, and because its process ended.
    assert "4 failed, 1 passed" in ran.stdout, ran.stdout
    assert "\nFAILED (call) test_probe.py::test_waits@one\n" in ran.stdout, ran.stdout
    assert "Timeout (>1.0s) from pytest-timeout" in ran.stdout
    for name in ("test_cannot_be_interrupted", "test_fails_and_its_fixture_waits"):
        assert f"crashed while running 'test_probe.py::{name}@one'" in ran.stdout, ran.stdout
    assert "in stuck_at_the_end" in ran.stderr  # the stacks of all threads


def test_a_process_that_dies_fails_its_test_only_and_the_run_ends(tmp_path: Path) -> None:
    ran = run(tmp_path, DYING, "-n", "2", "--dist", "loadgroup")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "1 failed, 29 passed" in ran.stdout, ran.stdout
    assert "crashed while running 'test_probe.py::test_number[7]'" in ran.stdout, ran.stdout


def test_a_thread_that_a_test_left_does_not_keep_the_process_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_EXIT_SECONDS_MAX", "1")
    ran = run(tmp_path, LEAVING)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "Timeout (0:00:01)!" in ran.stderr
    assert ran.returncode == 1


def test_tests_of_a_group_run_in_one_process(tmp_path: Path) -> None:
    ran = run(tmp_path, GROUPED, "-n", "2", "--dist", "loadgroup")
    assert "16 passed" in ran.stdout, ran.stdout + ran.stderr
    assert len(list(tmp_path.glob("pid-*"))) == 1


def test_a_failed_test_is_named_before_the_run_is_over(tmp_path: Path) -> None:
    """The run is killed by its second test."""
    text = "import os\ndef test_one():\n    assert False\ndef test_two():\n    os.kill(os.getpid(), 9)\n"
    ran = run(tmp_path, text)
    assert ran.returncode == -9, ran.stdout + ran.stderr
    assert re.search(r"^FAILED \(call\) test_probe.py::test_one$", ran.stdout, re.MULTILINE), ran.stdout


def test_the_limits_hold_for_this_run(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.pluginmanager.hasplugin("timeout")
    assert 0 < float(pytestconfig.getini("timeout")) < float(pytestconfig.getini("faulthandler_timeout"))
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True
