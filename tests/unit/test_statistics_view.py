"""Statistics as people see them: rates between two readings, and lines that fit a terminal."""

import copy
from typing import Any

import pytest

from mooncake_p2p.commands.stats import _Picture
from mooncake_p2p.output import format_duration
from mooncake_p2p.statistics_view import Reading, clip, memory_bar, overview, rates, slow_lines, totals

PEER: dict[str, Any] = {
    "name": "alpha",
    "peer_id": "12D3KooW" + "x" * 44,
    "software": "0.1.0",
    "incarnation": 7,
    "uptime_seconds": 130.0,
    "memory_capacity_bytes": 64 << 20,
    "memory_used_bytes": 16 << 20,
    "leased_bytes": 0,
    "objects": 1234,
    "known_locations": 1,
    "joined": True,
    "bootstrap": [],
    "counters": {
        "client_puts": 100,
        "client_put_bytes": 1000,
        "client_reads": 60,
        "client_reads_elsewhere": 20,
        "client_leases": 10,
        "client_misses": 30,
    },
    "received": {"tcp": {"objects": 5, "bytes": 5000, "failures": 1}},
    "served": {"tcp": {"objects": 1, "bytes": 2000}},
    "slow": {"threshold_seconds": 0.1, "total": 0, "operations": []},
}
MEMBER: dict[str, Any] = {
    "name": "alpha",
    "peer_id": PEER["peer_id"],
    "memory_capacity_bytes": 64 << 20,
    "memory_used_bytes": 16 << 20,
    "objects": 1234,
    "status": "suspect",
    "heard_seconds_ago": None,
    "software": "0.1.0",
}
CLUSTER: dict[str, Any] = {
    "name": "default",
    "peers": 1,
    "memory_capacity_bytes": 64 << 20,
    "memory_used_bytes": 16 << 20,
    "copies": 1234,
    "members": [MEMBER],
}


def document(**peer: Any) -> dict[str, Any]:
    return {"peer": {**copy.deepcopy(PEER), **peer}, "cluster": copy.deepcopy(CLUSTER)}


def test_objects_that_kept_memory_had_are_told_until_they_are_checked() -> None:
    returning = overview(document(objects_returning=1500), None)
    assert "1,500 more from before the start, not checked yet" in str(returning)
    assert "not checked" not in str(overview(document(objects_returning=0), None))


def test_totals_tell_hits_from_misses_and_here_from_elsewhere() -> None:
    total = totals(PEER)
    assert (total.puts, total.gets, total.misses) == (100, 90, 30)
    assert total.hit_rate == pytest.approx(0.75)
    assert total.local_share == pytest.approx(70 / 90)
    idle = totals({**PEER, "counters": {}})
    assert idle.hit_rate is None
    assert idle.local_share is None


def test_an_older_peer_without_the_new_fields_can_be_shown() -> None:
    old = document()
    for name in ("received", "served", "joined", "bootstrap", "slow"):
        del old["peer"][name]
    for name in ("status", "heard_seconds_ago", "software"):
        del old["cluster"]["members"][0][name]
    assert any("alpha" in line for line in overview(old, None))


def test_repair_is_shown_when_there_was_or_is_something_to_repair() -> None:
    def lines(**repair: int) -> list[str]:
        return [line for line in overview(document(repair=repair), None) if "repair" in line]

    assert lines(copies=0, bytes=0, lacking=0) == []
    (line,) = lines(copies=2, bytes=3 << 20, lacking=0)
    assert line.split(None, 1)[1] == "2 copies made again (3.0 MiB)"
    (line,) = lines(copies=0, bytes=0, lacking=1200)
    assert line.split(None, 1)[1] == "1,200 objects with fewer copies than wanted"
    (line,) = lines(copies=0, bytes=0, lacking=0, limited=3)
    assert line.split(None, 1)[1] == "3 objects limited by the number of peers"


def test_quotas_are_shown_with_what_all_others_have() -> None:
    assert not any("quota" in line for line in overview(document(quotas={}), None))
    use = {"quota_bytes": 8 << 20, "used_bytes": 6 << 20, "kept_bytes": 4 << 20}
    lines = overview(document(quotas={"job\x1b/a": use}), None)
    (first,) = [number for number, line in enumerate(lines) if line.startswith("  quota")]
    shown = [" ".join(line.split()) for line in lines[first : first + 3]]
    assert "\x1b" not in shown[0]
    assert shown[1].endswith("50.0 % of 8.0 MiB and 2.0 MiB more")
    assert shown[2] == "10.0 MiB of all others, and being written"


def test_what_a_namespace_has_on_the_ssd_and_its_cap_are_shown() -> None:
    use = {"quota_bytes": 8 << 20, "used_bytes": 6 << 20, "kept_bytes": 6 << 20}
    capped = use | {"ssd_bytes": 2 << 20, "cap_bytes": 16 << 20}
    lines = "\n".join(overview(document(quotas={"a": capped, "b": use | {"ssd_bytes": 0}}), None))
    assert lines.count("on the SSD, in all 8.0 MiB of 16.0 MiB") == 1
    assert lines.count("on the SSD") == 1
    assert "role" not in lines
    assert "  role" in "\n".join(overview(document(role="writer of 'a'"), None))


