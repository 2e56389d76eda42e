"""Dynamo's standalone indexer, fed by real vLLM engines with our tier, beside the truth: ENGINE-PYTHON INDEXER-PYTHON.

Run by `check_vllm --indexer`. The truth is what the pool has, by its own list of keys.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from check_vllm import CACHED_TOKENS, WEIGHTS, Engine, World, cached, free_port, post, prompt, say, until

from p2pstore import blocking

BLOCK_TOKENS = 32
MODEL = "tiny"
TOLD_SECONDS = 60.0
"""Until an index equals the pool. A peer that was killed is given up after some 9 s."""


class Indexer:
    """Dynamo's indexer in a process of its own, which all engines are registered at."""

    def __init__(self, world: World, python: str, stack: ExitStack) -> None:
        self._port = free_port()
        log = (world.folder / "indexer.log").open("wb")
        process = subprocess.Popen(
            [python, "-m", "dynamo.indexer", "--port", str(self._port)], stdout=log, stderr=log
        )
        stack.callback(process.kill)

        def listens() -> bool:
            try:
                return self._ask("/health", None) is not None
            except OSError:
                return False

        until(listens, "the indexer listens")

    def register(self, number: int, endpoint: str) -> None:
        """Have it listen to an engine, from nothing."""
        about = {"instance_id": number, "endpoint": endpoint, "model_name": MODEL}
        self._ask("/register", {**about, "block_size": BLOCK_TOKENS})

    def unregister(self, number: int) -> None:
        self._ask("/unregister", {"instance_id": number, "model_name": MODEL})

    def query(self, number: int, tokens: list[int]) -> dict[str, Any]:
        answer = self._ask("/query", {"token_ids": tokens, "model_name": MODEL})
        nothing = {"longest_matched": 0, "gpu": 0, "cpu": 0, "disk": 0}
        found: dict[str, Any] = answer["instances"].get(str(number), nothing)
        return found

    def stored(self, number: int) -> set[int]:
        """The blocks that it counts as this engine's, in the pool."""
        events = [each for index in self._ask("/dump", None).values() for each in index["events"]]
        return {
            block["block_hash"]
            for each in events
            if each["worker_id"] == number and each["storage_tier"] == "disk"
            for block in each["event"]["data"]["stored"]["blocks"]
        }

    def _ask(self, path: str, document: Any) -> Any:
        body = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            text = response.read()
        return json.loads(text or "{}")


class Told:
    """An engine that tells of its blocks, and what it told, read by vLLM's own structs."""

    def __init__(self, world: World, indexer: Indexer, name: str, number: int) -> None:
        self.world, self.indexer, self.name, self.number = world, indexer, name, number
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.hashes: dict[tuple[int | None, tuple[int, ...]], int] = {}
        """The engine's own hash of a block, by its parent's and its tokens: from what it told of its own memory."""
        self.unreadable: list[Any] = []
        self.kinds: dict[str, int] = {}
        self.begin()
        indexer.register(number, self.endpoint)
        listener, _ = world.start(f"listener-{name}", [_beside("listener.py"), self.endpoint])
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()

    def begin(self) -> None:
        config = self.world.tier(self.name)
        extra = config["kv_connector_extra_config"]
        extra["self_describing_kv_events"] = True
        extra["cpu_bytes_to_use"] = 16 << 20
        extra["secondary_tiers"][0]["enable_kv_events"] = True
        # A wildcard binds: an engine does not connect to itself.
        endpoint = self.endpoint.replace("127.0.0.1", "*")
        self.engine = Engine(self.world, self.name, config, environment={"KV_EVENTS": endpoint})

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """An answer, with what the engine has kept."""
        return self.engine.ask(tokens, keep_cache=True)

    def step(self) -> None:
        """Have the engine publish what it has to tell: it does not while it is idle."""
        post(self.engine.port, prompt(0, 8), keep_cache=True, max_tokens=1)

    def until_told(self, truth: Callable[[], set[int]], what: str) -> None:
        def equal() -> bool:
            self.step()
            return self.indexer.stored(self.number) == truth()

        try:
            until(equal, what, TOLD_SECONDS)
        except AssertionError as error:
            known, true = self.indexer.stored(self.number), truth()
            raise AssertionError(
                f"{error}: {len(true - known)} blocks are missing, {len(known - true)} are too many, "
                f"{len(known & true)} are right; {self.kinds}"
            ) from None
        say(f"  engine {self.name}: {len(truth())} blocks told, as it is: {what}; events: {self.kinds}")

    def pool(self) -> dict[int, str]:
        """The blocks that the pool has, as the engine's peer knows it: the key by the low 64 bits of vLLM's hash."""
        with blocking.connect(self.world.socket(self.name), namespace=WEIGHTS) as client:
            listed = client.list_keys(limit=100_000).keys
            keys = [each.key for each in listed if each.key.startswith("vllm/")]
            there = client.contains_many(keys)
        # The last four bytes are the group's.
        return {
            int(key.rpartition("/")[2][:-8][-16:], 16): key
            for key, is_there in zip(keys, there, strict=True)
            if is_there
        }

    def blocks_of(self, tokens: list[int]) -> list[int]:
        """The engine's own hashes of a prompt's blocks."""
        hashes: list[int] = []
        for begin in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = hashes[-1] if hashes else None
            hashes.append(self.hashes[parent, tuple(tokens[begin : begin + BLOCK_TOKENS])])
        return hashes

    def check_query(self, tokens: list[int]) -> int:
        """`/query` beside the truth. The tokens of the prompt that the pool has, from the first on."""
        pool = self.pool()
        held = BLOCK_TOKENS * len(list(takewhile(pool.__contains__, self.blocks_of(tokens))))
        answer = self.indexer.query(self.number, tokens)
        # Tiers add up: what the engine has in its own memory counts for the pool, too.
        assert answer["disk"] == max(held, answer["cpu"]), (answer, held)
        return held

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            for event in json.loads(line)["events"]:
                kind = f"{event['type']} {event.get('medium', '')}".strip()
                self.kinds[kind] = self.kinds.get(kind, 0) + 1
                if event["type"] == "unreadable":
                    self.unreadable.append(event)
                elif event["type"] == "BlockStored" and event["medium"] == "GPU":
                    self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        for number, each in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
            self.hashes[parent, tokens] = each
            parent = each


