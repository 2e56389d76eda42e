"""A KV cache shared between machines: one process prefills a prompt, another one decodes on from it.

The model is a tiny decoder-only transformer with random weights, the same in both processes. Attention
keys and values are kept in blocks of 16 tokens, one object per block and layer. The key of a block is a
hash of all tokens up to its end, so that two prompts share exactly the blocks of their common beginning.

    python examples/kvcache_transformer.py                   # two peers and both roles, on this machine
    python examples/kvcache_transformer.py prefill           # or each role at the peer of its machine
    python examples/kvcache_transformer.py decode
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from p2pstore import blocking

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("this example needs torch: install it with `scripts/setup --torch`, or `pip install torch`")

BLOCK_TOKENS = 16
LAYERS, HEADS, HEAD_WIDTH, VOCABULARY = 4, 4, 32, 256
WIDTH = HEADS * HEAD_WIDTH
MODEL = "tiny-1"
NAMESPACE = "examples/kvcache"
KV_SHAPE = (2, HEADS, BLOCK_TOKENS, HEAD_WIDTH)
"""What is stored per block and layer: keys and values."""

SYSTEM_PROMPT = "You are a helpful machine. You answer briefly, and only what you were asked. " * 3
QUESTION = "Q: how many peers does a pool need? A:"
NEW_TOKENS = 12


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def block_keys(tokens: list[int]) -> list[list[str]]:
    """The keys of each full block, one per layer. Hashes are chained: a key stands for its whole prefix."""
    keys = []
    digest = hashlib.blake2b(MODEL.encode(), digest_size=16).digest()
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = bytes(tokens[start : start + BLOCK_TOKENS])
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        keys.append([f"{MODEL}/{digest.hex()}/{layer}" for layer in range(LAYERS)])
    return keys


@dataclass
class Cache:
    """Keys and values of the tokens so far: per layer, (heads, tokens, width) each."""

    keys: list[torch.Tensor] = field(
        default_factory=lambda: [torch.empty(HEADS, 0, HEAD_WIDTH)] * LAYERS
    )
    values: list[torch.Tensor] = field(
        default_factory=lambda: [torch.empty(HEADS, 0, HEAD_WIDTH)] * LAYERS
    )

    @property
    def length(self) -> int:
        return int(self.keys[0].shape[1])

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[layer] = torch.cat([self.keys[layer], keys], dim=1)
        self.values[layer] = torch.cat([self.values[layer], values], dim=1)


class Transformer:
    """Embedding, four layers of attention and a feed-forward net, and logits. Seeded random weights."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=source) / math.sqrt(shape[0])

        self.embedding = weights(VOCABULARY, WIDTH) * 8
        self.attention_in = [weights(WIDTH, 3 * WIDTH) for _ in range(LAYERS)]
        self.attention_out = [weights(WIDTH, WIDTH) for _ in range(LAYERS)]
        self.feed_in = [weights(WIDTH, 4 * WIDTH) for _ in range(LAYERS)]
        self.feed_out = [weights(4 * WIDTH, WIDTH) for _ in range(LAYERS)]
        self.logits = weights(WIDTH, VOCABULARY)

    def run(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        """Logits after the last of `tokens`, which follow on what is in `cache` and are added to it.

        Always in steps of at most one block, whose bounds are those of the whole sequence: the same
        arithmetic, bit for bit, whether the blocks before came from the cache or were computed.
        """
        x = torch.empty(0)
        while tokens:
            count = min(len(tokens), BLOCK_TOKENS - cache.length % BLOCK_TOKENS)
            x = self._step(tokens[:count], cache)
            tokens = tokens[count:]
        return torch.nn.functional.layer_norm(x[-1], (WIDTH,)) @ self.logits

    def _step(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        start = cache.length
        x = self.embedding[tokens] + positions(start, len(tokens))
        for layer in range(LAYERS):
            x = x + self._attend(torch.nn.functional.layer_norm(x, (WIDTH,)), layer, cache, start)
            wide = torch.nn.functional.layer_norm(x, (WIDTH,)) @ self.feed_in[layer]
            x = x + torch.nn.functional.gelu(wide) @ self.feed_out[layer]
        return x

    def _attend(self, x: torch.Tensor, layer: int, cache: Cache, start: int) -> torch.Tensor:
        count = len(x)
        queries, keys, values = (
            (x @ self.attention_in[layer]).view(count, 3, HEADS, HEAD_WIDTH).permute(1, 2, 0, 3)
        )
        cache.append(layer, keys, values)
        scores = queries @ cache.keys[layer].transpose(1, 2) / math.sqrt(HEAD_WIDTH)
        later = torch.arange(start + count) > torch.arange(start, start + count)[:, None]
        weights = scores.masked_fill(later, -math.inf).softmax(dim=-1)
        return (weights @ cache.values[layer]).transpose(0, 1).reshape(count, WIDTH) @ (
            self.attention_out[layer]
        )


def positions(start: int, count: int) -> torch.Tensor:
    """Sinusoidal position embeddings."""
    rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10_000.0) / WIDTH))
    angles = torch.arange(start, start + count)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


