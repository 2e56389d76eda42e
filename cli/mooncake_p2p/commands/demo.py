"""`demo`: three real peers on this machine do what the store is for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from mooncake_p2p.options import Json, option
from mooncake_p2p.output import (
    AlreadyTold,
    CommandFailed,
    Interrupts,
    describe,
    print_json,
    progress,
    remark,
    short_id,
)
from p2pstore.local.peer_processes import LocalCluster, PeerProcess, wait_until
from p2pstore.objects import KIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from p2pstore.blocking import BlockingClient

# LLaMA3-70B: K and V for 8 heads of 128 numbers of 2 bytes in each of 80 layers.
TOKEN_BYTES: Final = 2 * 8 * 128 * 2 * 80
BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = BLOCK_TOKENS * TOKEN_BYTES
LOG_LINES_SHOWN: Final = 15
SPIN_AFTER_SECONDS: Final = 0.2
NEXT: Final = """
All peers of the demo are gone. Try next:
  mooncake-p2p join                a peer of your own, for this machine
  mooncake-p2p bench               its speed, against plain memory
  mooncake-p2p keygen cluster.key  the key of a cluster of several machines"""
MEMORY_SHARE: Final = 2
"""Blocks may fill a half of a peer: the third peer's replicas have room beside them."""

assert TOKEN_BYTES == 320 * KIB


@dataclass
class Step:
    """One step of the demo: its time, bytes and result. A step that does not time itself takes its whole time."""

    name: str
    seconds: float = 0.0
    bytes: int = 0
    note: str = ""

    @property
    def rate(self) -> str:
        return f"{self.bytes / self.seconds / 1e9:.2f}" if self.bytes else ""


def demo(
    memory: Annotated[str, option("SIZE", "Memory of each of the three peers.")] = "256MiB",
    blocks: Annotated[int, option("N", "KV cache blocks of 5 MiB to put at a time.", min=1)] = 16,
    json: Json = False,
) -> None:
    """Watch three peers on this machine do the real thing, in a few seconds.

    Three processes on loopback form a cluster. Blocks of KV cache are put on one and read on
    another; a peer is killed with kill -9 and what it held is still there; it comes back. Then
    everything is removed.
    """
    if blocks * BLOCK_BYTES * MEMORY_SHARE > parse_bytes(memory, "--memory"):
        raise ValueError(
            f"--blocks: {blocks} blocks of {format_bytes(BLOCK_BYTES)} need "
            f"--memory {format_bytes(blocks * BLOCK_BYTES * MEMORY_SHARE).replace(' ', '')} or more"
        )
    with Interrupts() as interrupts:
        cluster = LocalCluster(interrupts.held, memory)
        show = _Show(quiet=json)
        try:
            with interrupts.allowed():
                _play(cluster, show, blocks, memory)
        except BrokenPipeError:
            raise  # the reader of the output is gone
        except Exception as error:
            _show_failure(cluster, show, error)
            if json:
                print_json({"ok": False, **show.document()})
            raise AlreadyTold(CommandFailed(describe(error))) from error
        finally:
            cluster.close()
    if json:
        print_json({"ok": True, **show.document()})
    show.say(NEXT)


