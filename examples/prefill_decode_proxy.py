"""A proxy in front of prefill engines and decode engines: vLLM servers with the tier `P2PTier`, each beside a peer.

    python examples/prefill_decode_proxy.py 8000 --prefill http://a:8000 http://b:8000 --decode http://c:8000

The prompt goes to a prefill engine, which computes its blocks and puts them into the pool; then the request goes to a
decode engine, whose tier waits a moment for those that are announced only now. When no prefill engine answers, the
decode engine computes the prompt itself: no request fails for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANNOUNCED_SECONDS = 2.0
PREFILL_SECONDS = 120.0
DECODE_SECONDS = 600.0


class Engines:
    """Servers of one kind. The one with the fewest requests under way comes first."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.waiting: Counter[str] = Counter()
        self._turn = itertools.count()

    def best_first(self) -> list[str]:
        turn = next(self._turn) % len(self.addresses)
        in_turn = self.addresses[turn:] + self.addresses[:turn]
        return sorted(in_turn, key=self.waiting.__getitem__)


class Proxy(ThreadingHTTPServer):
    """`prefill` and `decode` are the engines."""

    daemon_threads = True

    def __init__(self, port: int, prefill: list[str], decode: list[str]) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.prefill, self.decode = Engines(prefill), Engines(decode)
        self.counting = threading.Lock()

    @contextmanager
    def asked(self, engines: Engines, path: str, body: dict[str, Any], seconds: float) -> Iterator[Any]:
        """The response of the first engine that answers. Raises `OSError` when none does; `HTTPError` is one."""
        for last, address in enumerate(engines.best_first(), 1 - len(engines.addresses)):
            with self.counting:
                engines.waiting[address] += 1
            try:
                request = urllib.request.Request(
                    address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
                )
                try:
                    response = urllib.request.urlopen(request, timeout=seconds)
                except OSError as error:
                    refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                    if refused or not last:
                        raise
                    continue
                with response:
                    yield response
                return
            finally:
                with self.counting:
                    engines.waiting[address] -= 1


class Handler(BaseHTTPRequestHandler):
    server: Proxy

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        short = {**body, "max_tokens": 1, "max_completion_tokens": 1, "stream": False}
        short.pop("stream_options", None)
        short.pop("min_tokens", None)
        server = self.server
        try:
            with server.asked(server.prefill, self.path, short, PREFILL_SECONDS) as done:
                done.read()
            body["kv_transfer_params"] = {"p2pstore_wait_seconds": ANNOUNCED_SECONDS}
        except OSError as error:
            print(f"no prefill engine computed this prompt ({error}): a decode engine does")
        try:
            with server.asked(server.decode, self.path, body, DECODE_SECONDS) as response:
                self._pass_on(response)
        except urllib.error.HTTPError as error:
            self._pass_on(error)
        except urllib.error.URLError as error:
            self.send_error(503, f"no decode engine answers: {error}")

    def _pass_on(self, response: Any) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.headers["Content-Type"])
        self.end_headers()
        while piece := response.read1():
            self.wfile.write(piece)


def main() -> None:
    parser = argparse.ArgumentParser(description="A proxy in front of prefill and decode engines.")
    parser.add_argument("port", type=int)
    parser.add_argument("--prefill", nargs="+", required=True, help="addresses of engines")
    parser.add_argument("--decode", nargs="+", required=True)
    arguments = parser.parse_args()
    Proxy(arguments.port, arguments.prefill, arguments.decode).serve_forever()


if __name__ == "__main__":
    main()
