"""An exception of a signal handler comes out of a blocking call unchanged, and the client works afterwards."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pstore import blocking, errors
from p2pstore.blocking import BlockingClient
from tests.cluster.processes import new_cluster
from tests.commands import ran
from tests.contract.worlds import peer_process


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
    with peer_process(tmp_path, "p") as peer, contextlib.ExitStack() as stack:
        client = stack.enter_context(blocking.connect(peer.socket, timeout=20))
        client.put("k", b"value")
        for call in CALLS:
            for error in RAISED:
                peer.process.send_signal(signal.SIGSTOP)
                try:
                    with pytest.raises(type(error)) as came, raising(error, 0.01):
                        call(client)
                finally:
                    peer.process.send_signal(signal.SIGCONT)
                assert came.value is error, f"{came.value!r} from {came.value.__context__!r}"
                client.put("k", b"value")
                assert client.get("k") == b"value"


def test_while_the_client_sleeps_between_two_looks(tmp_path: Path) -> None:
    with peer_process(tmp_path, "p") as peer, blocking.connect(peer.socket) as client:
        for error in (TimeoutError("mine"), errors.DeadlineExceeded("mine")):
            with pytest.raises(TimeoutError) as came, raising(error, 0.05):
                client.get("absent", wait=20)
            assert came.value is error
            client.put("k", b"x", overwrite=True)


PROGRAM = """
import gc, sys, threading, time
from p2pstore import blocking

held = []

def while_it_has_the_lock(frame, event, argument):
    # The janitor hears that it is to stop; before it says so, the interpreter ends, and takes it along.
    if frame.f_code.co_name == "wait" and frame.f_code.co_filename == threading.__file__:
        if event == "return" and argument is True:
            held.append(True)
            time.sleep(60)
        return while_it_has_the_lock

threading.settrace(while_it_has_the_lock)
client = blocking.connect(sys.argv[1])
client.put("key", bytes(100_000))
view = client.take_lease("key")
janitor = next(each for each in threading.enumerate() if each.name == "p2pstore-janitor")
client.close()
deadline = time.monotonic() + 20
while janitor.is_alive() and not held:
    assert time.monotonic() < deadline
    time.sleep(0.01)
gc.disable()  # it is collected when the interpreter ends
client.itself = client
del client
print("ends", flush=True)
gc.enable()
"""


def test_a_client_that_is_collected_at_the_end_does_not_keep_the_program() -> None:
    with new_cluster(1, halves=False) as cluster:
        cluster.start_first()
        socket = str(cluster.peers[0].socket)
        command = [sys.executable, "-c", PROGRAM, socket]
        try:
            done = ran(command, 40)
        except subprocess.TimeoutExpired as late:
            pytest.fail(f"it said {late.stdout!r} and did not end")
        assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
