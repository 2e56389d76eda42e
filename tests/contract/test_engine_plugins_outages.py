"""Plug-ins whose peer hangs, is away or comes late: schedulers go on, and nothing is said falsely."""

import asyncio
import functools
import importlib.util
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pstore.integrations import engine_client as engine_client
from p2pstore.integrations import retention
from p2pstore.local.local_connection import LocalConnection
from tests.contract.test_engine_plugins import (
    LMCACHE,
    VLLM,
    ChunkKey,
    CpuBackend,
    MemoryObj,
    finished,
    plugin,
    stand_in,
    vllm_spec,
)
from tests.contract.worlds import peer_process
from tests.waiting import eventually

KEYS = [bytes([number]) * 32 + b"\0\0\0\0" for number in range(4)]


def impatient(monkeypatch: pytest.MonkeyPatch, name: str, modules: dict[str, dict[str, Any]]) -> Any:
    """A plug-in's module, whose client waits for a second."""
    stand_in(monkeypatch, modules)
    module = plugin(monkeypatch, name)
    short = functools.partial(engine_client.EngineClient, timeout=1.0)
    monkeypatch.setattr(module, "EngineClient", short)
    return module


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = impatient(monkeypatch, "vllm", VLLM)
    monkeypatch.setattr(module, "kv_cache_utils", SimpleNamespace(NONE_HASH=b"seed"), raising=False)
    return module


