"""Calls of Mooncake's Python API, one after the other, and what came of them.

The same file runs against Mooncake's own package and against this project's, each in an interpreter that has it: so it
imports nothing else but numpy, and torch where there is one. `scripts/compare_with_mooncake` compares the outcomes, and
tests/contract compares ours with those recorded in tests/contract/mooncake_outcomes.json.
"""

import ctypes
import gc
import importlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Case = Callable[["Calls", Any], Any]
CASES: dict[str, Case] = {}
DIFFERENT: dict[tuple[str, int], tuple[Any, str]] = {
    ("put_other_buffers", 5): (-600, "not contiguous: Mooncake stores the wrong bytes"),
    ("put_other_buffers", 8): (
        "\0\0\1\0\2\0\3\0\4\0",
        "Mooncake stores as many bytes as there are elements",
    ),
    ("put_other_buffers", 9): ("", "was not stored"),
    ("batches", 2): ([], "Mooncake answers one value about no keys"),
    ("buffers", 5): (True, "the memory is shared with others"),
    ("several_buffers_an_object", 6): ([30], "more room than needed is no mistake"),
    ("too_large", 0): (-200, "there is no local buffer that it could be too large for"),
    ("remove_after_reading", 0): (0, "reads leave no lease behind"),
    ("remove_after_reading", 1): (-704, "was removed"),
    ("remove_by_regex", 5): (1, "patterns are Python's"),
    ("replicas", 5): (True, "a segment has one name"),
    ("tensors", 16): ([], "a scalar stays one"),
    ("tensors_spread", 9): ([None], "Mooncake answers a shard along another dimension"),
    ("tensors_spread", 10): ([None], "Mooncake answers a shard of another size"),
    ("tensors_spread", 20): ([[8, 6, 0.0]], "all of its shards are there"),
    ("tensors_spread_wrongly", 15): (-600, "what is no tensor is a code, as in put_tensor"),
}
"""Case and number of the result -> what it is here, and why."""

SEGMENT_BYTES = 256 * 1024 * 1024
BUFFER_BYTES = 128 * 1024 * 1024


def case(function: Case) -> Case:
    """Have this function's results compared. Each uses keys of its own, which begin with its name."""
    CASES[function.__name__] = function
    return function


class Calls:
    """The means of a case: a store that is set up, and the module that it comes from."""

    def __init__(self, module: Any, store: Any, setup: Callable[[Any], int]) -> None:
        self.module = module
        self.store = store
        self.setup = setup
        self._kept: list[Any] = []

    def memory(self, content: bytes | int, *, registered: bool = True) -> tuple[int, Any]:
        """The address of new memory, and the array that it is."""
        size = content if isinstance(content, int) else len(content)
        array = np.zeros(size, np.uint8)
        if isinstance(content, bytes):
            array[:] = np.frombuffer(content, np.uint8)
        self._kept.append(array)
        address = int(array.ctypes.data)
        if registered:
            assert self.store.register_buffer(address, size) == 0
        return address, array

    def config(self, **fields: Any) -> Any:
        config = self.module.ReplicateConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        return config


def outcome(action: Callable[[], Any]) -> Any:
    """The action's result, as JSON has it; or the kind of error."""
    try:
        return plain(action())
    except Exception as error:
        return f"raises {type(error).__name__}"


def plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return data.decode("latin-1") if len(data) <= 64 else f"{len(data)} bytes, {sum(data)}"
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"a {type(value).__name__}"


# --- objects ---------------------------------------------------------------------------------


@case
def put_get(c: Calls, s: Any) -> Any:
    return [
        s.put("put_get", b"first"),
        s.get("put_get"),
        s.put("put_get", b"second, longer"),
        s.get("put_get"),
        s.get("put_get nobody"),
        s.get_size("put_get"),
        s.get_size("put_get nobody"),
        s.is_exist("put_get"),
        s.is_exist("put_get nobody"),
        s.batch_is_exist(["put_get", "put_get nobody", "put_get"]),
        s.batch_is_exist([]),
    ]


@case
def put_other_buffers(c: Calls, s: Any) -> Any:
    return [
        outcome(lambda: s.put("put_other_buffers 1", bytearray(b"bytearray"))),
        outcome(lambda: s.put("put_other_buffers 2", memoryview(b"memoryview"))),
        outcome(lambda: s.put("put_other_buffers 3", np.arange(5, dtype=np.uint16))),
        outcome(lambda: s.put("put_other_buffers 4", "text")),
        outcome(lambda: s.put(5, b"x")),
        outcome(lambda: s.put("put_other_buffers 6", np.arange(10, dtype=np.uint8)[::2])),
        *(s.get(f"put_other_buffers {number}") for number in (1, 2, 3, 6)),
    ]


@case
def put_nothing(c: Calls, s: Any) -> Any:
    address, _ = c.memory(b"x")
    return [
        s.put("put_nothing", b""),
        s.is_exist("put_nothing"),
        s.put_from("put_nothing from", address, 0),
        s.is_exist("put_nothing from"),
        s.put_parts("put_nothing parts"),
        s.put_parts("put_nothing parts", b"", b""),
        s.is_exist("put_nothing parts"),
        s.put_parts("put_nothing some", b"", b"a"),
        s.put_batch([], []),
        s.put_batch(["put_nothing batch", "put_nothing batch 2"], [b"", b"ok"]),
        s.batch_is_exist(["put_nothing batch", "put_nothing batch 2"]),
        s.upsert("put_nothing upsert", b""),
        s.batch_put_from(["put_nothing b"], [address], [0]),
    ]


@case
def no_key(c: Calls, s: Any) -> Any:
    return [s.put("", b"value"), s.get(""), s.is_exist(""), s.get_size(""), s.remove("")]


@case
def long_key(c: Calls, s: Any) -> Any:
    key = "long_key " + "k" * 900
    return [s.put(key, b"value"), s.get(key), s.remove(key, True)]


@case
def odd_keys(c: Calls, s: Any) -> Any:
    keys = ["odd_keys/@:%\x01", "odd_keys é中", "odd_keys \\ .. /"]
    return [s.put_batch(keys, [b"1", b"2", b"3"]), s.get_batch(keys), s.batch_is_exist(keys)]


@case
def parts(c: Calls, s: Any) -> Any:
    return [
        s.put_parts("parts", b"ab", bytearray(b"cd"), memoryview(b"ef")),
        s.get("parts"),
        s.put_parts("parts", b"other"),
        s.get("parts"),
        s.upsert_parts("parts", b"new", b"er"),
        s.get("parts"),
        outcome(lambda: s.put_parts("parts 2", b"a", "text")),
        outcome(lambda: s.put_parts("parts 3", b"a", config=c.config())),
    ]


