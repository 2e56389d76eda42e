"""The safetensors reader: good tensors are found; broken ones affect only themselves and are named."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pstore.checkpoint.client.checkpoint_tensors import CheckpointTensors, Problems, TensorsWanted
from p2pstore.checkpoint.content.manifest import FileEntry, Manifest, hash_of
from p2pstore.checkpoint.content.pieces import full_map
from p2pstore.checkpoint.content.safetensors import (
    BITS,
    DTYPES,
    MAX_HEADER_BYTES,
    BrokenFile,
    header_end,
    read_header,
    read_weight_map,
)
from p2pstore.errors import CheckpointRefused, NoSuchKey, P2PStoreError
from tests.optional import require_torch

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3000\n"
PAGE = b"<!DOCTYPE html><html><head><title>Sign in</title></head></html>"


def file_with(header: object, data: int = 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


def test_tensors_lie_behind_the_header() -> None:
    content = file_with(
        {"__metadata__": {"a": 1}, "w": entry(), "e": entry(shape=[0], data_offsets=[3, 3])}
    )
    found = read_header(content, len(content))
    assert not found.bad
    assert found.entries["w"].end == len(content)
    assert found.entries["w"][:2] == ("F32", (2, 2))
    assert found.entries["e"].begin == found.entries["e"].end


@pytest.mark.parametrize(
    ("dtype", "shape", "length"),
    [
        ("F8_E8M0", [4, 4], 16),
        ("F4", [4, 8], 16),
        ("F6_E2M3", [8], 6),
        ("INT2_OF_2031", [64], 16),
        ("Q4_K", [256], 7),
    ],
)
def test_dtypes_that_are_not_whole_bytes_or_not_known_are_kept(
    dtype: str, shape: list[int], length: int
) -> None:
    content = file_with({"w": entry(dtype=dtype, shape=shape, data_offsets=[0, length])})
    found = read_header(content, len(content))
    assert found.entries["w"][:2] == (dtype, tuple(shape))
    assert found.entries["w"].end - found.entries["w"].begin == length


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (1, "lacks its dtype"),
        (entry(data_offsets=[0, 17]), "perhaps an unfinished download"),
        (entry(data_offsets=[-16, 0]), "are invalid"),
        (entry(data_offsets=[16, 0]), "before it begins"),
        (entry(data_offsets=[0]), "lacks its dtype"),
        (entry(shape=[4, 2]), "16 bytes are not those of shape"),
        (entry(shape=[-2, -2]), "are invalid"),
        (entry(shape=["x"]), "are invalid"),
        (entry(shape=[2.0, 2.0]), "are invalid"),
        (entry(shape=[True, 4]), "are invalid"),
        (entry(shape=[1 << 70]), "are invalid"),
        (entry(shape=[1] * 65), "are invalid"),
        (entry(shape="22"), "are invalid"),
        (entry(dtype=7), "are invalid"),
        (entry(dtype="F4", shape=[3]), "are not those"),
        (entry(data_offsets=["a", "b"]), "are invalid"),
    ],
)
def test_a_tensor_that_is_described_wrongly_harms_no_other(fields: object, why: str) -> None:
    good = entry(data_offsets=[16, 32])
    content = file_with({"bad": fields, "good": good}, 32)
    if why.startswith("perhaps"):
        content = file_with({"bad": entry(data_offsets=[16, 33]), "good": entry()}, 32)
    found = read_header(content, len(content))
    assert set(found.entries) == {"good"}
    assert why in found.bad["bad"]


def test_tensors_that_overlap_are_not_trusted_and_holes_do_no_harm() -> None:
    header = {
        "a": entry(),
        "b": entry(shape=[1], data_offsets=[8, 12]),
        "c": entry(data_offsets=[100, 116]),
        "none": entry(shape=[0], data_offsets=[4, 4]),
    }
    content = file_with(header, 200)
    found = read_header(content, len(content))
    assert set(found.entries) == {"c", "none"}
    assert found.bad == {
        "a": "its bytes are those of 'b' as well",
        "b": "its bytes are those of 'a' as well",
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty: perhaps an unfinished download"),
        (b"short", "it has 5 bytes only"),
        (POINTER, "a git-LFS pointer, not the file itself: run `git lfs pull`"),
        (PAGE, "an HTML page"),
        (b"\n <html>" + bytes(100), "an HTML page"),
        (bytes(4096), "it begins with zeros: perhaps an unfinished download"),
        ((1 << 60).to_bytes(8, "little") + bytes(100), "does not begin like a safetensors file"),
        (
            (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b'{"a"',
            "would have 100,000,001 bytes; 100,000,000",
        ),
        (file_with({"w": entry()})[:30], "it ends inside its header: perhaps an unfinished"),
        (file_with(b"nope"), "not JSON of the format"),
        (file_with(b"\xff\xfe{}"), "not JSON of the format"),
        (file_with(b'{"w": {"shape": [NaN]}}'), "NaN is no number"),
        (file_with(b'{"w": 1, "w": 2}'), "'w' is there twice"),
        (file_with(b'{"w": {"dtype": "F32", "dtype": "I32"}}'), "'dtype' is there twice"),
        (file_with(b"[" * 200_000), "not JSON of the format"),
        (file_with([]), "not a JSON object"),
    ],
)
def test_a_file_that_is_none_is_named_with_its_likely_cause(content: bytes, why: str) -> None:
    with pytest.raises(BrokenFile, match=re.escape(why)):
        read_header(content, len(content))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (POINTER, "git-LFS"),
        (PAGE, "HTML"),
        (b"[]", "no index of tensors"),
        (b'{"weight_map": 3}', "no index of tensors"),
        (b'{"weight_map": {"a": 3}}', "no index of tensors"),
        (b"[" * 200_000, "no index of tensors"),
        (b'{"weight_map": {"a": "model-1', "no index of tensors"),
    ],
)
def test_an_index_that_is_none_is_named_with_its_likely_cause(content: bytes, why: str) -> None:
    with pytest.raises(BrokenFile, match=why):
        read_weight_map(content)


def test_all_dtypes_with_a_name_have_a_length() -> None:
    assert set(DTYPES) < set(BITS)


GOOD = file_with({"w": entry(), "v": entry(dtype="F4", shape=[4, 8], data_offsets=[16, 32])}, 32)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=64), st.integers(0, len(GOOD)), st.integers(0, 64))
def test_whatever_the_bytes_a_file_is_read_or_is_broken(new: bytes, at: int, cut: int) -> None:
    content = GOOD[:at] + new + GOOD[at + cut :]
    try:
        found = read_header(content, len(content))
    except BrokenFile:
        return
    assert header_end(content, len(content)) <= len(content)
    for each in found.entries.values():
        assert 0 <= each.begin <= each.end <= len(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(json_values, json_values, json_values)
def test_whatever_a_header_says_only_that_tensor_is_refused(a: Any, b: Any, c: Any) -> None:
    header = {"w": {"dtype": a, "shape": b, "data_offsets": c}, "x": a, "good": entry()}
    content = file_with(json.dumps(header).encode())
    try:
        found = read_header(content, len(content))
    except BrokenFile:
        assert b"NaN" in content or b"Infinity" in content
        return
    assert "good" in found.entries or "good" in found.bad


# --- a version of some files --------------------------------------------------------------------


class InMemory:
    """A version whose files are all there, without a peer."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = [files[path] for path in sorted(files)]
        entries = [FileEntry(path, len(files[path]), 0o644, hash_of(b"")) for path in sorted(files)]
        self.manifest = Manifest(1, "m", 1 << 20, entries, b"")

    def bytes_of(self, file: int, begin: int = 0, end: int | None = None) -> memoryview:
        return memoryview(self._files[file])[begin:end]

    def close(self) -> None: ...


