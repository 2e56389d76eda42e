"""Cluster keys and allow lists replaced while real peers run: nothing fails, and who is out is out."""

# ruff: noqa: ASYNC240 (files of a line, written between two steps of a test)

from __future__ import annotations

import json
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from p2pstore import blocking, errors
from p2pstore.access.keyring import KeyRing, new_cluster_key, parse_cluster_keys
from p2pstore.gossip.gossip_messages import ControlKind, Ping
from p2pstore.gossip.links.control_link import LinkError
from p2pstore.gossip.links.host import ControlHost
from p2pstore.gossip.links.identity import Identity
from p2pstore.gossip.records import format_peer_id
from p2pstore.peer import Peer, open_peer
from p2pstore.runtime.trio_streams import TrioDriver
from p2pstore.transfer.data_messages import DataKind
from p2pstore.transfer.data_messages import Ping as DataPing
from p2pstore.transfer.read_tickets import Scope
from p2pstore.transfer.reading.connection_pool import ConnectionPool
from p2pstore.transfer.ticket_issuer import TicketIssuer
from p2pstore.transfer.transport import RemotePeer
from tests.cluster.machines import Machine
from tests.cluster.machines import Peer as Process
from tests.cluster.peers import config, write_private
from tests.cluster.test_control_host import stranger_host
from tests.waiting import eventually, until

SECONDS = 10.0


# --- real processes --------------------------------------------------------------------------


class Work:
    """Puts and gets from every peer to every other, until it is stopped; what failed is kept."""

    def __init__(self, peers: list[Process]) -> None:
        self.peers = peers
        self.rounds = 0
        self.failures: list[str] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @contextmanager
    def running(self) -> Iterator[Work]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stopped.set()
            self._thread.join(30)
            assert not self._thread.is_alive()

    def more(self, rounds: int = 2) -> None:
        """Wait until some more of it was done."""
        goal = self.rounds + rounds
        eventually(lambda: self.rounds >= goal or bool(self.failures))

    def _run(self) -> None:
        clients = [blocking.connect(peer.ready["socket"]) for peer in self.peers]
        try:
            while not self._stopped.is_set():
                number = self.rounds
                writer = clients[number % len(clients)]
                value = number.to_bytes(4, "big") * 50_000
                try:
                    assert writer.put(f"k{number}", value, replicas=2).copies == 2
                    for reader in clients:
                        assert reader.get(f"k{number}", wait=10) == value
                except Exception as error:
                    self.failures.append(f"round {number}: {error!r}")
                self.rounds += 1
        finally:
            for client in clients:
                client.close()


def hang_up(peer: Process, words: str) -> None:
    """SIGHUP, and wait until the log says what it should."""
    before = peer.log.read_text().count(words)
    peer.process.send_signal(signal.SIGHUP)
    eventually(lambda: peer.log.read_text().count(words) > before)


def test_a_key_is_replaced_while_the_cluster_works(machine: Machine) -> None:
    """Three peers over TCP with a file each; the steps reach them one after the other."""
    key = machine.folder / "master.key"
    assert machine.run("keygen", str(key)).returncode == 0
    old = key.read_text()
    peers: list[Process] = []
    for name in ("a", "b", "c"):
        write_private(machine.folder / f"{name}.key", old)
        bootstrap = ["--bootstrap", peers[0].ready["control"]] if peers else []
        options = ["--cluster-key-file", str(machine.folder / f"{name}.key"), "--transport", "tcp"]
        peers.append(machine.join(name, *options, *bootstrap))
    eventually(lambda: all(peer.alive() == 3 for peer in peers))

    with Work(peers).running() as work:
        for step in ("--add", "--promote", "--retire"):
            work.more()
            done = machine.run("keygen", step, "--json", str(key))
            assert done.returncode == 0, done.stderr
            first = json.loads(done.stdout)["keys"][0]
            for peer in peers:
                (machine.folder / f"{peer.name}.key").write_text(key.read_text())
                hang_up(peer, f"cluster key {first} proves")
                work.more()
        work.more()
        assert not work.failures
    assert parse_cluster_keys(key.read_text(), "key").keys != parse_cluster_keys(old, "key").keys
    assert len(parse_cluster_keys(key.read_text(), "key").keys) == 1
    assert all(peer.alive() == 3 for peer in peers)

    # A file that holds no key changes nothing.
    (machine.folder / "a.key").write_text("nonsense\n")
    hang_up(peers[0], "everything stays as it was")
    peers[0].client.put("after", b"value", replicas=3)
    # A peer that has only the old key is out.
    write_private(machine.folder / "late.key", old)
    late = Process(
        machine,
        "late",
        *("--cluster-key-file", str(machine.folder / "late.key")),
        *("--bootstrap", peers[1].ready["control"]),
    )
    assert late.process.wait(20) == 1
    assert "wrong cluster key: the two sides hold different keys" in late.log.read_text()
    eventually(lambda: "different keys" in peers[1].log.read_text())
    for peer in peers:
        assert "Traceback" not in peer.log.read_text()