class _Show:
    """The output of the demo: each step's result when it ends, on a terminal a spinner while peers start."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self.current = ""
        self.steps: list[Step] = []

    def say(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)

    @contextmanager
    def step(self, name: str, *, spins: bool = False) -> Iterator[Step]:
        """One step. `spins`: it takes a while, and drawing does not disturb what it measures."""
        self.current = name
        step, begin = Step(name), time.perf_counter()
        shown = spins and not self._quiet
        with progress(name, after_seconds=SPIN_AFTER_SECONDS) if shown else nullcontext():
            yield step
        step.seconds = step.seconds or time.perf_counter() - begin
        self.steps.append(step)
        rate = f", {format_bytes(step.bytes)} at {step.rate} GB/s" if step.bytes else ""
        self.say(f"  {name}: {step.seconds:.2f} s{rate}\n      {step.note}")

    def document(self) -> dict[str, Any]:
        return {
            "object": {"model": "LLaMA3-70B", "token_bytes": TOKEN_BYTES, "bytes": BLOCK_BYTES},
            "steps": [
                {**asdict(step), "gigabytes_per_second": round(step.bytes / step.seconds / 1e9, 3)}
                for step in self.steps
            ],
        }


def _play(cluster: LocalCluster, show: _Show, block_count: int, memory: str) -> None:
    show.say(
        f"Three peers with {memory} each. The objects are KV cache of LLaMA3-70B:\n"
        "80 layers x 8 heads x 128 numbers x 2 (K and V) x 2 bytes = 320 KiB per token,\n"
        f"so a block of {BLOCK_TOKENS} tokens is {format_bytes(BLOCK_BYTES)}.\n"
    )
    alpha, beta, gamma = (cluster.add(name) for name in ("alpha", "beta", "gamma"))
    with ExitStack() as clients:

        def connect(peer: PeerProcess) -> BlockingClient:
            client = peer.connect()
            clients.callback(client.close)
            return client

        with show.step("start alpha, and beta and gamma through it", spins=True) as step:
            cluster.start_all()
            on_alpha, on_beta, on_gamma = map(connect, (alpha, beta, gamma))
            for client in (on_alpha, on_beta, on_gamma):
                wait_until(lambda client=client: _alive(client) == 3, "all three see each other")  # type: ignore[misc]
            step.note = "each of them sees all three"

        prompt = _blocks("prompt", block_count)
        with show.step(f"put {block_count} blocks on alpha") as step:
            _put(step, on_alpha, prompt)
            step.note = "stored in alpha's memory, known to the others"

        with show.step("get them on beta") as step:
            _get_and_compare(step, on_beta, prompt)
            step.note = "moved from alpha to beta; every byte compared"

        session = _blocks("session", block_count)
        with show.step("put as many on gamma with 2 replicas") as step:
            _put(step, on_gamma, session, replicas=2)
            step.note = "stored on gamma and on one more peer each"

        with show.step("kill -9 gamma, get them on beta") as step:
            gamma.kill()
            _get_and_compare(step, on_beta, session)
            step.note = "served by the replicas; every byte compared"

        with show.step("start gamma again", spins=True) as step:
            peer_id = gamma.ready["peer_id"]
            cluster.begin(gamma, alpha.ready["control"])
            gamma.wait_until_ready()
            if gamma.ready["peer_id"] != peer_id:
                raise CommandFailed(f"gamma came back as {gamma.ready['peer_id']}, not {peer_id}")
            on_gamma = connect(gamma)
            for client in (on_alpha, on_beta, on_gamma):
                wait_until(lambda client=client: _alive(client) == 3, "all three see each other")  # type: ignore[misc]
            step.note = f"with the same peer id as before, {short_id(peer_id)}"

        with show.step("get the first blocks on gamma") as step:
            _get_and_compare(step, on_gamma, prompt)
            step.note = "a peer that came back reads like any other"


Blocks = dict[str, bytes]


def _blocks(name: str, count: int) -> Blocks:
    """Keys and values; random bytes, as incompressible as the real thing."""
    return {f"demo/{name}/{number:04}": os.urandom(BLOCK_BYTES) for number in range(count)}


def _put(step: Step, client: BlockingClient, blocks: Blocks, replicas: int = 1) -> None:
    step.bytes = len(blocks) * BLOCK_BYTES
    begin = time.perf_counter()
    results = client.put_many(list(blocks.items()), replicas=replicas)
    step.seconds = time.perf_counter() - begin
    for item in results:
        result = item.unwrap()
        if result.status != "created" or result.copies < replicas:
            raise CommandFailed(
                f"{item.key} is {result.status} with {result.copies} of {replicas} copies"
            )


def _get_and_compare(step: Step, client: BlockingClient, blocks: Blocks) -> None:
    buffers = {key: bytearray(BLOCK_BYTES) for key in blocks}
    step.bytes = len(blocks) * BLOCK_BYTES
    begin = time.perf_counter()
    results = client.get_many_into(list(buffers.items()))
    step.seconds = time.perf_counter() - begin
    for item in results:
        if item.unwrap() != BLOCK_BYTES or buffers[item.key] != blocks[item.key]:
            raise CommandFailed(f"{item.key} came back with other bytes than were put")


def _alive(client: BlockingClient) -> int:
    return sum(peer.status == "alive" for peer in client.peers())


def _show_failure(cluster: LocalCluster, show: _Show, error: Exception) -> None:
    remark(f"error: {show.current}: {describe(error)}")
    for peer in cluster.peers:
        if lines := peer.last_log_lines(LOG_LINES_SHOWN):
            remark(f"last lines of {peer.name}'s log:")
            for line in lines:
                remark(f"    {line}")