@case
def batches(c: Calls, s: Any) -> Any:
    return [
        s.put_batch(["batches 1", "batches 2"], [b"1", b"22"]),
        s.get_batch(["batches 1", "batches nobody", "batches 2"]),
        s.get_batch([]),
        s.put_batch(["batches 2", "batches 3"], [b"other", b"333"]),
        s.get_batch(["batches 2", "batches 3"]),
        outcome(lambda: s.put_batch(["batches 4"], [b"1", b"2"])),
        outcome(lambda: s.put_batch(["batches 5", "batches 6"], [b"1"])),
        s.batch_is_exist(["batches 4", "batches 5", "batches 6"]),
        s.upsert_batch(["batches 1", "batches 7"], [b"new", b"7"]),
        s.get_batch(["batches 1", "batches 7"]),
        outcome(lambda: s.upsert_batch([], [])),
    ]


@case
def same_key_twice_in_a_batch(c: Calls, s: Any) -> Any:
    key = "same_key_twice_in_a_batch"
    return [s.put_batch([key, key], [b"one", b"two"]), len(s.get(key)), s.get_batch([key, key])]


@case
def upsert(c: Calls, s: Any) -> Any:
    address, _ = c.memory(b"from memory")
    return [
        s.upsert("upsert", b"first"),
        s.get("upsert"),
        s.upsert("upsert", b"second, longer"),
        s.get("upsert"),
        s.upsert_from("upsert", address, 11),
        s.get("upsert"),
        s.batch_upsert_from(["upsert", "upsert 2"], [address, address], [4, 6]),
        s.get_batch(["upsert", "upsert 2"]),
    ]


@case
def buffers(c: Calls, s: Any) -> Any:
    s.put("buffers", b"abcdef")
    handle = s.get_buffer("buffers")
    view = memoryview(handle)
    read = ctypes.string_at(handle.ptr(), handle.size())
    many = s.batch_get_buffer(["buffers", "buffers nobody"])
    result = [
        len(handle),
        handle.size(),
        bytes(view),
        view.format,
        view.itemsize,
        view.readonly,
        read,
        np.asarray(handle).tolist(),
        s.get_buffer("buffers nobody"),
        [None if each is None else bytes(each) for each in many],
        s.batch_get_buffer([]),
    ]
    del view, handle, many
    gc.collect()
    return result


# --- memory of the caller --------------------------------------------------------------------


@case
def registering(c: Calls, s: Any) -> Any:
    address, array = c.memory(8192, registered=False)
    return [
        s.register_buffer(address, 8192),
        s.register_buffer(address, 8192),
        s.register_buffer(address, 4096),
        s.register_buffer(address + 4096, 4096),
        s.unregister_buffer(address),
        s.unregister_buffer(address),
        s.unregister_buffer(12345),
        outcome(lambda: s.register_buffer(0, 4096)),
        outcome(lambda: s.register_buffer(address, 0)),
        outcome(lambda: s.register_buffer(-1, 10)),
        array.sum().item(),
    ]


@case
def from_and_into(c: Calls, s: Any) -> Any:
    source, _ = c.memory(bytes(range(256)) * 16)
    room, target = c.memory(8192)
    return [
        s.put_from("from_and_into", source, 4096),
        s.get_into("from_and_into", room, 4096),
        target[:4096].sum().item(),
        target[4096:].sum().item(),
        s.get_into("from_and_into", room, 8192),
        s.get_into("from_and_into", room, 4095),
        s.get_into("from_and_into nobody", room, 8192),
        s.get_into("from_and_into", room, 0),
        s.put_from("from_and_into", room, 4096),
        s.put_from("from_and_into part", source + 10, 20),
        s.get("from_and_into part"),
    ]


@case
def unregistered_memory(c: Calls, s: Any) -> Any:
    source, _ = c.memory(b"not registered", registered=False)
    room, target = c.memory(14, registered=False)
    return [
        s.put_from("unregistered_memory", source, 14),
        s.is_exist("unregistered_memory"),
        s.put("unregistered_memory 2", b"not registered"),
        s.get_into("unregistered_memory 2", room, 14),
        target.tobytes(),
        s.batch_put_from(["unregistered_memory 3"], [source], [14]),
        s.batch_get_into(["unregistered_memory 2"], [room], [14]),
    ]


@case
def batches_from_and_into(c: Calls, s: Any) -> Any:
    source, _ = c.memory(bytes(range(200)))
    room, target = c.memory(400)
    keys = ["batches_from_and_into 1", "batches_from_and_into 2"]
    return [
        s.batch_put_from(keys, [source, source + 100], [100, 50]),
        s.batch_get_into([*keys, "batches_from_and_into 3"], [room, room + 100, room], [100, 100, 100]),
        target[:100].tolist() == list(range(100)),
        target[100:150].tolist() == list(range(100, 150)),
        target[150:].sum().item(),
        s.batch_put_from(keys, [source, source], [10, 10]),
        [s.get_size(key) for key in keys],
        s.batch_get_into(keys, [room], [100]),
        s.batch_get_into(keys, [room, room], [100]),
        s.batch_put_from(keys, [source], [100]),
        s.batch_get_into([], [], []),
        s.batch_put_from([], [], []),
        s.batch_get_into(keys, [room, room + 100], [10, 100]),
        s.batch_put_from([keys[0], "batches_from_and_into 4"], [source, source], [5, 6], c.config()),
        s.get_size("batches_from_and_into 4"),
    ]


@case
def several_buffers_an_object(c: Calls, s: Any) -> Any:
    source, _ = c.memory(bytes(range(200)))
    room, target = c.memory(400)
    keys = ["several_buffers_an_object 1", "several_buffers_an_object 2"]
    return [
        s.batch_put_from_multi_buffers(keys, [[source, source + 100], [source + 50]], [[10, 20], [30]]),
        s.get(keys[0]),
        s.batch_get_into_multi_buffers(
            [*keys, "several_buffers_an_object 3"],
            [[room, room + 200], [room + 100], [room]],
            [[15, 15], [30], [10]],
        ),
        target[:15].tolist(),
        target[200:215].tolist(),
        s.batch_get_into_multi_buffers(keys[:1], [[room, room + 100]], [[10, 10]]),
        s.batch_get_into_multi_buffers(keys[:1], [[room, room + 100]], [[10, 40]]),
        s.batch_get_into_multi_buffers(keys, [[room]], [[30]]),
        s.batch_put_from_multi_buffers(keys, [[source]], [[10]]),
        outcome(lambda: s.batch_put_from_multi_buffers(["several x"], [[source, source]], [[10]])),
        outcome(lambda: s.batch_put_from_multi_buffers(["several y"], [[]], [[]])),
        s.is_exist("several y"),
        s.batch_put_from_multi_buffers(
            keys[:1], [[source]], [[10]], c.config(prefer_alloc_in_same_node=True)
        ),
        s.batch_put_from_multi_buffers(
            ["several z"], [[source]], [[10]], c.config(prefer_alloc_in_same_node=True)
        ),
        s.get("several z"),
    ]


