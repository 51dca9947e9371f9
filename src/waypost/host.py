"""The name of this machine, in a module of its own: importing `socket` takes long, and many programs need no name."""

from __future__ import annotations

import socket


def host_name() -> str:
    """Return the name of this machine."""
    return socket.gethostname()