def tensors_of(
    files: Mapping[str, bytes], names: Sequence[str] = (), others: Sequence[str] = ()
) -> CheckpointTensors:
    version: Any = InMemory(files)
    wanted = TensorsWanted(names, others)
    if names or others:
        while wanted.look(version):
            assert wanted.pieces <= full_map(version.manifest.layout.count)
    else:
        wanted.take_all(version)
    wanted.check(version.manifest)
    return CheckpointTensors(version, wanted.places, wanted.files, wanted.problems)


MIXED = {
    "config.json": b"{}",
    "good.safetensors": file_with(
        {"good": entry(), "layers.0.q_proj": entry(data_offsets=[16, 32])}, 32
    ),
    "mx.safetensors": file_with(
        {
            "scales": entry(dtype="F8_E8M0", shape=[4, 4]),
            "blocks": entry(dtype="F4", shape=[4, 8], data_offsets=[16, 32]),
            "later": entry(dtype="F99", shape=[3], data_offsets=[32, 37]),
        },
        37,
    ),
    "pointer.safetensors": POINTER,
    "empty.safetensors": b"",
    "cut.safetensors": file_with({"cut": entry()})[:-3],
}


def test_one_broken_file_or_unknown_dtype_harms_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = tensors_of(MIXED)
    assert set(found) == {"good", "layers.0.q_proj", "scales", "blocks", "later"}
    assert np.array_equal(found["good"], np.zeros((2, 2), np.float32))
    assert found.dtype("blocks") == "F4"
    assert found.shape("blocks") == (4, 8)
    assert found.raw("later").nbytes == 5
    assert set(found.broken) == {"pointer.safetensors", "empty.safetensors"}
    assert "pointer.safetensors is left out: it is a git-LFS pointer" in caplog.text
    assert "cut is left out: cut.safetensors: its file has" in caplog.text
    for name in ("blocks", "later"):
        with pytest.raises(P2PStoreError, match=rf"has no such dtype here .*raw\('{name}'\)"):
            found[name]
    with pytest.raises(CheckpointRefused, match=r"tensor 'cut': cut.safetensors: .*unfinished"):
        found["cut"]
    with pytest.raises(NoSuchKey, match=r"nearest: 'good'; broken, and left out: .*git-LFS"):
        found["goood"]
    assert "cut" not in found
    assert found.get("other") is None


