"""Decisions of RDMA that need no device."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore.errors import ProtocolError
from p2pstore.objects import CHUNK_BYTES, KIB
from p2pstore.transfer.rdma import rdma_hardware as rdma_addresses
from p2pstore.transfer.rdma.rdma_hardware import (
    interface_of,
    network_bits,
    port_bytes_per_second,
    port_is_active,
)
from p2pstore.transfer.rdma.rdma_rules import (
    MAX_OUTSTANDING_READS,
    MAX_PACKET_NUMBER,
    MAX_QUEUE_PAIR_NUMBER,
    PARTED_AT_BYTES,
    PATH_MTU_BYTES,
    RETRY_COUNT,
    TAKEN_IN_BYTES_PER_SECOND,
    Endpoint,
    GidEntry,
    GidKind,
    Meaning,
    RemoteMemory,
    ServingDevice,
    WorkRoom,
    WorkStatus,
    agree,
    choose_gid,
    choose_serving,
    describe_status,
    first_of_two,
    meaning_of,
    same_network,
    split_read,
)
from tests.present import present


def gid(text: str) -> bytes:
    return ipaddress.IPv6Address(text).packed


LINK_LOCAL, MAPPED, GLOBAL = gid("fe80::1"), gid("::ffff:10.0.0.1"), gid("2001:db8::1")
addresses = st.sampled_from([LINK_LOCAL, MAPPED, gid("::ffff:10.0.0.2"), GLOBAL, bytes(16)])
kinds = st.integers(0, 4)
tables = st.lists(st.tuples(addresses, kinds), max_size=12).map(
    lambda rows: [GidEntry(index, address, kind) for index, (address, kind) in enumerate(rows)]
)
endpoints = st.builds(
    Endpoint,
    st.integers(1, MAX_QUEUE_PAIR_NUMBER),
    st.integers(0, MAX_PACKET_NUMBER),
    addresses.filter(any),
    st.sampled_from(PATH_MTU_BYTES),
    st.integers(1, 300),
)


@given(tables)
def test_the_chosen_address_is_the_best_that_there_is(table: list[GidEntry]) -> None:
    mapped = [
        each
        for each in table
        if each.kind == GidKind.ROCE_V2 and each.gid.startswith(bytes(10) + b"\xff\xff")
    ]
    routed = [each for each in table if each.kind == GidKind.ROCE_V2 and each.gid == GLOBAL]
    best = mapped or routed
    expected = best[0] if best else None
    assert choose_gid(table) == expected
    assert choose_gid(reversed(table)) == expected


def test_the_table_of_a_soft_device() -> None:
    table = [GidEntry(0, LINK_LOCAL, GidKind.ROCE_V2), GidEntry(1, MAPPED, GidKind.ROCE_V2)]
    chosen = present(choose_gid(table))
    assert chosen.index == 1


def test_a_port_with_both_versions_of_roce() -> None:
    table = [
        GidEntry(0, LINK_LOCAL, GidKind.ROCE_V1),
        GidEntry(1, LINK_LOCAL, GidKind.ROCE_V2),
        GidEntry(2, MAPPED, GidKind.ROCE_V1),
        GidEntry(3, MAPPED, GidKind.ROCE_V2),
    ]
    chosen = present(choose_gid(table))
    assert chosen.index == 3
    assert choose_gid(table[:3]) is None


@given(endpoints, endpoints)
def test_both_ends_agree_on_the_same_path(one: Endpoint, other: Endpoint) -> None:
    path = agree(one, other)
    assert path == agree(other, one)
    assert path.mtu_bytes == min(one.path_mtu_bytes, other.path_mtu_bytes)
    assert 1 <= path.reads <= min(one.reads, other.reads, MAX_OUTSTANDING_READS)


@pytest.mark.parametrize(
    "wrong",
    [
        Endpoint(0, 0, MAPPED, 1024, 1),
        Endpoint(1 << 24, 0, MAPPED, 1024, 1),
        Endpoint(1, -1, MAPPED, 1024, 1),
        Endpoint(1, 1 << 24, MAPPED, 1024, 1),
        Endpoint(1, 0, MAPPED[:15], 1024, 1),
        Endpoint(1, 0, bytes(16), 1024, 1),
        Endpoint(1, 0, MAPPED, 1500, 1),
        Endpoint(1, 0, MAPPED, 1024, 0),
    ],
)
def test_a_queue_pair_that_cannot_be_is_refused(wrong: Endpoint) -> None:
    with pytest.raises(ProtocolError, match="cannot be"):
        agree(Endpoint(1, 0, MAPPED, 1024, 1), wrong)


@given(st.integers(0, 10_000), st.integers(1, 3000))
def test_the_parts_of_a_read_follow_one_another(length: int, limit: int) -> None:
    parts = list(split_read(length, limit))
    assert [offset for offset, _ in parts] == list(range(0, length, limit))
    assert sum(size for _, size in parts) == length
    assert all(0 < size <= limit for _, size in parts)


def test_a_device_that_takes_no_message_reads_nothing() -> None:
    with pytest.raises(ValueError, match="no bytes"):
        list(split_read(10, 0))


def taken_in_after(first_bytes: int, length_bytes: int, link_bytes_per_second: float) -> float:
    """Seconds until a payload in two pieces is there, summed and copied."""
    first_done = first_bytes * (1 / link_bytes_per_second + 1 / TAKEN_IN_BYTES_PER_SECOND)
    all_here = length_bytes / link_bytes_per_second
    return max(first_done, all_here) + (length_bytes - first_bytes) / TAKEN_IN_BYTES_PER_SECOND


@given(st.integers(512 * KIB, CHUNK_BYTES), st.floats(1e6, 1e11))
def test_a_payload_is_parted_where_it_is_taken_in_soonest(length: int, rate: float) -> None:
    first = first_of_two(length, rate)
    assert 0 < first < length
    soonest = min(taken_in_after(other, length, rate) for other in range(0, length, PARTED_AT_BYTES))
    page = taken_in_after(0, PARTED_AT_BYTES, rate)
    assert taken_in_after(first, length, rate) <= soonest + page


def test_a_payload_is_halved_where_the_link_is_not_known() -> None:
    assert first_of_two(CHUNK_BYTES, 0.0) == CHUNK_BYTES // 2


@given(st.integers(1, 20), st.lists(st.integers(0, 4), max_size=200))
def test_room_is_never_taken_twice(places: int, steps: list[int]) -> None:
    room = WorkRoom(places)
    under_way = 0
    for requests in steps:
        if requests:
            fits = under_way + requests <= places
            assert room.take(requests) == fits
            under_way += requests if fits else 0
        elif under_way:
            room.give_back()
            under_way -= 1
        assert room.taken == under_way
    for _ in range(under_way):
        room.give_back()
    with pytest.raises(AssertionError, match="more completions"):
        room.give_back()


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        WorkRoom(0)


@given(st.integers(-5, 300))
def test_every_status_means_something_and_can_be_told(status: int) -> None:
    assert (meaning_of(status) is Meaning.DONE) == (status == 0)
    assert describe_status(status)


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (WorkStatus.FLUSHED, Meaning.FLUSHED),
        (WorkStatus.REMOTE_ACCESS, Meaning.STALE),
        (WorkStatus.RETRIES_EXCEEDED, Meaning.GONE),
        (WorkStatus.RECEIVER_RETRIES_EXCEEDED, Meaning.GONE),
        (WorkStatus.LOCAL_PROTECTION, Meaning.BROKEN),
        (WorkStatus.FATAL, Meaning.BROKEN),
        (77, Meaning.BROKEN),
    ],
)
def test_what_a_status_means(status: int, meaning: Meaning) -> None:
    assert meaning_of(status) is meaning


def test_retries_end() -> None:
    assert RETRY_COUNT <= 6  # 7 means "for ever" to soft-RoCE


@given(st.integers(0, 1000), st.integers(-10, 1100), st.integers(-10, 1100))
def test_only_what_is_inside_has_an_address(size: int, offset: int, length: int) -> None:
    memory = RemoteMemory(5000, size, 1)
    if offset >= 0 and length >= 0 and offset + length <= size:
        assert memory.at(offset, length) == 5000 + offset
    else:
        with pytest.raises(ProtocolError, match="outside"):
            memory.at(offset, length)


@pytest.mark.parametrize(
    ("own", "bits", "other", "same"),
    [
        ("::ffff:10.0.0.1", 96 + 24, "::ffff:10.0.0.200", True),
        ("::ffff:10.0.0.1", 96 + 24, "::ffff:10.0.1.1", False),
        ("::ffff:10.0.0.1", 96 + 31, "::ffff:10.0.0.0", True),
        ("::ffff:10.0.0.1", 96 + 32, "::ffff:10.0.0.0", False),
        ("2001:db8::1", 64, "2001:db8::ffff:1", True),
        ("2001:db8::1", 64, "2001:db8:0:1::1", False),
        ("2001:db8::1", 64, "::ffff:10.0.0.1", False),
        ("::ffff:10.0.0.1", None, "::ffff:10.0.0.1", False),
    ],
)
def test_networks(own: str, bits: int | None, other: str, same: bool) -> None:
    assert same_network(gid(own), bits, gid(other)) is same
    assert not same_network(gid(own), bits, gid(other)[:4])


def serving(text: str, readers: int = 0) -> ServingDevice:
    """By letters: a(ctive), n(etwork is the same), p(referred)."""
    return ServingDevice("a" in text, "n" in text, "p" in text, readers)


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ([], None),
        ([serving("np"), serving("p")], None),
        ([serving("ap"), serving("ap")], 0),
        ([serving("ap", 1), serving("ap")], 1),
        ([serving("ap", 3), serving("a")], 0),
        ([serving("ap"), serving("an", 7)], 1),
        ([serving("np"), serving("ap", 9), serving("a")], 1),
        ([serving("anp", 2), serving("anp", 1), serving("anp", 1)], 1),
    ],
)
def test_the_device_that_is_read_through(devices: list[ServingDevice], chosen: int | None) -> None:
    assert choose_serving(devices) == chosen


LOOPBACK = ipaddress.IPv6Address("::ffff:127.0.0.1").packed


def test_the_network_of_an_address() -> None:
    assert network_bits("lo", LOOPBACK) == 96 + 8
    assert network_bits("nope", LOOPBACK) is None
    assert network_bits("lo", ipaddress.IPv6Address("2001:db8::1").packed) is None


def test_a_device_that_is_not_there() -> None:
    assert interface_of("nope", 1, 0) == ""
    assert not port_is_active("nope", 1)
    assert port_bytes_per_second("nope", 1) == 0.0


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("100 Gb/sec (4X EDR)\n", 12.5e9), ("2.5 Gb/sec (1X SDR)\n", 0.3125e9), ("", 0.0), ("fast\n", 0.0)],
)
def test_what_a_link_carries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, bytes_per_second: float
) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "rate").write_text(text)
    monkeypatch.setattr(rdma_addresses, "DEVICES", tmp_path)
    assert port_bytes_per_second("mlx5_0", 1) == bytes_per_second
