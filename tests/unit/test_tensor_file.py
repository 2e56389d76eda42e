"""Tensors as a file in sealed memory, and that file as something that is published."""

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from p2pstore.checkpoint.client import checkpoint_calls as tensor_file
from p2pstore.checkpoint.client.checkpoint_calls import FILE_NAME, plan_image, write_image
from p2pstore.checkpoint.client.checkpoint_tensors import CheckpointTensors, TensorPlace
from p2pstore.checkpoint.content.pieces import Extent
from p2pstore.checkpoint.content.safetensors import DTYPES, read_header
from p2pstore.checkpoint.content.sources import SourceMemory
from p2pstore.errors import CapacityExceeded, CheckpointRefused
from p2pstore.values import numpy_dtype
from tests.optional import require_torch

TENSORS: dict[str, np.ndarray] = {
    "norm": np.arange(3, dtype=np.int8),
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "steps": np.array(7, dtype=np.int64),
    "none": np.zeros((0, 4), dtype=np.float16),
    "bias": np.arange(5, dtype=np.float32),
}


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def places_in(content: bytes) -> dict[str, TensorPlace]:
    header = read_header(content, len(content))
    assert not header.bad
    return {name: TensorPlace(*each[:2], 0, *each[2:]) for name, each in header.entries.items()}


def test_the_file_has_every_tensor_without_gaps_at_aligned_places() -> None:
    descriptor = write_image(plan_image(TENSORS))
    content = content_of(descriptor)
    os.close(descriptor)
    places = places_in(content)
    assert set(places) == set(TENSORS)
    for name, tensor in TENSORS.items():
        place = places[name]
        found = np.frombuffer(content[place.begin : place.end], numpy_dtype(DTYPES[place.dtype]))
        assert np.array_equal(found.reshape(place.shape), tensor)
        assert place.begin % tensor.itemsize == 0
    ranges = sorted((place.begin, place.end) for place in places.values())
    assert all(first[1] == second[0] for first, second in pairwise(ranges))
    assert ranges[-1][1] == len(content)


def test_the_same_tensors_lie_at_the_same_places_in_whatever_order_they_come() -> None:
    turned = dict(reversed(TENSORS.items()))
    assert plan_image(turned).header == plan_image(TENSORS).header


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        ({}, CheckpointRefused, "there is no tensor"),
        ({"x": np.zeros(2, "complex128")}, CheckpointRefused, "'x' of complex128 cannot"),
        ({1: np.zeros(2)}, CheckpointRefused, "names are text"),
        ({"__metadata__": np.zeros(2)}, CheckpointRefused, "cannot be published"),
        ({"x": [1.0]}, TypeError, "a tensor is a numpy array or a torch tensor, not list"),
        ({"x": np.zeros((4, 4))[:, ::2]}, ValueError, "not contiguous"),
    ],
)
def test_what_is_no_tensor_of_the_format_is_refused(
    tensors: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        plan_image(tensors)


def test_what_has_no_room_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "available_memory", lambda: (100, "this host"))
    with pytest.raises(CapacityExceeded, match="100 B are left of this host; publish them from"):
        write_image(plan_image(TENSORS))


def test_it_is_read_from_memory_that_cannot_change_any_more() -> None:
    descriptor = write_image(plan_image(TENSORS))
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    source = SourceMemory(descriptor, FILE_NAME)
    content = content_of(descriptor)
    os.close(descriptor)
    assert source.total_bytes == len(content)
    assert source.read([Extent(0, 8, 4), Extent(0, 0, 2)]) == content[8:12] + content[:2]
    source.close()
    source.close()


def test_memory_that_may_change_and_what_is_no_memory_is_refused() -> None:
    open_memory = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_memory, 10)
    folder = os.open("/", os.O_RDONLY)
    for descriptor in (open_memory, folder, -1):
        with pytest.raises(CheckpointRefused, match="not in sealed memory"):
            SourceMemory(descriptor, FILE_NAME)
    with pytest.raises(CheckpointRefused, match="an absolute path"):
        SourceMemory(open_memory, "/etc/passwd")
    os.close(open_memory)
    os.close(folder)


class _InMemory:
    """A version of one file, without a peer."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)

    def bytes_of(self, file: int, begin: int = 0, end: int | None = None) -> memoryview:
        return self._content[begin:end]


def test_torch_sees_the_same_memory_whatever_numpy_lacks() -> None:
    torch = require_torch()
    tensors = {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "none": torch.zeros((0, 3)),
        "one": torch.tensor(5),
    }
    descriptor = write_image(plan_image(tensors))
    content = content_of(descriptor)
    os.close(descriptor)
    places = places_in(content)
    version: Any = _InMemory(content)
    found = CheckpointTensors(version, places, ())
    for name, tensor in tensors.items():
        assert found.torch(name).dtype == tensor.dtype
        assert torch.equal(found.torch(name), tensor)
    place = places["half"]
    at = np.frombuffer(content, np.uint8).ctypes.data + place.begin
    assert found.torch("half").data_ptr() == at, "no copy"
    with pytest.raises(KeyError):
        found.torch("other")
