"""Publishing and fetching through the local peer. Written once for all drivers.

The client opens the directory and passes its descriptor, so that a path means what it means to its user. Each call has
a connection of its own, and its job ends with that: errors, cancellation and Ctrl-C leave nothing running. Fetched
pieces stay for the next time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict, TypeVar, Unpack

from msgspec import structs

from p2pstore import arguments
from p2pstore.access.keyring import parse_peer_id
from p2pstore.checkpoint import checkpoint_messages as local
from p2pstore.checkpoint.client.group_calls import (
    CheckpointGroups,
    checkpoint_name,
    make_directory,
    result_of,
)
from p2pstore.checkpoint.content.pieces import check_piece_bytes, pack_map
from p2pstore.checkpoint.content.safetensors import DTYPES, MAX_HEADER_BYTES
from p2pstore.checkpoint.content.sources import SEALS
from p2pstore.errors import CapacityExceeded, CheckpointRefused, DeadlineExceeded, NoSuchKey
from p2pstore.local.local_connection import LocalConnection, Request
from p2pstore.local.local_protocol import LocalKind
from p2pstore.memory.mapped.mapped_memory import available_memory
from p2pstore.objects import format_bytes
from p2pstore.results import CheckpointProgress, FetchedCheckpoint, PublishedCheckpoint
from p2pstore.runtime.blocking_streams import Facade, in_blocking_form
from p2pstore.values import TORCH_PREFIX, describe_tensor, source_view
from p2pstore.wire import Message

if TYPE_CHECKING:
    from p2pstore.checkpoint.client.checkpoint_tensors import CheckpointTensors, MappedVersion, Rows

M = TypeVar("M", bound=Message)
CheckpointWatch = Callable[[CheckpointProgress], None]

STALLED_SECONDS: Final = 60.0
"""A job without progress is given up after this time, or after the client's timeout where that is longer."""
STALLED: Final = {
    "waiting": "no peer publishes it",
    "fetching": "no peer that has it can be reached, or the disk does not answer",
    "seeding": "it is published, and no peer fetches what the others lack: fetch or follow it somewhere",
}
"""The likely cause of a stall, by phase."""
MAX_BYTES_PER_SECOND: Final = 2**63 - 1
_VERSION: Final = re.compile(r"[0-9a-fA-F]{4,32}")
FILE_NAME: Final = "model.safetensors"
ALIGNMENT: Final = 8
_NAMES: Final = {name: short for short, name in DTYPES.items()}


class VersionOptions(TypedDict, total=False):
    """Which version to fetch, and how long to wait for it."""

    version: str
    """The first 4 to 32 hexadecimal digits of a version; default: the newest."""
    publisher: str | None
    """The peer id that must have published it; default: the first publisher of the name that the peer saw."""
    wait: float
    """Seconds to wait for a checkpoint that is not published yet; default 0."""
    progress: CheckpointWatch | None
    """Called with the progress, some times a second."""


class FetchOptions(VersionOptions, total=False):
    """Options of `Checkpoints.fetch`."""

    flat: bool
    """Put the files into the directory itself, without versions."""
    keep: int
    """Versions that stay in the directory, the newest; default 2."""
    include: Sequence[str]
    """Patterns for whole relative paths (`*` matches `/` too) of the files to fetch; default: all."""
    exclude: Sequence[str]
    """Patterns of files not to fetch."""
    limit_rate: int
    """Limit in bytes a second; default 0, for none."""
    verify: bool
    """Read and hash again what is in the directory."""


