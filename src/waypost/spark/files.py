"""Files below one folder: on this machine through Python, elsewhere through pyarrow (a lake) or Hadoop (an output).

Small files are written whole or not at all: readers see the old content or the new one. Of two programs that `create`
the same file, one succeeds. On this machine that is a hard link, on HDFS a rename. Object stores have neither, so there
one program at a time may commit to one output.
"""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from waypost.errors import ConfigurationError
from waypost.urls import holds_secret, redact_text, redact_url

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Files(ABC):
    """The files below one root. Names are relative to it, with slashes."""

    is_local = False
    #: Whether Spark has a reader of its own for these files. PySpark as pip installs it has none for S3.
    is_read_by_spark = True

    def __init__(self, root: str) -> None:
        #: Where the folder is, as this process opens it.
        self.root = root

    @property
    def address(self) -> str:
        """Return what `open_lake_files` opens, in any process."""
        return self.root

    def path(self, name: str) -> str:
        """Return where a file is, as this process opens it."""
        return f"{self.root}/{name}"

    @abstractmethod
    def uri(self, name: str) -> str:
        """Return where a file is, as Spark takes it. Spark reads `%20` as three characters, so nothing is encoded."""

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, None if there is none."""

    @abstractmethod
    def replace(self, name: str, content: bytes) -> None:
        """Write a small file, whether or not it exists."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is such a file or folder."""

    @abstractmethod
    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder, sorted; none if it does not exist."""

    @abstractmethod
    def walk(self, folder: str) -> dict[str, int]:
        """Return all files below a folder by their relative names, with their sizes; none if it does not exist."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a folder with its content, if it exists; in an output also a single file."""

    def size(self, folder: str) -> int:
        """Return how many bytes the files below a folder have."""
        return sum(self.walk(folder).values())

    def has_rows(self, folder: str) -> bool:
        """Return whether there is a data file below a folder."""
        return any(not name.rpartition("/")[2].startswith(("_", ".")) for name in self.walk(folder))


class LakeFiles(Files):
    """The files of a lake, which this process writes through pyarrow."""

    @abstractmethod
    def arrow_system(self) -> Any:
        """Return the file system of pyarrow in which `path` is a path."""

    def create_folder(self, name: str) -> None:
        """Create a folder with its parents, where folders exist by themselves."""
        return

    def open_output(self, name: str) -> Any:
        """Open a new file for writing."""
        return self.arrow_system().open_output_stream(self.path(name))

    def close_output(self, stream: Any) -> None:
        """Close a file that was opened for writing; on disk when this returns."""
        stream.close()

    def sync_file(self, name: str) -> None:
        """Sync a file to disk, where that is needed."""
        return

    def sync_folder(self, name: str) -> None:
        """Sync the names in a folder to disk, where that is needed."""
        return

    def remove_file(self, name: str) -> None:
        """Remove a file, if it exists."""
        self.remove(name)


