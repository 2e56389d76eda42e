"""KV events of an engine, as vLLM's own structs read them, or what they cannot: ADDRESS. A JSON document a line."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch


def main() -> None:
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    listener = zmq.Context().socket(zmq.SUB)
    listener.connect(sys.argv[1])
    listener.setsockopt(zmq.SUBSCRIBE, b"")
    while True:
        _topic, number, packed = listener.recv_multipart()
        try:
            events: Any = decoder.decode(packed).events
        except msgspec.DecodeError as error:
            events = [{"type": "unreadable", "error": str(error), "bytes": packed.hex()}]
        document = {"number": int.from_bytes(number), "events": msgspec.to_builtins(events)}
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
