"""Publishing and fetching directories through the local peer. Written once for all drivers.

The caller's own process opens the directory and passes its descriptor, so that a path means what it means to the
caller. Each call has a connection of its own, and what it asked for ends with that: an error, a cancellation or Ctrl-C
leaves nothing running, and what was fetched stays for the next time.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs

from p2pstore.access.allowlist import parse_peer_id
from p2pstore.checkpoint.client.group_calls import CheckpointGroups, checkpoint_name, make_directory
from p2pstore.checkpoint.content.piece_map import pack_map
from p2pstore.checkpoint.content.pieces import check_piece_bytes
from p2pstore.client import arguments
from p2pstore.errors import CheckpointRefused, DeadlineExceeded, NoSuchKey
from p2pstore.local import checkpoint_messages as local
from p2pstore.local.local_connection import LocalConnection
from p2pstore.local.local_protocol import LocalKind
from p2pstore.results import CheckpointProgress, FetchedCheckpoint, PublishedCheckpoint
from p2pstore.wire import Message

if TYPE_CHECKING:
    from p2pstore.client.tensors import CheckpointTensors, MappedVersion, Rows

M = TypeVar("M", bound=Message)
CheckpointWatch = Callable[[CheckpointProgress], None]

LOOK_SECONDS: Final = 0.25
"""Between two looks at how far it is."""
STALLED_SECONDS: Final = 60.0
"""Without any progress, until a fetch or a publish is given up; or the client's timeout, where that is longer."""
STALLED: Final = {
    "waiting": "nobody publishes it",
    "fetching": "nobody who has it can be reached, or the disk does not answer",
    "seeding": "it is published, and nobody fetches what the others lack: fetch or follow it somewhere",
}
"""The likely cause, by phase."""
MOST_BYTES_PER_SECOND: Final = 2**63 - 1
_VERSION: Final = re.compile(r"[0-9a-fA-F]{4,32}")