class OutputFiles(Files):
    """Files to which several programs may commit at the same time."""

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none if it does not exist."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> bool:
        """Create a file with all of its content at once; return False if it exists already."""

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Rename a file or folder; the target must not exist."""


class LocalFiles(LakeFiles, OutputFiles):
    """A folder of this machine, or one that is mounted at the same path on every machine."""

    is_local = True

    def __init__(self, root: str) -> None:
        super().__init__(os.path.abspath(root))

    def uri(self, name: str) -> str:
        """Return the path with its scheme, since a cluster may have another default file system."""
        return f"file://{self.path(name)}"

    def read(self, name: str) -> bytes | None:
        try:
            return Path(self.path(name)).read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file; on disk when this returns."""
        self._write_temporary(name, content).replace(self.path(name))

    def create(self, name: str, content: bytes) -> bool:
        """Create a file by a hard link, which appears with all of its content and fails if the name exists."""
        temporary = self._write_temporary(name, content)
        try:
            os.link(temporary, self.path(name))
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def _write_temporary(self, name: str, content: bytes) -> Path:
        target = Path(self.path(name))
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return temporary

    def arrow_system(self) -> Any:
        import pyarrow.fs as arrow_fs

        return arrow_fs.LocalFileSystem()

    def create_folder(self, name: str) -> None:
        """Create a folder with its parents; on disk when this returns."""
        path = Path(self.path(name))
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync(folder.parent)

    def open_output(self, name: str) -> Any:
        self.create_folder(name.rpartition("/")[0])
        return Path(self.path(name)).open("xb")

    def close_output(self, stream: Any) -> None:
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()

    def sync_file(self, name: str) -> None:
        _sync(Path(self.path(name)))

    def sync_folder(self, name: str) -> None:
        _sync(Path(self.path(name)))

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self.path(folder))
        except FileNotFoundError:
            return []

    def folders(self, folder: str) -> list[str]:
        return sorted(name for name in self.names(folder) if os.path.isdir(self.path(f"{folder}/{name}")))

    def walk(self, folder: str) -> dict[str, int]:
        top = Path(self.path(folder))
        return {path.relative_to(top).as_posix(): path.stat().st_size for path in top.rglob("*") if path.is_file()}

    def move(self, source: str, target: str) -> None:
        os.makedirs(os.path.dirname(self.path(target)), exist_ok=True)
        os.rename(self.path(source), self.path(target))

    def remove(self, name: str) -> None:
        path = Path(self.path(name))
        while path.is_dir():
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                continue  # another process removes the same folder
        path.unlink(missing_ok=True)