def test_names_and_patterns_that_match_nothing_are_refused_and_the_nearest_named() -> None:
    assert set(tensors_of(MIXED, ["good", "layers.*"])) == {"good", "layers.0.q_proj"}
    assert bytes(tensors_of(MIXED, (), ["config.json"]).file("config.json")) == b"{}"
    for name, near in (
        ("layers.0.q_prj", r"nearest: 'layers.0.q_proj'"),
        ("*q_proj.weight*", r"nearest: 'layers.0.q_proj'"),
        ("GOOD", "nearest: 'good'"),
        ("zzz", "there are 'blocks', 'cut', 'good' and 3 more; broken"),
    ):
        with pytest.raises(NoSuchKey, match=near):
            tensors_of(MIXED, ["good", name])
    with pytest.raises(CheckpointRefused, match=r"tensor 'cut': cut.safetensors"):
        tensors_of(MIXED, ["cut"])
    with pytest.raises(NoSuchKey, match=r"no file of checkpoint 'm' matches 'confg.json'; nearest"):
        tensors_of(MIXED, ["good"], ["confg.json"])
    with pytest.raises(CheckpointRefused, match=r"pointer.safetensors is not in the .*git-LFS"):
        tensors_of({"pointer.safetensors": POINTER})


def test_an_index_says_what_is_where_and_what_is_missing() -> None:
    weight_map = {"good": "good.safetensors", "gone": "model-2.safetensors"}
    index = json.dumps({"weight_map": weight_map}).encode()
    files = {**MIXED, "model.safetensors.index.json": index}
    found = tensors_of(files, ["good"])
    assert set(found) == {"good"}
    with pytest.raises(CheckpointRefused, match=r"it is in model-2.safetensors, and there is none"):
        tensors_of(files, ["gone"])
    with pytest.raises(CheckpointRefused, match=r"model-2.safetensors, and there is none"):
        tensors_of(files)["gone"]
    # An index that is none harms only itself.
    broken = tensors_of({**MIXED, "model.safetensors.index.json": PAGE}, ["good"])
    assert set(broken) == {"good"}
    assert "an HTML page" in broken.broken["model.safetensors.index.json"]
    # Of two files with one tensor, the one that the index names counts.
    twice = {
        "a.safetensors": file_with({"w": entry()}),
        "b.safetensors": file_with({"w": entry(dtype="I32")}),
        "m.safetensors.index.json": json.dumps({"weight_map": {"w": "b.safetensors"}}).encode(),
    }
    assert tensors_of(twice).dtype("w") == "I32"


