"""What the tests use of the machine itself: programs that come as Debian packages and have no wheel.

    python scripts/system_parts.py

As root it installs what is missing, quietly; for other users it prints the one line that would. It never requests more
rights than it has, and it never fails: tests whose part is missing are listed at the end of their run. This is the one
place that names the packages; a test requires one with `@pytest.mark.needs("pgbouncer")`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: The programs of each package that the tests start.
PARTS: dict[str, tuple[str, ...]] = {
    "chromium-headless-shell": ("/usr/bin/chromium-headless-shell",),
    "pgbouncer": ("/usr/sbin/pgbouncer",),
    "rabbitmq-server": ("/usr/lib/rabbitmq/bin/rabbitmq-server", "/usr/bin/epmd"),
    "postgresql-15": ("/usr/lib/postgresql/15/bin/postgres", "/usr/lib/postgresql/15/bin/initdb"),
}
#: Debian's package would make a database of its own and start it. Written only where no PostgreSQL was before.
NO_DATABASE = Path("/etc/postgresql-common/createcluster.d/no-main-cluster.conf")
#: Two runs at once take turns.
APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")
INSTALL = ("install", "-y", "--no-install-recommends")


def is_there(name: str) -> bool:
    """Whether a package's programs can be started."""
    return all(os.access(program, os.X_OK) for program in PARTS[name])


def missing() -> list[str]:
    return [name for name in PARTS if not is_there(name)]


def line_for(names: list[str]) -> str:
    """Return the command line for a user with the rights."""
    return " ".join(("apt-get", *INSTALL, *names))


def install(names: list[str]) -> bool:
    if not NO_DATABASE.parents[1].exists():
        NO_DATABASE.parent.mkdir(parents=True)
        NO_DATABASE.write_text("create_main_cluster = false\n")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    output = ""
    for command in ((*APT, *INSTALL, *names), (*APT, "update"), (*APT, *INSTALL, *names)):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        output = (ran.stderr or ran.stdout).strip()
        if not missing():
            return True
    print(f"system: apt-get cannot install {' '.join(missing())}: {output.splitlines()[-1] if output else 'no reason'}")
    return False


def main() -> int:
    names = missing()
    if not names:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"system: some tests will not run without {' and '.join(names)}: {line_for(names)}", flush=True)
    else:
        print(f"system: installing {' '.join(names)} (once)", flush=True)
        install(names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
