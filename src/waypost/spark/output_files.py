"""The few things that consuming needs of a file system: whole files that appear at once, and folders that move.

Paths on this machine go through Python, all others through Hadoop, as Spark's own writes do. What matters is `create`:
of two programs that create the same file, one succeeds, and nobody ever reads half of it. On this machine that is a
hard link, on HDFS a rename. Object stores have neither, so there one program at a time may commit to one output.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import unquote, urlsplit

from waypost.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Files(Protocol):
    """Files by paths relative to one folder."""

    def uri(self, path: str) -> str:
        """The path as Spark takes it."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, none if it is not there."""

    def walk(self, folder: str) -> dict[str, int]:
        """All files below a folder by their relative paths, with their lengths."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""

    def read(self, path: str) -> str:
        """The text of a file."""

    def create(self, path: str, text: str) -> bool:
        """Make a file at once with all of its text; False if there is one already."""

    def replace(self, path: str, text: str) -> None:
        """Make a file, or give it another text."""

    def move(self, source: str, target: str) -> None:
        """Give a file or folder another name; the target must not be there."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""


class LocalFiles:
    """A folder of this machine, or one that is mounted at the same place on every machine."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).absolute()

    def uri(self, path: str) -> str:
        """The path as Spark takes it: with its scheme, since a cluster may take others for its own."""
        return (self._root / path).as_uri()

    def names(self, folder: str) -> list[str]:
        """The names in a folder, none if it is not there."""
        try:
            return os.listdir(self._root / folder)
        except FileNotFoundError:
            return []

    def walk(self, folder: str) -> dict[str, int]:
        """All files below a folder."""
        top = self._root / folder
        return {str(path.relative_to(top)): path.stat().st_size for path in top.rglob("*") if path.is_file()}

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return (self._root / path).exists()

    def read(self, path: str) -> str:
        """The text of a file."""
        return (self._root / path).read_text(encoding="utf-8")

    def create(self, path: str, text: str) -> bool:
        """A hard link appears at once with all that is in it, and fails where the name is taken."""
        fresh = self._fresh(path, text)
        try:
            os.link(fresh, self._root / path)
        except FileExistsError:
            return False
        finally:
            fresh.unlink()
        return True

    def replace(self, path: str, text: str) -> None:
        """Make a file, or give it another text."""
        self._fresh(path, text).replace(self._root / path)

    def _fresh(self, path: str, text: str) -> Path:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f".{uuid.uuid4().hex}.tmp")
        fresh.write_text(text, encoding="utf-8")
        return fresh

    def move(self, source: str, target: str) -> None:
        """Give a file or folder another name."""
        place = self._root / target
        place.parent.mkdir(parents=True, exist_ok=True)
        (self._root / source).rename(place)

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        place = self._root / path
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)


class HadoopFiles:
    """A folder of any file system that the session can write to."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._java = cast("Any", spark._jvm)
        self._configuration: Any = spark.sparkContext._jsc.hadoopConfiguration()
        self._root: Any = self._java.org.apache.hadoop.fs.Path(root)
        self._system: Any = self._root.getFileSystem(self._configuration)
        self._root = self._root.makeQualified(self._system.getUri(), self._system.getWorkingDirectory())

    def _path(self, path: str) -> Any:
        return self._java.org.apache.hadoop.fs.Path(self._root, path) if path else self._root

    def uri(self, path: str) -> str:
        """The path as Spark takes it."""
        return str(self._path(path).toString())

    def names(self, folder: str) -> list[str]:
        """The names in a folder, none if it is not there."""
        place = self._path(folder)
        if not self._system.exists(place):
            return []
        return [status.getPath().getName() for status in self._system.listStatus(place)]

    def walk(self, folder: str) -> dict[str, int]:
        """All files below a folder."""
        found: dict[str, int] = {}
        for status in self._system.listStatus(self._path(folder)):
            name = status.getPath().getName()
            if status.isDirectory():
                found |= {f"{name}/{below}": size for below, size in self.walk(f"{folder}/{name}").items()}
            else:
                found[name] = int(status.getLen())
        return found

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return bool(self._system.exists(self._path(path)))

    def read(self, path: str) -> str:
        """The text of a file."""
        stream = self._system.open(self._path(path))
        try:
            return str(self._java.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def create(self, path: str, text: str) -> bool:
        """Written beside and renamed, which fails where the name is taken."""
        fresh = f"{path.rpartition('/')[0]}/.{uuid.uuid4().hex}.tmp"
        self._write(fresh, text)
        hadoop = self._java.org.apache.hadoop.fs
        options = self._java.java.lang.reflect.Array.newInstance(hadoop.Options.Rename.NONE.getClass(), 0)
        context = hadoop.FileContext.getFileContext(self._system.getUri(), self._configuration)
        try:
            context.rename(self._path(fresh), self._path(path), options)
        except Exception as error:
            self._system.delete(self._path(fresh), False)
            if "FileAlreadyExistsException" in str(error):
                return False
            raise
        return True

    def replace(self, path: str, text: str) -> None:
        """Make a file, or give it another text."""
        self._write(path, text)

    def _write(self, path: str, text: str) -> None:
        stream = self._system.create(self._path(path), True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def move(self, source: str, target: str) -> None:
        """Give a file or folder another name."""
        place = self._path(target)
        self._system.mkdirs(place.getParent())
        if not self._system.rename(self._path(source), place):
            raise FileNotFoundError(f"{self.uri(source)} could not be moved to {self.uri(target)}")

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        self._system.delete(self._path(path), True)


def open_files(spark: SparkSession, output: str) -> Files:
    """The folder that a path names, as the session understands it."""
    scheme = urlsplit(output).scheme if "://" in output or output.startswith("file:") else ""
    if scheme == "file":
        return LocalFiles(unquote(urlsplit(output).path))
    if not hasattr(spark, "_jsc"):
        if scheme:
            raise ConfigurationError(
                f"over Spark Connect the output must be a folder that this machine and the cluster see at the same "
                f"path (file:///…): {scheme} is written through the JVM of a session of its own"
            )
        return LocalFiles(output)
    files = HadoopFiles(spark, output)
    # A path without a scheme is on this machine unless the cluster's configuration says otherwise.
    root = files.uri("")
    return LocalFiles(unquote(urlsplit(root).path)) if root.startswith("file:") else files