def test_an_index_may_name_tensors_that_its_files_lack() -> None:
    weight_map = {
        **{"w": "./a.safetensors", "lost": "a.safetensors"},
        **{"layers.0": "pointer.safetensors", "layers.1": "./a.safetensors"},
    }
    files = {
        "sub/a.safetensors": file_with({"w": entry(), "layers.1": entry(data_offsets=[16, 32])}, 32),
        "sub/pointer.safetensors": POINTER,
        "sub/m.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
    }
    assert set(tensors_of(files, ["w"])) == {"w"}
    assert not tensors_of(files, ["w"]).broken  # the pointer was not looked at
    with pytest.raises(CheckpointRefused, match=r"'lost': by its index it is in sub/a.safetensors"):
        tensors_of(files, ["lost"])
    for names in (["layers.*"], []):
        found = tensors_of(files, names)
        assert "layers.1" in found
        with pytest.raises(CheckpointRefused, match=r"in sub/pointer.safetensors: .*git-LFS"):
            found["layers.0"]


def test_names_may_have_brackets() -> None:
    files = {"m.safetensors": file_with({"h[0].w": entry(), "h0.w": entry(data_offsets=[16, 32])}, 32)}
    assert set(tensors_of(files, ["h[0].w"])) == {"h[0].w", "h0.w"}
    assert set(tensors_of({"m.safetensors": file_with({"h[0].w": entry()})}, ["h[0].w"])) == {"h[0].w"}


@pytest.mark.parametrize("dtype", ["U4", "U1", "S4", "V8", "M8", "f4", "O", "T", "i4,i4", "float99"])
def test_a_dtype_is_none_that_numpy_or_torch_only_happen_to_call_so(dtype: str) -> None:
    found = tensors_of({"m.safetensors": file_with({"w": entry(dtype=dtype)})})
    assert found.raw("w").nbytes == 16
    with pytest.raises(P2PStoreError, match=r"numpy has no such dtype here .*raw\('w'\)"):
        found["w"]


def test_a_shape_that_no_array_can_have_is_said() -> None:
    big = entry(shape=[0, 1 << 62], data_offsets=[0, 0])
    found = tensors_of({"m.safetensors": file_with({"w": big, "good": entry()})})
    assert found["good"].shape == (2, 2)
    with pytest.raises(P2PStoreError, match=r"cannot be an array of numpy: .*raw\('w'\)"):
        found["w"]


def test_torch_has_what_it_knows_of() -> None:
    torch = require_torch()
    found = tensors_of(MIXED)
    kind = getattr(torch, "float8_e8m0fnu", None)
    if kind is not None:
        assert found.torch("scales").dtype == kind
        assert tuple(found.torch("scales").shape) == (4, 4)
    with pytest.raises(P2PStoreError, match=r"dtype F4 and shape \(4, 8\), and torch has no such"):
        found.torch("blocks")


def test_problems_say_which_files_are_broken_and_no_more_than_some() -> None:
    problems = Problems({f"{number}.safetensors": "broken" for number in range(20)}, {})
    assert problems.said().endswith("7.safetensors: broken and 12 more files")
