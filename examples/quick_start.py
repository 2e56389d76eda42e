"""Put, get, lease and remove, in a plain script. Needs a running peer: `mooncake-p2p join`.

Of several peers on this machine, MOONCAKE_P2P_SOCKET names the one to use.
"""

from __future__ import annotations

import p2pstore
from p2pstore import blocking


def main() -> None:
    with blocking.connect(namespace="examples") as store:
        result = store.put("greeting", b"hello, cluster", overwrite=True)
        print(f"put: {result.status}, {result.copies} copy on {result.location}")

        print("get:", store.get("greeting"))

        buffer = bytearray(1024)
        length = store.get_into("greeting", buffer)  # no allocation: straight into our memory
        print(f"get_into: {length} bytes")

        with store.lease("greeting") as view:  # no copy at all: the peer's own memory
            print(f"lease: {bytes(view[:5])!r}...")

        # A batch costs one request for all; each item has a result of its own.
        puts = store.put_many([(f"block {number}", bytes(4096)) for number in range(100)])
        print(f"put_many: {sum(each.ok for each in puts)} of {len(puts)}")
        print("match_prefix:", store.match_prefix(["block 0", "block 1", "no such block"]))

        try:
            store.get("no such key")
        except p2pstore.NoSuchKey as error:
            print("get of what is not there:", error)

        store.remove("greeting")
        print("contains after remove:", store.contains("greeting"))


if __name__ == "__main__":
    main()