# --- in this process -------------------------------------------------------------------------


@asynccontextmanager
async def member(key: bytes) -> AsyncIterator[tuple[ControlHost, ConnectionPool]]:
    """A stranger who holds `key`: a control host and data connections, without a peer behind them."""
    identity, ring = Identity(bytes(range(32))), KeyRing([key])
    issuer = TicketIssuer(identity, ring)
    pool = ConnectionPool(
        TrioDriver(), lambda peer: issuer.ticket(peer.peer_id, Scope.READ | Scope.PEER)
    )
    with closing(pool):
        async with stranger_host(ring=ring, identity=identity) as host:
            yield host, pool


async def ask_control(peer: Peer, host: ControlHost) -> None:
    peer_id = peer.node.core.peer_id
    with trio.fail_after(SECONDS):
        await host.ask(peer_id, [peer.control], ControlKind.PING, Ping(1, []), SECONDS)


async def ask_data(peer: Peer, pool: ConnectionPool) -> None:
    with trio.fail_after(SECONDS):
        await pool.request(data_of(peer), DataKind.PING, DataPing())


def data_of(peer: Peer) -> RemotePeer:
    return RemotePeer(peer.node.core.peer_id, tuple(peer.data))


async def ended(pool: ConnectionPool, seconds: float) -> None:
    """Wait until the other side has closed the pool's one connection."""
    [[place]] = pool._peers.values()
    assert place.connection is not None
    with trio.fail_after(seconds):
        assert await place.connection.stream.receive_into(memoryview(bytearray(1))) == 0


async def test_a_member_with_a_removed_key_is_out_within_seconds(tmp_path: Path) -> None:
    old, new = new_cluster_key(), new_cluster_key()
    key_file = Path(write_private(tmp_path / "key", f"{old}\n"))
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=str(key_file))) as peer,
        member(bytes.fromhex(old)) as (host, pool),
    ):
        await ask_control(peer, host)
        await ask_data(peer, pool)
        [connection] = host.connections[peer.node.core.peer_id]
        key_file.write_text(f"{new}\n{old}\n")
        assert await peer.reload()
        assert not await peer.reload()  # nothing new
        await ask_control(peer, host)  # still accepted, and on the connections that were there
        await ask_data(peer, pool)
        assert host.connections[peer.node.core.peer_id] == [connection]

        key_file.write_text(f"{new}\n")
        assert await peer.reload()
        await ended(pool, 2)
        with trio.fail_after(2):
            await connection.ended.wait()
        with pytest.raises(LinkError, match="different keys"):
            await ask_control(peer, host)
        with pytest.raises(errors.AuthenticationFailed, match="does not hold"):
            await ask_data(peer, pool)


@pytest.mark.parametrize("bad", ["", "nonsense", "0" * 64, "mode", "gone"])
async def test_a_bad_file_changes_nothing(tmp_path: Path, bad: str) -> None:
    key = new_cluster_key()
    key_file = Path(write_private(tmp_path / "key", key))
    async with (
        open_peer(config(tmp_path, "a", cluster_key_file=str(key_file))) as peer,
        member(bytes.fromhex(key)) as (host, pool),
    ):
        await ask_control(peer, host)
        if bad == "gone":
            key_file.unlink()
        elif bad == "mode":
            key_file.write_text(new_cluster_key())
            key_file.chmod(0o644)
        else:
            key_file.write_text(bad)
        with pytest.raises(errors.ConfigError, match=str(key_file)) as error:
            await peer.reload()
        assert key not in str(error.value)
        await ask_control(peer, host)
        await ask_data(peer, pool)


