"""A directory of this process alone, for what Java is started with and what it writes.

Names in the system's temporary directory that others can guess are not used: another user could have made them first,
with a program of their own in place of Java, or a link where a file is to be written.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from pathlib import Path

_made: dict[int, Path] = {}
_kept: set[Path] = set()
_lock = threading.Lock()


def private_directory() -> Path:
    """Return the directory of this process: a random name, open to this user only, removed at the end."""
    with _lock:
        path = _made.get(os.getpid())
        if path is None or not path.is_dir():
            path = _made[os.getpid()] = Path(tempfile.mkdtemp(prefix="waypost-spark-"))
            atexit.register(_remove, path, os.getpid())
        return path


def keep_directory(path: Path) -> None:
    """Keep the directory when the process ends, so that the log in it can be read."""
    _kept.add(path)


def _remove(path: Path, owner: int) -> None:
    # A forked child must not remove the directory of its parent.
    if os.getpid() == owner and path not in _kept:
        shutil.rmtree(path, ignore_errors=True)
