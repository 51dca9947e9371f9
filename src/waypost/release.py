"""The version of this release, for the command line and the records of workers."""

from __future__ import annotations

VERSION = "0.2.0.dev0"


def minor_of(version: str) -> tuple[str, ...]:
    """Return what releases have in common that differ by patches only: they use the same tables and functions."""
    return tuple(version.split(".")[:2])


#: The version of the data: grows with a release that writes what the release before cannot use. 1: release 0.1.
#: Queues get settings of this version when an upgrade is finished: then no process of the release before is left.
DATA_VERSION = 2
#: The first version of the data beside which processes of the next release can run.
SIDE_BY_SIDE = 2
#: Kind and name of the shared record with the version of the data that `waypost migrate --finish` has confirmed.
FINISHED = ("waypost-upgrade", "finished")
