"""Warnings about a server: a command that ends soon prints each of them once a day, not at every call.

Workers and servers warn at each start, and `waypost doctor` lists what it finds each time. What was warned of is in a
small file of the user's state directory, by a hash. Where that cannot be read or written, commands warn each time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

FILE = "warnings.json"
#: The event of log records that are warnings about a server.
EVENT = "durability"


def state_folder() -> Path | None:
    """Return the folder in which programs of this user keep what they remember, None if there is none."""
    for name in ("XDG_STATE_HOME", "LOCALAPPDATA"):
        if os.path.isabs(os.environ.get(name, "")):
            return Path(os.environ[name]) / "waypost"
    folder = os.path.expanduser("~/.local/state/waypost")
    # A user may have no entry in the list of users.
    return Path(folder) if os.path.isabs(folder) else None


class OncePerDay(logging.Filter):
    """Lets a warning about a server pass if it was not given on this day."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        if getattr(record, "event", None) != EVENT or self._folder is None:
            return True
        today = datetime.now(UTC).date().isoformat()
        given = read_days(self._folder)
        name = hashlib.sha256(f"{getattr(record, 'store', '')}\n{getattr(record, 'problem', '')}".encode()).hexdigest()
        if given.get(name) == today:
            return False
        # Older days are left out, so the file stays small.
        write_days(self._folder, {one: day for one, day in given.items() if day == today} | {name: today})
        return True


def read_days(folder: Path) -> dict[str, str]:
    """Return the day of each warning, by its hash; nothing if the file is absent or damaged."""
    try:
        found = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_days(folder: Path, days: dict[str, str]) -> None:
    """Save the day of each warning for this user alone; nothing happens if that is not possible."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Two commands at once replace the file as a whole; at worst a warning is given twice. It is mode 600.
        handle, path = tempfile.mkstemp(dir=folder, prefix=f"{FILE}.")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(days, file)
            os.replace(path, folder / FILE)
        except OSError:
            os.unlink(path)


@contextmanager
def warnings_once_per_day() -> Iterator[None]:
    """Give each warning about a server once a day inside the `with` block."""
    log, once = logging.getLogger("waypost"), OncePerDay(state_folder())
    log.addFilter(once)
    try:
        yield
    finally:
        log.removeFilter(once)
