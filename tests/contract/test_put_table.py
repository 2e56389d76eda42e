"""Puts of a key that exists, in memory or on an SSD, here or there: every case, through two real peers with SSDs."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pstore import blocking, errors
from p2pstore.blocking import BlockingClient
from p2pstore.objects import MIB
from p2pstore.results import TransferRequest
from tests.contract.worlds import peer_process
from tests.waiting import eventually

PLACES = ("nowhere", "here", "elsewhere", "both", "here_ssd", "elsewhere_ssd")
POLICIES = ("keep", "overwrite", "error")
PUTS = (
    *(("put", "equal"), ("put", "other"), ("put_many", "equal"), ("put_many", "other")),
    *(("put_tensor", "equal"), ("put_tensor", "other"), ("put_tensor", "shape")),
    *(("transfer", "equal"), ("transfer", "other")),
)
TENSOR = np.arange(24, dtype="<i4")
VALUES = {"equal": TENSOR, "other": TENSOR + 1, "shape": TENSOR.reshape(4, 6)}
FIRST_TTL, SECOND_TTL = 1000.0, 500.0


@pytest.fixture(scope="module")
def peers(module_path: Path) -> Iterator[tuple[BlockingClient, Any]]:
    """A near and a far peer, with a key for each case in its place."""
    with ExitStack() as stack:
        clients: list[BlockingClient] = []
        bootstrap: tuple[str, ...] = ()
        for name in ("near", "far"):
            (module_path / f"{name}.ssd").mkdir()
            ssd = ("--ssd", str(module_path / f"{name}.ssd"), "--ssd-capacity", "256MiB")
            options = ("--memory", "16MiB", *ssd, *bootstrap)
            peer = stack.enter_context(peer_process(module_path, name, *options))
            bootstrap = ("--bootstrap", peer.control)
            clients.append(stack.enter_context(blocking.connect(peer.socket)))
        near, far = clients
        for place in ("here_ssd", "elsewhere_ssd"):
            _prepare(near, far, place)
        for number, client in product(range(20), clients):
            client.put(f"fill {client.peer_name} {number}", bytes(MIB))
        for place in ("here", "elsewhere", "both"):
            _prepare(near, far, place)
        yield near, far


def _prepare(near: BlockingClient, far: BlockingClient, place: str) -> None:
    """Put the tensor where the cases of this place want it."""
    holder = far if place.startswith("elsewhere") else near
    options: dict[str, Any] = {"replicas": 2} if place == "both" else {}
    keys = [_key(place, policy, *put) for policy, put in product(POLICIES, PUTS)]
    for key in keys:
        durable = place.endswith("ssd")
        made = holder.put_tensor(key, TENSOR, ttl=FIRST_TTL, durable=durable, **options)
        assert (made.status, made.copies) == ("created", made.wanted)
    eventually(lambda: all(near.contains_many(keys)))


def _key(place: str, policy: str, call: str, value: str) -> str:
    return f"{place}/{policy}/{call}/{value}"


def _put(client: BlockingClient, key: str, call: str, value: Any, **options: Any) -> str:
    try:
        if call == "put_many":
            return client.put_many([(key, value)], **options)[0].unwrap().status
        if call == "transfer":
            with client.transfers([TransferRequest(key, value, "put", **options)]) as made:
                result: Any = made.results()[0].unwrap()
                return str(result.status)
        return str(getattr(client, call)(key, value, **options).status)
    except errors.KeyExists:
        return "KeyExists"


def _ends_in(client: BlockingClient, key: str) -> float | None:
    (listed,) = client.list_keys(key, local=True, limit=1).keys
    assert listed.key == key
    return None if listed.expires_unix is None else listed.expires_unix - time.time()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_put_does_what_is_documented(
    peers: tuple[BlockingClient, BlockingClient], place: str, policy: str
) -> None:
    near, _ = peers
    for number, (call, value) in enumerate(PUTS):
        key, case = _key(place, policy, call, value), (call, value)
        has_ttl = call != "transfer" and number % 2 == 0
        ttl = {"ttl": SECOND_TTL} if has_ttl else {}
        status = _put(near, key, call, VALUES[value], on_conflict=policy, **ttl)
        stays = place != "nowhere" and (value == "equal" or policy != "overwrite")
        if place == "nowhere":
            assert status == "created", case
        elif value == "equal":
            assert status == "unchanged", case
        else:
            wanted = {"keep": "kept_existing", "overwrite": "created", "error": "KeyExists"}
            assert status == wanted[policy], case
        if stays:
            assert np.array_equal(near.get_tensor(key), TENSOR), case
        elif call == "put_tensor":
            assert np.array_equal(near.get_tensor(key), VALUES[value]), case
        else:
            assert near.get(key) == VALUES[value].tobytes(), case
        if status in ("created", "unchanged"):
            ends = _ends_in(near, key)
            lasts = SECOND_TTL if has_ttl else FIRST_TTL if stays else None
            assert ends == (lasts and pytest.approx(lasts, abs=100.0)), case
