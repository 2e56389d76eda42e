"""Messages to a service manager, as sd_notify(3) has them; and none where there is no manager."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from p2pstore.peer.lifetime.run import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = str(tmp_path / "notify")
        listener.bind(name if request.param == "path" else "\0" + name)
        listener.settimeout(5.0)
        yield listener


def environment_of(listener: socket.socket, **more: str) -> dict[str, str]:
    name = listener.getsockname()
    text = name if isinstance(name, str) else "@" + name[1:].decode()
    return {"NOTIFY_SOCKET": text, "HOME": "/", **more}


def heard(listener: socket.socket) -> dict[str, str]:
    lines = listener.recv(4096).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_each_change_is_told_once(listener: socket.socket) -> None:
    environment = environment_of(listener)
    manager = ServiceManager.of_environment(environment)
    assert environment == {"HOME": "/"}, "what the peer starts is not the service"
    manager.ready("serving /run/p.sock")
    assert heard(listener) == {"READY": "1", "STATUS": "serving /run/p.sock"}
    manager.reloading()
    told = heard(listener)
    assert told.pop("RELOADING") == "1"
    assert int(told.pop("MONOTONIC_USEC")) > 0
    assert not told
    manager.stopping(2.5)
    told = heard(listener)
    assert (told["STOPPING"], told["EXTEND_TIMEOUT_USEC"]) == ("1", "2500000")


async def test_signs_of_life_come_from_the_event_loop(
    listener: socket.socket, autojump_clock: trio.testing.MockClock
) -> None:
    variables = {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    manager = ServiceManager.of_environment(environment_of(listener, **variables))
    assert manager.watchdog_seconds == 30.0
    with trio.move_on_after(25.0):
        await manager.give_signs()
    for _ in range(3):  # at 0, 10 and 20 s
        assert heard(listener) == {"WATCHDOG": "1"}
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(1)


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "3000000"}])
async def test_what_the_manager_had_no_room_for_is_told_again(
    listener: socket.socket, watchdog: dict[str, str], autojump_clock: trio.testing.MockClock
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                other.sendto(b"OTHER=1", listener.getsockname())
    manager = ServiceManager.of_environment(environment_of(listener, **watchdog))
    manager.ready("serving")
    with trio.move_on_after(0.5):
        await manager.give_signs()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            assert heard(listener) == {"OTHER": "1"}
    with trio.move_on_after(2.5):
        await manager.give_signs()
    assert heard(listener)["READY"] == "1"


@pytest.mark.parametrize("variables", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "0"}])
async def test_nobody_waits_for_signs(variables: dict[str, str]) -> None:
    manager = ServiceManager.of_environment(variables)
    assert manager.watchdog_seconds is None
    await manager.give_signs()
    manager.ready("nobody is told")
    other = {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}
    assert ServiceManager.of_environment(other).watchdog_seconds is None, "another process's"


def test_a_manager_that_is_gone_costs_a_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ServiceManager(str(tmp_path / "nowhere")).ready("x")
        ServiceManager("vsock:2:1").ready("x")
    assert "was not told READY=1: No such file" in caplog.text
    assert "neither a path nor begins with @" in caplog.text
