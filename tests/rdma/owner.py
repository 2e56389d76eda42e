"""An owner in a process of its own: `python -m tests.rdma.owner LENGTH`; its memory goes when it is killed."""

from __future__ import annotations

import json
import sys

import trio

from p2pstore.objects import MIB
from tests.contract.test_transport import pattern, put, segment_of
from tests.rdma.harness import RdmaHarness


async def main(length: int) -> None:
    segment = segment_of(length + 8 * MIB)
    digest = put(segment, "key", pattern(length))
    async with RdmaHarness.open_rdma(segment) as harness:
        copy = harness.copy(digest)
        print(
            json.dumps({"address": harness.address, "digest": digest.hex(), "slot": copy.slot}),
            flush=True,
        )
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]))