@case
def with_metadata(c: Calls, s: Any) -> Any:
    source, _ = c.memory(b"value of it")
    about, _ = c.memory(b"about it")
    return [
        s.put_from_with_metadata("with_metadata", source, about, 11, 8),
        s.get("with_metadata"),
        s.put_from_with_metadata("with_metadata", source, about, 3, 8),
        s.get("with_metadata"),
        s.put_from_with_metadata("with_metadata 2", source, about, 0, 8),
        s.put_from_with_metadata("with_metadata 3", source, about, 11, 0),
        s.get_batch(["with_metadata 2", "with_metadata 3"]),
    ]


@case
def ranges(c: Calls, s: Any) -> Any:
    s.put("ranges", bytes(range(100)))
    s.put("ranges 2", bytes(range(100, 200)))
    room, target = c.memory(200)
    other, second = c.memory(100)
    return [
        s.get_into_ranges(
            [room], [["ranges", "ranges 2"]], [[[0, 50], [100]]], [[[10, 20], [5]]], [[[5, 6], [7]]]
        ),
        target[:5].tolist(),
        target[50:56].tolist(),
        target[100:107].tolist(),
        s.get_into_ranges(
            [room, other],
            [["ranges"], ["ranges nobody", "ranges 2"]],
            [[[0]], [[0], [10]]],
            [[[0]], [[0], [0]]],
            [[[3]], [[4], [5]]],
        ),
        second[10:15].tolist(),
        s.get_into_ranges([room], [["ranges"]], [[[0]]], [[[90]]], [[[20]]]),
        s.get_into_ranges([room], [["ranges"]], [[[190]]], [[[0]]], [[[20]]]),
        s.get_into_ranges([room], [["ranges"]], [[[0]]], [[[0, 1]]], [[[20]]]),
        s.get_into_ranges([room], [["ranges"], ["ranges"]], [[[0]]], [[[0]]], [[[20]]]),
        s.get_into_ranges([], [], [], [], []),
        s.get_into_ranges([room], [["ranges"]], [[[0]]], [[[0]]], [[[0]]]),
    ]


@case
def large(c: Calls, s: Any) -> Any:
    size = 40 * 1024 * 1024 + 12345
    content = np.resize(np.arange(251, dtype=np.uint8), size)
    source, _ = c.memory(content.tobytes())
    room, target = c.memory(size)
    return [
        s.put_from("large", source, size),
        s.get_size("large"),
        s.get_into("large", room, size),
        bool((target == content).all()),
        len(s.get("large")),
        s.remove("large", True),
    ]


@case
def too_large(c: Calls, s: Any) -> Any:
    size = SEGMENT_BYTES + 64 * 1024 * 1024
    source, _ = c.memory(size)
    value = bytes(size)
    result = [s.put("too_large", value), s.put_from("too_large from", source, size)]
    s.unregister_buffer(source)
    return result


# --- removing --------------------------------------------------------------------------------


@case
def remove(c: Calls, s: Any) -> Any:
    s.put_batch([f"remove {number}" for number in range(6)], [b"value"] * 6)
    return [
        s.remove("remove 0"),
        s.get("remove 0"),
        s.remove("remove 0"),
        s.is_exist("remove 0"),
        s.remove("remove nobody"),
        s.remove("remove nobody", True),
        s.remove("remove 1", force=True),
        s.batch_remove(["remove 2", "remove nobody", "remove 3"], True),
        s.batch_remove([]),
        s.batch_is_exist([f"remove {number}" for number in range(6)]),
        s.put("remove 0", b"again"),
        s.get("remove 0"),
    ]


@case
def remove_after_reading(c: Calls, s: Any) -> Any:
    s.put("remove_after_reading", b"value")
    s.get("remove_after_reading")
    return [s.remove("remove_after_reading"), s.remove("remove_after_reading", True)]


@case
def remove_by_regex(c: Calls, s: Any) -> Any:
    s.put_batch([f"remove_by_regex {n}" for n in ("a1", "a2", "b1", "c")], [b"value"] * 4)
    return [
        s.remove_by_regex("^remove_by_regex a"),
        s.remove_by_regex("by_regex b[0-9]$", force=True),
        s.remove_by_regex("remove_by_regex nobody"),
        outcome(lambda: s.remove_by_regex("remove_by_regex [")),
        s.batch_is_exist([f"remove_by_regex {n}" for n in ("a1", "a2", "b1", "c")]),
        s.remove_by_regex(r"^remove_by_\w+ \u0063$"),
    ]


# --- how and where ---------------------------------------------------------------------------


@case
def configs(c: Calls, s: Any) -> Any:
    m = c.module
    new = m.ReplicateConfig()
    fields = {
        name: plain(getattr(new, name))
        for name in (
            *("replica_num", "nof_replica_num", "dfs_replica_num", "soft_pin_ttl_ms", "with_hard_pin"),
            *("preferred_segment", "preferred_segments", "preferred_nof_segments"),
            *("prefer_alloc_in_same_node", "group_ids"),
        )
    }
    return [
        fields,
        str(new.soft_pin_action),
        str(new.data_type),
        outcome(lambda: setattr(new, "soft_pin_ttl_ms", -1)),
        outcome(lambda: setattr(new, "soft_pin_ttl_ms", 2**64)),
        outcome(lambda: setattr(new, "soft_pin_ttl_ms", 1.5)),
        outcome(lambda: setattr(new, "replica_num", -1)),
        outcome(lambda: setattr(new, "replica_num", "2")),
        outcome(lambda: setattr(new, "nonsense", 1)),
        s.put("configs replicas", b"value", c.config(replica_num=2)),
        s.put("configs none", b"value", c.config(replica_num=0)),
        s.put("configs hard", b"value", c.config(with_hard_pin=True)),
        s.put("configs soft", b"value", c.config(soft_pin_action=m.SoftPinAction.ENABLE)),
        s.put(
            "configs soft 2",
            b"value",
            c.config(soft_pin_action=m.SoftPinAction.ENABLE, soft_pin_ttl_ms=5000),
        ),
        s.put("configs soft 3", b"value", c.config(soft_pin_ttl_ms=5000)),
        s.put(
            "configs soft 4",
            b"value",
            c.config(soft_pin_action=m.SoftPinAction.DISABLE, soft_pin_ttl_ms=5000),
        ),
        s.put("configs node", b"value", c.config(prefer_alloc_in_same_node=True)),
        s.put("configs segment", b"value", c.config(preferred_segment="nobody:1")),
        s.put("configs segments", b"value", c.config(preferred_segments=["nobody:1", "nobody:2"])),
        s.put("configs own", b"value", c.config(preferred_segment=s.get_hostname())),
        s.put("configs group", b"value", c.config(group_ids=["g"])),
        s.put("configs type", b"value", c.config(data_type=m.ObjectDataType.WEIGHT)),
        outcome(lambda: s.put("configs wrong", b"value", "config")),
        outcome(lambda: s.put("configs none given", b"value", None)),
        s.batch_is_exist(["configs replicas", "configs none", "configs hard", "configs soft 3"]),
        s.put_batch(["configs b"], [b"value"], c.config(replica_num=3)),
        outcome(lambda: s.put_parts("configs p", b"value", config=c.config(replica_num=2))),
    ]


