"""Running a peer in the foreground, for the command line."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec
import trio

from p2pstore.config import PeerConfig
from p2pstore.errors import ConfigError
from p2pstore.nursery import sole_cause
from p2pstore.peer.api import MAX_LOCAL_PEERS, Peer, open_peer
from p2pstore.peer.logs import configure_logs
from p2pstore.statedir import is_in_use

logger = logging.getLogger("p2pstore.peer")

STATE_DIRECTORY_NAME: Final = "mooncake-p2p"


def run_peer(config: PeerConfig) -> None:
    """Run a peer until SIGINT, SIGTERM or `mooncake-p2p leave`.

    Prints `ready {...}` on stdout when it can serve. Raises what `open_peer` raises. A second signal
    ends the process at once.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("p2pstore runs on Linux only: it needs memfd, SCM_RIGHTS and /proc")
    configure_logs(config)
    settled = with_places(config.checked())
    try:
        trio.run(_run, settled)
    except BaseExceptionGroup as group:
        raise sole_cause(group) from None


def with_places(config: PeerConfig) -> PeerConfig:
    """The configuration with a state directory and a name that no other peer of this host uses."""
    if config.state_dir is not None:
        return config
    root = state_root()
    for number in range(1, MAX_LOCAL_PEERS + 1):
        name = config.name if number == 1 else f"{config.name}-{number}"
        path = root / name
        if not is_in_use(path):
            return msgspec.structs.replace(config, name=name, state_dir=str(path))
    raise ConfigError(
        f"{MAX_LOCAL_PEERS} peers named {config.name} run here; give --name and --state-dir"
    )


def state_root() -> Path:
    """Where state directories go by default: the user's state home, or /var/lib for root."""
    home = os.environ.get("XDG_STATE_HOME")
    if home:
        return Path(home) / STATE_DIRECTORY_NAME
    if os.getuid() == 0:
        return Path("/var/lib") / STATE_DIRECTORY_NAME
    return Path.home() / ".local" / "state" / STATE_DIRECTORY_NAME


async def _run(config: PeerConfig) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_stop_on_signal, signals, nursery.cancel_scope)
            await _serve(config)
            nursery.cancel_scope.cancel()


async def _serve(config: PeerConfig) -> None:
    async with open_peer(config) as peer:
        if config.bootstrap:
            with trio.move_on_after(config.join_timeout):
                await peer.node.settled.wait()
        _say_ready(peer)
        await peer.node.leave_requested.wait()
        logger.info("leaving")


def _say_ready(peer: Peer) -> None:
    document = {
        "peer_id": peer.peer_id,
        "name": peer.name,
        "control": peer.control,
        "data": peer.data,
        "socket": peer.socket,
        "metrics": None,
        "joined": peer.node.contacted.is_set(),
        "peers": 1 + len(peer.node.core.live_peers()),
    }
    try:
        print("ready " + json.dumps(document), flush=True)
    except BrokenPipeError:
        # Whoever started the peer does not listen; that is no reason to stop serving.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _stop_on_signal(signals: object, scope: trio.CancelScope) -> None:
    first = True
    async for number in signals:  # type: ignore[attr-defined]  # trio's receiver type is private
        if not first:
            logger.warning("second signal: ending at once")
            os._exit(128 + number)
        first = False
        logger.info("%s: leaving", signal.Signals(number).name)
        scope.cancel()
