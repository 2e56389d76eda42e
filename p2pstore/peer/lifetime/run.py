"""Running a peer as a process, for the command line."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

import p2pstore
from p2pstore.access.invite import Invite
from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError, P2PStoreError
from p2pstore.local.socket_paths import own_directory, unreachable_by_others
from p2pstore.peer.api import Peer, open_peer
from p2pstore.peer.lifetime.logs import configure_logs, reopen_logs, send_stderr_to_log
from p2pstore.runtime.linux import has_terminal
from p2pstore.runtime.trio_tasks import open_background_nursery, sole_cause
from p2pstore.state.places import kept
from p2pstore.transfer.rdma.rdma_topology import is_matrix

logger = logging.getLogger("p2pstore.peer")

LOG_NAME: Final = "peer.log"
ENDING_SECONDS: Final = 15.0
"""Upper bound of an end after draining: goodbyes, and an SSD that hangs."""
ReadyText = Callable[[Mapping[str, Any]], str]
"""Makes the text that stdout gets when a peer serves, of `_ready_document`."""
_PATHS: Final = (
    "cluster_key_file",
    "allow_file",
    "state_dir",
    "socket",
    "log_file",
    "memory_path",
    "ssd",
)


def ready_line(document: Mapping[str, Any]) -> str:
    """The line for programs: `ready ` and JSON."""
    return "ready " + json.dumps(document)


def run_peer(
    config: PeerConfig,
    invite: Invite | None = None,
    *,
    detached: bool = False,
    ready_text: ReadyText = ready_line,
) -> None:
    """Run a peer until SIGINT, SIGTERM or `mooncake-p2p leave`; SIGHUP opens the log file anew and has the
    peer read its key and allow files again.

    Prints `ready_text` on stdout when it can serve. `invite` is kept in the state directory, for the next start,
    unless the peer is refused or cannot start. `detached` is for a process of its own session: it logs to the state
    directory unless told otherwise, and after `ready` holds on to nothing of the process that started it. Raises what
    `open_peer` raises. A second signal ends the process at once. A service manager that started this process
    (NOTIFY_SOCKET) is told when it serves, reloads and leaves, and hears from its event loop.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("p2pstore runs on Linux only: it needs memfd, SCM_RIGHTS and /proc")
    settled = _with_absolute_paths(config.checked())
    with kept(invite, settled.state_dir):
        _run_settled(settled, detached, ready_text)