class Checkpoints(CheckpointGroups):
    """What a client can do with checkpoints. Made by `client.checkpoints`."""

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
        """Publish the files below a directory as the newest version of `name`; returns when others can fetch it, or,
        with `wait_seeded`, when they have every piece of it among them: then the directory may change.

        `include` and `exclude` are patterns for whole relative paths (`*` matches `/` too). `piece_bytes` is a power of
        two, 0 for the usual. The local peer reads the files from where they are for as long as it runs.

        In place of a directory, tensors by name: numpy arrays and CPU torch tensors. They are copied once, to memory
        that the local peer serves them from until it has a newer version that was published so, and fetched as a
        directory with `model.safetensors`, or by `fetch_tensors`. They may be changed when this returns.

        What belongs to a download or a version control (`.git`, `.cache/huggingface`, `*.incomplete`, `*.lock`) is left
        out unless `include` names it. The result's `notes` say so, and which files are not what they are called.

        Raises `CheckpointRefused` for what cannot be published, such as an index that names files which are not there,
        and for a name that another peer publishes already, `CapacityExceeded` for tensors that have no room,
        `CheckpointChanged` when a file changes meanwhile, and `DeadlineExceeded` when nothing moves any more.
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
            done = await self._do(
                LocalKind.CHECKPOINT_PUBLISH, request, local.Published, directory, progress
            )
        with suppress(NoSuchKey):  # removed at this moment
            notes += [
                f"{each.publisher_name} ({each.publisher}) publishes {name!r} as well: whoever trusts that one takes "
                "nothing from here"
                for each in await self.status(name)
                if not each.mine
            ]
        return PublishedCheckpoint(
            done.version.hex(),
            done.files,
            done.total_bytes,
            done.pieces,
            done.piece_bytes,
            tuple(notes),
        )

    async def _publish_tensors(
        self, request: local.Publish, tensors: Mapping[str, Any], progress: CheckpointWatch | None
    ) -> local.Published:
        if request.include or request.exclude:
            raise ValueError("include and exclude are for files: pass the tensors that are meant")
        from p2pstore.client.tensor_file import FILE_NAME, plan_image, write_image

        image = plan_image(tensors)
        memory = await self._driver.run_in_thread(partial(write_image, image))
        try:
            request = structs.replace(request, file=FILE_NAME)
            connection = await self._open(descriptor=memory)
        finally:
            os.close(memory)
        try:
            return await self._ask(
                connection,
                LocalKind.CHECKPOINT_PUBLISH,
                request,
                local.Published,
                progress,
                0.0,
            )
        finally:
            connection.close()

    async def fetch(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        version: str = "",
        publisher: str | None = None,
        flat: bool = False,
        keep: int = 2,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        limit_rate: int = 0,
        verify: bool = False,
        wait: float = 0.0,
        progress: CheckpointWatch | None = None,
    ) -> FetchedCheckpoint:
        """Fetch a version (the newest, unless `version` gives the digits that another begins with) to
        `directory/VERSION`, and have `directory/current` name it; with `flat`, to the directory itself. The directory
        is made if it is not there. What is there already and has the right hash is not fetched, an interrupted fetch
        goes on where it was, and of older versions `keep` stay.

        `include` and `exclude` are patterns for whole relative paths (`*` matches `/` too): only those files are
        brought, which takes the pieces that they are in. Files of the version that are there already stay, and when all
        are wanted later, only the others are fetched. Raises `ValueError` when no file matches.

        `publisher` is a peer id: nobody else's checkpoint of that name is taken; by default the one who published it
        when this peer first saw the name. `limit_rate` bounds what is fetched, in bytes a second. `verify` reads again
        what is there. `wait` seconds for a checkpoint that is not published yet.

        Raises `NoSuchKey`, `CheckpointRefused`, `Unavailable` when nobody who has it can be reached, `CapacityExceeded`
        and `ConfigError` when the directory has no room or cannot be written to, `DeadlineExceeded` when nothing moves
        any more.
        """
        if version and not _VERSION.fullmatch(arguments.text("version", version)):
            raise ValueError(f"version must be 4 to 32 hexadecimal digits, not {version!r}")
        request = local.Fetch(
            self._namespace,
            checkpoint_name(name),
            version.lower(),
            b"" if publisher is None else parse_peer_id(publisher, "publisher"),
            arguments.flag("flat", flat),
            arguments.whole_number("keep", keep),
            arguments.whole_number(
                "limit_rate", limit_rate, minimum=0, maximum=MOST_BYTES_PER_SECOND
            ),
            arguments.flag("verify", verify),
            round(1000 * arguments.seconds("wait", wait)),
            os.fspath(directory),
            include=arguments.key_list(list(include)),
            exclude=arguments.key_list(list(exclude)),
        )
        make_directory(directory)
        done = await self._do(
            LocalKind.CHECKPOINT_FETCH, request, local.Fetched, directory, progress, wait
        )
        place = os.path.join(os.fspath(directory), done.directory) if done.directory else directory
        return FetchedCheckpoint(
            done.version.hex(),
            os.fspath(place),
            done.total_bytes,
            done.fetched_bytes,
            done.whole,
            tuple(done.unmatched),
        )

    async def fetch_tensors(
        self,
        name: str,
        names: Sequence[str] = (),
        *,
        files: Sequence[str] = (),
        rows: Rows | None = None,
        version: str = "",
        publisher: str | None = None,
        wait: float = 0.0,
        progress: CheckpointWatch | None = None,
    ) -> CheckpointTensors:
        """Fetch a version to the local peer's memory and map it: its tensors by name, as views without a copy. Clients
        of one peer share the memory. It is given back when the last of them closes what this returns; the peer passes
        the version on until then.

        With `names` (patterns), only the tensors that match are fetched, as far as pieces allow, and only they are
        there; `files` are patterns of other files that are wanted, such as `*.json`. `rows(name, shape)` says which
        rows of a tensor are wanted, as a slice of its first dimension, None for all of them: what one rank of several
        needs.

        A file that is called .safetensors and is none, or a tensor that its header describes wrongly, is left out,
        which the log says (`CheckpointTensors.broken`); tensors of dtypes that nobody here knows are there as bytes
        (`CheckpointTensors.raw`).

        Raises as `fetch`; `NoSuchKey` for one of `names` or `files` that nothing matches, naming the nearest,
        `CheckpointRefused` when what is wanted is in no file that is what it should be, and `CapacityExceeded` for more
        than the peer's `--checkpoint-memory`.
        """
        if version and not _VERSION.fullmatch(arguments.text("version", version)):
            raise ValueError(f"version must be 4 to 32 hexadecimal digits, not {version!r}")
        patterns, other_files = arguments.key_list(names), arguments.key_list(files)
        some = bool(patterns or other_files or rows is not None)
        request = local.Fetch(
            self._namespace,
            checkpoint_name(name),
            version.lower(),
            b"" if publisher is None else parse_peer_id(publisher, "publisher"),
            wait_ms=round(1000 * arguments.seconds("wait", wait)),
            memory=True,
            pieces=b"" if some else None,
        )
        from p2pstore.client.tensors import CheckpointTensors, TensorsWanted

        wanted = TensorsWanted(patterns, other_files, rows)
        mapped = await self._fetch_and_map(request, progress, wait)
        try:
            if not some:
                await self._driver.run_in_thread(partial(wanted.take_all, mapped))
            while some and await self._driver.run_in_thread(partial(wanted.look, mapped)):
                before, count = mapped, mapped.manifest.layout.count
                request = structs.replace(
                    request,
                    version=mapped.version.hex(),
                    pieces=pack_map(wanted.pieces, count),
                )
                mapped = await self._fetch_and_map(request, progress, wait)
                before.close()
            await self._driver.run_in_thread(partial(wanted.check, mapped.manifest))
            return CheckpointTensors(mapped, wanted.places, wanted.files, wanted.problems)
        except BaseException:
            mapped.close()
            raise

    async def _fetch_and_map(
        self, request: local.Fetch, progress: CheckpointWatch | None, wait: float
    ) -> MappedVersion:
        bringing = await self._open()
        try:
            done = await self._ask(
                bringing, LocalKind.CHECKPOINT_FETCH, request, local.Fetched, progress, wait
            )
            mapped = await self._open(checkpoint=done.version)
        finally:
            bringing.close()  # from here on the other connection holds it
        try:
            from p2pstore.client.tensors import MappedVersion

            return await self._driver.run_in_thread(lambda: MappedVersion(mapped, done.version))
        except BaseException:
            mapped.close()
            raise

    async def _do(
        self,
        kind: LocalKind,
        request: Message,
        reply_type: type[M],
        directory: str | os.PathLike[str],
        progress: CheckpointWatch | None,
        patience: float = 0.0,
    ) -> M:
        connection = await self._open(directory)
        try:
            return await self._ask(connection, kind, request, reply_type, progress, patience)
        finally:
            connection.close()

    async def _ask(
        self,
        connection: LocalConnection,
        kind: LocalKind,
        request: Message,
        reply_type: type[M],
        progress: CheckpointWatch | None,
        patience: float,
    ) -> M:
        ahead = await connection.request_ahead(
            kind, request, reply_type, progress_seconds=self._timeout
        )
        await self._watch(connection, progress, max(self._timeout, STALLED_SECONDS) + patience)
        return await ahead.receive()

    async def _watch(
        self, connection: LocalConnection, progress: CheckpointWatch | None, patience: float
    ) -> None:
        """Until it is over. Raises `DeadlineExceeded` when nothing changes for so long."""
        seen, moved_at = 0, time.monotonic()
        while True:
            reply = await connection.request(
                LocalKind.CHECKPOINT_PROGRESS,
                local.Progress(seen, round(1000 * LOOK_SECONDS)),
                local.ProgressReply,
                progress_seconds=self._timeout + LOOK_SECONDS,
            )
            if reply.ended:
                return
            now = time.monotonic()
            if reply.number != seen:
                seen, moved_at = reply.number, now
                if progress is not None:
                    progress(
                        CheckpointProgress(
                            reply.phase, reply.done_bytes, reply.total_bytes, reply.members
                        )
                    )
                await self._driver.sleep(LOOK_SECONDS / 2)
            elif now - moved_at > patience:
                why = STALLED.get(reply.phase, "the disk does not answer, or is busy")
                raise DeadlineExceeded(f"nothing moved for {patience:g} s ({reply.phase}): {why}")


def _inspected(request: local.Publish, directory: str | os.PathLike[str]) -> list[str]:
    """Notes on the files that are to be published. Raises `CheckpointRefused` and `OSError`."""
    from p2pstore.checkpoint.content.inspecting import inspect
    from p2pstore.checkpoint.content.source_directory import SourceDirectory

    root = Path(directory)
    if not root.is_dir():
        os.stat(root)
        raise NotADirectoryError(
            errno.ENOTDIR,
            f"{os.strerror(errno.ENOTDIR)}; publish its folder, with include",
            str(root),
        )
    source = SourceDirectory(root, request.include, request.exclude)
    return inspect(source, request.include, request.exclude)


def _piece_bytes(piece_bytes: int) -> int:
    """A length that pieces may have, or 0 for the usual. Raises `TypeError` and `ValueError`."""
    number = arguments.whole_number("piece_bytes", piece_bytes, minimum=0)
    if number:
        try:
            check_piece_bytes(number)
        except CheckpointRefused as error:
            raise ValueError(str(error)) from None
    return number
