"""Files below one folder, of a lake or of an output: on this machine through Python, elsewhere through pyarrow.

Small files are written whole or not at all: readers see the old content or the new one.
"""

from __future__ import annotations

import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from waypost.errors import ConfigurationError
from waypost.urls import holds_secret, parameter_names, redact_text, redact_url


def join_path(folder: str, name: str) -> str:
    """Return the path of a name in a folder; either may be empty."""
    return f"{folder}/{name}" if folder and name else folder or name


class LakeFiles(ABC):
    """The files below one root. Names are relative to it, with slashes; "" is the root itself."""

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
        return join_path(self.root, name)

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
    def modified(self, folder: str) -> dict[str, int]:
        """Return all files below a folder by their relative names, with the time at which the storage changed them."""

    @abstractmethod
    def modified_ms(self, name: str) -> int | None:
        """Return when the storage changed a file, in milliseconds by its own clock; None if there is none."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a folder with its content, if it exists."""

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


class LocalFiles(LakeFiles):
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

    def folders(self, folder: str) -> list[str]:
        path = Path(self.path(folder))
        return sorted(one.name for one in path.iterdir() if one.is_dir()) if path.is_dir() else []

    def walk(self, folder: str) -> dict[str, int]:
        top = Path(self.path(folder))
        return {path.relative_to(top).as_posix(): path.stat().st_size for path in top.rglob("*") if path.is_file()}

    def modified(self, folder: str) -> dict[str, int]:
        found = ((name, self.modified_ms(join_path(folder, name))) for name in _names_below(Path(self.path(folder))))
        return {name: at for name, at in found if at is not None}

    def modified_ms(self, name: str) -> int | None:
        try:
            return os.stat(self.path(name)).st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None

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
        #: Whether a name may have slashes without any folder above it.
        self._has_objects = self._system.type_name in ("s3", "gcs", "abfs")
        super().__init__(root)

    def uri(self, name: str) -> str:
        return join_path(self._uri, name)

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
        if not self._has_objects:
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

    def modified(self, folder: str) -> dict[str, int]:
        found = self._list(folder, recursive=True)
        top = len(self.path(folder)) + 1
        return {
            info.path[top:]: info.mtime_ns // 1_000_000
            for info in found
            if info.type == self._fs.FileType.File and info.mtime_ns is not None
        }

    def modified_ms(self, name: str) -> int | None:
        at = self._system.get_file_info(self.path(name)).mtime_ns
        return None if at is None else int(at // 1_000_000)

    def remove(self, name: str) -> None:
        try:
            self._system.delete_dir(self.path(name))
        except FileNotFoundError:
            return


def _names_below(top: Path) -> Iterator[str]:
    """Yield the files below a folder. Other processes may remove some meanwhile."""
    for folder, _, names in os.walk(top):
        for name in names:
            yield (Path(folder) / name).relative_to(top).as_posix()


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


def open_lake_files(root: str, what: str = "lake") -> LakeFiles:
    """Return the files of a lake, or what else it is: a folder of this machine, or a URI that pyarrow can open."""
    if not root:
        raise ConfigurationError(f"the {what} has no path: give a folder, or a URI such as s3://bucket/{what}")
    scheme, path = _split_scheme(root)
    if "%" in path:
        raise ConfigurationError(
            f"the {what} {redact_url(root)} has a % in its path, which the Delta library takes for an encoded "
            "character: choose another name"
        )
    if scheme in ("", "file"):
        return LocalFiles(path)
    if "@" in root or holds_secret(root):
        raise ConfigurationError(
            f"the {what} {redact_url(root)} is named with its keys, and Spark shows paths in its plans and logs: "
            "leave them out, and set them in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in "
            "Spark's configuration"
        )
    if "?" in root or "#" in root:
        # Paths of files are appended to the URI, and the Delta library does not read parameters.
        names = ", ".join(parameter_names(root)) or "after ? or #"
        raise ConfigurationError(
            f"the {what} {redact_url(root)} is named with parameters ({names}): give scheme, bucket and path only, and "
            "set the others in the environment (AWS_ENDPOINT_URL, AWS_REGION, AWS_ALLOW_HTTP)"
        )
    import pyarrow as pa

    try:
        return ArrowFiles(root)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = redact_text(str(error), root)
        raise ConfigurationError(f"the {what} {redact_url(root)} cannot be opened: {reason}") from None