@pytest.fixture
def askers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads that made requests of a peer."""
    names: set[str] = set()
    frame = LocalConnection._frame

    def noted(self: LocalConnection, *arguments: Any) -> Any:
        names.add(threading.current_thread().name)
        return frame(self, *arguments)

    monkeypatch.setattr(LocalConnection, "_frame", noted)
    return names


def tier_of(module: Any, socket: str, *, spec: Any = None, **options: Any) -> Any:
    memory = np.arange(6 * 5000, dtype=np.uint8).reshape(6, 5000)
    options = {"weight_version": "outages@v1", "socket": socket, **options}
    return module.P2PTier(spec or vllm_spec(), memory.data, "P2PTier", **options)


def store(module: Any, tier: Any, keys: list[bytes]) -> bool:
    job = module.TransferJob(1, keys, np.arange(len(keys)), False, None)
    tier.submit_store(job)
    return bool(finished(tier).success)


def test_a_scheduler_is_answered_while_the_peer_hangs(
    tmp_path: Path, vllm: Any, askers: set[str]
) -> None:
    hit, miss, retry = (vllm.LookupResult[name] for name in ("HIT", "MISS", "RETRY"))
    with peer_process(tmp_path, "hung") as peer:
        tier = tier_of(vllm, peer.socket)
        tier.on_new_request(None)
        assert store(vllm, tier, KEYS[:1])
        assert [tier.lookup(key, None) for key in KEYS[:2]] == [hit, miss]
        peer.process.send_signal(signal.SIGSTOP)
        # Its table is trusted for a moment more. Then a question is open, and then late.
        eventually(lambda: tier.lookup(KEYS[2], None) is retry)
        eventually(lambda: tier.lookup(KEYS[2], None) is miss)
        assert tier.lookup(KEYS[3], None) is miss, "nothing else waits"
        eventually(lambda: not tier._client.answers)
        assert not store(vllm, tier, KEYS[1:2])
        assert tier.lookup(KEYS[0], None) is hit, "its memory can be read"
        tier._rows[5] = 0
        tier.submit_load(vllm.TransferJob(2, KEYS[:2], np.array([5, 4]), True, None))
        assert finished(tier).successful_keys == (KEYS[0],)
        assert np.array_equal(tier._rows[5], tier._rows[0])
        assert tier.get_stats().reduce() == {vllm.PEER_ANSWERS: 0}
        peer.process.send_signal(signal.SIGCONT)
        eventually(lambda: tier._client.answers)
        assert tier.get_stats().reduce() == {vllm.PEER_ANSWERS: 1}
        eventually(lambda: store(vllm, tier, KEYS[1:2]))
        assert tier.get_stats() is None
        tier.shutdown()
    assert threading.current_thread().name not in askers
    assert askers


def test_an_engine_starts_without_a_peer_and_uses_it_when_it_comes(
    tmp_path: Path, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier = tier_of(vllm, str(tmp_path / "late.sock"))
    tier.on_new_request(None)
    assert tier.lookup(KEYS[0], None) is vllm.LookupResult.MISS
    assert not store(vllm, tier, KEYS[:1])
    assert len([each for each in caplog.records if "nothing is found" in each.message]) == 1
    with peer_process(tmp_path, "late"):
        eventually(lambda: store(vllm, tier, KEYS[:1]))
        assert tier.lookup(KEYS[0], None) is vllm.LookupResult.HIT
        tier.shutdown()
    assert "the peer answers" in caplog.text


def test_engines_that_can_share_nothing_are_told_at_the_first_request_and_no_others(
    tmp_path: Path, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with peer_process(tmp_path, "told") as peer:
        ends = threading.Semaphore(0)

        def ask(seed: bytes, **options: Any) -> None:
            tier = tier_of(vllm, peer.socket, **options)
            vllm.kv_cache_utils.NONE_HASH = seed  # vLLM chooses it after it made the tier
            for _ in range(2):
                tier.on_new_request(None)
            tier._client.run_in_worker(lambda _: ends.release())
            assert ends.acquire(timeout=60)
            tier.shutdown()
            del vllm.kv_cache_utils.NONE_HASH

        del vllm.kv_cache_utils.NONE_HASH
        ask(b"seed", spec=vllm_spec(name="/models/of/one/model"))
        ask(b"seed", spec=vllm_spec(name="/cache/models--org--model/snapshots/0f1e"))
        ask(b"seed", model="model", spec=vllm_spec(name="another"), locality="REMOTE")
        assert not caplog.records
        ask(b"other", spec=vllm_spec())
        ask(b"seed", spec=vllm_spec(tp_size=2, name="another"))
    hashes, layout = (each.message for each in caplog.records)
    assert "PYTHONHASHSEED" in hashes
    assert "model_name ('another' here, 'model' there)" in layout
    assert "tp_size (2 here, 1 there)" in layout
    assert "PYTHONHASHSEED" not in layout


def test_after_its_end_a_tier_holds_nothing_of_the_engine_s_memory(
    tmp_path: Path, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with peer_process(tmp_path, "end") as peer:
        view = np.zeros((6, 5000), np.uint8).data
        options = {"weight_version": "end@v1", "socket": peer.socket, "thread": 3}
        tier = vllm.P2PTier(vllm_spec(), view, "P2PTier", **options)
        assert "did you mean 'threads'?" in caplog.text
        assert store(vllm, tier, KEYS)
        tier.shutdown()
        view.release()
        assert set(tier.config_info()) == set(vllm.P2PTier.config_info_keys({}))
        assert set(vllm.P2PTier.build_metric_definitions({})) == {vllm.PEER_ANSWERS}


def test_a_request_waits_for_blocks_that_another_engine_has_just_computed(
    tmp_path: Path, vllm: Any
) -> None:
    hit, miss, retry = (vllm.LookupResult[name] for name in ("HIT", "MISS", "RETRY"))

    def request(name: str, **parameters: Any) -> Any:
        return SimpleNamespace(req_id=name, kv_transfer_params=parameters or None)

    with peer_process(tmp_path, "wait") as peer:
        tier = tier_of(vllm, peer.socket)
        plain = request("plain")
        patient = request("patient", p2pstore_wait_seconds=600)
        hasty = request("hasty", p2pstore_wait_seconds=0.01)
        for each in (plain, patient, hasty):
            tier.on_new_request(each)
        assert [tier.lookup(KEYS[0], each) for each in (plain, patient)] == [miss, retry]
        eventually(lambda: tier.lookup(KEYS[0], hasty) is miss)
        assert store(vllm, tier, KEYS[:1])
        assert tier.lookup(KEYS[0], patient) is hit
        tier.on_request_finished(patient)
        assert tier.lookup(KEYS[1], patient) is miss
        tier.touch(KEYS, plain)
        tier.shutdown()


def test_a_request_says_how_long_its_blocks_are_kept(
    tmp_path: Path, vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """By its parameters, or by an orchestrator's hints, of which this one is about the first 32 tokens."""
    retain = SimpleNamespace(
        action_type="kv.retain",
        payload={"directives": [{"start": 0, "end": 32, "priority": 80, "duration": 600.0}]},
    )
    hints = SimpleNamespace(actions=[retain, SimpleNamespace(action_type="kv.fetch", payload={})])

    def request(parameters: dict[str, Any] | None, hints: Any = None) -> Any:
        return SimpleNamespace(
            req_id="r",
            kv_transfer_params=parameters,
            kv_hints=hints,
            get_offload_key_position=lambda key: 16 * (1 + KEYS.index(key)),
        )

    with peer_process(tmp_path, "kept") as peer:
        tier = tier_of(vllm, peer.socket)
        client = tier._client._client

        def kept(key: bytes) -> tuple[str, bool]:
            (listed,) = client.list_keys(prefix=tier._name(key)).keys
            return listed.pin, listed.expires_unix is not None

        def store_for(context: Any, keys: list[bytes]) -> None:
            tier.submit_store(vllm.TransferJob(1, keys, np.arange(len(keys)), False, context))
            assert finished(tier).success

        store_for(request(None, hints), KEYS[:3])
        eventually(lambda: [kept(key)[0] for key in KEYS[:3]] == ["soft", "soft", "none"])
        store_for(request({"p2pstore_ttl_seconds": 3600, "p2pstore_pin_seconds": 60}), KEYS[3:])
        eventually(lambda: kept(KEYS[3]) == ("soft", True))
        assert not kept(KEYS[2])[1]
        tier.touch([KEYS[2]], request({"p2pstore_pin_seconds": 60}))
        eventually(lambda: kept(KEYS[2])[0] == "soft")
        assert not caplog.records
        store_for(request({"p2pstore_pin_seconds": "for good"}), KEYS[:1])
        assert "is not understood" in caplog.text
        tier.shutdown()


