"""The files of examples/deploy fit each other and the worker that they start."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from waypost.store.valkey import checkup

pytestmark = pytest.mark.promise("FACE-5")

#: It has no types. moto brings it.
yaml: Any = importlib.import_module("yaml")
FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
ENDPOINT = Path(__file__).parents[2] / "src" / "waypost" / "see" / "endpoint.py"


def read_unit() -> dict[str, list[str]]:
    """Return the settings of the systemd unit."""
    settings: dict[str, list[str]] = {}
    for line in (FOLDER / "waypost-worker.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            settings.setdefault(name, []).append(value)
    return settings


def read_yaml(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def container() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod and the container of the Deployment."""
    deployment = next(one for one in read_yaml("kubernetes.yaml") if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    return pod, pod["containers"][0]


def docker_command() -> list[str]:
    found = re.search(r"^CMD (\[.*\])$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return list(yaml.safe_load(found[1]))


def worker_commands() -> dict[str, list[str]]:
    """Return the arguments of `waypost` in each file."""
    return {
        "systemd": shlex.split(read_unit()["ExecStart"][0])[1:],
        "docker": docker_command(),
        "kubernetes": container()[1]["args"],
    }


def drain_seconds(arguments: list[str]) -> float:
    return float(arguments[arguments.index("--timeout") + 1])


@pytest.mark.parametrize("name", ["systemd", "docker", "kubernetes"])
def test_the_command_starts_a_worker(name: str, tmp_path: Path) -> None:
    arguments = worker_commands()[name]
    shutil.copy(FOLDER / "shop.py", tmp_path)
    (tmp_path / "url").write_text("memory://\n")
    # The same with a free port and an end.
    port = arguments.index("--metrics-port") + 1
    started = [*arguments[:port], "0", *arguments[port + 1 :], "--until-empty"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "waypost"), *started], cwd=tmp_path, capture_output=True, text=True,
        timeout=120, check=False, env=os.environ | {"WAYPOST_URL": f"file://{tmp_path / 'url'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_supervisor_waits_longer_than_the_worker_drains() -> None:
    commands = worker_commands()
    compose = read_yaml("compose.yaml")[0]["services"]["worker"]
    waits = {
        "systemd": float(read_unit()["TimeoutStopSec"][0]),
        "docker": float(compose["stop_grace_period"].removesuffix("s")),
        "kubernetes": float(container()[0]["terminationGracePeriodSeconds"]),
    }
    assert {name for name, seconds in waits.items() if seconds < drain_seconds(commands[name]) + 5} == set()


def test_probes_go_to_paths_and_a_port_that_the_worker_serves() -> None:
    _, worker = container()
    served = set(re.findall(r"^    (/\w+) ", ENDPOINT.read_text(), re.MULTILINE))
    (port,) = worker["ports"]
    arguments = worker["args"]
    assert arguments[arguments.index("--metrics-port") + 1] == str(port["containerPort"])
    assert arguments[arguments.index("--metrics-host") + 1] == "0.0.0.0"  # a probe comes from the node
    probes = {name: worker[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {probe["path"] for probe in probes.values()} <= served
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert "http://127.0.0.1:9464/health" in (FOLDER / "Dockerfile").read_text()


def test_the_url_of_the_store_comes_from_a_file_everywhere() -> None:
    compose = read_yaml("compose.yaml")[0]["services"]
    (variable,) = container()[1]["env"]
    given = [
        read_unit()["Environment"][0].removeprefix("WAYPOST_URL="),
        compose["worker"]["environment"]["WAYPOST_URL"],
        compose["migrate"]["environment"]["WAYPOST_URL"],
        variable["value"],
    ]
    assert [url for url in given if not url.startswith("file:///") and not url.startswith("file://%d/")] == []
    mounts = {mount["mountPath"] for mount in container()[1]["volumeMounts"]}
    assert os.path.dirname(variable["value"].removeprefix("file://")) in mounts


def test_the_users_of_the_containers_are_not_root() -> None:
    pod, worker = container()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert worker["securityContext"]["readOnlyRootFilesystem"] is True
    assert re.search(r"^USER 10001$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert pod["securityContext"]["runAsUser"] == 10001


def test_every_file_that_compose_mounts_is_here_or_a_secret() -> None:
    document = read_yaml("compose.yaml")[0]
    mounted = [one.partition(":")[0] for one in document["services"]["valkey"]["volumes"] if one.startswith("./")]
    assert [name for name in mounted if not (FOLDER / name).exists()] == []
    used = {name for service in document["services"].values() for name in service.get("secrets", [])}
    assert used == set(document["secrets"])


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "waypost-worker.service"
    # The program itself is not on this machine.
    unit.write_text((FOLDER / unit.name).read_text().replace("/opt/shop/.venv/bin/waypost", "/bin/true"))
    done = subprocess.run([program, "verify", str(unit)], capture_output=True, text=True, timeout=120, check=False)
    assert [line for line in (done.stdout + done.stderr).splitlines() if unit.name in line] == []


def test_the_acl_has_every_command_of_the_store() -> None:
    allowed = set(re.findall(r"\+([a-z]+)", (FOLDER / "valkey.acl").read_text()))
    needed = {name.lower() for names in checkup.verbs().values() for name in names}
    needed |= {name.lower() for name in checkup.OTHER_COMMANDS}
    connecting = {"auth", "hello", "ping", "client", "select", "unsubscribe", "waitaof"}
    assert allowed == needed | connecting
