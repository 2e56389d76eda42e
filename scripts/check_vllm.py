"""Real vLLM engines of the CPU build share blocks through real peers: ENGINE-PYTHON. Run by `check_vllm`.

`--links`: only the time to the first token of a prompt that another host's peer holds, over links of several rates
between network namespaces, beside that of an engine without a peer.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shaped_hosts import Host, network_of

from p2pstore import blocking
from p2pstore.integrations.engine_client import PROBE_KEY

HERE = Path(__file__).parent
ROOT = HERE.parent
WEIGHTS = "tiny@v1"
PROMPT_TOKENS = 1500
CACHED_TOKENS = PROMPT_TOKENS // 32 * 32
START_SECONDS = 300.0
ANSWER_SECONDS = 120.0
END_SECONDS = 120.0
MAX_CALL_SECONDS = 0.001
"""Of 99 % of the scheduler's calls. A hundred times as much where the machine is busy with other programs."""
MAX_MORE_SECONDS = 1.0
"""Until the first token, with a stopped peer: one that is waited for costs five. The figures are printed."""
FORBIDDEN = re.compile(r"Traceback|BufferError|differs from those|Segmentation")
MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 512, "vocab_size": 1000, "max_position_embeddings": 8192},
    **{"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
    **{"torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2},
}
LINKED_MODEL = {**MODEL, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
LINKED_MODEL |= {"num_key_value_heads": 4, "intermediate_size": 1536}
LINKED_TOKENS = 2040
LINKED_TOKEN_BYTES = 8 * 4 * 64 * 2 * 4
"""Of the blocks of one token: layers, heads, numbers of K and V, each of 4 bytes."""
LINKS = {"100 Mbit/s": 10**8, "1 Gbit/s": 10**9, "10 Gbit/s": 10**10}
QUEUE_BYTES = 1 << 20
LINKED_TURNS = 5
BEGAN = time.monotonic()


def say(*what: Any) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s ", *what, flush=True)


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(10, 990), k=tokens)


def post(port: int, tokens: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": 8, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def check_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    (a,), (b,) = one["choices"], other["choices"]
    assert a["token_ids"] == b["token_ids"], (a, b)
    pairs = zip(a["logprobs"], b["logprobs"], strict=True)
    assert all(abs(x - y) < 1e-3 for x, y in pairs), (a, b)


class World:
    """Peers and engines in a folder; of names in `hosts` in a network of their own. All end with it."""

    def __init__(self, python: str, folder: Path, stack: ExitStack) -> None:
        self._python, self.folder, self._stack = python, folder, stack
        self._first = free_port()
        self.hosts: dict[str, Host] = {}
        self.model, self.memory = MODEL, "128MiB"

    def _address(self, name: str) -> str:
        return self.hosts[name].address if name in self.hosts else "127.0.0.1"

    def _in(self, name: str, command: Sequence[str]) -> list[str]:
        return self.hosts[name].command(*command) if name in self.hosts else [*command]

    def peer(self, name: str) -> subprocess.Popen[str]:
        """A peer, ready. All have one cluster, which they meet in through the first one's address."""
        port = self._first if name == "a" else 0
        joins = [] if name == "a" else ["--bootstrap", f"{self._address('a')}:{self._first}"]
        address = self._address(name)
        command = [
            *(sys.executable, "-m", "mooncake_p2p", "join", "--name", name, "--insecure"),
            *("--cluster", "check-vllm", "--memory", self.memory, "--data-listen", f"{address}:0"),
            *("--listen", f"{address}:{port}", "--socket", self.socket(name)),
            *("--state-dir", str(self.folder / f"state-{name}"), *joins),
        ]
        process = subprocess.Popen(
            self._in(name, command),
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"peer-{name}.log").open("ab"),
            text=True,
        )
        self._stack.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready"), (self.folder / f"peer-{name}.log").read_text()
        return process

    def start(
        self, name: str, program: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[subprocess.Popen[str], Path]:
        """A program of the engines' Python, and its log."""
        paths = f"{HERE / 'vllm_cpu'}:{ROOT}:{ROOT / 'cli'}"
        quiet = {"LMCACHE_TRACK_USAGE": "false"}
        variables = {**os.environ, "PYTHONPATH": paths, **quiet, **environment}
        variables.pop("PYTHONHASHSEED", None)
        log = self.folder / f"{name}.log"
        process = subprocess.Popen(
            self._in(name.removeprefix("engine-"), [self._python, *program]),
            stdout=subprocess.PIPE,
            stderr=log.open("wb"),
            env=variables,
            text=True,
        )
        self._stack.callback(process.kill)
        return process, log

    def held(self, name: str, namespace: str) -> int:
        """The number of blocks that this peer knows of."""
        with blocking.connect(self.socket(name), namespace=namespace) as client:
            keys = [each.key for each in client.list_keys(limit=100_000).keys]
            there = client.contains_many([key for key in keys if not key.startswith(PROBE_KEY)])
        return sum(there)

    def pinned(self, name: str) -> int:
        with blocking.connect(self.socket(name), namespace=WEIGHTS) as client:
            keys = client.list_keys(limit=100_000).keys
        return sum(each.pin == "soft" and not each.key.startswith(PROBE_KEY) for each in keys)

    def ask_cold(
        self, engine: Engine, tokens: list[int], name: str, namespace: str = WEIGHTS
    ) -> dict[str, Any]:
        """The answer of an engine that computes it, once its blocks are known to the peer of this name."""
        wanted = self.held(name, namespace) + len(tokens) // (64 if "lmcache" in namespace else 32)
        answer = engine.ask(tokens)
        assert cached(answer) == 0, cached(answer)
        until(lambda: self.held(name, namespace) >= wanted, "the blocks are announced")
        return answer

    def socket(self, name: str) -> str:
        return str(self.folder / f"{name}.sock")

    def tier(self, name: str) -> dict[str, Any]:
        """The configuration of an engine beside this peer."""
        ours = {"type": "P2PTier", "module_path": "p2pstore.integrations.vllm"}
        ours |= {"weight_version": WEIGHTS, "socket": self.socket(name)}
        extra = {"spec_name": "CPUTieringSpec", "spec_module_path": "cpu_spec"}
        extra |= {"cpu_bytes_to_use": 128 << 20, "secondary_tiers": [ours]}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


class Engine:
    """An engine in a process of its own, which has a model folder of its own: its path is not in the keys."""

    def __init__(
        self,
        world: World,
        name: str,
        config: dict[str, Any],
        *options: str,
        before: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self.port, self._host = name, free_port(), world.hosts.get(name)
        # LMCache's keys have the model's path.
        folder = world.folder / ("lmcache" if "LMCache" in config["kv_connector"] else name) / "tiny"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(world.model))
        program = [*before, str(HERE / "vllm_cpu/engine.py"), str(folder), str(self.port)]
        program += [json.dumps(config), *options]
        self.process, self.log = world.start(f"engine-{name}", program, environment)

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready"):
                say(f"  engine {self.name}: {line.strip()}")
                return
        raise AssertionError(f"engine {self.name} ended:\n{self.log.read_text()[-4000:]}")

    def ask(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        with nullcontext() if self._host is None else self._host.inside():
            answer = post(self.port, tokens, **more)
        say(f"  engine {self.name}: {cached(answer)} cached, {answer['seconds']:.3f} s")
        return answer

    def ask_warm(self, tokens: list[int]) -> dict[str, Any]:
        """The answer, which has to come from the pool. Asked once: the engine stores blocks of its own, too."""
        answer = self.ask(tokens)
        assert cached(answer) == CACHED_TOKENS, cached(answer)
        return answer

    def times(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/times") as response:
            times: dict[str, Any] = json.load(response)
        return times

    def until_peer_answers(self) -> None:
        until(lambda: bool(self.times()["peer answers"]), f"engine {self.name} has its peer")

    def end(self, *, allowed: str = "") -> None:
        """Ctrl-C, and a look through the log."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(END_SECONDS) == 0, self.log.read_text()[-4000:]
        text = self.log.read_text()
        found = [line for line in text.splitlines() if FORBIDDEN.search(line)]
        if allowed:
            assert any(allowed in line for line in found), f"nothing said of {allowed}"
            found = [line for line in found if allowed not in line]
        assert not found, found


def check_pool(world: World, a: Engine, b: Engine, peers: dict[str, Any]) -> None:
    """Cold, from the pool, a part of it, the holder killed, and started again."""
    cold = world.ask_cold(a, prompt(1), "b")
    check_same(cold, b.ask_warm(prompt(1)))
    part = prompt(1)[:800] + prompt(7)[:700]
    reads = b.ask(part)
    assert cached(reads) == 800, cached(reads)
    check_same(a.ask(part), reads)
    a.ask(prompt(8), kv_transfer_params={"p2pstore_pin_seconds": 600})
    until(lambda: world.pinned("a") == PROMPT_TOKENS // 32, "a request's blocks are pinned")
    say("pool, partial prefix and pins")
    peers["a"].kill()
    peers["a"].wait()
    check_same(cold, b.ask(prompt(1)))
    lone = a.ask(prompt(2))
    peers["a"] = world.peer("a")
    a.until_peer_answers()
    until(lambda: world.held("a", WEIGHTS) == world.held("b", WEIGHTS), "the peers agree")
    check_same(world.ask_cold(a, prompt(3), "b"), b.ask_warm(prompt(3)))
    check_same(lone, b.ask(prompt(2)))
    say("holder killed and started again")


def check_stopped(world: World, a: Engine, b: Engine, alone: Engine, peers: dict[str, Any]) -> None:
    """A stopped peer costs next to nothing; `alone` has none."""
    untried = world.ask_cold(a, prompt(4), "b")
    world.ask_cold(a, prompt(5), "b")
    b.ask(prompt(98), max_tokens=1)
    peers["b"].send_signal(signal.SIGSTOP)
    # While its table is still trusted: of another peer, of its own, unknown.
    first = [b.ask(prompt(seed), max_tokens=1)["seconds"] for seed in (5, 3, 99)]
    say("first requests after the stop:", first)
    times: dict[str, list[float]] = {"stopped": [], "none": []}
    for seed in range(100, 107):
        times["stopped"].append(b.ask(prompt(seed), max_tokens=1)["seconds"])
        times["none"].append(alone.ask(prompt(seed), max_tokens=1)["seconds"])
    stopped, none = (min(each) for each in times.values())  # what other programs take is left out
    say(f"time to the first token: {stopped:.3f} s with a stopped peer, {none:.3f} s without one")
    assert stopped < none + MAX_MORE_SECONDS, times
    assert max(first) < max(times["none"]) + 3 * MAX_MORE_SECONDS, (first, times)
    peers["b"].send_signal(signal.SIGCONT)
    b.until_peer_answers()
    check_same(untried, b.ask_warm(prompt(4)))  # what could not be read is not tried again for 5 s
    say("stopped peer, which went on")


def check_split(world: World, prefill: list[Engine], decode: Engine) -> None:
    """Two prefill engines and a decode engine behind the example's proxy; a prefill engine is killed."""
    port = free_port()
    addresses = [f"http://127.0.0.1:{each.port}" for each in prefill]
    proxy = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "examples/prefill_decode_proxy.py"), str(port)),
            *("--prefill", *addresses, "--decode", f"http://127.0.0.1:{decode.port}"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    world._stack.callback(proxy.kill)

    def listens() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    until(listens, "the proxy listens")
    for seed in (20, 21):
        answer = post(port, prompt(seed))
        assert cached(answer) == CACHED_TOKENS, cached(answer)
        check_same(decode.ask(prompt(seed)), answer)
    answers: dict[int, dict[str, Any]] = {}

    def ask(seed: int) -> None:
        answers[seed] = post(port, prompt(seed))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(30, 36)]
    for each in threads:
        each.start()
    prefill[0].process.kill()
    for each in threads:
        each.join()
    assert len(answers) == len(threads)
    for seed, answer in answers.items():
        check_same(decode.ask(prompt(seed)), answer)
    say("prefill and decode engines; a prefill engine killed:", list(map(cached, answers.values())))


def check_hashes(world: World) -> None:
    """An engine with another hash algorithm is told."""
    other = Engine(world, "d", world.tier("b"), "sha256_cbor")
    other.wait_ready()
    assert cached(other.ask(prompt(1))) == 0
    other.end(allowed="in hashes")
    say("another hash algorithm is said")


def check_mooncake(world: World) -> None:
    """vLLM's own connector for Mooncake's store, which is ours here."""
    config = world.folder / "mooncake.json"
    sizes = {"global_segment_size": "64mb", "local_buffer_size": "16mb"}
    address = {"master_server_address": f"127.0.0.1:{free_port()}", "metadata_server": "P2PHANDSHAKE"}
    config.write_text(json.dumps({**address, **sizes, "protocol": "tcp", "device_name": ""}))
    connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    connector["kv_load_failure_policy"] = "recompute"
    share_through(
        world,
        "Mooncake's API",
        "default",
        *(
            Engine(
                world,
                f"mooncake-{name}",
                connector,
                before=["-m", "p2pstore.integrations.as_mooncake"],
                environment={
                    "MOONCAKE_CONFIG_PATH": str(config),
                    "MOONCAKE_P2P_SOCKET": world.socket(name),
                },
            )
            for name in "ab"
        ),
    )


def check_lmcache(world: World) -> None:
    """LMCache's server beside each engine, with our L2 adapter."""
    engines = []
    for name in "ab":
        port = free_port()
        adapter = {"type": "plugin", "module_path": "p2pstore.integrations.lmcache"}
        adapter["class_name"] = "P2PL2Adapter"
        ours = {"weight_version": "lmcache@v1", "socket": world.socket(name)}
        program = ["-m", "lmcache.v1.multiprocess.server", "--port", str(port), "--l1-size-gb", "1"]
        program += ["--supported-transfer-mode", "engine_driven", "--no-l1-use-lazy"]
        program += ["--eviction-policy", "LRU", "--chunk-size", "64", "--disable-observability"]
        program += ["--l2-adapter", json.dumps({**adapter, "adapter_params": ours})]
        world.start(f"lmcache-server-{name}", program)
        connector = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
        connector["kv_load_failure_policy"] = "recompute"
        extra = {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
        config = {**connector, "kv_connector_extra_config": extra}
        engines.append(Engine(world, f"lmcache-{name}", config))
    share_through(world, "LMCache's server", "lmcache@v1", *engines)


def share_through(world: World, what: str, namespace: str, one: Engine, other: Engine) -> None:
    """Two engines share a prompt's blocks by this way."""
    for each in (one, other):
        each.wait_ready()
    check_same(world.ask_cold(one, prompt(50), "b", namespace), other.ask_warm(prompt(50)))
    for each in (one, other):
        each.end()
    say(what)


def measure_links(python: str) -> None:
    """A row by link: bytes, best and median seconds until the first token with the pool and without, and the rate of
    prefill with which fetching is no faster."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(network_of(3, folder, 10**10, QUEUE_BYTES))
        world = World(python, folder, stack)
        world.hosts = dict(zip("abc", network.hosts, strict=True))
        world.model, world.memory = LINKED_MODEL, "1GiB"
        for name in "ab":
            world.peer(name)
        a, b, alone = engines = [Engine(world, name, world.tier(name)) for name in "abc"]
        for each in engines:
            each.wait_ready()
        for seed in (1, 2):  # what an engine does only once
            world.ask_cold(a, prompt(seed, LINKED_TOKENS), "b")
            b.ask(prompt(seed, LINKED_TOKENS), max_tokens=1)
            alone.ask(prompt(seed, LINKED_TOKENS), max_tokens=1)
        for link, rate in LINKS.items():
            network.reshape(rate)
            times: dict[str, list[float]] = {"pool": [], "alone": []}
            for turn in range(LINKED_TURNS):
                tokens = prompt(rate + turn, LINKED_TOKENS)
                world.ask_cold(a, tokens, "b")
                answer = b.ask(tokens, max_tokens=1)
                assert cached(answer) == LINKED_TOKENS // 32 * 32, cached(answer)
                times["pool"].append(answer["seconds"])
                times["alone"].append(alone.ask(tokens, max_tokens=1)["seconds"])
            pool, without = (
                f"{min(each):.2f} / {statistics.median(each):.2f} s" for each in times.values()
            )
            megabytes = LINKED_TOKENS // 32 * 32 * LINKED_TOKEN_BYTES / 1e6
            even = rate / 8 / LINKED_TOKEN_BYTES
            say(f"| {link} | {megabytes:.0f} MB | {pool} | {without} | {even:,.0f} tokens/s |")
            say("  all:", times)


def run(python: str, *options: str) -> None:
    if "--links" in options:
        measure_links(python)
        return
    with ExitStack() as stack:
        world = World(python, Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        peers = {name: world.peer(name) for name in "ab"}
        engines = [Engine(world, name, world.tier(name)) for name in "abc"]
        for each in engines:
            each.wait_ready()
        say("engines are ready, one of them without a peer")
        a, b, c = engines
        check_pool(world, a, b, peers)
        check_stopped(world, a, b, c, peers)
        peers["c"] = world.peer("c")
        c.until_peer_answers()
        until(lambda: world.held("c", WEIGHTS) >= world.held("a", WEIGHTS), "all is announced")
        c.ask_warm(prompt(3))
        say("no peer at start")
        for each in (a, b, c):
            times = each.times()
            say(f"calls of engine {each.name}'s scheduler: {times}")
            busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
            assert times["p99_seconds"] < MAX_CALL_SECONDS * (100 if busy else 1)
        check_split(world, [a, b], c)
        for each in (b, c):
            each.end()
        check_hashes(world)
        if "--mooncake" in options:
            check_mooncake(world)
        if "--lmcache" in options:
            check_lmcache(world)
        for peer in peers.values():
            peer.send_signal(signal.SIGINT)
            assert peer.wait(30) == 0
    say("passed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and all that was started ends
    run(*sys.argv[1:])
