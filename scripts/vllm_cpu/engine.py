"""A vLLM engine of the CPU build behind a small HTTP server: FOLDER PORT KV-TRANSFER-CONFIG [HASH-ALGORITHM].

`POST /v1/completions` takes and answers what vLLM's own does, as far as `check_vllm` needs it, one request at a time,
each with an empty cache of its own, or with `keep_cache`. `GET /times` tells how long the scheduler's calls of the tier
took. `KV_EVENTS`, an address in the environment, has the engine publish KV events there, and keep 4,160 tokens at most.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)

import vllm
from vllm import LLM, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig

CALLS = ["lookup", "submit_store", "submit_load", "get_finished_jobs", "on_new_request", "get_stats"]
TIMES: list[float] = []
TIERS: list[Any] = []


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            TIMES.append(time.perf_counter() - begin)

    return call


def made(folder: str, config: dict[str, Any], algorithm: str) -> LLM:
    if config["kv_connector"] == "OffloadingConnector":
        from p2pstore.integrations.vllm import P2PTier

        for name in CALLS:
            setattr(P2PTier, name, timed(getattr(P2PTier, name)))
        begin = P2PTier.__init__

        def noted(self: P2PTier, *arguments: Any, **options: Any) -> None:
            begin(self, *arguments, **options)
            TIERS.append(self)

        P2PTier.__init__ = noted
    events: dict[str, Any] = {}
    if endpoint := os.environ.get("KV_EVENTS"):
        events["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
        events["num_gpu_blocks_override"] = 130
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=4096,
        enforce_eager=True,
        block_size=32,
        distributed_executor_backend="mp" if "LMCache" in config["kv_connector"] else "uni",
        prefix_caching_hash_algo=algorithm,
        kv_transfer_config=KVTransferConfig(**config),
        **events,
    )


class Handler(BaseHTTPRequestHandler):
    """`llm` is the engine."""

    llm: LLM
    resets_connector: bool

    def do_GET(self) -> None:
        times = sorted(TIMES) or [0.0]
        p99, most = times[int(0.99 * len(times))], times[-1]
        answers = all(each._client.answers for each in TIERS)
        self._answer(
            {"calls": len(TIMES), "p99_seconds": p99, "max_seconds": most, "peer answers": answers}
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        sampling = SamplingParams(
            temperature=0,
            max_tokens=asked["max_tokens"],
            logprobs=1,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": asked.get("kv_transfer_params")},
        )
        if not asked.get("keep_cache"):
            # Mooncake's connector would empty the store.
            self.llm.reset_prefix_cache(reset_connector=self.resets_connector)
        begin = time.perf_counter()
        (output,) = self.llm.generate([{"prompt_token_ids": asked["prompt"]}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        first = output.outputs[0]
        logprobs = [each.logprob for step in first.logprobs or () for each in step.values()]
        self._answer(
            {
                "choices": [{"token_ids": list(first.token_ids), "logprobs": logprobs}],
                "usage": {"prompt_tokens_details": {"cached_tokens": output.num_cached_tokens}},
                "seconds": seconds,
            }
        )
        self._store_the_rest()

    def _store_the_rest(self) -> None:
        """Go on until all blocks are stored, as vLLM's server does after its answer."""
        engine = self.llm.llm_engine
        while engine.engine_core.engine_core.scheduler.has_requests():
            engine.step()

    def _answer(self, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: the log is looked through for what should not be there."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    folder, port, config, *rest = sys.argv[1:]
    connector = json.loads(config)
    Handler.resets_connector = connector["kv_connector"] == "OffloadingConnector"
    Handler.llm = made(folder, connector, *(rest or ["sha256"]))
    server = HTTPServer(("127.0.0.1", int(port)), Handler)
    print("ready, vLLM", vllm.__version__, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
    Handler.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
