"""`bench trace`: what a pool saves on a published trace of requests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from mooncake_p2p.commands.bench import Result, machine
from mooncake_p2p.options import Json, argument, flag, option, with_records
from mooncake_p2p.output import CommandFailed, print_json, print_table, progress, remark
from p2pstore.objects import format_bytes, parse_bytes

if TYPE_CHECKING:
    from mooncake_p2p.trace_replay import OutagePlan, RealOutcome, Scale
    from p2pstore.trace.one_cache import Model, Request
    from p2pstore.trace.pool import PoolSettings, Replayed

_BLOCKS: Final = re.compile(r"([0-9]{1,12}) ?blocks?")


class Policy(StrEnum):
    prefix = "prefix"
    lru = "lru"
    s3_fifo = "s3-fifo"


class Routing(StrEnum):
    round_robin = "round-robin"
    random = "random"
    affine = "affine"
    unequal = "unequal"


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The pool that serves the trace."""

    peers: Annotated[int, option("N", "How many.", min=1, max=1000)] = 10
    memory: Annotated[str, option("SIZE|Nblocks", "Memory of each peer.")] = "5859blocks"
    ssd: Annotated[str, option("SIZE|Nblocks", "SSD of each peer; 0: none.")] = "0"
    policy: Annotated[Policy, typer.Option(help="Order of eviction from memory.")] = Policy.prefix
    routing: Annotated[
        Routing,
        typer.Option(
            help="Which peer a request goes to; affine: has its prefix; unequal: 70 % to the first."
        ),
    ] = Routing.round_robin
    load_bound: Annotated[float, option("F", "affine: at most F times the mean of requests.")] = 1.05
    keep_after: Annotated[
        int, option("N", "Readers keep copies of what was read N times; 0: never.", min=0)
    ] = 10

    def settings(self, model: Model) -> PoolSettings:
        """Checked, in blocks. Raises `ValueError` naming an option."""
        from p2pstore.trace.one_cache import MIN_BLOCKS
        from p2pstore.trace.pool import PoolSettings

        memory_blocks = _blocks(self.memory, "--memory", model)
        ssd_blocks = _blocks(self.ssd, "--ssd", model)
        if not memory_blocks:
            raise ValueError(f"--memory: {self.memory!r} is less than a block")
        if 0 < ssd_blocks < MIN_BLOCKS:
            raise ValueError(f"--ssd: {self.ssd!r} is less than {MIN_BLOCKS} blocks")
        if not self.load_bound >= 1:
            raise ValueError(f"--load-bound: {self.load_bound:g} is below 1, the mean")
        return PoolSettings(
            peers=self.peers,
            memory_blocks=memory_blocks,
            ssd_blocks=ssd_blocks,
            policy=self.policy.value,
            routing=self.routing.value,
            load_bound=self.load_bound,
            keep_after=self.keep_after,
        )


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How the trace is replayed and shown."""

    token_bytes: Annotated[str, option("SIZE", "KVCache of a token; a block has 512 tokens.")] = "320KiB"
    block_bytes: Annotated[
        str, option("SIZE", "Real peers: what a block takes there.", show_default="16KiB")
    ] = ""
    kill_every: Annotated[
        float,
        option("SECONDS", "Real peers: time between two kills of a peer, which starts again.", min=0),
    ] = 0.0
    down: Annotated[float, option("SECONDS", "How long it is away.", min=0)] = 5.0
    plot: Annotated[
        str | None, option("FILE", "Picture: hit rate by memory; of real peers, as it grows.")
    ] = None


@with_records
def bench_trace(
    file: Annotated[str, argument("FILE", "The trace, JSON lines.")],
    simulate: Annotated[bool, flag("--simulate", "Only on simulated peers, and compare more.")] = False,
    *,
    pool: PoolOptions,
    replay: ReplayOptions,
    json: Json = False,
) -> None:
    """Replay a trace of requests: what a pool of peers would save.

    Without --simulate, N peers are started on this machine, with blocks of --block-bytes, and serve
    the requests one after the other; beside them the same pool in simulation, which takes as long
    and loses the same peers. FILE is as in the
    traces published with the Mooncake paper (FAST '25): timestamp, input_length, output_length and
    hash_ids of each request. The real code decides what is evicted, in virtual time; locations are
    known to all at once, and reading takes no time. A hit is a block of the prefix up to the first
    one that is nowhere. COMPUTE SAVED is the share of prefill operations that need not be done, by
    Eq. 1 of the paper for LLaMA3-70B. The rest is bytes of KVCache read, by where they were.
    """
    from mooncake_p2p.trace_replay import OutagePlan
    from p2pstore.trace.one_cache import Model
    from p2pstore.trace.pool import cases, compare

    model = Model(kv_bytes_per_token=_at_least_one(parse_bytes(replay.token_bytes, "--token-bytes")))
    settings, plot = pool.settings(model), replay.plot
    if plot is not None:
        _pyplot()  # a missing module is reported now, not after minutes
    requests = _read(file)
    if not simulate:
        scale = _scale(replay.block_bytes, settings)
        outages = OutagePlan(replay.kill_every, replay.down)
        _replay_for_real(requests, settings, model, scale, outages, json, plot)
        return
    if replay.kill_every:
        raise ValueError("--kill-every: real peers only, without --simulate")
    blocks = len({block for request in requests for block in request.hash_ids})
    replayed: list[Replayed] = []
    with progress("replaying") as bar:
        for each in compare(requests, cases(settings, blocks), model):
            replayed.append(each)
            bar.relabel(f"replayed {each.case.name}")
        if plot is not None:
            bar.relabel("replaying for the picture")
            _draw(requests, settings, model, plot)
    if json:
        results = [asdict(result) for result in _results(replayed, model)]
        print_json({"results": results, "machine": machine()})
    else:
        _show(replayed, model)
        total = replayed[0].outcome.counts
        remark(f"{total.requests:,} requests, {total.tokens:,} tokens, {blocks:,} blocks")


# --- what was asked for --------------------------------------------------------------------------


def _blocks(text: str, option: str, model: Model) -> int:
    counted = _BLOCKS.fullmatch(text.strip())
    if counted is not None:
        return int(counted[1])
    return parse_bytes(text, option) // model.block_bytes


def _at_least_one(size: int) -> int:
    if not size:
        raise ValueError("--token-bytes: must be at least 1 byte")
    return size


def _read(file: str) -> list[Request]:
    from p2pstore.trace.one_cache import MAX_LINE_BYTES, read_requests

    with Path(file).open("rb") as lines:
        return list(read_requests(iter(partial(lines.readline, MAX_LINE_BYTES + 1), b"")))


def _scale(block_bytes: str, settings: PoolSettings) -> Scale:
    from mooncake_p2p.trace_replay import (
        BLOCK_BYTES,
        MIN_BLOCK_BYTES,
        MIN_COLD_BLOCK_BYTES,
        PAGE_BYTES,
        Scale,
    )

    least = MIN_COLD_BLOCK_BYTES if settings.ssd_blocks else MIN_BLOCK_BYTES
    size = parse_bytes(block_bytes, "--block-bytes") if block_bytes else max(least, BLOCK_BYTES)
    if size < least or size % PAGE_BYTES:
        raise ValueError(f"--block-bytes: a multiple of 4KiB from {format_bytes(least)} on")
    return Scale(size)


def _replay_for_real(
    requests: Sequence[Request],
    settings: PoolSettings,
    model: Model,
    scale: Scale,
    outages: OutagePlan,
    as_json: bool,
    plot: str | None,
) -> None:
    from mooncake_p2p import trace_replay
    from mooncake_p2p.output import Interrupts
    from p2pstore.local.peer_processes import LocalCluster

    with Interrupts() as interrupts, progress("replaying") as bar:

        def advanced(count: int) -> None:
            if count % 100 == 0:
                bar.relabel(f"replayed {count:,} of {len(requests):,} requests")

        memory = scale.memory_bytes(settings.memory_blocks)
        options = ("--eviction-policy", settings.policy, "--network", "local")
        cluster = LocalCluster(interrupts.held, str(memory), *options)
        try:
            with interrupts.allowed():
                real = trace_replay.replay(cluster, requests, settings, model, scale, outages, advanced)
        finally:
            cluster.close()
    simulated, simulated_ratios = _simulated(requests, settings, model, real)
    if plot is not None:
        _draw_growth(real, simulated_ratios, settings, plot)
    compression = requests[-1].seconds / real.seconds if real.seconds else 0.0
    if as_json:
        results = [asdict(each) for each in _real_results(real, simulated, compression)]
        print_json({"results": results, "machine": machine()})
        return
    print_table(
        _real_rows(real, simulated, compression),
        {"WHAT": lambda row: row[0], f"{settings.peers} PEERS, {settings.policy}": lambda row: row[1]},
    )


def _simulated(
    requests: Sequence[Request], settings: PoolSettings, model: Model, real: RealOutcome
) -> tuple[float, list[float]]:
    """The hit rate of the same pool when the requests come as they came, and the same peers die; and what it was before
    each request. Small blocks are not copied because they are hot."""
    import msgspec

    from p2pstore.trace.pool import Pool

    pool = Pool(replace(settings, keep_after=0), model)
    ratios: list[float] = []

    def as_served() -> Iterator[Request]:
        for request, seconds in zip(requests, real.served_at, strict=True):
            ratios.append(pool.outcome.counts.ratio)
            yield msgspec.structs.replace(request, timestamp=round(seconds * 1000))

    return pool.replay(as_served(), real.changes).counts.ratio, ratios


def _real_results(real: RealOutcome, simulated: float, compression: float) -> Iterator[Result]:
    ratio = real.counts.ratio
    yield Result("hit rate", ratio, "", "simulation", simulated, ratio / (simulated or 1.0))
    yield Result("compute saved", real.counts.compute_saved, "")
    yield Result("prefill tokens reused", real.counts.reused_tokens, "tokens")
    yield Result("time compression", compression, "times")
    yield Result("peers killed", real.kills, "")
    yield Result("blocks that could not be read", real.unreadable, "")
    yield Result("of these, a living peer had", real.failed, "")
    yield Result("last copies dropped", real.last_copies_dropped, "")
    for way, size in real.read_bytes.items():
        yield Result(f"read by {way}", size, "B")


def _real_rows(real: RealOutcome, simulated: float, compression: float) -> Iterator[tuple[str, str]]:
    counts = real.counts
    yield "hit rate", f"{counts.ratio:.4f} (simulated {simulated:.4f})"
    yield "compute saved", f"{counts.compute_saved:.1%}"
    yield "tokens reused", f"{counts.reused_tokens:,} of {counts.tokens:,}"
    yield "time", f"{real.seconds:.0f} s, the trace {compression:.0f} times as fast"
    yield "peers killed", f"{real.kills:,}"
    yield "blocks known, but not read", f"{real.unreadable:,}, a living peer had {real.failed:,}"
    if real.first_failure:
        yield "the first of these", real.first_failure
    yield "last copies dropped", f"{real.last_copies_dropped:,}"
    for way, size in real.read_bytes.items():
        if size:
            yield f"read, {way}", format_bytes(size)


# --- what came of it -------------------------------------------------------------------------------


def _results(replayed: Sequence[Replayed], model: Model) -> Iterator[Result]:
    base = replayed[0]
    for each in replayed:
        counts, name = each.outcome.counts, each.case.name
        ratio, saved = base.outcome.counts.ratio, base.outcome.counts.compute_saved
        against = "" if each is base else base.case.name
        for what, value, baseline in (
            ("hit rate", counts.ratio, ratio),
            ("compute saved", counts.compute_saved, saved),
        ):
            compared = baseline if against else None
            quotient = value / baseline if against and baseline else None
            yield Result(f"{name}: {what}", value, "", against, compared, quotient)
        yield Result(f"{name}: prefill tokens reused", counts.reused_tokens, "tokens")
        for source, tokens in each.outcome.tokens_from.items():
            size = tokens * model.kv_bytes_per_token
            yield Result(f"{name}: read from {source}", size, "B")
        written = each.outcome.ssd_blocks_written * model.block_bytes
        yield Result(f"{name}: written to SSDs", written, "B")


def _show(replayed: Sequence[Replayed], model: Model) -> None:
    from p2pstore.trace.pool import Source

    def read_from(source: Source) -> Callable[[Replayed], str]:
        return lambda each: format_bytes(each.outcome.tokens_from[source] * model.kv_bytes_per_token)

    sources = [each for each in Source if any(one.outcome.tokens_from[each] for one in replayed)]
    print_table(
        replayed,
        {
            "WHAT": lambda each: each.case.name,
            ">HIT RATE": lambda each: f"{each.outcome.counts.ratio:.4f}",
            ">TOKENS REUSED": lambda each: f"{each.outcome.counts.reused_tokens:,}",
            ">COMPUTE SAVED": lambda each: f"{each.outcome.counts.compute_saved:.1%}",
            **{f">{source.upper()}": read_from(source) for source in sources},
        },
    )


def _draw(requests: Sequence[Request], settings: PoolSettings, model: Model, path: str) -> None:
    from p2pstore.trace.pool import by_memory

    axes = {"xlabel": "memory of each peer, GiB", "ylabel": "hit rate", "xscale": "log"}
    with _picture(settings, path, **axes) as axis:
        for name, points in by_memory(requests, settings, model).items():
            sizes = [blocks * model.block_bytes / 2**30 for blocks, _ in points]
            axis.plot(sizes, [ratio for _, ratio in points], marker="o", label=name)


def _draw_growth(
    real: RealOutcome, simulated: Sequence[float], settings: PoolSettings, path: str
) -> None:
    """The hit rate so far, over time, and when peers were killed."""
    with _picture(settings, path, xlabel="seconds", ylabel="hit rate so far") as axis:
        axis.plot(real.served_at, real.ratios, label="real peers")
        axis.plot(real.served_at, simulated, label="simulated", linestyle="--")
        killed = [change.request for change in real.changes if not change.up]
        for number, request in enumerate(killed):
            label = "a peer is killed" if number == 0 else None
            axis.axvline(real.served_at[request], color="gray", linewidth=0.5, label=label)


@contextmanager
def _picture(settings: PoolSettings, path: str, **axes: str) -> Iterator[Any]:
    """The axis to draw on; the picture is saved at the end."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    yield axis
    axis.set(title=f"{settings.peers} peers, {settings.policy}, {settings.routing}", **axes)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise CommandFailed("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
