"""Getting many objects: what is here from the mapping, the rest in one batch per holder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2pstore.client.answers import plain_error
from p2pstore.client.fetch import Fetcher
from p2pstore.client.values import destination_view
from p2pstore.errors import P2PStoreError
from p2pstore.results import ItemResult
from p2pstore.transfer.failover import SilentHolders, is_silence
from p2pstore.transfer.transport import BufferDestination, Destination


async def fetch_many(
    fetcher: Fetcher, items: Sequence[tuple[str, Any]], digest_of: Callable[[str], bytes]
) -> list[ItemResult[int]]:
    """Write each (key, buffer)'s value to the beginning of its buffer; per item the length, or the error."""
    results: list[ItemResult[int]] = [ItemResult(key) for key, _ in items]
    missing: dict[int, tuple[bytes, Destination]] = {}
    for index, (key, buffer) in enumerate(items):
        try:
            digest = digest_of(key)
            view = destination_view(buffer)
            copied = await fetcher.read_here_into(digest, view)
        except (P2PStoreError, ValueError, TypeError) as error:
            results[index] = ItemResult(key, error=plain_error(error))
            continue
        if copied is None:
            missing[index] = (digest, BufferDestination(view))
        else:
            results[index] = ItemResult(key, copied.length)
    if missing:
        await _fetch_elsewhere(fetcher, missing, results)
    return results


async def _fetch_elsewhere(
    fetcher: Fetcher,
    missing: dict[int, tuple[bytes, Destination]],
    results: list[ItemResult[int]],
) -> None:
    """One plan for all; then per holder one batch; what fails there is tried alone."""
    plans = dict(
        zip(
            missing,
            await fetcher.plan(
                results[next(iter(missing))].key, [each[0] for each in missing.values()]
            ),
            strict=True,
        )
    )
    silent = SilentHolders()
    batches: dict[int, list[int]] = {}
    for index, plan in plans.items():
        if plan.holders and not plan.holders[0].same_host and not plan.through_peer:
            batches.setdefault(plan.holders[0].member, []).append(index)
    for indices in batches.values():
        holder = plans[indices[0]].holders[0]
        pulled = await fetcher.pull_many(
            holder,
            [missing[index] for index in indices],
            others=(others := all(len(plans[index].holders) > 1 for index in indices)),
        )
        if any(is_silence(outcome) for outcome in pulled):
            silent.add(holder.member, hurried=others)
        for index, outcome in zip(indices, pulled, strict=True):
            if not isinstance(outcome, Exception):
                results[index] = ItemResult(results[index].key, outcome.length)
    for index, (digest, destination) in missing.items():
        key = results[index].key
        if results[index].value is not None:
            continue
        try:
            done = await fetcher.fetch_planned(key, digest, destination, plans[index], silent)
        except (P2PStoreError, ValueError) as error:
            fetcher.ended(error)
            results[index] = ItemResult(key, error=error)
        else:
            results[index] = ItemResult(key, done.length)
