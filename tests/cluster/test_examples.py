"""The programs in `examples/` and the Python in README.md do what they say, against real peers."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.commands import ran
from tests.contract.worlds import peer_process
from tests.optional import require_torch
from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
EXAMPLE_SECONDS = 120


@dataclass
class Machine:
    """A machine with a running peer, as programs see it."""

    environment: dict[str, str]
    control: str

    def run(self, *command: str) -> str:
        """The output of a Python program; it must end well, with nothing on stderr."""
        done = ran([sys.executable, "-W", "error", *command], EXAMPLE_SECONDS, env=self.environment)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert "Warning" not in done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with (
        tempfile.TemporaryDirectory(prefix="p2p") as folder,
        peer_process(Path(folder), "local") as peer,
    ):
        environment = {**os.environ, "MOONCAKE_P2P_SOCKET": peer.socket, "XDG_RUNTIME_DIR": folder}
        yield Machine(environment, peer.control)


def test_every_example_is_run() -> None:
    mine = Path(__file__).read_text(encoding="utf-8")
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(
        re.findall(r'EXAMPLES / "(\w+\.py)"\)', mine)
    )


def test_quick_start(machine: Machine) -> None:
    printed = machine.run(str(EXAMPLES / "quick_start.py"))
    assert "put: created, 1 copy on local" in printed
    assert "get: b'hello, cluster'" in printed
    assert "match_prefix: 2" in printed
    assert "contains after remove: False" in printed


def test_asyncio_service(machine: Machine) -> None:
    printed = machine.run(str(EXAMPLES / "asyncio_service.py"))
    assert re.search(r"'found': [4-7]\d", printed)
    assert "gave up waiting" in printed
    assert "flushed; left: 0" in printed


def test_a_peer_in_a_trio_program(machine: Machine) -> None:
    printed = machine.run(str(EXAMPLES / "trio_peer.py"))
    assert "put: created, 2 of 2 copies" in printed
    assert "equal: True" in printed
    assert "holders: ['first', 'second']" in printed
    assert "list_keys: 10 keys" in printed


def test_new_weights_for_a_group(machine: Machine) -> None:
    printed = machine.run(str(EXAMPLES / "new_weights.py"))
    for step in (100, 200):
        assert f"step {step}: 2 of 2 engines switched" in printed
        assert {f"engine-{number} uses step {step}" for number in (1, 2)} <= set(printed.splitlines())


def test_a_scheduler_in_front_of_engines(machine: Machine) -> None:
    printed = machine.run(str(EXAMPLES / "prefix_scheduler.py"))
    found = re.search(r"(\d+) blocks reused, (\d+) of them from other machines; (\d+) computed", printed)
    assert found, printed
    reused, fetched, computed = map(int, found.groups())
    assert reused + computed == sum(12 * (1 + 4 * turn) for turn in range(1, 6))
    assert computed <= 300, "each block is computed once or, where news of it was on its way, twice"
    assert fetched < reused / 2, "most requests go where their prefix is"


def test_a_kv_cache_shared_by_two_processes(machine: Machine) -> None:
    require_torch()
    printed = machine.run(str(EXAMPLES / "kvcache_transformer.py"))
    assert "56 of 56 objects were new" in printed
    assert "prefill saved for 224 of 269 tokens (83%)" in printed
    assert "logits identical to those without the cache: True" in printed


def test_a_model_is_broadcast(machine: Machine, tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [50_000], "data_offsets": [0, 200_000]}})
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + os.urandom(200_000)
    )
    (tmp_path / "config.json").write_text("{}")
    printed = machine.run(str(EXAMPLES / "broadcast_model.py"), str(tmp_path))
    assert "published model@" in printed
    assert printed.count("1 tensors, identical: True") == 3
    assert "all have it after" in printed


class Engine(ThreadingHTTPServer):
    """Stands where an engine would, and notes what it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EngineAnswers)
        self.asked: list[dict[str, Any]] = []
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class EngineAnswers(BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"tokens": body["max_tokens"]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_proxy_of_prefill_and_decode_engines() -> None:
    """With real engines: `scripts/check_vllm`."""
    port = free_port("127.0.0.1")
    prefill, decode = Engine(), Engine()
    command = [sys.executable, str(EXAMPLES / "prefill_decode_proxy.py"), str(port)]
    command += ["--prefill", prefill.address, "--decode", decode.address]
    proxy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask() -> Any:
        body = json.dumps({"prompt": "p", "max_tokens": 7}).encode()
        with urlopen(f"http://127.0.0.1:{port}/v1/completions", body, EXAMPLE_SECONDS) as answer:
            return json.load(answer)

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        eventually(listens)
        assert ask() == {"tokens": 7}
        assert [each["max_tokens"] for each in prefill.asked] == [1]
        assert decode.asked[0]["kv_transfer_params"]["p2pstore_wait_seconds"] > 0
        prefill.end()
        assert ask() == {"tokens": 7}
        assert "kv_transfer_params" not in decode.asked[1]
    finally:
        proxy.kill()
        proxy.wait()
        prefill.end()
        decode.end()


def test_without_torch_the_example_says_what_to_install(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError('no torch', name='torch')"
    (tmp_path / "torch.py").write_text(missing)
    done = ran(
        [sys.executable, str(EXAMPLES / "kvcache_transformer.py")],
        EXAMPLE_SECONDS,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "scripts/setup --torch" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def python_in_readme() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)


@pytest.mark.parametrize("number", range(len(python_in_readme())))
def test_the_python_in_the_readme(number: int, machine: Machine) -> None:
    """As it stands there, but for the address of the other machine and the memory it takes."""
    program = python_in_readme()[number]
    program = program.replace("127.0.0.1:17946", machine.control).replace("1GiB", "64MiB")
    machine.run("-c", program)