class Checkpoints(CheckpointGroups):
    """A client's operations on checkpoints. Made by `client.checkpoints`."""

    async def publish(
        self,
        name: str,
        directory: str | os.PathLike[str] | Mapping[str, Any],
        *,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        piece_bytes: int = 0,
        wait_seeded: bool = False,
        progress: CheckpointWatch | None = None,
    ) -> PublishedCheckpoint:
        """Publish the files below a directory as the newest version of `name`. Returns when others can fetch it; with
        `wait_seeded`, when they have every piece among them, so that the directory may change.

        `include` and `exclude` are patterns for whole relative paths (`*` matches `/` too). `piece_bytes` is a power of
        two, 0 for the usual. The local peer reads the files in place as long as it runs.

        Instead of a directory: tensors by name, numpy arrays or CPU torch tensors. They are copied once, to memory from
        which the peer serves them until it has a newer version published so. Others fetch them as a directory with
        `model.safetensors`, or by `fetch_tensors`. They may be changed when this returns.

        Files of downloads and version control (`.git`, `.cache/huggingface`, `*.incomplete`, `*.lock`) are left out
        unless `include` names them. The result's `notes` name those, and files whose content belies their names.

        Raises `CheckpointRefused` for what cannot be published, such as an index of missing files, and for a name of
        another publisher, `CapacityExceeded` for tensors without room, `CheckpointChanged` when a file changes
        meanwhile, and `DeadlineExceeded` without progress.
        """
        request = local.Publish(
            self._namespace,
            checkpoint_name(name),
            arguments.key_list(list(include)),
            arguments.key_list(list(exclude)),
            _piece_bytes(piece_bytes),
            arguments.flag("wait_seeded", wait_seeded),
            "" if isinstance(directory, Mapping) else os.fspath(directory),
        )
        notes: list[str] = []
        if isinstance(directory, Mapping):
            done = await self._publish_tensors(request, directory, progress)
        else:
            notes = await self._driver.run_in_thread(partial(_inspected, request, directory))
            done = await self._published(await self._open(directory), request, progress)
        notes += await self._other_publishers(name)
        return result_of(PublishedCheckpoint, done, notes=tuple(notes))

    async def _other_publishers(self, name: str) -> list[str]:
        """A note for each."""
        try:
            infos = await self.status(name)
        except NoSuchKey:  # removed at this moment
            return []
        return [
            f"{each.publisher_name} ({each.publisher}) publishes {name!r} as well: peers that trust that publisher "
            "take nothing from here"
            for each in infos
            if not each.mine
        ]

    async def _publish_tensors(
        self, request: local.Publish, tensors: Mapping[str, Any], progress: CheckpointWatch | None
    ) -> local.Published:
        if request.include or request.exclude:
            raise ValueError("include and exclude are for files: pass the tensors that are meant")
        memory = await self._driver.run_in_thread(partial(write_image, plan_image(tensors)))
        try:
            request = structs.replace(request, file=FILE_NAME)
            connection = await self._open(descriptor=memory)
        finally:
            os.close(memory)
        return await self._published(connection, request, progress)

    async def fetch(
        self, name: str, directory: str | os.PathLike[str], **options: Unpack[FetchOptions]
    ) -> FetchedCheckpoint:
        """Fetch a version to `directory/VERSION`, and have `directory/current` name it; with `flat`, to the directory
        itself. Makes the directory. Pieces that are there are not fetched again: an interrupted fetch goes on where it
        was. See `FetchOptions`.

        With `include` or `exclude` only those files are fetched, with the pieces that they are in. Files of the version
        that are there stay; a later fetch without patterns brings only the others. Raises `ValueError` when no file
        matches.

        Raises `NoSuchKey`, `CheckpointRefused`, `Unavailable` when no peer that has it can be reached,
        `CapacityExceeded` and `ConfigError` when the directory has no room or cannot be written to, `DeadlineExceeded`
        without progress.
        """
        _check_names(options, FetchOptions)
        request = structs.replace(
            self._version_wanted(name, options),
            flat=arguments.flag("flat", options.get("flat", False)),
            keep=arguments.whole_number("keep", options.get("keep", 2)),
            limit_bytes_per_second=arguments.whole_number(
                "limit_rate", options.get("limit_rate", 0), minimum=0, maximum=MAX_BYTES_PER_SECOND
            ),
            verify=arguments.flag("verify", options.get("verify", False)),
            path=os.fspath(directory),
            include=arguments.key_list(list(options.get("include", ()))),
            exclude=arguments.key_list(list(options.get("exclude", ()))),
        )
        make_directory(directory)
        done = await self._fetched(await self._open(directory), request, options.get("progress"))
        place = os.path.join(os.fspath(directory), done.directory) if done.directory else directory
        unmatched = tuple(done.unmatched)
        return result_of(FetchedCheckpoint, done, directory=os.fspath(place), unmatched=unmatched)

    async def fetch_tensors(
        self,
        name: str,
        names: Sequence[str] = (),
        *,
        files: Sequence[str] = (),
        rows: Rows | None = None,
        **options: Unpack[VersionOptions],
    ) -> CheckpointTensors:
        """Fetch a version to the local peer's memory and map it: its tensors by name, as views without a copy. Clients
        of one peer share the memory. It is freed when the last of them closes the result; until then the peer passes
        the version on. See `VersionOptions`.

        With `names` (patterns), only matching tensors are fetched, as far as pieces allow; `files` are patterns of
        other wanted files, such as `*.json`. `rows(name, shape)` returns the wanted rows of a tensor as a slice of its
        first dimension, None for all: the share of one rank.

        Broken .safetensors files and wrongly described tensors are left out and logged (`CheckpointTensors.broken`).
        Tensors of unknown dtypes are there as bytes (`CheckpointTensors.raw`).

        Raises as `fetch`; `NoSuchKey` for one of `names` or `files` without a match, naming the nearest,
        `CheckpointRefused` when what is wanted is broken, and `CapacityExceeded` above the peer's
        `--checkpoint-memory`.
        """
        _check_names(options, VersionOptions)
        patterns, other_files = arguments.key_list(names), arguments.key_list(files)
        some = bool(patterns or other_files or rows is not None)
        request = structs.replace(
            self._version_wanted(name, options), memory=True, pieces=b"" if some else None
        )
        from p2pstore.checkpoint.client.checkpoint_tensors import CheckpointTensors, TensorsWanted

        wanted, progress = TensorsWanted(patterns, other_files, rows), options.get("progress")
        mapped = await self._fetch_and_map(request, progress)
        try:
            if not some:
                await self._driver.run_in_thread(partial(wanted.take_all, mapped))
            while some and await self._driver.run_in_thread(partial(wanted.look, mapped)):
                before, count = mapped, mapped.manifest.layout.count
                request = structs.replace(
                    request, version=mapped.version.hex(), pieces=pack_map(wanted.pieces, count)
                )
                mapped = await self._fetch_and_map(request, progress)
                before.close()
            await self._driver.run_in_thread(partial(wanted.check, mapped.manifest))
            return CheckpointTensors(mapped, wanted.places, wanted.files, wanted.problems)
        except BaseException:
            mapped.close()
            raise

    def _version_wanted(self, name: str, options: VersionOptions) -> local.Fetch:
        version = options.get("version", "")
        if version and not _VERSION.fullmatch(arguments.text("version", version)):
            raise ValueError(f"version must be 4 to 32 hexadecimal digits, not {version!r}")
        publisher = options.get("publisher")
        return local.Fetch(
            self._namespace,
            checkpoint_name(name),
            version.lower(),
            b"" if publisher is None else parse_peer_id(publisher, "publisher"),
            wait_ms=round(1000 * arguments.seconds("wait", options.get("wait", 0.0))),
        )

    async def _fetch_and_map(
        self, request: local.Fetch, progress: CheckpointWatch | None
    ) -> MappedVersion:
        connection = await self._open()
        try:
            done = await self._fetched(connection, request, progress, close=False)
            mapped = await self._open(checkpoint=done.version)
        finally:
            connection.close()  # the other connection holds the version now
        try:
            from p2pstore.checkpoint.client.checkpoint_tensors import MappedVersion

            return await self._driver.run_in_thread(lambda: MappedVersion(mapped, done.version))
        except BaseException:
            mapped.close()
            raise

    async def _fetched(
        self,
        connection: LocalConnection,
        request: local.Fetch,
        progress: CheckpointWatch | None,
        *,
        close: bool = True,
    ) -> local.Fetched:
        job = Request(connection, LocalKind.CHECKPOINT_FETCH, request, local.Fetched, self._timeout)
        return await self._watched(job, progress, patience=request.wait_ms / 1000, close=close)

    async def _published(
        self, connection: LocalConnection, request: local.Publish, progress: CheckpointWatch | None
    ) -> local.Published:
        job = Request(connection, LocalKind.CHECKPOINT_PUBLISH, request, local.Published, self._timeout)
        return await self._watched(job, progress)

    async def _watched(
        self,
        job: Request[M],
        progress: CheckpointWatch | None,
        *,
        patience: float = 0.0,
        close: bool = True,
    ) -> M:
        """Have the peer do a job, and wait for its end. `patience`: further seconds without progress."""
        watch = _Watch(progress, max(self._timeout, STALLED_SECONDS) + patience)
        return await self._do(
            job,
            LocalKind.CHECKPOINT_PROGRESS,
            local.ProgressReply,
            watch.look,
            self._timeout,
            close=close,
        )


