"""`pip install p2pstore` without the extra `peer`: clients and commands, beside a peer of another environment."""

import json
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.client_environment import build, make_environment, needed
from tests.cluster.older_version import sources_of
from tests.commands import ran
from tests.contract.worlds import peer_process

MAX_PACKAGES = 12
PREVIOUS_VERSION = "5df8ac77c8adaab8e8e9b9a864530574ef5af2d1"
"""A commit: the last before the client had an environment of its own."""
SECONDS = 60.0

PROGRAM = """
import asyncio, sys
from p2pstore import aio, blocking, errors

path = sys.argv[1]
values = {f"k{n}": bytes([n]) * (1 << n) for n in range(3, 22)}
with blocking.connect(path) as client:
    for key, value in values.items():
        assert client.put(key, value).status == "created"
        assert client.get(key) == value
    results = client.put_many([("many/" + key, value) for key, value in values.items()])
    assert all(result.unwrap().status == "created" for result in results)
    buffers = {key: bytearray(len(value)) for key, value in values.items()}
    for result in client.get_many_into([("many/" + key, buffers[key]) for key in values]):
        result.unwrap()
    assert buffers == values
    with client.lease("k20") as view:
        assert bytes(view) == values["k20"]
    assert client.contains_many(["k5", "none"]) == [True, False]
    assert client.remove("k5")
    try:
        client.get("k5")
    except errors.NoSuchKey:
        pass
    else:
        raise AssertionError("a removed key was read")

async def main():
    async with await aio.connect(path) as client:
        await client.put("aio", b"value")
        assert await client.get("aio") == b"value"
asyncio.run(main())
for module in ("trio", "libp2p", "cryptography", "lz4", "blake3", "prometheus_client"):
    assert module not in sys.modules, module
"""

MOONCAKE = """
import sys
from p2pstore.integrations.mooncake import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", "") == 0
assert store.put("mooncake", b"value") == 0
assert store.get("mooncake") == b"value"
assert store.close() == 0
"""

NO_PEER = """
import p2pstore
try:
    p2pstore.open_peer
except p2pstore.PeerNotInstalled as error:
    print(error)
"""


@pytest.fixture(scope="module")
def built(module_path: Path) -> list[Path]:
    return build(module_path)


@pytest.fixture(scope="module")
def python(module_path: Path, built: list[Path]) -> Path:
    (wheel,) = (each for each in built if each.suffix == ".whl")
    return make_environment(module_path, wheel)


@pytest.fixture(scope="module")
def socket(module_path: Path) -> Iterator[str]:
    with peer_process(module_path, "p") as peer:
        yield peer.socket


def run(python: Path, *arguments: str, status: int = 0, **variables: str) -> tuple[str, str]:
    done = ran(
        [str(python), *arguments],
        SECONDS,
        cwd=python.parent,
        env={"PATH": "/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), **variables},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_the_distributions_pass_the_check_of_the_index(built: list[Path]) -> None:
    run(Path(sys.executable), "-m", "twine", "check", "--strict", *map(str, built))


def test_the_wheel_holds_what_runs_and_nothing_else(built: list[Path]) -> None:
    (wheel,) = (each for each in built if each.suffix == ".whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"p2pstore", "mooncake_p2p"}
    assert not [name for name in names if "tests" in name or "simulation" in name]


def test_a_client_brings_few_packages_and_wheels_only() -> None:
    packages = needed("p2pstore")
    assert len(packages) <= MAX_PACKAGES, sorted(packages)
    assert not packages & {"libp2p", "fastecdsa", "trio", "cryptography", "prometheus-client"}


def test_clients_work(python: Path, socket: str) -> None:
    run(python, "-c", PROGRAM, socket)


def test_clients_work_with_a_peer_of_the_previous_version(python: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    with peer_process(tmp_path, "p", sources=sources_of(PREVIOUS_VERSION, sources)) as peer:
        run(python, "-c", PROGRAM, peer.socket)


def test_mooncakes_api_works(python: Path, socket: str) -> None:
    run(python, "-c", MOONCAKE, MOONCAKE_P2P_SOCKET=socket)


def test_commands_that_talk_to_a_peer_work(python: Path, socket: str, tmp_path: Path) -> None:
    def command(*words: str) -> str:
        return run(python, "-m", "mooncake_p2p", *words)[0]

    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(b"value of a file")
    place = ("--socket", socket)
    command("put", "file", str(source), *place)
    command("get", "file", "--output", str(back), *place)
    assert back.read_bytes() == source.read_bytes()
    assert "file" in command("ls", *place)
    assert json.loads(command("stats", "--json", *place))
    assert command("peers", *place)
    assert command("doctor", *place)
    assert "p2pstore1:" in command("invite", *place)
    command("rm", "file", *place)


@pytest.mark.parametrize("words", [["join"], ["demo"]])
def test_what_needs_a_peer_says_so_in_one_line(python: Path, words: list[str]) -> None:
    _, said = run(python, "-m", "mooncake_p2p", *words, status=1)
    assert len(said.splitlines()) == 1
    assert "pip install 'p2pstore[peer]'" in said


def test_open_peer_says_what_is_missing(python: Path) -> None:
    said, _ = run(python, "-c", NO_PEER)
    assert "pip install 'p2pstore[peer]'" in said
