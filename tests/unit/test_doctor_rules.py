"""The doctor's judgements of readings, each in all of its outcomes."""

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.access.invite import Invite, format_invite
from p2pstore.access.keyring import new_cluster_key
from p2pstore.objects import GIB, MIB
from p2pstore.status.doctor import machine_rules as machine
from p2pstore.status.doctor import network_rules as network
from p2pstore.status.doctor import network_rules as peers
from p2pstore.status.doctor import way_rules as way
from p2pstore.status.doctor.finding import (
    Failure,
    Finding,
    Status,
    broken,
    fine,
    skipped,
    summary,
    warning,
    worst_failure,
)
from p2pstore.status.doctor.support_bundle import REMOVED, Redactor
from p2pstore.transfer.rdma.rdma_rules import GidEntry
from p2pstore.transfer.rdma.rdma_topology import (
    DevicePlace,
    Machine,
    Nic,
    NumaNode,
    matrix_of,
    overridden,
)
from p2pstore.wire import Code
from tests.unit.gossip_network import peer_record

OK, WARNING, BROKEN, SKIPPED = Status.OK, Status.WARNING, Status.BROKEN, Status.SKIPPED

memory = machine.MemoryReading
clock = machine.ClockReading
interface = network.InterfaceReading
DISK = partial(machine.judge_disk, "/data")