@case
def enums(c: Calls, s: Any) -> Any:
    m = c.module
    return [
        {
            name: [[str(each), each.name, int(each)] for each in getattr(m, name).__members__.values()]
            for name in ("SoftPinAction", "ObjectDataType", "ReplicaStatus", "TaskType", "TaskStatus")
        }
    ]


@case
def replicas(c: Calls, s: Any) -> Any:
    m = c.module
    s.put("replicas", b"x" * 5000)
    (described,) = s.get_replica_desc("replicas")
    memory = described.get_memory_descriptor().buffer_descriptor
    many = s.batch_get_replica_desc(["replicas", "replicas nobody"])
    return [
        described.status == m.ReplicaStatus.COMPLETE,
        described.is_memory_replica(),
        described.is_disk_replica(),
        described.is_local_disk_replica(),
        memory.size,
        memory.transport_endpoint == s.get_hostname(),
        type(memory.buffer_address).__name__,
        outcome(lambda: described.get_disk_descriptor()),
        s.get_replica_desc("replicas nobody"),
        {key: len(each) for key, each in many.items()},
        s.batch_get_replica_desc([]),
    ]


@case
def clear_replicas(c: Calls, s: Any) -> Any:
    keys = ["clear_replicas 1", "clear_replicas 2"]
    s.put_batch(keys, [b"value"] * 2)
    return [
        sorted(s.batch_replica_clear([*keys, "clear_replicas nobody"])),
        s.batch_is_exist(keys),
        s.batch_replica_clear([]),
        s.put_batch(keys, [b"value"] * 2),
        s.batch_replica_clear(keys, "nobody:1"),
        s.batch_is_exist(keys),
    ]


@case
def tasks(c: Calls, s: Any) -> Any:
    s.put("tasks", b"value")
    own = s.get_hostname()
    return [
        s.create_copy_task("tasks nobody", ["nobody:1"])[1],
        s.create_copy_task("tasks", ["nobody:1"])[1],
        s.create_copy_task("tasks", [])[1],
        s.create_move_task("tasks", own, "nobody:1")[1],
        s.create_move_task("tasks", "nobody:1", own)[1],
        s.create_move_task("tasks", own, own)[1],
        s.create_move_task("tasks nobody", own, own)[1],
        outcome(lambda: s.query_task((1, 2))),
    ]


@case
def sessions(c: Calls, s: Any) -> Any:
    s.put("sessions", bytes(range(100)))
    room, target = c.memory(200)
    source, _ = c.memory(bytes(range(100, 200)))
    keys = ["sessions new 1", "sessions new 2"]
    return [
        s.batch_get_session_start(["sessions", "sessions nobody"]),
        s.batch_get_into_multi_buffer_ranges(["sessions"], [[room, room + 100]], [[10, 20]], [[5, 50]]),
        target[:10].tolist(),
        target[100:120].tolist(),
        s.batch_get_into_multi_buffer_ranges(["sessions"], [[room]], [[10]], [[95]]),
        s.batch_get_into_multi_buffer_ranges(["sessions nobody"], [[room]], [[10]], [[0]]),
        s.batch_get_session_end(["sessions"]),
        s.batch_get_into_multi_buffer_ranges(["sessions"], [[room]], [[10]], [[5]]),
        s.batch_put_session_start(keys, [40, 50]),
        s.is_exist(keys[0]),
        s.batch_put_from_multi_buffer_ranges(keys, [[source], [source]], [[20], [50]], [[20], [0]]),
        s.batch_put_from_multi_buffer_ranges(keys[:1], [[source]], [[20]], [[0]]),
        s.batch_put_from_multi_buffer_ranges(keys[:1], [[source]], [[20]], [[30]]),
        s.batch_put_session_end(keys[:1]),
        s.batch_put_session_revoke(keys[1:]),
        s.batch_is_exist(keys),
        s.get_size(keys[0]),
        s.batch_put_session_end(keys),
        s.batch_put_session_revoke(keys),
        s.batch_put_session_start(["sessions"], [10]),
        s.batch_put_from_multi_buffer_ranges(["sessions"], [[source]], [[10]], [[0]]),
        s.batch_put_session_end(["sessions"]),
        s.get_size("sessions"),
    ]


@case
def segments(c: Calls, s: Any) -> Any:
    mounted = s.allocate_and_mount_segment(16 * 1024 * 1024)
    ids = mounted.get("segment_ids", [])
    return [
        mounted["ret"],
        sorted(mounted),
        [type(each).__name__ for each in ids],
        mounted["allocated_size"],
        s.unmount_and_free_segment(ids),
        s.unmount_and_free_segment(ids),
        outcome(lambda: s.unmount_segment(["no uuid"])),
        s.unmount_segment([]),
        outcome(lambda: s.mount_segment("/no/such/file", 16 * 1024 * 1024)["ret"]),
        outcome(lambda: s.mount_segment("/no/such/file", 0)["ret"]),
        outcome(lambda: s.allocate_and_mount_segment(0)["ret"]),
        outcome(lambda: s.unmount_local_disk_segment()),
        s.get_offload_rpc_read_count(),
    ]


@case
def buffer_pools(c: Calls, s: Any) -> Any:
    module = c.module

    def refusal(action: Callable[[], Any]) -> Any:
        try:
            return plain(action())
        except RuntimeError as error:
            return str(error)

    refused = [
        refusal(lambda: module.BufferPool(None)),
        refusal(lambda: module.BufferPool(module.MooncakeDistributedStore())),
        refusal(lambda: module.BufferPool(s, 2**20, alignment=12345)),
        refusal(lambda: module.BufferPool(s, 2**20, min_size_class=0)),
    ]
    pool = module.BufferPool(s, 2**20, min_size_class=4096, alignment=4096, max_regions=1)
    lease = pool.acquire(1234)
    view = lease.buffer
    view[:4] = b"abcd"
    found = [
        *(lease.size, len(view), view.format, view.readonly, lease.ptr % 64),
        s.put_from("buffer_pools", lease.ptr, 4),
        s.get("buffer_pools"),
        refusal(lease.release),
        refusal(lambda: pool.acquire(1, block=False)),
        refusal(lambda: pool.acquire(1, timeout=0.02)),
        refusal(lambda: pool.acquire(1, timeout=-1)),
        refusal(lambda: pool.acquire(2**40)),
        outcome(lambda: pool.acquire(-1)),
        refusal(pool.close),
    ]
    del view
    gc.collect()
    ended = [lease.release(), lease.release(), refusal(lambda: lease.ptr), lease.size]
    ended.append(outcome(lambda: lease.buffer))
    with pool.buffer(0) as other:
        ended += [other.size, len(other.buffer)]
    lost = pool.acquire(2**20)
    del lost
    gc.collect()
    ended += [pool.close(), pool.close(), refusal(lambda: pool.acquire(1))]
    return [*refused, *found, *ended]