@pytest.mark.parametrize("wrong", [0, -1, "nan", [1], {}])
def test_a_request_cannot_keep_blocks_for_good(wrong: Any) -> None:
    said: list[str] = []
    long = retention.retention({"lmcache.p2pstore_pin_seconds": 1e300}, None, said.append, "lmcache.")
    assert long.pin_seconds(1) == retention.MAX_RETAINED_SECONDS
    assert not said
    assert retention.retention({"p2pstore_ttl_seconds": wrong}, None, said.append).ttl is None
    assert len(said) == 1


def test_an_orchestrator_s_hint_without_tokens_is_about_all() -> None:
    hints = [
        SimpleNamespace(action_type="kv.retain", payload={"priority": 5, "ttl_seconds": 90}),
        SimpleNamespace(action_type="kv.retain", payload={"priority": 1}),
        SimpleNamespace(action_type="kv.retain", payload={"priority": 0, "ttl_seconds": 9e9}),
        SimpleNamespace(action_type="kv.retain", payload={"directives": [{"covers_output": True}]}),
    ]
    kept = [retention.retention({}, SimpleNamespace(actions=[each]), pytest.fail) for each in hints]
    assert [each.pin_seconds(10**6) for each in kept] == [90, 1800, 0, 0]
    assert {each.ttl for each in kept} == {None}


def test_lmcache_starts_without_a_peer_and_is_answered_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, askers: set[str]
) -> None:
    if importlib.util.find_spec("lmcache") is not None:
        pytest.skip("LMCache is installed: its own basic_check is the test")
    module = impatient(monkeypatch, "lmcache", LMCACHE)
    extra = {"p2pstore_weight_version": "hung@lm", "p2pstore_socket": str(tmp_path / "hung.sock")}
    config = SimpleNamespace(extra_config=extra, pre_caching_hash_algorithm="builtin")
    keys = [ChunkKey("chunk")]

    async def use() -> None:
        connector = module.P2PConnector(asyncio.get_running_loop(), CpuBackend(False), config)
        assert connector.batched_contains(keys) == 0
        assert not await connector.exists(keys[0])
        with peer_process(tmp_path, "hung") as peer:
            async with asyncio.timeout(60):
                while not connector.exists_sync(keys[0]):
                    await connector.batched_put(keys, [MemoryObj(bytes(1000), [])])
            peer.process.send_signal(signal.SIGSTOP)
            # Its table is trusted for a moment more. Then a question is open for 0.1 s.
            other = [ChunkKey("other")]
            eventually(lambda: not connector.batched_contains(other) and not connector._client.answers)
            assert connector.batched_contains([*keys, *other]) == 1, "its memory can be read"
            assert await connector.batched_async_contains("", keys) == 1
            found, missing = await connector.batched_get([*keys, *other])
            assert bytes(found.byte_array) == bytes(1000)
            assert missing is None
            peer.process.send_signal(signal.SIGCONT)
            eventually(lambda: connector._client.answers)
            assert await connector.batched_async_contains("", keys) == 1
            kept = ChunkKey("kept", {"lmcache.p2pstore_pin_seconds": 60})
            await connector.batched_put([kept], [MemoryObj(bytes(1000), [])])
            assert threading.current_thread().name not in askers
            (listed,) = connector._client._client.list_keys(prefix="kept").keys
            assert listed.pin == "soft"
            await connector.close()

    asyncio.run(use())
    assert askers
