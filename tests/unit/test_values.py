"""Values, destinations and tensors as bytes; and how a client decides what to reserve."""

import array
import mmap
import random
import re
import resource
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pstore import arguments
from p2pstore.client.puts import (
    WINDOW_BYTES,
    WINDOW_ITEMS,
    GrantedAhead,
    copy_and_sum,
    fill,
    trailer_bound,
    windows,
)
from p2pstore.errors import P2PStoreError
from p2pstore.memory.segment_layout import TrailerBody, encode_trailer
from p2pstore.objects import MIB, chunk_count, chunk_sums
from p2pstore.runtime.blocking_streams import BlockingDriver, run_blocking
from p2pstore.values import (
    Gathered,
    RegisteredBuffer,
    describe_tensor,
    destination_view,
    destination_views,
    empty_tensor,
    fresh_bytes,
    source_view,
    value_of,
)
from tests.optional import require_torch


@pytest.mark.parametrize(
    "value",
    [
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"xabcdx")[1:5],
        array.array("I", [0x64636261]),
        np.frombuffer(b"abcd", "<i2"),
        np.frombuffer(b"abcd", np.uint8).reshape(2, 2),
        np.array(0x64636261, "<i4"),
        np.frombuffer(b"abcd", "S4"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sources_are_their_bytes_in_place(value: Any) -> None:
    view = source_view(value)
    assert (bytes(view), view.format, view.ndim) == (b"abcd", "B", 1)


def test_nothing_is_copied() -> None:
    values = np.zeros((3, 4), np.float32)
    destination_view(values)[:4] = np.float32(7).tobytes()
    assert values[0, 0] == 7
    times = np.zeros(2, "M8[s]")
    destination_view(times)[:8] = (5).to_bytes(8, "little")
    assert times[0] == np.datetime64(5, "s")
    with mmap.mmap(-1, 4096) as mapping:
        view = destination_view(mapping)
        view[0] = 1
        assert mapping[0] == 1
        view.release()


@pytest.mark.parametrize("value", [b"", bytearray(), np.zeros((0, 3)), np.zeros((3, 0), "M8[s]")])
def test_empty_values(value: Any) -> None:
    assert bytes(source_view(value)) == b""
    assert len(destination_view(value)) == 0


def test_what_is_not_contiguous_or_writable() -> None:
    fortran = np.asfortranarray(np.zeros((2, 3)))
    for bad in (np.zeros((3, 3)).T, np.zeros(6)[::2], memoryview(bytes(8))[::2], fortran):
        with pytest.raises(ValueError, match="contiguous"):
            source_view(bad)
    for readonly in (b"x", memoryview(bytearray(1)).toreadonly()):
        with pytest.raises(ValueError, match="read-only"):
            destination_view(readonly)


@pytest.mark.parametrize("value", ["text", 1, None, [1], object(), np.array([[], None], object)])
def test_what_has_no_bytes(value: Any) -> None:
    with pytest.raises(TypeError):
        source_view(value)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bool", ">f8", "M8[ns]", "U5", "S3", "c16", "uint64", "V7"]
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)])
def test_numpy_tensors_keep_dtype_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = np.zeros(shape, dtype)
    name, stored = describe_tensor(tensor)
    made = empty_tensor(name, stored, tensor.nbytes, None)
    assert (made.dtype, made.shape) == (tensor.dtype, shape)


def test_plain_names_are_plain() -> None:
    assert describe_tensor(np.zeros(2, "<f4")) == ("float32", (2,))
    assert describe_tensor(np.zeros(2, ">f4")) == (">f4", (2,))


def test_what_is_no_tensor() -> None:
    for neither in (b"bytes", [1, 2], 7):
        with pytest.raises(TypeError, match="numpy array or a torch tensor"):
            describe_tensor(neither)
    for bad in (np.zeros(1, object), np.zeros(1, "i4,f4"), np.zeros(2, "V0")):
        with pytest.raises(ValueError, match="plain numbers"):
            describe_tensor(bad)


@pytest.mark.parametrize(
    ("dtype", "shape", "length", "text"),
    [
        ("float32", (3, -1), 4, "does not have the 4 bytes"),
        ("float32", (-1, -1), 4, "does not have"),
        ("float32", (3,), 8, "does not have"),
        ("float32", (0,), 4, "does not have"),
        ("float32", (2**40,), 0, "does not have"),  # nothing is allocated for it
        ("V2000000000", (1,), 1, "does not have"),
        ("O", (1,), 8, "no dtype of plain numbers"),
        ("i4,f4", (1,), 8, "no dtype of plain numbers"),
        ("(2,)i4", (1,), 8, "no dtype of plain numbers"),
        ("float99", (1,), 4, "float99"),
        ("i4,", (1,), 4, "dtype"),
    ],
)
def test_what_was_stored_is_not_trusted(
    dtype: str, shape: tuple[int, ...], length: int, text: str
) -> None:
    with pytest.raises(P2PStoreError, match=text):
        empty_tensor(dtype, shape, length, "numpy")