def _beside(name: str) -> str:
    return str(Path(__file__).parent / "vllm_cpu" / name)


def check_puts(a: Told, b: Told) -> None:
    """What one engine stored, and what the other one read."""
    for seed in (1, 2, 3, 4):
        a.ask(prompt(seed))
    a.until_told(lambda: set(a.pool()), "puts")
    for seed in (1, 2, 3, 4):
        assert a.check_query(prompt(seed)) == CACHED_TOKENS
    assert a.indexer.query(a.number, prompt(1))["cpu"] == 0, "its own memory lost the first prompt"
    until(lambda: set(a.pool()) == set(b.pool()), "the peers agree")
    assert cached(b.ask(prompt(1))) == CACHED_TOKENS
    b.until_told(lambda: set(a.blocks_of(prompt(1))), "reads")
    say("puts and reads")


def check_removals(a: Told, b: Told) -> None:
    """Blocks are removed at one peer; both engines tell of it."""
    pool = b.pool()
    with blocking.connect(b.world.socket("b"), namespace=WEIGHTS) as client:
        client.remove_many([pool[each] for each in a.blocks_of(prompt(1))[20:]])
    a.until_told(lambda: set(a.pool()), "removals")
    b.until_told(lambda: set(a.blocks_of(prompt(1))[:20]), "removals")
    assert a.check_query(prompt(1)) == 20 * BLOCK_TOKENS
    say("removals")


def check_reset(a: Told) -> None:
    """The engine forgets all of its own, and tells consumers to. What is used again is told again."""
    a.engine.ask(prompt(2))
    a.until_told(lambda: set(a.blocks_of(prompt(2))), "a reset")
    assert a.check_query(prompt(2)) == CACHED_TOKENS
    say("a reset of the engine's cache")


def check_crash(a: Told, b: Told, peers: dict[str, Any]) -> None:
    """The peer that held most of it is killed, and comes back. Both engines know of blocks that the other peer has."""
    b.ask(prompt(6))
    until(lambda: set(b.blocks_of(prompt(6))) <= set(a.pool()), "the peers agree")
    a.ask(prompt(6))
    told = {
        each.number: each.indexer.stored(each.number) | set(b.blocks_of(prompt(6))) for each in (a, b)
    }
    for each in (a, b):
        each.until_told(partial(told.__getitem__, each.number), "blocks of the other peer")
    peers["a"].kill()
    peers["a"].wait()
    b.until_told(lambda: set(b.pool()) & told[b.number], "a crash")
    peers["a"] = a.world.peer("a")
    a.engine.until_peer_answers()
    a.until_told(lambda: set(a.pool()) & told[a.number], "a crash, beside the peer that came back")
    say("a crash")


def check_restart(a: Told) -> None:
    """A new engine counts from 0 again: the index ignores it until it is registered anew."""
    a.engine.process.kill()
    a.engine.process.wait()
    a.begin()
    a.engine.wait_ready()
    a.ask(prompt(5))
    a.indexer.unregister(a.number)
    a.indexer.register(a.number, a.endpoint)
    a.engine.ask(prompt(5))
    a.until_told(lambda: set(a.blocks_of(prompt(5))), "a new engine")
    say("a new engine in the place of the old one")


def run(python: str, indexer_python: str) -> None:
    with ExitStack() as stack:
        world = World(python, Path(stack.enter_context(tempfile.TemporaryDirectory())), stack)
        peers = {name: world.peer(name) for name in "ab"}
        indexer = Indexer(world, indexer_python, stack)
        a, b = (Told(world, indexer, name, number) for number, name in enumerate("ab", 1))
        for each in (a, b):
            each.engine.wait_ready()
        say("engines are ready")
        check_puts(a, b)
        check_removals(a, b)
        check_reset(a)
        check_crash(a, b, peers)
        check_restart(a)
        for each in (a, b):
            assert not each.unreadable, each.unreadable
            each.engine.end()
    say("passed")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and all that was started ends
    run(*sys.argv[1:])
