"""The live view of `stats --watch` on terminals that are too small, and without its peer."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_p2p.commands.cluster import _Picture
from mooncake_p2p.statistics_view import Reading

MEMBERS = 5


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> _Picture:
    picture = _Picture(1.0)
    document: dict[str, Any] = {"cluster": {"members": [{}] * MEMBERS}}
    picture.reading = Reading(document, 1.0)
    lines = [f"line {number}" for number in range(10)] + [f"member {n}" for n in range(MEMBERS)]
    monkeypatch.setattr(picture, "lines", lambda columns: lines)
    return picture


def test_what_does_not_fit_is_counted(picture: _Picture) -> None:
    assert len(picture.fitted(60, 24)) == 24
    assert "enlarge" not in "".join(picture.fitted(60, 24))
    shown = picture.fitted(60, 15)
    assert shown[-3:] == ["member 2", "(2 of 5 members: enlarge the terminal)", "every 1 s; Ctrl-C ends"]
    shown = picture.fitted(60, 8)
    assert shown[-2] == "(9 more lines, all 5 members among them: enlarge the terminal)"[:60] or (
        shown[-2].endswith("~")
    )
    assert "members" in shown[-2]


def test_a_peer_that_is_gone_is_said_whole(picture: _Picture) -> None:
    picture.read_at = "12:00:00"
    picture.problem = "no answer, trying again: " + "word " * 30 + "end"
    for columns in (40, 60, 100):
        shown = picture.fitted(columns, 20)
        assert len(shown) == 20
        assert max(map(len, shown)) <= columns
        text = " ".join(shown)
        assert "STALE, as of 12:00:00: no answer" in text
        assert text.endswith("end")


def test_lines_that_are_cut_are_pointed_out(picture: _Picture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cut" not in picture.fitted(60, 24)[-1]
    monkeypatch.setattr(picture, "lines", lambda columns: ["name and memor~"])
    assert picture.fitted(60, 24)[-1].endswith("~: cut, widen the terminal")