# --- tensors ---------------------------------------------------------------------------------


def _torch() -> Any:
    return importlib.import_module("torch")


def kinds() -> list[Any]:
    """The kinds of numbers that tensors of both may have."""
    torch = _torch()
    return [
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8),
        *(torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    ]


def same(left: Any, right: Any) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    return bool(
        left is not None
        and left.dtype == right.dtype
        and left.shape == right.shape
        and _torch().equal(left, right)
    )


def shape(tensor: Any) -> Any:
    return None if tensor is None else list(tensor.shape)


@case
def tensors(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    others = [kind for kind in kinds() if kind != tensor.dtype]
    made = [torch.ones(5).to(kind) for kind in others]
    return [
        s.put_tensor("tensors", tensor),
        same(s.get_tensor("tensors"), tensor),
        s.put_tensor("tensors", tensor + 1),
        same(s.get_tensor("tensors"), tensor),
        s.upsert_tensor("tensors", tensor + 1),
        same(s.get_tensor("tensors"), tensor + 1),
        s.get_tensor("tensors nobody"),
        s.batch_put_tensor([f"tensors {kind}" for kind in others], made),
        [
            got is not None and got.dtype == kind and got.shape == (5,)
            for got, kind in zip(
                s.batch_get_tensor([f"tensors {kind}" for kind in others]), others, strict=True
            )
        ],
        [
            None if each is None else tuple(each.shape)
            for each in s.batch_get_tensor(["tensors", "tensors nobody"])
        ],
        s.get_size("tensors"),
        outcome(lambda: s.put_tensor("tensors wrong", b"bytes")),
        outcome(lambda: s.put_tensor("tensors list", [1, 2])),
        s.put_tensor("tensors t", tensor.transpose(0, 2)),
        same(s.get_tensor("tensors t"), tensor.transpose(0, 2)),
        s.put_tensor("tensors scalar", torch.tensor(5.0)),
        outcome(lambda: tuple(s.get_tensor("tensors scalar").shape)),
        outcome(lambda: s.put_tensor("tensors empty", torch.zeros(0, 3))),
        outcome(lambda: tuple(s.get_tensor("tensors empty").shape)),
        outcome(lambda: s.put_tensor("tensors complex", torch.zeros(2, dtype=torch.complex64))),
        outcome(lambda: s.put_tensor("tensors deep", torch.zeros([1] * 9))),
        s.put("tensors bytes", b"these are not a tensor"),
        outcome(lambda: s.get_tensor("tensors bytes")),
        s.put("tensors bytes 2", b"x" * 400),
        outcome(lambda: s.get_tensor("tensors bytes 2")),
    ]


@case
def tensors_published(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(6)
    return [
        s.pub_tensor("tensors_published", tensor, c.config(replica_num=1)),
        same(s.get_tensor("tensors_published"), tensor),
        s.upsert_pub_tensor("tensors_published", tensor + 1, c.config()),
        same(s.get_tensor("tensors_published"), tensor + 1),
        s.batch_pub_tensor(["tensors_published 2", "tensors_published 3"], [tensor, tensor], c.config()),
        s.batch_upsert_tensor(["tensors_published 2"], [tensor * 2]),
        s.batch_upsert_pub_tensor(["tensors_published 3"], [tensor * 3], c.config()),
        [
            each.sum().item()
            for each in s.batch_get_tensor(["tensors_published 2", "tensors_published 3"])
        ],
        outcome(lambda: s.batch_put_tensor(["tensors_published 4"], [tensor, tensor])),
        outcome(lambda: s.batch_put_tensor([], [])),
        outcome(lambda: s.batch_get_tensor([])),
        outcome(lambda: s.pub_tensor("tensors_published 5", tensor, c.config(soft_pin_ttl_ms=5))),
    ]


@case
def tensors_in_memory(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(24, dtype=torch.int16).reshape(4, 6)
    room, target = c.memory(4096)
    s.put_tensor("tensors_in_memory", tensor)
    got = s.get_tensor_into("tensors_in_memory", room, 4096)
    header = target[:304].copy()
    result = [
        same(got, tensor),
        s.get_size("tensors_in_memory"),
        bytes(target[304:352]) == tensor.numpy().tobytes(),
        header[:48].tolist(),
        header.sum().item(),
        s.put_tensor_from("tensors_in_memory 2", room, 352),
        same(s.get_tensor("tensors_in_memory 2"), tensor),
        s.upsert_tensor_from("tensors_in_memory 2", room, 352),
        s.get_tensor_into("tensors_in_memory", room, 100),
        s.get_tensor_into("tensors_in_memory nobody", room, 4096),
        s.put_tensor_from("tensors_in_memory 3", room, 351),
        s.put_tensor_from("tensors_in_memory 4", room, 353),
        s.put_tensor_from("tensors_in_memory 5", room, 100),
        s.batch_put_tensor_from(
            ["tensors_in_memory 6", "tensors_in_memory 7"], [room, room], [352, 352]
        ),
        s.batch_upsert_tensor_from(["tensors_in_memory 6"], [room], [352]),
        [
            None if each is None else tuple(each.shape)
            for each in s.batch_get_tensor_into(
                ["tensors_in_memory 6", "tensors_in_memory nobody"], [room, room + 2048], [2048, 2048]
            )
        ],
        outcome(lambda: s.batch_get_tensor_into(["tensors_in_memory 6"], [room, room], [2048])),
    ]
    del got
    return result


@case
def tensor_headers(c: Calls, s: Any) -> Any:
    torch = _torch()
    room, target = c.memory(4096)
    headers = []
    for number, kind in enumerate(kinds()):
        s.put_tensor(f"tensor_headers {number}", torch.ones(3, 2).to(kind))
        s.get_into(f"tensor_headers {number}", room, 4096)
        headers.append([int(each) for each in target[:304].view(np.int32)])
    return headers


@case
def tensors_in_parallel(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    key = "tensors_in_parallel"
    halves = torch.chunk(tensor, 2, 0)
    room, _ = c.memory(4096)
    whole, _ = c.memory(4096)
    return [
        s.put_tensor_with_tp(key, tensor, 0, 2, 0),
        s.batch_is_exist([key, f"{key}_tp_0", f"{key}_tp_1", f"{key}_tp_2"]),
        [same(s.get_tensor_with_tp(key, rank, 2, 0), half) for rank, half in enumerate(halves)],
        same(s.get_tensor(f"{key}_tp_1"), halves[1]),
        outcome(lambda: s.get_tensor_with_tp(key, 2, 2, 0)),
        outcome(lambda: s.get_tensor_with_tp(key, 0, 1, 0)),
        s.put_tensor_with_tp(f"{key} columns", tensor, 0, 4, 1),
        [shape(s.get_tensor_with_tp(f"{key} columns", rank, 4, 1)) for rank in range(3)],
        outcome(lambda: s.get_tensor_with_tp(f"{key} columns", 3, 4, 1)),
        s.put_tensor_with_tp(f"{key} one", tensor),
        same(s.get_tensor_with_tp(f"{key} one"), tensor),
        s.is_exist(f"{key} one_tp_0"),
        s.batch_put_tensor_with_tp([f"{key} b1", f"{key} b2"], [tensor, tensor + 1], 0, 2, 0),
        [shape(each) for each in s.batch_get_tensor_with_tp([f"{key} b1", f"{key} b2"], 1, 2)],
        s.pub_tensor_with_tp(f"{key} pub", tensor, c.config(), 0, 2, 1),
        shape(s.get_tensor_with_tp(f"{key} pub", 1, 2, 1)),
        s.batch_pub_tensor_with_tp([f"{key} pub2"], [tensor], c.config(), 0, 2, 1),
        shape(s.get_tensor_with_tp_into(f"{key} pub2", room, 4096, 1, 2, 1)),
        [shape(each) for each in s.batch_get_tensor_with_tp_into([f"{key} pub2"], [room], [4096], 0, 2)],
        s.put_tensor(f"{key} whole", tensor),
        s.get_tensor_into(f"{key} whole", whole, 4096) is not None,
        s.put_tensor_with_tp_from(f"{key} from", whole, 304 + 192, 0, 2, 0),
        same(s.get_tensor_with_tp(f"{key} from", 1, 2, 0), halves[1]),
        s.batch_put_tensor_with_tp_from([f"{key} from2"], [whole], [304 + 192], 0, 2, 1),
        shape(s.get_tensor_with_tp(f"{key} from2", 1, 2, 1)),
        outcome(lambda: s.put_tensor_with_tp(f"{key} bad", tensor, 0, 2, 5)),
        outcome(lambda: s.put_tensor_with_tp(f"{key} many", tensor, 0, 16, 0)),
        outcome(lambda: s.put_tensor_with_tp(f"{key} bad2", tensor, 3, 2, 0)),
        outcome(lambda: s.get_tensor_with_tp(f"{key} whole", 1, 2, 0)),
    ]


def axis(c: Calls, kind: str, rank: int, size: int, split: Any = None, number: Any = None) -> Any:
    made = c.module.ParallelAxis()
    made.kind, made.rank, made.size, made.split_dim = kind, rank, size, split
    if kind == "ep":
        made.expert_id = number
    if kind == "pp":
        made.stage_id = number
    return made


def spread(c: Calls, *axes: Any) -> Any:
    made = c.module.TensorParallelism()
    made.axes = list(axes)
    return made


def cut(c: Calls, rank: int, size: int, split: int) -> Any:
    return spread(c, axis(c, "tp", rank, size, split))


def target(c: Calls, mode: str, parallelism: Any = None) -> Any:
    made = c.module.ReadTarget()
    made.mode, made.parallelism = mode, parallelism
    return made


class Partition:
    """A writer's partition, to Mooncake: anything with these."""

    def __init__(self, rank: int, size: int, split_dim: int) -> None:
        self.rank, self.size, self.split_dim = rank, size, split_dim


def read(c: Calls, key: str, *wanted: Any) -> Any:
    """Shape and first element of what is read, for each target."""
    got = [c.store.get_tensor_with_parallelism(key, each) for each in wanted]
    return [None if each is None else [*each.shape, each.flatten()[0].item()] for each in got]


@case
def tensors_spread(c: Calls, s: Any) -> Any:
    """Shards of one axis: each rank puts its own."""
    torch = _torch()
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    rows = torch.chunk(tensor, 2, 0)
    columns = torch.chunk(tensor, 3, 1)
    key = "tensors_spread"
    asked = [(1, 2, 0), (0, 4, 0), (3, 4, 0), (7, 8, 0), (0, 1, 0)]
    return [
        s.put_tensor_with_parallelism(f"{key} 1", rows[0], cut(c, 0, 2, 0)),
        read(c, f"{key} 1", target(c, "shard", cut(c, 0, 2, 0)), target(c, "full"), None),
        read(c, f"{key} 1", *(target(c, "full", cut(c, *each)) for each in asked[:3])),
        s.put_tensor_with_parallelism(f"{key} 1", rows[1], cut(c, 1, 2, 0)),
        [s.get(f"{key} 1{each}") for each in ("_tp_0", "_tp_1", "__parallelism_manifest", "")],
        read(c, f"{key} 1", *(target(c, "shard", cut(c, *each)) for each in asked)),
        read(c, f"{key} 1", *(target(c, "full", cut(c, *each)) for each in asked)),
        read(c, f"{key} 1", target(c, "shard"), target(c, "full"), target(c, "as_stored"), None),
        read(c, f"{key} 1", target(c, "full", cut(c, 0, 3, 0)), target(c, "full", cut(c, 0, 2, 1))),
        read(c, f"{key} 1", target(c, "shard", cut(c, 0, 2, 1))),
        read(c, f"{key} 1", target(c, "shard", cut(c, 0, 3, 0))),
        s.put_tensor_with_parallelism(f"{key} 1", rows[0] + 1, cut(c, 0, 2, 0)),
        s.upsert_tensor_with_parallelism(f"{key} 1", rows[1] + 9, cut(c, 1, 2, 0)),
        read(c, f"{key} 1", target(c, "full", cut(c, 0, 2, 0)), target(c, "shard", cut(c, 1, 2, 0))),
        [
            s.put_tensor_with_parallelism(f"{key} 2", each, cut(c, rank, 3, 1))
            for rank, each in enumerate(columns)
        ],
        same(s.get_tensor_with_parallelism(f"{key} 2", target(c, "full", cut(c, 0, 3, 1))), tensor),
        same(
            s.get_tensor_with_parallelism(f"{key} 2", target(c, "shard", cut(c, 1, 2, 1))), tensor[:, 3:]
        ),
        s.put_tensor_with_tp(f"{key} 3", tensor, 0, 2, 0),
        read(c, f"{key} 3", *(target(c, "shard", cut(c, *each)) for each in asked[:4])),
        read(c, f"{key} 3", target(c, "full", cut(c, 0, 2, 0)), target(c, "full")),
        read(c, f"{key} 3", target(c, "full", cut(c, 0, 1, 0))),
        s.put_tensor(f"{key} 4", tensor),
        read(c, f"{key} 4", None, target(c, "full"), target(c, "Full"), target(c, "shard")),
        read(c, f"{key} 4", *(target(c, "shard", cut(c, *each)) for each in asked)),
        read(c, f"{key} 4", *(target(c, "full", cut(c, *each)) for each in asked)),
        read(c, f"{key} 4", target(c, "as_stored", cut(c, 0, 1, 0)), target(c, "full", spread(c))),
        outcome(lambda: read(c, f"{key} 4", target(c, "nonsense"))),
        outcome(lambda: read(c, f"{key} 4", object())),
        s.put_tensor_with_parallelism(f"{key} 5", tensor),
        read(c, f"{key} 5", None),
    ]


@case
def tensors_spread_wrongly(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)

    def put(*axes: Any, value: Any = tensor) -> Any:
        return outcome(
            lambda: s.put_tensor_with_parallelism("tensors_spread_wrongly", value, spread(c, *axes))
        )

    pp = axis(c, "pp", 0, 2, None, 7)
    config = c.config(soft_pin_ttl_ms=5)
    return [
        *(put(axis(c, "tp", *each)) for each in [(0, 2), (2, 2, 0), (0, 0, 0), (-1, 2, 0)]),
        *(put(axis(c, "tp", *each)) for each in [(0, 2, 5), (0, 2, -1)]),
        *(put(axis(c, "dp", 0, 2, 0)), put(axis(c, "xx", 0, 2)), put(axis(c, "pp", 0, 2))),
        *(put(axis(c, "ep", 0, 2)), put(axis(c, "ep", 0, 2, 0, 3)), put()),
        put(axis(c, "tp", 0, 2, 0), axis(c, "tp", 0, 2, 1)),
        put(axis(c, "tp", 0, 5, 0), pp),
        put(axis(c, "tp", 0, 1, 0), value=torch.tensor(5.0)),
        put(axis(c, "tp", 0, 2, 0), value=b"bytes"),
        s.put_tensor_with_parallelism("tensors_spread_wrongly", tensor, object()),
        s.put_tensor_with_parallelism("tensors_spread_wrongly", tensor, cut(c, 0, 2, 0), config),
        s.is_exist("tensors_spread_wrongly_tp_0"),
    ]


@case
def tensors_spread_along_several_axes(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    key = "tensors_spread_along_several_axes"

    def along(rank: int, size: int, copy: int = 1) -> Any:
        return spread(
            c, *(axis(c, "pp", 0, 2, None, 7), axis(c, "tp", rank, size, 0), axis(c, "dp", copy, 2))
        )

    names = [f"__dp_1of2__tp_{rank}of2_sd0__pp_0of2_sid7" for rank in range(2)]
    asked = [(1, 2), (1, 4), (0, 1), (1, 2, 0)]
    return [
        [s.put_tensor_with_parallelism(key, tensor, along(rank, 2)) for rank in range(2)],
        [s.get(key + each) for each in (*names, "__parallelism_manifest")],
        read(c, key, *(target(c, "shard", along(*each)) for each in asked)),
        read(c, key, *(target(c, "full", along(*each)) for each in asked)),
        read(c, key, target(c, "shard", cut(c, 1, 2, 0)), target(c, "full", cut(c, 0, 2, 0))),
        s.put_tensor_with_parallelism(f"{key} d", tensor, spread(c, axis(c, "DP", 0, 2))),
        s.put_tensor_with_parallelism(f"{key} e", tensor, spread(c, axis(c, "ep", 1, 2, None, 3))),
        [s.get(f"{key} {each}") for each in ("d__dp_0of2", "e__ep_1of2_eid3")],
        read(c, f"{key} d", target(c, "shard", spread(c, axis(c, "dp", 0, 2)))),
        read(c, f"{key} d", target(c, "shard", spread(c, axis(c, "dp", 1, 2)))),
        read(c, f"{key} d", target(c, "full", spread(c, axis(c, "dp", 0, 2))), target(c, "full")),
    ]


@case
def tensors_of_writers(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    key = "tensors_of_writers"

    def put(rank: int, size: int, split: int, name: str = key) -> Any:
        return s.put_tensor_with_parallelism(name, tensor, writer_partition=Partition(rank, size, split))

    names = ["__writer_0of2_sd0", "__writer_1of2_sd0", "__writer_manifest"]
    return [
        put(0, 2, 0),
        read(c, key, target(c, "full")),
        put(1, 2, 0),
        [s.get(key + each) for each in names],
        read(c, key, target(c, "full"), target(c, "shard"), None),
        read(c, key, *(target(c, "shard", cut(c, *e)) for e in [(1, 2, 0), (1, 4, 0), (0, 1, 0)])),
        read(c, key, *(target(c, "full", cut(c, *e)) for e in [(1, 2, 0), (1, 4, 0), (0, 1, 0)])),
        [put(*each, f"{key} wrong") for each in [(2, 2, 0), (0, 2, 7), (0, 3, 0), (0, 0, 0)]],
        s.put_tensor_with_parallelism(f"{key} wrong", tensor, writer_partition=5),
        s.put_tensor_with_parallelism(
            f"{key} wrong", tensor, cut(c, 0, 2, 0), writer_partition=Partition(0, 2, 0)
        ),
        s.upsert_tensor_with_parallelism(key, tensor + 5, writer_partition=Partition(0, 2, 0)),
        read(c, key, target(c, "full")),
        s.put_tensor(key, tensor + 100),
        read(c, key, target(c, "full"), None, target(c, "shard", cut(c, 0, 1, 0))),
    ]


@case
def tensors_spread_in_batches(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    key = "tensors_spread_in_batches"
    keys = [f"{key} {number}" for number in range(4)]
    both = [Partition(0, 2, 1), Partition(1, 2, 1)]
    room, memory = c.memory(4096)
    source, _ = c.memory(4096)
    put = s.batch_put_tensor_with_parallelism
    put_from = s.batch_put_tensor_with_parallelism_from
    s.put_tensor(f"{key} whole", tensor)
    size = s.get_into(f"{key} whole", source, 4096)

    def shapes(tensors: list[Any]) -> Any:
        return [shape(each) for each in tensors]

    return [
        put(keys[:2], [tensor, tensor], [cut(c, 0, 2, 0), spread(c, axis(c, "dp", 0, 2))]),
        put(keys[2:], [tensor, tensor], [None, cut(c, 0, 3, 0)]),
        [put(keys[:2], [tensor] * 2, [None]), put(keys[:2], [tensor]), put([], [])],
        put(keys[:2], [tensor] * 2, [None] * 2, writer_partitions=both),
        put([f"{key} w"] * 2, [tensor] * 2, writer_partitions=both),
        put([f"{key} plain"], [tensor]),
        shapes(
            s.batch_get_tensor_with_parallelism(
                [f"{key} w", keys[1], f"{key} plain", "nobody"],
                [target(c, "full"), target(c, "shard", spread(c, axis(c, "dp", 0, 2))), None, None],
            )
        ),
        shapes(s.batch_get_tensor_with_parallelism([f"{key} plain", "nobody"])),
        shapes(s.batch_get_tensor_with_parallelism([f"{key} plain", "nobody"], [None])),
        shapes(s.batch_get_tensor_with_parallelism([])),
        s.put_tensor_with_parallelism_from(f"{key} f", source, size, cut(c, 0, 2, 1)),
        [s.get(f"{key} f{each}") for each in ("_tp_0", "_tp_1")],
        s.is_exist(f"{key} f__parallelism_manifest"),
        s.put_tensor_with_parallelism_from(f"{key} g", source, size),
        s.put_tensor_with_parallelism_from(f"{key} g", source, size - 1, cut(c, 0, 2, 1)),
        s.put_tensor_with_parallelism_from(
            f"{key} g", source, size, writer_partition=Partition(1, 2, 0)
        ),
        s.batch_is_exist([f"{key} g", f"{key} g__writer_1of2_sd0", f"{key} g__writer_manifest"]),
        put_from(keys[:2], [source] * 2, [size] * 2, [cut(c, 0, 3, 1), None]),
        s.is_exist(f"{keys[0]}_tp_2"),
        put_from(keys[:2], [source] * 2, [size]),
        s.batch_upsert_tensor_with_parallelism_from(keys[:1], [source], [size]),
        s.upsert_tensor_with_parallelism_from(f"{key} f", source, size, cut(c, 0, 2, 1)),
        s.batch_upsert_tensor_with_parallelism(keys[:1], [tensor], [cut(c, 1, 2, 0)]),
        shape(
            s.get_tensor_with_parallelism_into(
                f"{key} f", room, 4096, target(c, "full", cut(c, 0, 2, 1))
            )
        ),
        memory[:496].tobytes(),
        shape(
            s.get_tensor_with_parallelism_into(
                f"{key} f", room, 4096, target(c, "shard", cut(c, 1, 3, 1))
            )
        ),
        memory[:368].tobytes(),
        s.get_tensor_with_parallelism_into(f"{key} f", room, 400, target(c, "full", cut(c, 0, 2, 1))),
        shapes(
            s.batch_get_tensor_with_parallelism_into(
                [f"{key} plain", "nobody", f"{key} w"],
                [room, room, room + 1000],
                [1000, 1000, 1000],
                [None, None, target(c, "full")],
            )
        ),
        shapes(s.batch_get_tensor_with_parallelism_into([f"{key} plain"], [room], [1000, 10])),
    ]


@case
def safetensors(c: Calls, s: Any) -> Any:
    torch = _torch()
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    s.put_tensor("safetensors", tensor)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "one.safetensors")
        saved = s.save_tensor_to_safetensor("safetensors", path)
        written = Path(path).read_bytes()
        header = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
        names = {name: entry for name, entry in header.items() if name != "__metadata__"}
        missing = s.save_tensor_to_safetensor("safetensors nobody", path + "2")
        exists = os.path.exists(path + "2")
        s.remove("safetensors", True)
        loaded = s.load_tensor_from_safetensor("safetensors", path)
        other = s.load_tensor_from_safetensor("safetensors other", path)
        return [
            saved,
            names,
            missing,
            exists,
            same(loaded, tensor),
            same(s.get_tensor("safetensors"), tensor),
            same(other, tensor),
            same(s.get_tensor("safetensors other"), tensor),
            outcome(lambda: s.load_tensor_from_safetensor("safetensors", path + "3")),
        ]


# --- beginning and end -----------------------------------------------------------------------


@case
def several_stores(c: Calls, s: Any) -> Any:
    other = c.module.MooncakeDistributedStore()
    done = c.setup(other)
    return [
        done,
        s.put("several_stores", b"value"),
        other.get("several_stores"),
        other.close(),
        other.close(),
        other.get("several_stores"),
        other.health_check(),
    ]


@case
def health(c: Calls, s: Any) -> Any:
    return [s.health_check(), c.module.MooncakeDistributedStore().health_check()]


@case
def hostnames(c: Calls, s: Any) -> Any:
    return bool(re.fullmatch(r"[\w.\-]+:\d+", s.get_hostname()))


@case
def closed(c: Calls, s: Any) -> Any:
    """Only what does not end Mooncake's process."""
    store = c.module.MooncakeDistributedStore()
    assert c.setup(store) == 0
    room = np.zeros(100, np.uint8)
    return [
        store.put("closed", b"value"),
        store.close(),
        store.get("closed"),
        store.get_batch(["closed"]),
        store.put_from("closed", int(room.ctypes.data), 100),
        store.upsert("closed", b"value"),
        store.health_check(),
        store.close(),
    ]


@case
def zz_remove_all(c: Calls, s: Any) -> Any:
    """Last: nothing of the others is left."""
    s.remove_all(True)
    s.put_batch(["zz 1", "zz 2", "zz 3"], [b"1", b"2", b"3"])
    return [s.remove_all(True), s.remove_all(), s.batch_is_exist(["zz 1", "zz 2"])]


def run(module: Any, setup: Callable[[Any], int], names: list[str] | None = None) -> dict[str, Any]:
    """The outcome of every case (or the named ones), with one store."""
    store = module.MooncakeDistributedStore()
    assert setup(store) == 0
    calls = Calls(module, store, setup)
    try:
        return {
            name: outcome(lambda: CASES[name](calls, calls.store))  # noqa: B023 - called at once
            for name in (names or CASES)
        }
    finally:
        store.close()


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Every difference, with its reason where there is one; a line each."""
    lines = []
    for name, wanted in theirs.items():
        got = ours.get(name)
        pairs = [(0, wanted, got)]
        if isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
            pairs = [(number, *pair) for number, pair in enumerate(zip(wanted, got, strict=True))]
        for number, one, other in pairs:
            if one != other:
                value, why = DIFFERENT.get((name, number), (None, ""))
                reason = why if why and other == value else "NOT EXPECTED"
                lines.append(f"{name} {number}: theirs {one!r:.60}, ours {other!r:.60}: {reason}")
    return lines


def main() -> None:
    """`mooncake_calls.py MODULE MASTER FILE [CASE...]`: run them, and write their outcomes as JSON.
    `mooncake_calls.py compare FILE FILE`: Mooncake's and ours; the status is 1 when they differ unexpectedly."""
    if sys.argv[1] == "compare":
        lines = compare(*(json.loads(Path(each).read_text()) for each in sys.argv[2:4]))
        print("\n".join(lines) or "no difference")
        sys.exit(any(line.endswith("NOT EXPECTED") for line in lines))
    module = importlib.import_module(sys.argv[1])

    def setup(store: Any) -> int:
        code: int = store.setup(
            "127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, BUFFER_BYTES, "tcp", "", sys.argv[2]
        )
        return code

    outcomes = run(module, setup, sys.argv[4:])
    Path(sys.argv[3]).write_text(json.dumps(outcomes, indent=1, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