def test_a_dtype_that_numpy_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if not installed
    with pytest.raises(P2PStoreError, match=r'install ml_dtypes, or pass framework="torch"'):
        empty_tensor("torch.bfloat16", (2,), 4, "numpy")
    stand_in = ModuleType("ml_dtypes")
    stand_in.bfloat16 = np.float16  # type: ignore[attr-defined] # of the same width
    monkeypatch.setitem(sys.modules, "ml_dtypes", stand_in)
    assert empty_tensor("torch.bfloat16", (2,), 4, "numpy").nbytes == 4
    with pytest.raises(P2PStoreError, match="neither numpy nor ml_dtypes"):
        empty_tensor("torch.float99", (2,), 4, "numpy")


def test_torch_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # as if not installed
    with pytest.raises(P2PStoreError, match=r'install it, or pass framework="numpy"'):
        empty_tensor("torch.float32", (2,), 8, None)
    assert empty_tensor("torch.float32", (2,), 8, "numpy").dtype == np.float32


def test_a_registered_buffer() -> None:
    memory = bytearray(10_000)
    with RegisteredBuffer(destination_view(memory)) as registered:
        assert len(registered) == 10_000
        assert source_view(registered) is registered.view
        destination_view(registered)[5:7] = b"xy"
        assert bytes(registered[5:8]) == b"xy\0"
        with pytest.raises(TypeError, match="slices"):
            registered[3]  # type: ignore[index] # that is the point
        with pytest.raises(BufferError):
            memory.append(1)
    registered.close()
    memory.append(1)
    for use in (source_view, destination_view, len):
        with pytest.raises(ValueError, match="register it again"):
            use(registered)


def test_the_pages_of_a_registered_buffer_are_there() -> None:
    with mmap.mmap(-1, 64 * MIB) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        before = resource.getrusage(resource.RUSAGE_SELF)
        with RegisteredBuffer(destination_view(memory)[5:-5]) as registered:
            ready = resource.getrusage(resource.RUSAGE_SELF)
            np.frombuffer(registered.view, np.uint8)[:] = 7
            used = resource.getrusage(resource.RUSAGE_SELF)
    assert used.ru_minflt - ready.ru_minflt < 1000 < 64 * MIB // mmap.PAGESIZE
    assert ready.ru_minflt >= before.ru_minflt


