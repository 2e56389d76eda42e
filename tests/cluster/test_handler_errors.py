"""An exception of a signal handler comes out of a blocking call unchanged, and the client works afterwards."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pstore import blocking, errors
from p2pstore.blocking import BlockingClient
from tests.cluster.lone_peer import peer_process


class Alarm(Exception):
    """An exception of a caller's own."""


@contextlib.contextmanager
def raising(error: BaseException, seconds: float) -> Iterator[None]:
    """Have a signal handler raise it after a while."""

    def strike(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


CALLS: tuple[Callable[[BlockingClient], object], ...] = (
    lambda client: client.get("absent", wait=20),
    lambda client: client.put("other", bytes(100_000), overwrite=True),
    lambda client: client.get_many(["absent", "k"]),
    lambda client: client.peers(),
    lambda client: blocking.connect(client.socket_path, timeout=20),
)

RAISED: tuple[BaseException, ...] = (
    *(Alarm("mine"), TimeoutError("mine"), OSError(5, "mine"), BlockingIOError(11, "mine")),
    *(ConnectionResetError("mine"), ValueError("mine"), KeyError("mine"), RuntimeError("mine")),
    *(errors.DeadlineExceeded("mine"), errors.ProtocolError("mine"), errors.StoreClosed("mine")),
    *(errors.NoSuchKey("mine"), KeyboardInterrupt("mine")),
)


def test_it_comes_out_as_itself(tmp_path: Path) -> None:
    with peer_process(tmp_path) as (process, path), contextlib.ExitStack() as stack:
        client = stack.enter_context(blocking.connect(path, timeout=20))
        client.put("k", b"value")
        for call in CALLS:
            for error in RAISED:
                process.send_signal(signal.SIGSTOP)
                try:
                    with pytest.raises(type(error)) as came, raising(error, 0.01):
                        call(client)
                finally:
                    process.send_signal(signal.SIGCONT)
                assert came.value is error, f"{came.value!r} from {came.value.__context__!r}"
                client.put("k", b"value")
                assert client.get("k") == b"value"


def test_while_the_client_sleeps_between_two_looks(tmp_path: Path) -> None:
    with peer_process(tmp_path) as (_, path), blocking.connect(path) as client:
        for error in (TimeoutError("mine"), errors.DeadlineExceeded("mine")):
            with pytest.raises(TimeoutError) as came, raising(error, 0.05):
                client.get("absent", wait=20)
            assert came.value is error
            client.put("k", b"x", overwrite=True)