class ArrowFiles(LakeFiles):
    """A folder at a URI that pyarrow can open (s3, gs, hdfs)."""

    def __init__(self, uri: str) -> None:
        import pyarrow.fs as arrow_fs

        self._fs = arrow_fs
        self._system, root = arrow_fs.FileSystem.from_uri(uri)
        self._uri = uri.rstrip("/")
        self.is_read_by_spark = not uri.startswith(("s3://", "s3a://"))
        super().__init__(root)

    def uri(self, name: str) -> str:
        return f"{self._uri}/{name}"

    @property
    def address(self) -> str:
        return self._uri

    def arrow_system(self) -> Any:
        return self._system

    def remove_file(self, name: str) -> None:
        try:
            self._system.delete_file(self.path(name))
        except FileNotFoundError:
            return

    def read(self, name: str) -> bytes | None:
        try:
            with self._system.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file. An object appears when its stream is closed."""
        self._system.create_dir(self.path(name).rpartition("/")[0], recursive=True)
        with self._system.open_output_stream(self.path(name)) as stream:
            stream.write(content)

    def exists(self, name: str) -> bool:
        return bool(self._system.get_file_info(self.path(name)).type != self._fs.FileType.NotFound)

    def _list(self, folder: str, *, recursive: bool) -> list[Any]:
        selector = self._fs.FileSelector(self.path(folder), allow_not_found=True, recursive=recursive)
        return list(self._system.get_file_info(selector))

    def folders(self, folder: str) -> list[str]:
        found = self._list(folder, recursive=False)
        return sorted(info.base_name for info in found if info.type == self._fs.FileType.Directory)

    def walk(self, folder: str) -> dict[str, int]:
        found = self._list(folder, recursive=True)
        top = len(self.path(folder)) + 1
        return {info.path[top:]: info.size for info in found if info.type == self._fs.FileType.File}

    def remove(self, name: str) -> None:
        try:
            self._system.delete_dir(self.path(name))
        except FileNotFoundError:
            return


class HadoopFiles(OutputFiles):
    """A folder of any file system that the session can write to."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        self._java = cast("Any", spark._jvm)
        self._configuration: Any = spark.sparkContext._jsc.hadoopConfiguration()
        folder: Any = self._java.org.apache.hadoop.fs.Path(root)
        self._system: Any = folder.getFileSystem(self._configuration)
        self._folder: Any = folder.makeQualified(self._system.getUri(), self._system.getWorkingDirectory())
        super().__init__(str(self._folder.toString()))

    def _path(self, name: str) -> Any:
        return self._java.org.apache.hadoop.fs.Path(self._folder, name)

    def uri(self, name: str) -> str:
        return str(self._path(name).toString())

    def read(self, name: str) -> bytes | None:
        if not self.exists(name):
            return None
        stream = self._system.open(self._path(name))
        try:
            return bytes(self._java.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def replace(self, name: str, content: bytes) -> None:
        stream = self._system.create(self._path(name), True)
        try:
            stream.write(bytearray(content))
        finally:
            stream.close()

    def create(self, name: str, content: bytes) -> bool:
        """Create a file by writing it under another name and renaming it, which fails if the name exists."""
        temporary = f"{name.rpartition('/')[0]}/.{uuid.uuid4().hex}.tmp"
        self.replace(temporary, content)
        hadoop = self._java.org.apache.hadoop.fs
        options = self._java.java.lang.reflect.Array.newInstance(hadoop.Options.Rename.NONE.getClass(), 0)
        context = hadoop.FileContext.getFileContext(self._system.getUri(), self._configuration)
        try:
            context.rename(self._path(temporary), self._path(name), options)
        except Exception as error:
            self._system.delete(self._path(temporary), False)
            if "FileAlreadyExistsException" in str(error):
                return False
            raise
        return True

    def exists(self, name: str) -> bool:
        return bool(self._system.exists(self._path(name)))

    def _list(self, folder: str) -> list[Any]:
        return list(self._system.listStatus(self._path(folder))) if self.exists(folder) else []

    def names(self, folder: str) -> list[str]:
        return [status.getPath().getName() for status in self._list(folder)]

    def folders(self, folder: str) -> list[str]:
        return sorted(status.getPath().getName() for status in self._list(folder) if status.isDirectory())

    def walk(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for status in self._list(folder):
            name = status.getPath().getName()
            if status.isDirectory():
                found |= {f"{name}/{below}": size for below, size in self.walk(f"{folder}/{name}").items()}
            else:
                found[name] = int(status.getLen())
        return found

    def move(self, source: str, target: str) -> None:
        self._system.mkdirs(self._path(target).getParent())
        if not self._system.rename(self._path(source), self._path(target)):
            raise FileNotFoundError(f"{self.uri(source)} could not be moved to {self.uri(target)}")

    def remove(self, name: str) -> None:
        self._system.delete(self._path(name), True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _split_scheme(root: str) -> tuple[str, str]:
    """Return the scheme of a root ("" for a plain path), and the path of one on this machine, not decoded, as Spark."""
    if root.startswith("file:"):
        return "file", "/" + root.removeprefix("file:").lstrip("/")
    return root.partition("://")[0] if "://" in root else "", root


def open_lake_files(root: str) -> LakeFiles:
    """Return the files of a lake: a folder of this machine, or a URI that pyarrow can open."""
    if not root:
        raise ConfigurationError("the lake has no path: give a folder, or a URI such as s3://bucket/lake")
    scheme, path = _split_scheme(root)
    if "%" in path:
        raise ConfigurationError(
            f"the lake {redact_url(root)} has a % in its path, which the Delta library takes for an encoded character: "
            "choose another name"
        )
    if scheme in ("", "file"):
        return LocalFiles(path)
    if "@" in root or holds_secret(root):
        raise ConfigurationError(
            f"the lake {redact_url(root)} is named with its keys, and Spark shows paths in its plans and logs: "
            "leave them out, and set them in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in "
            "Spark's configuration"
        )
    import pyarrow as pa

    try:
        return ArrowFiles(root)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = redact_text(str(error), root)
        raise ConfigurationError(f"the lake {redact_url(root)} cannot be opened: {reason}") from None


def open_output_files(spark: SparkSession, root: str) -> OutputFiles:
    """Return the files of an output where the session would write them."""
    scheme, path = _split_scheme(root)
    if scheme == "file":
        return LocalFiles(path)
    if not hasattr(spark, "_jsc"):
        if scheme:
            raise ConfigurationError(
                f"over Spark Connect the output must be a folder that this machine and the cluster see at the same "
                f"path (file:///…): {scheme} is written through the JVM of a session of its own"
            )
        return LocalFiles(path)
    files = HadoopFiles(spark, root)
    # A path without a scheme is on this machine unless the cluster's configuration has another default.
    scheme, path = _split_scheme(files.root)
    return LocalFiles(path) if scheme == "file" else files
