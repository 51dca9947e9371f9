"""The tool that changes code and looks for a test that fails: it changes what it says, and its list is current."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from scripts import mutant_tests, mutants

BEFORE = "LIMIT = 3\n\n\ndef is_due(at, now):\n    return at <= now\n\n\ndef other():\n    return 1\n"


def test_a_living_function_gets_the_changed_code(tmp_path: Path) -> None:
    path = tmp_path / "changed_module.py"
    path.write_text(BEFORE)
    spec = importlib.util.spec_from_file_location("changed_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    is_due = module.is_due
    assert is_due(1, 1)
    changed = mutant_tests.change_functions(str(path), BEFORE, BEFORE.replace("<=", "<"))
    assert [name for _, name, _ in changed] == ["is_due"]
    assert not is_due(1, 1)


def test_a_change_that_acts_at_import_is_not_tested_in_a_fork(tmp_path: Path) -> None:
    with pytest.raises(mutant_tests.NeedsImport):
        mutant_tests.change_functions(str(tmp_path / "module.py"), BEFORE, BEFORE.replace("LIMIT = 3", "LIMIT = 4"))


def test_every_mutant_changes_its_file_and_keeps_its_lines() -> None:
    for path in mutants.all_files("store/memory/queue.py"):
        text = (mutants.ROOT / path).read_text()
        for mutant in mutants.mutants_of(path):
            changed = mutant.changed(text)
            assert changed != text
            assert changed.count("\n") == text.count("\n")


def test_a_larger_sample_of_a_seed_holds_the_smaller_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drawn(count: int) -> set[str]:
        arguments = ["mutants", "--files", "store/memory/*", "--guards", "--sample", str(count), "--list"]
        monkeypatch.setattr(sys, "argv", arguments)
        assert mutants.main() == 0
        return set(capsys.readouterr().out.splitlines())

    assert len(drawn(20)) == 20
    assert drawn(20) < drawn(50)


def test_every_known_survivor_is_a_mutant_of_today_with_a_reason() -> None:
    entries = json.loads(mutants.LEFT.read_text())
    for entry in entries:
        assert entry["kind"] in ("equivalent", "gap"), entry
        assert entry["reason"], entry
    possible = {
        mutant.key for name in {entry["file"] for entry in entries} for mutant in mutants.mutants_of(Path(name))
    }
    assert mutants.known_survivors().keys() <= possible