def test_rates_are_differences_over_the_time_between() -> None:
    later = document()
    later["peer"]["counters"].update(client_puts=110, client_reads=80, client_misses=50)
    later["peer"]["received"] = {"tcp": {"bytes": 9000}, "shm": {"bytes": 400}}
    rate = rates(Reading(document(), 10.0), Reading(later, 12.0))
    assert rate is not None
    assert (rate.puts, rate.gets, rate.misses) == (5.0, 10.0, 10.0)
    assert rate.hit_rate == pytest.approx(0.5)
    assert rate.received_bytes == {"tcp": 2000.0, "shm": 200.0}
    assert rate.document()["received_bytes_per_second"] == {"tcp": 2000, "shm": 200}


@pytest.mark.parametrize("changes", [{"incarnation": 8}, {"peer_id": "another"}])
def test_a_restart_makes_no_rates(changes: dict[str, Any]) -> None:
    assert rates(Reading(document(), 10.0), Reading(document(**changes), 11.0)) is None


def test_without_time_between_there_are_no_rates() -> None:
    assert rates(None, Reading(document(), 10.0)) is None
    assert rates(Reading(document(), 10.0), Reading(document(), 10.0)) is None


def test_every_line_fits_and_shows_strangers_text_harmlessly() -> None:
    shown = document(name="n" * 64, software="\x1b[31m")
    shown["cluster"]["members"][0]["name"] = "m" * 64
    rate = rates(Reading(document(), 1.0), Reading(document(), 2.0))
    for columns in (80, 40):
        lines = overview(shown, rate, columns=columns)
        assert max(map(len, lines)) <= columns
        assert "\x1b" not in "".join(lines)
    assert any("PER SECOND" in line for line in overview(document(), rate))
    assert not any("PER SECOND" in line for line in overview(document(), None))


def test_a_lonely_peer_says_so() -> None:
    lonely = overview(document(joined=False, bootstrap=["h:1"]), None)
    assert any("no bootstrap peer has answered" in line for line in lonely)
    assert not any("no bootstrap" in line for line in overview(document(joined=False), None))


def test_what_is_wrong_is_said_with_cause_and_cure() -> None:
    assert not any("warning" in line for line in overview(document(problems=[]), None))
    problem = {"status": "warning", "name": "members", "what": "1 member is dead: c\x1b[1m"}
    problem |= {"cause": "cut off " * 20, "cure": "start it again"}
    lines = overview(document(problems=[problem]), None, columns=80)
    first = next(number for number, line in enumerate(lines) if "warning" in line)
    assert lines[first] == "  warning    1 member is dead: c\\x1b[1m"
    assert lines[first + 1].startswith("  why        cut off")
    assert lines[first + 3].strip() == "cut off cut off cut off"
    assert lines[first + 4] == "  cure       start it again"


@pytest.mark.parametrize(
    ("used", "capacity", "shown"),
    [
        (0, 100, "[" + "." * 30 + "] 0.0 % of 100 B"),
        (50, 100, "[" + "#" * 15 + "." * 15 + "] 50.0 % of 100 B"),
        (100, 100, "[" + "#" * 30 + "] 100.0 % of 100 B"),
        (0, 0, "none"),
    ],
)
def test_bars(used: int, capacity: int, shown: str) -> None:
    assert memory_bar(used, capacity, False) == shown


def test_slow_operations_show_where_the_time_went() -> None:
    operation = {
        "what": "lease",
        "key": "prompt/\x07" + "k" * 100,
        "keys": 3,
        "client": "c",
        "unix": 0.0,
        "seconds": 1.5,
        "waiting_seconds": 0.25,
        "stages": [{"what": "pull", "seconds": 1.25, "peer": "b", "transport": "tcp"}],
        "outcome": "refused",
    }
    slow = {"threshold_seconds": 0.1, "total": 200, "operations": [operation]}
    lines = slow_lines(slow)
    assert lines[0] == "1 of 200 operations of 0.1 s or more, the latest first"
    assert slow_lines({**slow, "total": 1})[0] == "1 operation of 0.1 s or more, the latest first"
    assert "+2" in lines[2]
    assert "1.50 s" in lines[2]
    assert "waiting 250.0 ms, pull 1.25 s from b by tcp" in lines[3]
    assert "refused" in lines[4]
    assert max(map(len, lines)) <= 80
    assert "\x07" not in "".join(lines)
    assert "no operation took 0.1 s" in slow_lines({**slow, "operations": []})[0]
    assert "--slow-operation" in slow_lines({**slow, "threshold_seconds": 0.0})[0]


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.5, "0.5 s"), (119, "119 s"), (130, "2 min"), (200_000, "2 d")]
)
def test_durations(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown


def test_a_cut_line_shows_that_it_was_cut() -> None:
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 6) == "abcde~"


SSD: dict[str, Any] = {
    "state": "ok",
    "why": "",
    "capacity_bytes": 1 << 40,
    "live_bytes": 1 << 39,
    "objects": 4321,
    "hit_rate": 0.5,
    "write_amplification": 1.04,
    "read_latency": {"p50_ms": 1.5, "p99_ms": 12.0},
    "read_bytes_per_second": 0,
    "written_bytes_per_second": 2_000_000,
}


def test_an_ssd_is_shown_with_what_is_wrong_with_it() -> None:
    lines = overview(document(ssd=SSD), None, columns=120)
    text = "\n".join(lines)
    assert "50.0 % of 1.0 TiB" in text
    assert "4,321 objects, hit rate 50.0 %, write amplification 1.04" in text
    assert "read only" not in text
    failed = SSD | {"state": "read_only", "why": "writing failed\x1b[2J"}
    lines = overview(document(ssd=failed), None, columns=120)
    assert any("read only: writing failed" in line and "\x1b" not in line for line in lines)


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