class _Watch:
    """Reports progress, and raises `DeadlineExceeded` after `patience` seconds without any."""

    def __init__(self, progress: CheckpointWatch | None, patience: float) -> None:
        self._progress = progress
        self._patience = patience
        self._seen, self._moved_at = 0, time.monotonic()

    def look(self, reply: local.ProgressReply) -> None:
        now = time.monotonic()
        if reply.number != self._seen:
            self._seen, self._moved_at = reply.number, now
            if self._progress is not None:
                self._progress(result_of(CheckpointProgress, reply))
        elif now - self._moved_at > self._patience:
            why = STALLED.get(reply.phase, "the disk does not answer, or is busy")
            raise DeadlineExceeded(f"no progress for {self._patience:g} s ({reply.phase}): {why}")


def _check_names(options: Mapping[str, object], kind: type[VersionOptions]) -> None:
    """Raises `TypeError` for a keyword that is no option, as a plain signature would."""
    unknown = options.keys() - kind.__annotations__.keys()
    if unknown:
        raise TypeError(f"unexpected keyword arguments: {', '.join(sorted(unknown))}")


def _inspected(request: local.Publish, directory: str | os.PathLike[str]) -> list[str]:
    """Notes on the files to be published. Raises `CheckpointRefused` and `OSError`."""
    from p2pstore.checkpoint.content.sources import SourceDirectory, inspect

    root = Path(directory)
    if not root.is_dir():
        os.stat(root)
        raise NotADirectoryError(
            errno.ENOTDIR, f"{os.strerror(errno.ENOTDIR)}; publish its folder, with include", str(root)
        )
    source = SourceDirectory(root, request.include, request.exclude)
    return inspect(source, request.include, request.exclude)


