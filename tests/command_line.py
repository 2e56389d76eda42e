"""Commands run in this process, for tests of their status and output."""

import json
from typing import Any, NamedTuple

import pytest


class Printed(NamedTuple):
    """The output of a command."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its document of `--json`."""
        return json.loads(self.out)


class Cli:
    """`cli("get", "k")` runs a command, which must end with `status`, and returns its output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> Printed:
        from mooncake_p2p.main import run

        self._capsys.readouterr()  # of what was printed before
        ended = run([str(each) for each in words])
        printed = Printed(*self._capsys.readouterr())
        assert ended == status, printed.err
        return printed
