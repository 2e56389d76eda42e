"""The setup of all tests."""

import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Cli

with contextlib.suppress(ImportError):  # the virtual machine's tests run without it
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # no test fails because the machine is busy
    settings.load_profile("untimed")

_STATE = "XDG_STATE_HOME"


def pytest_configure(config: pytest.Config) -> None:
    """Have Ctrl-C end this process and those that it starts: a shell that started the tests in the background, as some
    builders do, has it ignored, and each process hands that on. Nothing goes to the user's state directory."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _STATE not in os.environ:
        os.environ[_STATE] = place = tempfile.mkdtemp(prefix="p2p-state-")
        config.add_cleanup(lambda: shutil.rmtree(place, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Have garbage collections pass over modules and tests, a million objects: tests collect often."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def module_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a module's own fixtures; it goes with them rather than with the whole run."""
    folder: Path = tmp_path_factory.mktemp("module")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs commands in this process."""
    return Cli(capsys)
