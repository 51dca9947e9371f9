"""Make the peers' environments: `python -m benchmarks.peers.setup [name …]`, or `make bench-setup`.

Each is a folder under `.bench/` with a virtual environment or node modules. A stamp holds what was installed, so a
second run has nothing to do; two runs at once take turns on a lock, which the system drops when its holder ends. A peer
that cannot be set up is named at the end, and the others are there all the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.peers.registry import ENVIRONMENTS, PEERS, Peer, peer

#: pip and npm wait for the network most of the time, and for two cores the rest.
AT_ONCE = 2
NODE_MAJOR_MIN = 20


class SetupFailed(Exception):
    """Raised when an environment cannot be made, with the reason."""


def run(command: Sequence[str | os.PathLike[str]], **options: object) -> str:
    """Return the output of a command; raise `SetupFailed` with the end of it on failure."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    except OSError as error:
        raise SetupFailed(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise SetupFailed(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-600:]}")
    text: str = done.stdout
    return text


def make_python(chosen: Peer) -> None:
    """Make a virtual environment with the listed versions."""
    run([sys.executable, "-m", "venv", chosen.folder])
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--prefer-binary"]
    run([chosen.folder / "bin" / "python", *install, *chosen.requirements])


def make_node(chosen: Peer) -> None:
    """Install Node modules from a package file that is written here."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise SetupFailed("node and npm are needed and not there")
    version = run(["node", "--version"]).strip()
    if int(version.removeprefix("v").split(".")[0]) < NODE_MAJOR_MIN:
        raise SetupFailed(f"node {NODE_MAJOR_MIN} or later is needed and this is {version}")
    chosen.folder.mkdir(parents=True)
    wanted = dict(requirement.split("==") for requirement in chosen.requirements)
    package = {"name": f"bench-{chosen.name}", "private": True, "dependencies": wanted}
    (chosen.folder / "package.json").write_text(json.dumps(package, indent=2))
    run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"], cwd=chosen.folder)


def set_up(chosen: Peer) -> str | None:
    """Make one environment unless it exists; return None, or why it could not be made."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f"{chosen.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if chosen.is_ready:
            return None
        # The rest of an interrupted run is of no use.
        shutil.rmtree(chosen.folder, ignore_errors=True)
        try:
            (make_node if chosen.language == "node" else make_python)(chosen)
        except SetupFailed as error:
            shutil.rmtree(chosen.folder, ignore_errors=True)
            return str(error)
        chosen.stamp.write_text(chosen.mark)
        return None


def main(names: Sequence[str]) -> int:
    """Set up the named peers, or all; return 1 if one of them failed."""
    try:
        chosen = [peer(name) for name in names] or list(PEERS)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        return 2
    with ThreadPoolExecutor(AT_ONCE) as threads:
        failures = dict(zip(chosen, threads.map(set_up, chosen), strict=True))
    for one, failure in failures.items():
        print(f"{one.name:24} {'ready' if failure is None else failure}", flush=True)
    missing = [one.name for one, failure in failures.items() if failure is not None]
    if missing:
        print(f"not measured beside waypost until they are set up: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