def _piece_bytes(piece_bytes: int) -> int:
    """A valid length of pieces, or 0 for the usual. Raises `TypeError` and `ValueError`."""
    number = arguments.whole_number("piece_bytes", piece_bytes, minimum=0)
    if number:
        try:
            check_piece_bytes(number)
        except CheckpointRefused as error:
            raise ValueError(str(error)) from None
    return number


class BlockingCheckpoints(Facade):
    """The checkpoints of one blocking client. The methods are those of `Checkpoints`, plain."""

    publish = in_blocking_form(Checkpoints.publish)
    fetch = in_blocking_form(Checkpoints.fetch)
    follow = in_blocking_form(Checkpoints.follow)
    update = in_blocking_form(Checkpoints.update)
    names = in_blocking_form(Checkpoints.names)
    status = in_blocking_form(Checkpoints.status)
    wait_followers = in_blocking_form(Checkpoints.wait_followers)
    remove = in_blocking_form(Checkpoints.remove)
    forget = in_blocking_form(Checkpoints.forget)
    fetch_tensors = in_blocking_form(Checkpoints.fetch_tensors)


class TensorImage(NamedTuple):
    """A safetensors file in sealed memory, from which the local peer publishes: its header, and its tensors' bytes in
    order. They are copied once, as the peer reads the same memory for as long as it is published."""

    header: bytes
    tensors: list[memoryview]

    @property
    def total_bytes(self) -> int:
        return len(self.header) + sum(view.nbytes for view in self.tensors)


def plan_image(tensors: Mapping[Any, Any]) -> TensorImage:
    """The layout of the file. The largest elements come first, so that all are aligned; then by name, so that equal
    tensors always have the same place, and versions share unchanged pieces.

    Raises `CheckpointRefused` without tensors and for a dtype outside the format, `TypeError` and `ValueError` for what
    is no contiguous tensor in this host's memory.
    """
    if not tensors:
        raise CheckpointRefused("there is no tensor to publish")
    described = []
    for name, tensor in tensors.items():
        dtype, shape = describe_tensor(tensor)
        short = _NAMES.get(dtype.removeprefix(TORCH_PREFIX))
        if short is None or not isinstance(name, str) or name == "__metadata__":
            raise CheckpointRefused(
                f"{name!r} of {dtype} cannot be published: names are text, dtypes one of {', '.join(_NAMES)}"
            )
        view, items = source_view(tensor), math.prod(shape)
        described.append((-(view.nbytes // items if items else 1), name, short, shape, view))
    described.sort(key=lambda each: each[:2])
    header: dict[str, Any] = {}
    views, at = [], 0
    for _, name, short, shape, view in described:
        header[name] = {"dtype": short, "shape": list(shape), "data_offsets": [at, at + view.nbytes]}
        at += view.nbytes
        views.append(view)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointRefused(f"{len(tensors):,} tensors are too many for one file: publish fewer")
    return TensorImage(len(text).to_bytes(8, "little") + text, views)


def write_image(image: TensorImage) -> int:
    """A descriptor of sealed memory with the file, to be closed. Raises `CapacityExceeded` without room."""
    room, where = available_memory()
    if image.total_bytes > room:
        raise CapacityExceeded(
            f"{format_bytes(image.total_bytes)} of tensors have no room in memory: {format_bytes(room)} are left of "
            f"{where}; publish them from files"
        )
    descriptor = os.memfd_create("p2pstore-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        offset = 0
        for view in (memoryview(image.header), *image.tensors):
            while view:
                count = os.pwrite(descriptor, view, offset)
                view, offset = view[count:], offset + count
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