MACHINE: list[tuple[Callable[..., Finding], tuple[Any, ...], dict[str, Any], Status]] = [
    (machine.judge_python, ((3, 11, 2), "CPython"), {}, OK),
    (machine.judge_python, ((3, 10, 9), "CPython"), {}, BROKEN),
    (machine.judge_kernel, ("Linux", "6.1.0-13-amd64"), {}, OK),
    (machine.judge_kernel, ("Linux", "5.13.0"), {}, WARNING),
    (machine.judge_kernel, ("Linux", "3.10.0"), {}, BROKEN),
    (machine.judge_kernel, ("Darwin", "23.0.0"), {}, BROKEN),
    (machine.judge_kernel, ("Linux", "custom"), {}, SKIPPED),
    (machine.judge_memory, (memory(64 * GIB, 32 * GIB),), {}, OK),
    (machine.judge_memory, (memory(64 * GIB, 2 * GIB),), {}, WARNING),
    (machine.judge_memory, (memory(64 * GIB, 32 * MIB),), {}, BROKEN),
    (machine.judge_memory, (memory(64 * GIB, 32 * GIB, 8 * GIB, GIB),), {}, OK),
    (machine.judge_memory, (memory(64 * GIB, 32 * GIB, 8 * GIB, 15 * GIB // 2),), {}, WARNING),
    (machine.judge_memory, (memory(64 * GIB, 32 * GIB, 8 * GIB, 8 * GIB),), {}, BROKEN),
    (machine.judge_memory, (memory(64 * GIB, 32 * GIB, 1 << 62, GIB),), {}, OK),
    (machine.judge_memlock, (8 * MIB,), {"unlimited": False, "rdma": False}, OK),
    (machine.judge_memlock, (8 * MIB,), {"unlimited": False, "rdma": True}, WARNING),
    (machine.judge_memlock, (8 * MIB,), {"unlimited": True, "rdma": True}, OK),
    (machine.judge_memlock, (None,), {"unlimited": False, "rdma": True}, OK),
    (machine.judge_open_files, (1024, 4096), {}, WARNING),
    (machine.judge_open_files, (255, 4096), {}, BROKEN),
    (machine.judge_open_files, (65_536, None), {}, OK),
    (machine.judge_open_files, (None, None), {}, OK),
    (machine.judge_huge_pages, (0, 0, 2 * MIB, "never"), {"made": False}, OK),
    (machine.judge_huge_pages, (0, 0, 2 * MIB, "never"), {"made": True, "rdma": True}, OK),
    (machine.judge_numa, ({}, ""), {}, OK),
    (machine.judge_numa, ({0: GIB, 1: GIB}, ""), {}, OK),
    (machine.judge_numa, ({0: GIB, 1: GIB}, "not permitted"), {}, WARNING),
    (machine.judge_huge_pages, (0, 0, 2 * MIB, "never"), {"made": False, "rdma": True}, WARNING),
    (machine.judge_huge_pages, (0, 0, 2 * MIB, "advise"), {"made": False, "rdma": True}, OK),
    (machine.judge_huge_pages, (512, 100, 2 * MIB, "advise"), {"made": False}, OK),
    (machine.judge_memfd, ("",), {}, OK),
    (machine.judge_memfd, ("memfd_create: Operation not permitted",), {}, BROKEN),
    (machine.judge_shm_directory, (GIB, MIB, True), {}, OK),
    (machine.judge_shm_directory, (None, 0, False), {}, WARNING),
    (machine.judge_shm_directory, (GIB, MIB, False), {}, WARNING),
    (machine.judge_state_directory, ("/s", "", GIB), {}, OK),
    (machine.judge_state_directory, ("/s", "", 10 * MIB), {}, WARNING),
    (machine.judge_state_directory, ("/s", "", 1000), {}, BROKEN),
    (machine.judge_state_directory, ("/s", "not writable", GIB), {}, BROKEN),
    (machine.judge_socket_directories, ("/run/x", []), {}, OK),
    (machine.judge_socket_directories, ("", ["/run: not writable"]), {}, BROKEN),
    (machine.judge_clock, (clock(True, 0.01),), {}, OK),
    (machine.judge_clock, (clock(True, 16.0),), {}, WARNING),
    (machine.judge_clock, (clock(False, 0.0),), {}, WARNING),
    (machine.judge_copy, (10e9,), {}, OK),
    (machine.judge_copy, (1e9,), {}, WARNING),
    (machine.judge_hash, (30e9,), {}, OK),
    (machine.judge_hash, (1e9,), {}, WARNING),
    (DISK, (True, 2e9, 1e9, 64 * MIB), {}, OK),
    (DISK, (True, 2e9, 50e6, 64 * MIB), {}, WARNING),
    (DISK, (False, 2e9, 1e9, 64 * MIB), {}, WARNING),
    (machine.judge_libraries, ({"trio": "0.35"}, ""), {}, OK),
    (machine.judge_libraries, ({}, "a peer cannot be started: no libp2p"), {}, BROKEN),
    (network.judge_port, (17946, "control", "", ""), {}, OK),
    (network.judge_port, (17946, "control", "Address already in use", "alpha"), {}, OK),
    (network.judge_port, (17946, "control", "Address already in use", ""), {}, WARNING),
    (network.judge_congestion_control, ("bbr", "cubic"), {}, OK),
    (network.judge_congestion_control, ("bbr", "bbr"), {}, WARNING),
    (network.judge_backlog, (4096,), {}, OK),
    (network.judge_backlog, (128,), {}, WARNING),
    (network.judge_interface, (interface("eth0", True, 1500, 1000, None),), {}, OK),
    (network.judge_interface, (interface("eth0", True, 1500, 100_000, 0),), {}, WARNING),
    (network.judge_interface, (interface("eth0", True, 9000, 100_000, 0),), {}, OK),
    (network.judge_interface, (interface("eth0", False, 1500, 100_000, 0),), {}, OK),
    (network.judge_gpus, ([],), {}, OK),
    (network.judge_gpus, ([network.GpuReading("0000:01:00.0", "NVIDIA", 1)],), {}, OK),
]

attempt = way.ConnectAttempt
no_noise = partial(way.judge_no_noise, "h:1", "reset")
no_admission = partial(way.judge_no_admission, keyless=False, cluster="default")
data_failure = partial(way.judge_data_failure, "data h:1", "h:1", "reset")

WAY: list[tuple[Callable[..., Finding], tuple[Any, ...], dict[str, Any], Failure | Status]] = [
    (way.judge_resolution, ("h", ["10.0.0.1"], ""), {}, OK),
    (way.judge_resolution, ("h", [], "unknown"), {}, Failure.UNREACHABLE),
    (way.judge_connect, ([attempt("h:1", 0.1)], 5.0), {}, OK),
    (way.judge_connect, ([attempt("h:1", 5, "late"), attempt("i:1", 0.1)], 5.0), {}, WARNING),
    (way.judge_connect, ([attempt("h:1", 0, "refused", True)], 5.0), {}, Failure.UNREACHABLE),
    (way.judge_connect, ([attempt("h:1", 5, "no answer")], 5.0), {}, Failure.UNREACHABLE),
    (no_noise, (5.0, 5.0), {}, Failure.DEADLINE),
    (no_noise, (0.1, 5.0), {}, Failure.BROKEN),
    (no_admission, ("wrong key", Code.AUTHENTICATION_FAILED, 0.1, 5.0), {}, Failure.BROKEN),
    (no_admission, ("on the allow list", Code.AUTHENTICATION_FAILED, 0.1, 5.0), {}, WARNING),
    (no_admission, ("cluster 'a' calls", Code.WRONG_CLUSTER, 0.1, 5.0), {}, Failure.BROKEN),
    (no_admission, ("versions", Code.PROTOCOL_MISMATCH, 0.1, 5.0), {}, Failure.BROKEN),
    (no_admission, ("lost", None, 0.1, 5.0), {}, Failure.BROKEN),
    (no_admission, ("silent", None, 4.9, 5.0), {}, Failure.DEADLINE),
    (way.judge_path_mtu, (1500, 1448), {}, OK),
    (way.judge_path_mtu, (600, 548), {}, WARNING),
    (way.judge_clock_skew, (0.01, 0.001), {}, OK),
    (way.judge_clock_skew, (-2.0, 0.1), {}, WARNING),
    (way.judge_clock_skew, (60.0, 0.1), {}, Failure.BROKEN),
    (way.judge_clock_skew, (60.0, 59.5), {}, OK),
    (way.judge_rate, ("tcp", 10**9, 1.0, "one connection"), {}, OK),
    (way.judge_rate, ("tcp", 10**6, 1.0, "one connection"), {}, WARNING),
    (data_failure, (Failure.UNREACHABLE,), {"loopback_elsewhere": False}, Failure.UNREACHABLE),
    (data_failure, (Failure.BROKEN,), {"loopback_elsewhere": False}, Failure.BROKEN),
    (data_failure, (Failure.UNREACHABLE,), {"loopback_elsewhere": True}, Failure.BROKEN),
    (way.stalled, ("tcp", 5.0), {}, Failure.DEADLINE),
    (way.judge_round_trip, ("control", [0.1, 0.2, 3.0]), {}, OK),
]


def check_words(finding: Finding) -> None:
    """A problem comes with a cause and a cure; a good finding with neither."""
    problem = finding.status in (WARNING, BROKEN)
    assert bool(finding.cause) is (problem or finding.status is SKIPPED)
    assert bool(finding.cure) is problem
    assert (finding.failure is not Failure.NONE) is (finding.status is BROKEN)
    assert finding.name
    if finding.status is OK:
        assert finding.value


@pytest.mark.parametrize(("judge", "arguments", "options", "status"), MACHINE)
def test_judgements_of_the_machine(
    judge: Callable[..., Finding], arguments: tuple[Any, ...], options: dict[str, Any], status: Status
) -> None:
    finding = judge(*arguments, **options)
    assert finding.status is status
    check_words(finding)


@pytest.mark.parametrize(("judge", "arguments", "options", "outcome"), WAY)
def test_judgements_of_the_way(
    judge: Callable[..., Finding],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    outcome: Failure | Status,
) -> None:
    finding = judge(*arguments, **options)
    assert outcome in (finding.status, finding.failure)
    check_words(finding)


def test_a_key_that_is_missing_is_asked_for_and_a_wrong_one_is_to_be_replaced() -> None:
    def cure(keyless: bool) -> str:
        code = Code.AUTHENTICATION_FAILED
        return way.judge_no_admission("no", code, 0, 5, keyless=keyless, cluster="c").cure

    assert cure(True).startswith("give the cluster's key")
    assert cure(False).startswith("copy the cluster's key")


@pytest.mark.parametrize(
    ("greeting", "refused"),
    [
        (None, False),
        (way.GREETING, False),
        (way.GREETING[:5], False),
        (b"", True),
        (b"220 mail ready\r\n", True),
        (b"\xff\x00", True),
    ],
)
def test_the_first_bytes_of_a_stranger(greeting: bytes | None, refused: bool) -> None:
    finding = way.judge_greeting("h:1", greeting)
    assert (finding is not None) is refused
    if finding is not None:
        assert finding.failure is Failure.BROKEN
        check_words(finding)


def test_another_version_in_an_answer_is_told() -> None:
    record = peer_record(1, software="0.1.0")
    assert way.judge_who(record, 3, "0.1.0", (1, 2)).status is OK
    other = way.judge_who(record, 3, "0.2.0", (2, 3))
    assert other.status is WARNING
    assert "0.2.0" in other.cause
    check_words(other)


LINK_LOCAL = bytes.fromhex("fe80000000000000505400fffe000001")
MAPPED = bytes(10) + b"\xff\xff" + bytes((10, 0, 0, 7))


def test_rdma_devices() -> None:
    def port(**changes: Any) -> network.RdmaPortReading:
        facts: dict[str, Any] = {
            "device": "mlx5_0",
            "port": 1,
            "active": True,
            "state": "ACTIVE",
            "link_layer": "Ethernet",
            "rate": "100 Gb/sec",
            "gids": (GidEntry(0, LINK_LOCAL, 2), GidEntry(3, MAPPED, 1), GidEntry(4, MAPPED, 2)),
        }
        return network.RdmaPortReading(**{**facts, **changes})

    def statuses(*ports: network.RdmaPortReading, problem: str = "") -> list[Status]:
        findings = network.judge_rdma(ports, pyverbs_problem=problem)
        for finding in findings:
            check_words(finding)
        return [finding.status for finding in findings]

    assert statuses() == [OK]
    assert statuses(problem="no such module") == [OK]
    assert statuses(port()) == [OK, OK]
    (found, _) = network.judge_rdma([port()], pyverbs_problem="")
    assert "RoCE v2 as 10.0.0.7 (GID 4)" in found.value
    assert statuses(port(), problem="no such module") == [OK, WARNING]
    assert statuses(port(port=2, gids=())) == [OK, OK]
    assert statuses(port(active=False, state="DOWN")) == [WARNING, OK]
    assert statuses(port(gids=(GidEntry(3, MAPPED, 1),))) == [WARNING, OK]
    assert statuses(port(gids=(GidEntry(0, LINK_LOCAL, 2),))) == [WARNING, OK]
    assert statuses(port(link_layer="InfiniBand")) == [WARNING, OK]


def test_which_rdma_devices_are_near_which_memory() -> None:
    nodes = (NumaNode(0, {0: 10, 1: 21}), NumaNode(1, {0: 21, 1: 10}))
    known = Machine(nodes, (Nic("mlx5_0", DevicePlace((), 0)), Nic("mlx5_1", DevicePlace((), 1))))
    findings = network.judge_topology(known, matrix_of(known), told=False)
    assert [(each.name, each.value) for each in findings] == [
        ("rdma for cpu:0", "mlx5_0; else mlx5_1"),
        ("rdma for cpu:1", "mlx5_1; else mlx5_0"),
    ]
    lost = Machine(nodes, (*known.nics, Nic("rxe0", DevicePlace())))
    (*_, found) = network.judge_topology(lost, matrix_of(lost), told=False)
    assert (found.status, "rxe0" in found.value) == (WARNING, True)
    check_words(found)
    matrix = overridden(lost, '{"cpu:0": [[], ["rxe0"]]}', "")
    findings = network.judge_topology(lost, matrix, told=True)
    assert [each.status for each in findings] == [OK, OK]
    assert findings[0].value == "none preferred; else rxe0"
    alone = Machine(nodes[:1], lost.nics)
    assert len(network.judge_topology(alone, matrix_of(alone), told=False)) == 1
    nothing = Machine(nodes)
    assert network.judge_topology(nothing, matrix_of(nothing), told=False) == []
    check_words(network.judge_wrong_topology("rdma_topology: not JSON"))


def ssd(**changes: Any) -> dict[str, Any]:
    well: dict[str, Any] = {"state": "ok", "why": "", "capacity_bytes": 1 << 40, "live_bytes": 1 << 39}
    return {**well, "objects": 1000, "damaged": 0, "read_latency": {"p99_ms": 2.5}, **changes}


def test_peers_on_this_machine() -> None:
    def judge(**changes: Any) -> dict[str, Finding]:
        peer = {"name": "a", "software": "1", "problems": [], **changes}
        document = {"peer": peer, "cluster": {"name": "c", "peers": 2}}
        findings = peers.judge_local_peer(document, "1")
        for finding in findings:
            check_words(finding)
        return {finding.name: finding for finding in findings}

    def statuses(**changes: Any) -> dict[str, Status]:
        return {name: finding.status for name, finding in judge(**changes).items()}

    def problem(name: str, status: str) -> dict[str, str]:
        return {"status": status, "name": name, "what": "w", "cause": "why", "cure": "do"}

    assert statuses() == {"peer a": OK}
    assert statuses(software="2") == {"peer a": OK, "peer a: this command": WARNING}
    assert statuses(clock_ahead_seconds=0.001) == {"peer a": OK, "peer a: clock": OK}
    older = {"peer": {"name": "a", "software": "1"}, "cluster": {"name": "c", "peers": 2}}
    assert [each.status for each in peers.judge_local_peer(older, "1")] == [OK, SKIPPED]
    check_words(peers.silent_local_peer("/s", "no answer"))
    check_words(peers.absent_local_peer("/s", "nobody listens"))

    # A problem that a peer names is told in its words, and stands for a reading of the same thing.
    said = [problem("alone", "broken"), problem("clock", "warning"), problem("ssd", "broken")]
    assert statuses(problems=said, clock_ahead_seconds=-2.0, ssd=ssd(state="off", why="it is gone")) == {
        **{"peer a": OK, "peer a: alone": BROKEN, "peer a: clock": WARNING},
        "peer a: ssd": BROKEN,
    }
    alone = judge(problems=said)["peer a: alone"]
    assert (alone.value, alone.cause, alone.cure) == ("w", "why", "do")


def test_ssds_of_peers() -> None:
    def judge(**changes: Any) -> Finding:
        finding = network.judge_ssd("peer a", ssd(**changes))
        check_words(finding)
        return finding

    assert judge().status is OK
    assert judge(damaged=2).status is WARNING
    for state in ("read_only", "off"):
        failed = judge(state=state, why="writing failed: no space left on the device")
        assert (failed.name, failed.status) == ("peer a: ssd", BROKEN)


def test_the_first_breakage_decides_and_all_are_counted() -> None:
    late = broken("b", "", "cause", "cure", Failure.DEADLINE)
    findings = [fine("a", "v"), warning("w", "v", "cause", "cure"), late, broken("c", "", "x", "y")]
    assert worst_failure(findings) is Failure.DEADLINE
    assert worst_failure(findings[:2]) is Failure.NONE
    assert summary([*findings, skipped("s", "why")]) == {
        "ok": 1,
        "warning": 1,
        "broken": 2,
        "skipped": 1,
    }
    assert late.document() == {
        "name": "b",
        "status": "broken",
        "value": "",
        "cause": "cause",
        "cure": "cure",
        "failure": "deadline",
    }
    assert fine("m", "v", mtu_bytes=5).document()["measured"] == {"mtu_bytes": 5}


SECRET = bytes(range(100, 132))


@given(st.binary(min_size=16, max_size=40), st.text(max_size=20), st.text(max_size=20))
def test_a_known_secret_is_gone_in_every_form(secret: bytes, before: str, after: str) -> None:
    redactor = Redactor([secret])
    forms = [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret).decode().rstrip("="),
        repr(secret)[2:-1],
    ]
    for form in forms:
        assert form not in redactor.clean(f"{before} {form} {after}")
        assert form not in redactor.clean(f"x{form}y")


@pytest.mark.parametrize(
    "secret",
    [
        new_cluster_key(),
        base64.b64encode(SECRET + b"\x11" * 8).decode(),
        format_invite(Invite("c", ("10.0.0.1:17946",), (SECRET,))),
        format_invite(Invite("c", ("10.0.0.1:17946",))),
    ],
)
def test_what_looks_like_a_secret_is_gone(secret: str) -> None:
    cleaned = Redactor().clean(f"--invite {secret}, and more")
    assert secret[12:] not in cleaned
    assert cleaned.endswith(", and more")


@pytest.mark.parametrize(
    "text", ["secret=abc", '"api_key": "abc def"', "PASSWORD: abc", "x_token='abc'"]
)
def test_what_is_called_a_secret_is_gone(text: str) -> None:
    cleaned = Redactor().clean(f"{{{text}, 1}}")
    assert "abc" not in cleaned
    assert REMOVED in cleaned
    assert cleaned.endswith(", 1}")


@pytest.mark.parametrize(
    "text",
    [
        "12D3KooWQhAj76cqPja9erPrCoNbD5NCmkUSjixLkBTLPAC1Qp8u at 127.0.0.1:24801",
        "/var/lib/mooncake-p2p/machines/a-machine-with-a-long-name-17/state/peer.log",
        "p2pstore.gossip.links.connection_limits_and_other_long_names_of_modules",
        "checkpoint llm@0123456789abcdef0123456789abcdef published",
        "2026-01-31T12:00:00.123Z WARNING peer: tickets are renewed",
        "the key 'prompt/17' was removed, its token count is 4096",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert Redactor([SECRET]).clean(text) == text


def test_too_short_a_secret_is_not_looked_for() -> None:
    assert Redactor([b"", b"short"]).clean("short") == "short"


@pytest.mark.parametrize("value", ["3.5.0", 7, None, "a b"])
def test_json_stays_json(value: object) -> None:
    cleaned = Redactor().clean(json.dumps({"secretstorage": value, "other": 1}, indent=1))
    assert json.loads(cleaned) == {"secretstorage": REMOVED, "other": 1}