# --- the two roles ------------------------------------------------------------------------------


def prefill(store: blocking.BlockingClient) -> None:
    """Compute the prompt once, and put its full blocks: one batch for all layers."""
    tokens, cache = tokens_of(SYSTEM_PROMPT), Cache()
    Transformer().run(tokens, cache)
    items = []
    for number, keys in enumerate(block_keys(tokens)):
        part = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
        for layer, key in enumerate(keys):
            pair = torch.stack([cache.keys[layer][:, part], cache.values[layer][:, part]])
            items.append((key, pair))
    results = store.put_many(items)
    stored = sum(each.unwrap().status == "created" for each in results)
    print(f"prefill: {len(tokens)} tokens, {stored} of {len(items)} objects were new", flush=True)


def read_blocks(store: blocking.BlockingClient, tokens: list[int], cache: Cache) -> int:
    """Fill the cache with the blocks that the cluster has of this prompt's beginning. How many tokens."""
    keys = [key for block in block_keys(tokens) for key in block]
    blocks = store.match_prefix(keys) // LAYERS
    memory = torch.empty(blocks, LAYERS, *KV_SHAPE)
    places = [memory[block, layer] for block in range(blocks) for layer in range(LAYERS)]
    for place, result in zip(
        places, store.get_many_into(list(zip(keys, places, strict=False))), strict=True
    ):
        if result.unwrap() != place.nbytes:  # a missing block would be computed; this one is odd
            raise ValueError(f"{result.key} has another length")
    for block in memory:
        for layer in range(LAYERS):
            cache.append(layer, block[layer][0], block[layer][1])
    return blocks * BLOCK_TOKENS


def generate(model: Transformer, tokens: list[int], cache: Cache) -> tuple[list[int], torch.Tensor]:
    """New tokens after the prompt, and the logits that each was chosen by."""
    logits = [model.run(tokens[cache.length :], cache)]
    chosen = [int(logits[-1].argmax())]
    while len(chosen) < NEW_TOKENS:
        logits.append(model.run(chosen[-1:], cache))
        chosen.append(int(logits[-1].argmax()))
    return chosen, torch.stack(logits)


def decode(store: blocking.BlockingClient) -> None:
    """Answer a question after the prompt that somebody else prefilled; then again without the cache."""
    model, tokens = Transformer(), tokens_of(SYSTEM_PROMPT + QUESTION)
    began = time.perf_counter()
    cache = Cache()
    saved = read_blocks(store, tokens, cache)
    chosen, logits = generate(model, tokens, cache)
    with_cache = time.perf_counter() - began
    began = time.perf_counter()
    chosen_alone, logits_alone = generate(model, tokens, Cache())
    without_cache = time.perf_counter() - began
    print(
        f"decode: prefill saved for {saved} of {len(tokens)} tokens "
        f"({saved / len(tokens):.0%}); {with_cache * 1000:.0f} ms, without {without_cache * 1000:.0f} ms"
    )
    same = torch.equal(logits, logits_alone) and chosen == chosen_alone
    print(f"logits identical to those without the cache: {same}", flush=True)
    if not (same and saved):
        raise SystemExit(1)


# --- both at once, on this machine --------------------------------------------------------------


@contextlib.contextmanager
def local_peer(folder: Path, name: str, *options: str) -> Iterator[dict[str, str]]:
    """A peer in a process of its own; what its `ready` line says."""
    command = [sys.executable, "-m", "mooncake_p2p", "join", "--name", name, "--memory", "64MiB"]
    command += ["--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--log-level", "warning"]
    command += ["--socket", str(folder / f"{name}.sock"), "--state-dir", str(folder / name)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline().removeprefix("ready "))
        finally:
            process.terminate()


def both() -> None:
    """Two peers, and each role in a process of its own, at a peer of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_peer(Path(folder), "one") as one,
        local_peer(Path(folder), "two", "--bootstrap", one["control"]) as two,
    ):
        for role, peer in (("prefill", one), ("decode", two)):
            environment = {**os.environ, "MOONCAKE_P2P_SOCKET": peer["socket"]}
            subprocess.run([sys.executable, __file__, role], env=environment, check=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", nargs="?", choices=["prefill", "decode"], help="default: both")
    role = parser.parse_args().role
    if role is None:
        both()
        return
    torch.set_num_threads(1)  # more would only wait for each other in a model this small
    with torch.inference_mode(), blocking.connect(namespace=NAMESPACE) as store:
        {"prefill": prefill, "decode": decode}[role](store)


if __name__ == "__main__":
    main()