def _run_settled(settled: PeerConfig, detached: bool, ready_text: ReadyText) -> None:
    if detached and settled.log_file is None and settled.state_dir is not None:
        Path(settled.state_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        settled = msgspec.structs.replace(settled, log_file=os.path.join(settled.state_dir, LOG_NAME))
    _raise_descriptor_limit()
    configure_logs(settled)
    manager = ServiceManager.of_environment(os.environ)
    try:
        trio.run(_run, settled, detached, ready_text, manager)
    except BaseException as error:
        cause = sole_cause(error) if isinstance(error, BaseExceptionGroup) else error
        if settled.log_file is not None and isinstance(cause, P2PStoreError):
            logger.error("%s", cause)  # the command says it on stderr, where this log does not go
        raise cause from None
    logger.info("stopped", extra={"event": "stopped"})


def _raise_descriptor_limit() -> None:
    """As many descriptors as this user may have: a peer that is full of strangers and clients holds 3,500."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):  # then it is as the administrator wants it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _with_absolute_paths(config: PeerConfig) -> PeerConfig:
    """Paths keep the meaning that they have to the starting process, wherever this one goes."""
    paths = {name: getattr(config, name) for name in _PATHS}
    if config.rdma_topology and not is_matrix(config.rdma_topology):
        paths["rdma_topology"] = config.rdma_topology
    absolute = {name: os.path.abspath(path) for name, path in paths.items() if path}
    more = [each.with_absolute_path() for each in config.memory_pieces]
    return msgspec.structs.replace(config, **absolute, more_memory=more)


async def _run(
    config: PeerConfig, detached: bool, ready_text: ReadyText, manager: ServiceManager
) -> None:
    # Under nohup a terminal may go without its peer.
    bound_to_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()
    with (
        trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        trio.open_signal_receiver(signal.SIGHUP) as hangups,  # kept until there is a peer to tell
    ):
        async with open_background_nursery() as to_the_end, trio.open_nursery() as nursery:
            to_the_end.start_soon(manager.give_signs)

            def stop() -> None:
                manager.stopping(config.drain_timeout + ENDING_SECONDS)
                nursery.cancel_scope.cancel()

            nursery.start_soon(_stop_on_signal, signals, stop)
            watch = partial(_watch_hangups, hangups, bound_to_terminal, manager)
            await _serve(config, watch, detached, ready_text, manager)
            nursery.cancel_scope.cancel()


async def _serve(
    config: PeerConfig,
    watch_hangups: Callable[[Peer], Awaitable[None]],
    detached: bool,
    ready_text: ReadyText,
    manager: ServiceManager,
) -> None:
    async with open_peer(config) as peer, open_background_nursery() as nursery:
        with short_collections():
            nursery.start_soon(watch_hangups, peer)
            _say_started(peer)
            if config.bootstrap:
                with trio.move_on_after(config.join_timeout):
                    await peer.node.control.settled.wait()
            ready = _ready_document(peer)
            if config.bootstrap and not peer.node.control.settled.is_set():
                logger.warning(
                    "no bootstrap peer answered within %g s: serving alone, and trying on",
                    config.join_timeout,
                    extra={"event": "join_timed_out"},
                )
            _say_ready(ready_text(ready))
            manager.ready(f"serving {peer.socket}")
            if detached:
                _let_go()
            await peer.node.leave_requested.wait()
            manager.stopping(peer.node.drain_seconds + ENDING_SECONDS)
            logger.info("leaving: asked to", extra={"event": "leaving"})


def _say_started(peer: Peer) -> None:
    """Only now: what cannot start ends with the one line that the command prints."""
    config = peer.node.config
    logger.info(
        "p2pstore %s started, as %s of cluster %s",
        p2pstore.__version__,
        config.name,
        config.cluster,
        extra={"event": "started", "process_id": os.getpid(), "state_dir": config.state_dir},
    )
    logger.info(
        "listening: control %s, data %s, clients %s",
        peer.control,
        ", ".join(peer.data),
        peer.socket,
        extra={"event": "listening", "peer_id": peer.peer_id},
    )
    if config.state_dir is not None and Path(config.state_dir).is_relative_to(own_directory()):
        logger.warning(
            "this user has no home directory: what this peer has to remember is in %s, which the machine may remove at "
            "its next start. Name a place that lasts with --state-dir, or set XDG_STATE_HOME",
            config.state_dir,
        )
    if peer.metrics is not None:
        logger.info("status page: http://%s/", peer.metrics, extra={"event": "status_page"})
    if config.socket_mode_bits() & 0o077:
        closed = unreachable_by_others(Path(peer.socket))
        if closed is not None:
            logger.warning(
                "the socket's mode lets others in, but %s keeps them out: choose another place with --socket",
                closed,
            )


async def _watch_hangups(
    hangups: AsyncIterator[int], bound_to_terminal: bool, manager: ServiceManager, peer: Peer
) -> None:
    async for _ in hangups:
        if bound_to_terminal and not has_terminal():
            logger.info("leaving: the terminal is gone", extra={"event": "leaving"})
            peer.node.leave_requested.set()
        else:
            manager.reloading()
            reopen_logs()  # the log file was rotated
            try:
                await peer.reload()
            except ConfigError as error:
                logger.error("everything stays as it was: %s", error)
            manager.ready(f"serving {peer.socket}")


def _ready_document(peer: Peer) -> dict[str, Any]:
    return {
        "peer_id": peer.peer_id,
        "name": peer.name,
        "control": peer.control,
        "data": peer.data,
        "socket": peer.socket,
        "metrics": peer.metrics,
        "joined": peer.node.control.contacted.is_set(),
        "peers": 1 + len(peer.node.core.live_peers()),
    }


def _say_ready(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError as error:
        # A closed pipe or a full disk is no reason to stop serving.
        # Buffered output goes there too, or the end of the process would complain.
        _send_to_nowhere(1)
        logger.warning("the ready line was not printed: standard output: %s", error.strerror)


def _let_go() -> None:
    """Hold on to nothing of the process that started this one: its pipes, its directory."""
    _send_to_nowhere(1)
    send_stderr_to_log()
    os.chdir("/")


def _send_to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


async def _stop_on_signal(signals: AsyncIterator[int], stop: Callable[[], None]) -> None:
    first = True
    async for number in signals:
        if not first:
            logger.warning("second signal: ending at once")
            os._exit(128 + number)
        first = False
        logger.info("leaving: %s", signal.Signals(number).name, extra={"event": "leaving"})
        stop()


LONG_SECONDS: Final = 0.05
"""CPU time of a full collection, with some 50,000 objects, above which later ones leave out what it has found alive."""
THOROUGH_GROWTH: Final = 1.5
"""Growth of what is left out after which one collection looks at all of it. Cycles that were alive at a long collection
are garbage that no other finds, such as connections that were open then: that bounds it to a third of all objects."""
_FULL: Final = 2


class _FreezeAfterLong:
    """A callback of the collector."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._frozen = gc.get_freeze_count()
        """Objects left out after the last thorough collection."""
        self._is_thorough = False

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] != _FULL:
            return
        if phase == "start":
            self._began_at = time.thread_time()
        elif self._is_thorough:
            gc.freeze()
            self._frozen, self._is_thorough = gc.get_freeze_count(), False
        elif time.thread_time() - self._began_at > LONG_SECONDS:
            gc.freeze()
            if gc.get_freeze_count() > THOROUGH_GROWTH * self._frozen:
                gc.unfreeze()
                self._is_thorough = True