@pytest.mark.parametrize(
    ("check", "bad", "error", "text"),
    [
        (arguments.whole_number, "2", TypeError, "n must be a whole number, not '2' (str)"),
        (arguments.whole_number, 2.0, TypeError, "n must be a whole number"),
        (arguments.whole_number, True, TypeError, "n must be a whole number"),
        (arguments.whole_number, 0, ValueError, "n must be 1 to 2,147,483,647, not 0"),
        (arguments.whole_number, 2**31, ValueError, "n must be 1 to"),
        (arguments.seconds, "1", TypeError, "n must be a number of seconds, not '1' (str)"),
        (arguments.seconds, None, TypeError, "n must be a number of seconds"),
        (arguments.seconds, False, TypeError, "n must be a number of seconds"),
        (arguments.seconds, -1, ValueError, "n must be 0 or more"),
        (arguments.seconds, float("nan"), ValueError, "n must be 0 or more"),
        (arguments.seconds, float("inf"), ValueError, "at most 1e9 seconds"),
        (arguments.milliseconds, 0, ValueError, "n must be above 0"),
        (arguments.milliseconds, "1s", TypeError, "n must be a number of seconds"),
        (arguments.flag, 1, TypeError, "n must be True or False, not 1 (int)"),
        (arguments.text, b"k", TypeError, "n must be a str, not b'k' (bytes)"),
    ],
)
def test_arguments_that_cannot_be(check: Any, bad: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        check("n", bad)


def test_arguments_that_can_be() -> None:
    assert arguments.whole_number("n", np.int16(3)) == 3
    assert arguments.seconds("n", np.float32(0.5)) == 0.5
    assert arguments.seconds("n", 0) == 0.0
    assert [arguments.milliseconds("n", each) for each in (None, 1e-9, 2)] == [0, 1, 2000]
    assert arguments.item_columns(iter([("a", b"x"), ["b", b"y"]])) == (["a", "b"], [b"x", b"y"])
    assert arguments.item_columns([]) == ([], [])
    assert arguments.key_list(key for key in "ab") == ["a", "b"]
    for bad in ("ab", b"ab", 7):
        with pytest.raises(TypeError, match="keys must be a sequence of str"):
            arguments.key_list(bad)
        with pytest.raises(TypeError, match="items must be a sequence of"):
            arguments.item_columns(bad)
    with pytest.raises(TypeError, match=r"items\[1\] must be a \(key, buffer\) pair"):
        arguments.item_columns([("a", b""), "b"])
    for wrong, error in ((3, TypeError), ("firm", ValueError)):
        with pytest.raises(error, match="pin must be 'none', 'soft' or 'hard'"):
            arguments.pin_number(wrong)
    unknowns: list[object] = ["jax", 3, []]
    for unknown in unknowns:
        with pytest.raises(ValueError, match="framework must be"):
            arguments.framework(unknown)


def test_torch_tensors() -> None:
    torch = require_torch()
    names = ("float32", "bfloat16", "bool", "int64", "complex64", "float8_e4m3fn")
    for name in names:
        tensor = torch.zeros((2, 3)).to(getattr(torch, name))
        stored, shape = describe_tensor(tensor)
        assert (stored, shape) == (f"torch.{name}", (2, 3))
        made = empty_tensor(stored, shape, tensor.nbytes, None)
        assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
        destination_view(made)[:] = source_view(tensor)
        assert torch.equal(made.view(torch.uint8), tensor.view(torch.uint8))
    for bad in (torch.zeros(2, 3).T, torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()):
        with pytest.raises(ValueError, match="call"):
            source_view(bad)
    assert len(source_view(torch.nn.Parameter(torch.zeros(3)))) == 12
    assert len(source_view(torch.zeros(0, 3))) == 0


@pytest.mark.parametrize("length", [0, 1, 2, 65_536, 65_537, 4 * MIB, 4 * MIB + 4097])
def test_fresh_bytes(length: int) -> None:
    content = random.Random(length).randbytes(length)
    view, finish = fresh_bytes(length)
    assert (len(view), view.readonly, view.format) == (length, False, "B")
    view[:] = content
    value = finish()
    assert type(value) is bytes
    assert value == content
    assert hash(value) == hash(content)


@pytest.mark.parametrize("length", [0, 1, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 3 * MIB + 7])
def test_sums_are_those_of_the_copy(length: int) -> None:
    source = random.Random(length).randbytes(length)
    target = bytearray(length)
    assert copy_and_sum(memoryview(target), memoryview(source)) == chunk_sums(target)
    assert target == source


def test_large_values_are_filled_in_pieces() -> None:
    source = random.Random(1).randbytes(9 * MIB + 5)
    target = bytearray(len(source))
    calls = 0

    class Counting(BlockingDriver):
        async def run_in_thread(self, function: Any) -> Any:
            nonlocal calls
            calls += 1
            return function()

    sums = run_blocking(fill(Counting(), memoryview(target), memoryview(source), lambda: None))
    assert (bytes(target), sums, calls) == (source, chunk_sums(source), 3)


@given(st.lists(st.integers(0, 3), max_size=6), st.integers(0, 2**32))
def test_a_gathered_value_is_its_parts_one_after_the_other(lengths: list[int], seed: int) -> None:
    rng = random.Random(seed)
    parts = [rng.randbytes(length * rng.choice((1, 1_000, 350_000))) for length in lengths]
    whole = b"".join(parts)
    value = Gathered([*parts, np.empty(0, np.float32)])
    assert (len(value), value.nbytes, value_of(value)) == (len(whole), len(whole), value)
    start = rng.randint(0, len(whole))
    end = rng.randint(start, len(whole))
    assert b"".join(value.between(start, end)) == whole[start:end]
    assert value.joined() == whole
    target = bytearray(len(whole))
    sums = run_blocking(fill(BlockingDriver(), memoryview(target), value, lambda: None))
    assert (bytes(target), sums) == (whole, chunk_sums(whole))


def test_parts_of_a_value_are_buffers() -> None:
    with pytest.raises(TypeError, match="not str"):
        Gathered([b"a", "text"])
    with pytest.raises(ValueError, match="not contiguous"):
        Gathered([np.zeros(10)[::2]])


@given(
    st.text(min_size=1, max_size=300),
    st.integers(0, 2**32),
    st.sampled_from(["", "torch.float8_e4m3fn"]),
    st.lists(st.integers(0, 2**63 - 1), max_size=20),
)
def test_the_trailer_fits_its_bound(key: str, length: int, dtype: str, shape: list[int]) -> None:
    trailer = TrailerBody(
        "n" * 255, key, bytes(8 * chunk_count(length)), 2**53, 2**31, 2, dtype, tuple(shape)
    )
    bound = trailer_bound(len(key.encode()) + 255, length, dtype, len(shape))
    assert len(encode_trailer(trailer)) <= bound
    assert bound % 64 == 0


@given(st.lists(st.integers(0, 3 * WINDOW_BYTES), max_size=40), st.integers(1, 3000))
def test_windows_cover_a_batch_within_their_limits(sizes: list[int], small: int) -> None:
    sizes = sizes + [1] * small
    cut = windows(sizes)
    assert [index for group in cut for index in group] == list(range(len(sizes)))
    for group in cut:
        assert 1 <= len(group) <= WINDOW_ITEMS
        assert len(group) == 1 or sum(sizes[index] for index in group) <= WINDOW_BYTES


def test_the_last_windows_of_large_values_are_small() -> None:
    assert [len(each) for each in windows([MIB] * 64)] == [16, 16, 16, 8, 4, 4]
    assert [len(each) for each in windows([MIB] * 64, 8 * MIB)] == [8] * 7 + [4, 4]
    assert [len(each) for each in windows([MIB] * 4)] == [4]


def test_a_batch_that_is_copied_goes_in_few_windows() -> None:
    assert [len(each) for each in windows([MIB] * 80, 32 * MIB, is_copied=True)] == [16, 32, 32]
    assert [len(each) for each in windows([MIB] * 16, 32 * MIB, is_copied=True)] == [16]
    assert [len(each) for each in windows([MIB] * 9, 4 * MIB, is_copied=True)] == [4, 4, 1]
    assert [len(each) for each in windows([1024] * 600, is_copied=True)] == [256, 256, 88]


def test_reservations_ahead_follow_the_pattern_of_puts() -> None:
    ahead = GrantedAhead(max_bytes=1000)
    a, b = (100, 64, 1), (200, 64, 1)
    assert ahead.wanted(a) == []
    assert ahead.wanted(a) == [a]
    assert ahead.granted(a, [(1, 0)]) == []
    assert ahead.take(a) == ([(1, 0)], [])
    assert ahead.take(a) == ([], [])
    assert ahead.granted(a, [(2, 0)]) == []
    assert ahead.held
    assert ahead.take(b) == ([], [2])
    assert not ahead.held
    assert ahead.wanted(b) == []
    assert ahead.granted(a, [(4, 0)]) == [4]  # asked for before the size changed
    assert not ahead.held


def test_a_batch_takes_the_rooms_of_single_puts_and_asks_for_what_lacks() -> None:
    ahead = GrantedAhead(max_bytes=1000)
    one, batch = (100, 64, 1), (100, 64, 6)
    assert ahead.wanted(one) == []
    assert ahead.wanted(batch) == [batch]
    assert ahead.granted(batch, [(number, 0) for number in range(6)]) == []
    assert ahead.take(one) == ([(0, 0)], [])
    assert ahead.wanted(batch) == [one]
    assert ahead.granted(one, [(6, 0)]) == []
    assert ahead.take(batch) == ([(number, 0) for number in range(1, 7)], [])
    assert not ahead.held


def test_reservations_ahead_have_limits() -> None:
    ahead = GrantedAhead(max_bytes=1000)
    large, small = (1001, 64, 1), (1000, 64, 1)
    assert ahead.wanted(large) == ahead.wanted(large) == []
    assert ahead.wanted(small) == []
    for number in range(4):
        assert ahead.wanted(small) == [small]
        assert ahead.granted(small, [(number, 0)]) == []
    assert ahead.wanted(small) == []
    assert ahead.drop_unused() == [0, 1, 2, 3]
    ahead.granted(small, [(9, 0)])
    assert ahead.take(large) == ([], [9])
    ahead.wanted(small)
    ahead.granted(small, [(10, 0)])  # a put came: the reservation stays until the next look
    assert ahead.drop_unused() == []
    assert ahead.drop_unused() == [10]
    batch = (300, 64, 64)
    assert ahead.wanted(batch) == []
    assert ahead.wanted(batch) == [(300, 64, 13)]  # 4,000 bytes


@pytest.mark.parametrize(
    "other",
    [
        bytearray(5),
        np.zeros(3, np.int32),
        np.zeros(3, np.int32).data,
        memoryview(bytearray(12)).cast("B", (3, 4)),
        memoryview(bytearray()),
    ],
)
def test_many_destinations_are_those_of_each(other: Any) -> None:
    plain = [memoryview(bytearray(size)) for size in (4, 0, 9)]
    assert all(view is given for view, given in zip(destination_views(plain), plain, strict=True))
    views = destination_views([*plain, other])
    assert views == [*map(destination_view, plain), destination_view(other)]
    assert {(view.format, view.ndim, view.readonly) for view in views} == {("B", 1, False)}
    assert destination_views([]) == []


@pytest.mark.parametrize("other", [memoryview(b"abc"), memoryview(bytearray(8))[::2], b"abc", 7])
def test_one_destination_that_is_none_is_said(other: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        destination_views([memoryview(bytearray(4)), other])
