"""Files of a lake, wherever it lies: a folder of this machine, or a URI that pyarrow knows (s3, gs, hdfs).

Small files are written whole or not at all: beside their place first, then moved there.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.fs as pafs

from waypost.errors import ConfigurationError, StoreError
from waypost.urls import holds_secret, redact_text, redact_url


class Files:
    """The files below one root. Paths are relative to it, with slashes."""

    def __init__(self, root: str) -> None:
        if not root:
            raise ConfigurationError("say where the lake is: a folder, or a URI such as s3://bucket/lake")
        self.is_local = "://" not in root or root.startswith("file://")
        if not self.is_local and ("@" in root or holds_secret(root)):
            raise ConfigurationError(
                f"the lake {redact_url(root)} is named with its keys, and Spark shows paths in its plans and logs: "
                "leave them out, and set them in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) or in "
                "Spark's configuration"
            )
        try:
            if self.is_local:
                path = os.path.abspath(root.removeprefix("file://"))
                self.system: Any = pafs.LocalFileSystem()
                self.base, self.uri = path, Path(path).as_uri()
            else:
                self.system, self.base = pafs.FileSystem.from_uri(root)
                self.uri = root.rstrip("/")
        except (pa.ArrowException, OSError, ValueError) as error:
            said = redact_text(str(error), root)
            raise ConfigurationError(f"the lake {redact_url(root)} cannot be opened: {said}") from None

    def path(self, name: str) -> str:
        """Where a file is, as pyarrow's file system knows it."""
        return f"{self.base}/{name}"

    def spark_path(self, name: str) -> str:
        """Where a file is, as Spark knows it."""
        return f"{self.uri}/{name}"

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none."""
        try:
            with self.system.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file: readers see the old one or the new one, whole. On disk when this returns."""
        path = self.path(name)
        self.system.create_dir(path.rpartition("/")[0], recursive=True)
        if not self.is_local:
            # An object appears when its stream is closed.
            with self.system.open_output_stream(path) as stream:
                stream.write(content)
            return
        fresh = f"{path}.{os.getpid()}.new"
        with Path(fresh).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(fresh).replace(path)

    def exists(self, name: str) -> bool:
        """Whether there is such a file or folder."""
        return bool(self.system.get_file_info(self.path(name)).type != pafs.FileType.NotFound)

    def folders(self, name: str) -> list[str]:
        """The names of the folders in a folder; none if it is not there."""
        found = self.system.get_file_info(pafs.FileSelector(self.path(name), allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    def size(self, name: str) -> int:
        """How many bytes lie in a folder."""
        found = self.system.get_file_info(pafs.FileSelector(self.path(name), allow_not_found=True, recursive=True))
        return sum(info.size for info in found if info.type == pafs.FileType.File)

    def has_rows(self, name: str) -> bool:
        """Whether a folder holds any file of data."""
        found = self.system.get_file_info(pafs.FileSelector(self.path(name), allow_not_found=True, recursive=True))
        return any(info.type == pafs.FileType.File and not info.base_name.startswith(("_", ".")) for info in found)

    def remove(self, name: str) -> None:
        """Remove a folder with all that is in it, if it is there."""
        try:
            self.system.delete_dir(self.path(name))
        except FileNotFoundError:
            return


class OneAtATime:
    """Keeps a second process from changing the same lake. The system ends it with the process, however that ends.

    It works on folders of this machine; elsewhere, two runs at once are the operator's to prevent.
    """

    def __init__(self, files: Files, name: str) -> None:
        self._files = files
        self._name = name
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        if not self._files.is_local:
            return self
        try:
            import fcntl
        except ImportError:
            return self
        path = Path(self._files.path(self._name))
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise StoreError(
                f"another process is changing the lake {self._files.base}: wait for it to end, or stop it"
            ) from None
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