@contextmanager
def short_collections() -> Iterator[None]:
    """Keep full collections short within this block. Leaves the 100,000 objects of the imported modules out as well:
    with them a full collection takes 100 ms, and comes only when 25,000 objects have survived since the last."""
    gc.freeze()
    gc.collect()  # else the next one waits until there is a quarter of what was frozen
    callback = _FreezeAfterLong()
    gc.callbacks.append(callback)
    try:
        yield
    finally:
        gc.callbacks.remove(callback)


SIGNS_PER_PERIOD: Final = 3
"""How often a sign of life is given within the time after which the manager misses it."""
RETRY_SECONDS: Final = 1.0
MAX_WAITING: Final = 8
"""Messages that the manager had no room for; of more, the newest count."""
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The manager that started this process, if one did. Telling it something never fails: it may be gone."""

    def __init__(self, address: str | None = None, watchdog_seconds: float | None = None) -> None:
        self.watchdog_seconds = watchdog_seconds
        """The manager restarts a process that is silent for longer; None: it has no watchdog."""
        self._waiting: deque[str] = deque(maxlen=MAX_WAITING)
        self._address = None if address is None else address.replace("@", "\0", 1)
        if address is not None and address[:1] not in ("/", "@"):
            logger.warning("NOTIFY_SOCKET: %r is neither a path nor begins with @", address)
            self._address = None

    @classmethod
    def of_environment(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """The one that the environment names. Takes its variables out: child processes are not that service."""
        address, period, process = (environment.pop(name, None) for name in _VARIABLES)
        if process is not None and process != str(os.getpid()):
            period = None
        seconds = int(period) / 1e6 if period is not None and period.isdecimal() else 0.0
        return cls(address, seconds or None)

    def ready(self, status: str) -> None:
        """This peer serves: for the first time, or again after `reloading`."""
        self._tell("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, seconds: float) -> None:
        """This peer leaves within `seconds`."""
        self._tell("STOPPING=1", "STATUS=leaving", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    async def give_signs(self) -> None:
        """Give signs of life until cancelled: from the event loop, so that one that hangs gives none. What the manager
        had no room for is told again."""
        if self._address is None:
            return
        while True:
            self._tell_what_waits()
            if self.watchdog_seconds is None:
                await trio.sleep(RETRY_SECONDS)
            else:
                self._send("WATCHDOG=1")
                await trio.sleep(self.watchdog_seconds / SIGNS_PER_PERIOD)

    def _tell(self, *lines: str) -> None:
        self._waiting.append("\n".join(lines))
        self._tell_what_waits()

    def _tell_what_waits(self) -> None:
        while self._waiting and self._send(self._waiting[0]):
            self._waiting.popleft()

    def _send(self, text: str) -> bool:
        """Whether that is done with: not when the manager's queue is full."""
        if self._address is None:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as speaker:
                speaker.sendto(text.encode(), self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            what = text.partition("\n")[0]
            logger.warning("the service manager was not told %s: %s", what, error.strerror)
        return True