async def test_peers_off_the_allow_list_are_refused_or_put_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of the first names the second; then also a third, then the second no more."""
    key = write_private(tmp_path / "key", new_cluster_key())
    allow = tmp_path / "allow"
    seeds = {name: Identity(name.encode() * 32) for name in "bc"}
    ids = {name: format_peer_id(identity.peer_id) for name, identity in seeds.items()}
    for name, identity in seeds.items():
        (tmp_path / name).mkdir(0o700)
        text = f"p2pstore identity 1\n{identity.seed.hex()}\n"
        write_private(tmp_path / name / "identity.key", text)
    allow.write_text(f"# the second\n{ids['b']}\n")

    def settings(name: str, *bootstrap: Peer, **more: object) -> Any:
        state = {"state_dir": str(tmp_path / name)} if name in seeds else {}
        return config(tmp_path, name, *bootstrap, cluster_key_file=key, transport="tcp", **state, **more)

    async with open_peer(settings("a", allow_file=str(allow))) as a, open_peer(settings("b", a)) as b:
        await b.put("of b", bytes(100_000))
        await a.put("of a", bytes(100_000))
        assert await a.get("of b", wait=5) == await b.get("of a", wait=5)
        with pytest.raises(errors.AuthenticationFailed, match=f"{ids['c']} is not on the allow"):
            async with open_peer(settings("c", a)) as c:
                with trio.fail_after(15):
                    await c.node.leave_requested.wait()
        said = [r.getMessage() for r in caplog.records if "allow list" in r.getMessage()]
        assert any(line.startswith("dropped") and ids["c"] in line for line in said), said

        allow.write_text(f"{ids['c']}\n{ids['b']}\n")
        assert await a.reload()
        async with open_peer(settings("c", a)) as c:
            await until(lambda: len(a.node.core.live_peers()) == 2)
            await c.put("of c", bytes(100_000))
            assert await b.get("of c", wait=5) == bytes(100_000)

            allow.write_text(f"{ids['c']}\n")
            assert await a.reload()
            await until(lambda: b.node.core.peer_id not in a.node.host.connected(), 5)
            assert [format_peer_id(each) for each in a.node.core.live_peers()] == [ids["c"]]
            assert not a.contains_nowait("of b")
            with pytest.raises(errors.NoSuchKey):
                await a.get("of b")
            with pytest.raises(errors.AuthenticationFailed, match="allow list"):
                await b.node.pool.request(data_of(a), DataKind.PING, DataPing())
            # The third, whose list knows nothing of it, goes on with both; its word of the
            # second brings that one back nowhere.
            assert await c.get("of b", wait=5) == await c.get("of a", wait=5)
            rounds = a.node.core.gossip.questions.count
            await until(lambda: a.node.core.gossip.questions.count > rounds + 20)
            assert [format_peer_id(each) for each in a.node.core.live_peers()] == [ids["c"]]
    assert not [r for r in caplog.records if r.exc_info and r.name.startswith("p2pstore")]


async def test_a_list_that_does_not_name_the_bootstrap_peer_ends_the_one_that_has_it(
    tmp_path: Path,
) -> None:
    allow = tmp_path / "allow"
    allow.write_text(format_peer_id(Identity(b"x" * 32).peer_id))
    async with open_peer(config(tmp_path, "a")) as a:
        with pytest.raises(errors.AuthenticationFailed, match=f"{a.peer_id} is not on the allow"):
            async with open_peer(config(tmp_path, "b", a, allow_file=str(allow))) as b:
                with trio.fail_after(15):
                    await b.node.leave_requested.wait()


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read"), ("# nobody\n", "shut out"), ("\nQmYx", "line 2"), ("\xff", "text")],
)
async def test_a_bad_allow_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    allow = tmp_path / "allow"
    if text is not None:
        allow.write_text(text, "latin-1")
    with pytest.raises(errors.ConfigError, match=words) as error:
        async with open_peer(config(tmp_path, "a", allow_file=str(allow))):
            pass
    assert str(allow) in str(error.value)


# --- without a key ---------------------------------------------------------------------------

WIDE: list[tuple[dict[str, object], str]] = [
    ({"listen": "0.0.0.0:0"}, "listen"),
    ({"listen": "[::]:0"}, "listen"),
    ({"data_listen": ["127.0.0.1:0", "0.0.0.0:0"]}, "data_listen"),
    ({"data_listen": ["[::]:0"]}, "data_listen"),
    ({"listen": "elsewhere.test:0"}, "listen"),
    ({"data_listen": ["elsewhere.test:0"]}, "data_listen"),
    ({"listen": "localhost:0", "data_listen": ["127.0.0.1:0"]}, "listen"),
    ({"data_listen": ["localhost:0"]}, "data_listen"),
]


@pytest.mark.parametrize(("settings", "setting"), WIDE)
async def test_without_a_key_nobody_else_reaches_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object], setting: str
) -> None:
    """Whatever a name resolves to: here `localhost` is every address of this machine."""
    lookup = socket.getaddrinfo

    def everywhere(host: str, *arguments: Any, **options: Any) -> Any:
        wide = "0.0.0.0" if host in ("localhost", "elsewhere.test") else host
        return lookup(wide, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", everywhere)
    with pytest.raises(errors.ConfigError, match=f"{setting}: .*no cluster key") as error:
        async with open_peer(config(tmp_path, "a", **settings, insecure=False)):
            pass
    assert "keygen" in str(error.value)
    assert "--insecure" in str(error.value)
    others = {"advertise": "127.0.0.1", "data_advertise": ["127.0.0.1:1"]}
    async with open_peer(config(tmp_path, "a", **settings, **others, insecure=True)) as peer:
        await peer.put("k", b"value")


async def test_advertising_an_address_opens_no_port(tmp_path: Path) -> None:
    """Advertised addresses are not bound: without a key the peer stays on loopback."""
    options = {"listen": None, "advertise": "192.0.2.1", "data_advertise": ["192.0.2.1:1"]}
    async with open_peer(config(tmp_path, "a", **options, insecure=False)) as peer:
        assert peer.node.host.listening[0] == "127.0.0.1"


# --- identities used twice -------------------------------------------------------------------


def copied(machine: Machine, original: Process, name: str) -> list[str]:
    """Options for a peer with a copy of the identity in a state directory of its own."""
    directory = machine.folder / f"{name}-state"
    directory.mkdir(0o700)
    [key] = (machine.folder / "home").rglob(f"{original.name}/identity.key")
    write_private(directory / "identity.key", key.read_text())
    return ["--state-dir", str(directory)]


def ends_as_duplicate(twin: Process) -> None:
    assert twin.process.wait(30) == 1, twin.log.read_text()
    assert re.search(r"another live peer( at \S+)? uses this peer's identity", twin.log.read_text())


@pytest.mark.parametrize("through", ["itself", "a third"])
def test_the_newer_of_two_twins_ends(machine: Machine, through: str) -> None:
    third = machine.join("third")
    first = machine.join("first", "--bootstrap", third.ready["control"])
    first.client.put("k", b"value")
    door = first if through == "itself" else third
    options = copied(machine, first, "twin")
    for _ in range(3):  # as a service manager would try
        ends_as_duplicate(Process(machine, "twin", *options, "--bootstrap", door.ready["control"]))
    first.client.put("after", b"value")
    assert third.client.get("after", wait=5) == b"value"
    eventually(lambda: third.alive() == 2)
    assert first.process.poll() is None


def test_the_newer_twin_ends_although_the_older_slept_when_it_came(machine: Machine) -> None:
    third = machine.join("third")
    first = machine.join("first", "--bootstrap", third.ready["control"])
    eventually(lambda: third.alive() == 2)
    first.process.send_signal(signal.SIGSTOP)
    try:
        options = copied(machine, first, "twin")
        twin = Process(machine, "twin", *options, "--bootstrap", third.ready["control"])
        twin.wait_until_ready()
    finally:
        first.process.send_signal(signal.SIGCONT)
    ends_as_duplicate(twin)
    first.client.put("after", b"value")
    assert third.client.get("after", wait=10) == b"value"
