"""What `pip install waypost` installs: the built package, its metadata, its files, and its extras."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.metadata import Metadata

from tests.packaging.built import PROJECT, ROOT, build, check_installed

pytestmark = [pytest.mark.promise("FACE-5"), pytest.mark.xdist_group("packaging")]


class Built(NamedTuple):
    sdist: Path
    wheel: Path
    #: The files of the wheel by name.
    files: dict[str, int]
    metadata: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    sdist, wheel = build(tmp_path_factory.mktemp("dist"))
    with zipfile.ZipFile(wheel) as archive:
        files = {entry.filename: entry.file_size for entry in archive.infolist()}
        (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
        return Built(sdist, wheel, files, archive.read(name).decode())


def test_the_metadata_is_valid_and_complete(built: Built) -> None:
    metadata = Metadata.from_email(built.metadata, validate=True)
    assert metadata.name == "waypost"
    assert str(metadata.version) == PROJECT["version"]
    assert metadata.license_expression == "Apache-2.0"
    assert str(metadata.requires_python) == ">=3.11"
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert set(metadata.provides_extra or []) == set(PROJECT["optional-dependencies"])
    # What an index refuses: a field given twice.
    fields = [field.lower() for field in message_from_string(built.metadata)]
    several = {"classifier", "requires-dist", "provides-extra", "license-file"}
    assert [field for field in set(fields) - several if fields.count(field) > 1] == []


def test_without_extras_one_small_package_is_installed() -> None:
    assert PROJECT["dependencies"] == ["msgspec>=0.19", "tzdata; sys_platform == 'win32'"]


def test_the_wheel_has_all_files_of_the_packages_and_no_others(built: Built) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    expected = {name.removeprefix("src/") for name in tracked if (ROOT / name).exists()}
    assert {name for name in built.files if ".dist-info/" not in name} == expected
    information = {name.partition(".dist-info/")[2] for name in built.files if ".dist-info/" in name}
    assert information == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_wheel_has_no_server_and_no_test_of_our_own(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        programs = [name for name in built.files if archive.read(name)[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")]
    assert programs == []
    assert [name for name in built.files if Path(name).name.startswith(("test_", "conftest"))] == []
    assert built.wheel.stat().st_size < 4_000_000


def test_the_source_package_builds_the_same_wheel_and_has_no_leftovers(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "README.md", "LICENSE", "src/waypost/__init__.py"} <= set(names)
    assert [name for name in names if name.startswith((".", "tests/", "benchmarks/"))] in ([], [".gitignore"])


def test_the_wheel_works_in_a_fresh_environment(built: Built, tmp_path: Path) -> None:
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(built.wheel)], check=True, capture_output=True, timeout=200)
    # The one dependency, without an index.
    found = importlib.util.find_spec("msgspec")
    assert found is not None
    assert found.origin is not None
    (target,) = (folder / "lib").glob("python3.*/site-packages")
    shutil.copytree(Path(found.origin).parent, target / "msgspec")
    check_installed(python, tmp_path, PROJECT["version"])
