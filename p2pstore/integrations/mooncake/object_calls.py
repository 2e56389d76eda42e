"""Objects as bytes: put, get, and whether they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from p2pstore.errors import (
    BufferTooSmall,
    CapacityExceeded,
    LeaseLimitExceeded,
    NoSuchKey,
    P2PStoreError,
)
from p2pstore.integrations.mooncake.base import StoreBase
from p2pstore.integrations.mooncake.memory import BufferHandle, handle_of
from p2pstore.integrations.mooncake.mooncake_types import (
    DEFAULT_CONFIG,
    ErrorCode,
    ExistOptions,
    ReplicateConfig,
    alike,
    put_and_upsert,
    put_options,
    unused_fields,
)
from p2pstore.objects import encode_key
from p2pstore.results import Buffer
from p2pstore.values import Gathered, source_view

T = TypeVar("T")
Failures = tuple[type[Exception], ...]
FAILURES = (P2PStoreError, ValueError)
"""Errors that become a code. Others are mistakes of a program, and raised."""
ITEM_FAILURES = (*FAILURES, TypeError)
"""Errors that become the code of one item of a batch; its other items go on."""
INVALID = int(ErrorCode.INVALID_PARAMS)


class ObjectCalls(StoreBase):
    """Calls whose values are bytes, or buffers of the caller."""

    def _put(
        self, overwrite: bool, key: str, value: Buffer, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """Store a value. An object that exists stays as it is, and 0 is returned all the same. An empty value is -600,
        and so is one that is not contiguous in memory. With `upsert` the pin is that of the config, not of the object
        before."""
        try:
            view = source_view(value)
            if not view.nbytes:
                return INVALID
            return self._store(key, view, config, overwrite=overwrite)
        except FAILURES as error:
            return self._code(error)

    put, upsert = put_and_upsert(_put)

    def _put_parts(
        self, overwrite: bool, key: str, *parts: Buffer, config: ReplicateConfig = DEFAULT_CONFIG
    ) -> int:
        """Store several buffers, one after the other, as one value; none at all is 0, and stores nothing."""
        try:
            value = Gathered(parts)
            return self._store(key, value, config, overwrite=overwrite) if len(value) else 0
        except FAILURES as error:
            return self._code(error)

    put_parts, upsert_parts = put_and_upsert(_put_parts)

    def _put_batch(
        self,
        overwrite: bool,
        keys: Sequence[str],
        values: Sequence[Buffer],
        config: ReplicateConfig = DEFAULT_CONFIG,
    ) -> int:
        """`put` for many: 0, or the first error. With an empty value among them nothing is stored: -600."""
        if not alike(keys, values):
            return INVALID
        try:
            views = [source_view(value) for value in values]
        except ITEM_FAILURES as error:
            return self._item_code(error)
        if any(not view.nbytes for view in views):
            return INVALID
        codes = self._store_many(keys, views, config, overwrite=overwrite)
        return next((code for code in codes if code), 0)

    put_batch, upsert_batch = put_and_upsert(_put_batch)

    def get(self, key: str) -> bytes:
        """The value; empty for an unknown key, and after any failure, which is logged."""
        try:
            return self._live.get(key)
        except NoSuchKey:
            return b""
        except FAILURES as error:
            self._read_code(error)
            return b""

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """`get` for many, in one go. (Mooncake answers `[b""]` when it is asked for none; this is then empty.)"""
        try:
            results = self._live.get_many(keys)
        except FAILURES as error:
            self._read_code(error)
            return [b""] * len(keys)
        self._warn_of([each.error for each in results])
        return [b"" if each.value is None else each.value for each in results]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """The value in place, in the memory of this machine's peer, as long as the handle is there; None as `get`.
        When this store holds too much already, or the peer has no room for it, it is a copy of its own."""
        try:
            return handle_of(self._live.take_lease(key))
        except NoSuchKey:
            return None
        except (LeaseLimitExceeded, CapacityExceeded):
            value = self.get(key)
            return handle_of(memoryview(value)) if value else None
        except FAILURES as error:
            self._read_code(error)
            return None

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """`get_buffer` for many, in one go."""
        return [handle_of(each) if isinstance(each, memoryview) else None for each in self._wholes(keys)]

    def is_exist(self, key: str, options: ExistOptions | None = None) -> int:
        """1 when some living peer is known to hold the key, else 0; -600 before `setup` and after `close`. Never
        negative otherwise: callers take the answer for a truth value. It costs no round trip, may lag behind by a
        moment, and does not keep the object from being evicted or removed, as Mooncake's does."""
        self._warn_of_options(options)
        if self._client is None:
            return INVALID
        try:
            return 1 if self._live.contains(key) else 0
        except FAILURES as error:
            self._read_code(error)
            return 0

    def batch_is_exist(self, keys: Sequence[str], options: ExistOptions | None = None) -> list[int]:
        """`is_exist` for many; -1 for all of them when the peer does not answer."""
        self._warn_of_options(options)
        try:
            return [1 if each else 0 for each in self._live.contains_many(keys)]
        except (ValueError, TypeError):  # one of them cannot be a key
            return [self.is_exist(key) if is_key(key) else 0 for key in keys]
        except P2PStoreError as error:
            self._code(error)
            return [-1] * len(keys)

    def probe_key(self, key: str) -> int:
        """`is_exist`, which grants no lease either."""
        return self.is_exist(key)

    def batch_probe_key(self, keys: Sequence[str], options: ExistOptions | None = None) -> list[int]:
        """`batch_is_exist`, which grants no leases either."""
        return self.batch_is_exist(keys, options)

    def get_size(self, key: str) -> int:
        """The length of the value in bytes, or -704 for an unknown key."""
        try:
            self._live.get_into(key, bytearray())
        except BufferTooSmall as error:
            return error.needed
        except FAILURES as error:
            return self._read_code(error)
        return 0

    # --- for the other calls -----------------------------------------------------------------

    def _wholes(self, keys: Sequence[str]) -> list[memoryview | int]:
        """The objects in place, or codes. Objects beyond the lease limit or the peer's room are copied."""
        try:
            results = self._live.take_leases(keys)
        except FAILURES as error:
            return [self._read_code(error)] * len(keys)
        no_room = LeaseLimitExceeded, CapacityExceeded
        copied = [each.key for each in results if isinstance(each.error, no_room)]
        values = dict(zip(copied, self.get_batch(copied), strict=True))
        wholes: list[memoryview | int] = []
        for each in results:
            if each.value is not None:
                wholes.append(each.value)
            elif values.get(each.key):
                wholes.append(memoryview(values[each.key]))
            else:
                assert each.error is not None
                wholes.append(self._read_code(each.error))
        return wholes

    def _item_code(self, error: Exception) -> int:
        return self._code(ValueError(str(error)) if isinstance(error, TypeError) else error)

    def _sorted_out(
        self, items: Iterable[Any], make: Callable[[Any], T], failures: Failures = ITEM_FAILURES
    ) -> tuple[list[int], dict[int, T]]:
        """Results of `make` for the items of a batch, by their numbers; and a code for each item, that of its error."""
        codes: list[int] = []
        made: dict[int, T] = {}
        for number, item in enumerate(items):
            try:
                made[number] = make(item)
                codes.append(INVALID)
            except failures as error:
                codes.append(self._item_code(error))
        return codes, made

    def _warn_of_options(self, options: ExistOptions | None) -> None:
        if options is not None and options.asked:
            self._warn_once(
                "ExistOptions change nothing: an answer keeps no object from being evicted; get_buffer and get "
                "sessions hold objects"
            )

    def _warn_of(self, errors: Sequence[Exception | None]) -> None:
        """Log all errors but unknown keys."""
        for error in errors:
            if error is not None and not isinstance(error, NoSuchKey):
                self._read_code(error)

    def _put_options(self, config: ReplicateConfig, *, same_node: bool = False) -> dict[str, Any]:
        """`put_options`; what the config asks for in vain is said once."""
        options = put_options(config, same_node=same_node)
        for text in unused_fields(config):
            self._warn_once(text)
        return options

    def _store(
        self, key: str, value: Buffer, config: ReplicateConfig, *, overwrite: bool = False
    ) -> int:
        """Put one value; one that lies in several places is `Gathered`. Raises what the client raises."""
        client = self._live
        client.put(key, value, overwrite=overwrite, **self._put_options(config))
        return self._keep_pinned([key], config)[0]

    def _store_many(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        config: ReplicateConfig,
        *,
        overwrite: bool = False,
        same_node: bool = False,
    ) -> list[int]:
        """Put many values, in few requests; a code for each."""
        try:
            results = self._live.put_many(
                list(zip(keys, values, strict=True)),
                overwrite=overwrite,
                **self._put_options(config, same_node=same_node),
            )
        except FAILURES as error:
            return [self._code(error)] * len(keys)
        codes = [0 if each.error is None else self._code(each.error) for each in results]
        stored = [number for number, code in enumerate(codes) if not code]
        return filled(codes, stored, self._keep_pinned([keys[number] for number in stored], config))

    def _keep_pinned(self, keys: Sequence[str], config: ReplicateConfig) -> list[int]:
        """Give the soft pins of what was stored their length, where that is not the usual half an hour; a code for
        each. An object that went to another peer, for want of room here, is pinned there."""
        codes = [0] * len(keys)
        seconds = (config.soft_pin_ttl_ms or 0) / 1000
        for number, key in enumerate(keys if seconds else ()):
            try:
                self._live.pin(key, "soft", ttl=seconds, fetch=False)
            except NoSuchKey:
                continue
            except FAILURES as error:
                codes[number] = self._code(error)
        return codes


def filled(codes: list[int], places: Iterable[int], answers: Sequence[int]) -> list[int]:
    """The codes, with the answers to the items at these places filled in."""
    for number, code in zip(places, answers, strict=True):
        codes[number] = code
    return codes


def is_key(key: Any) -> bool:
    try:
        encode_key(key)
    except (ValueError, TypeError):
        return False
    return True
