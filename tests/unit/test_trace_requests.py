"""Reading a trace: its requests, and the errors of lines that cannot be replayed."""

from __future__ import annotations

import msgspec
import pytest

from p2pstore.errors import ConfigError
from p2pstore.trace import trace_requests
from p2pstore.trace.trace_requests import MAX_LINE_BYTES, Request, read_requests
from tests.unit.trace_requests import conversations

LINE = b'{"timestamp": 27, "input_length": 600, "output_length": 1, "hash_ids": [0, 4]}\n'


def test_a_request_is_what_its_line_says() -> None:
    line = LINE[:-2] + b', "more": true}\n'
    assert list(read_requests([line, b"\n", LINE])) == [Request(27, 600, 1, [0, 4])] * 2
    request = next(read_requests([LINE]))
    assert request.seconds == 0.027
    assert [request.tokens_in(blocks) for blocks in range(3)] == [0, 512, 600]


def test_what_was_written_is_read() -> None:
    written = conversations(50)
    lines = [msgspec.json.encode(each) + b"\n" for each in written]
    assert list(read_requests(lines)) == written


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"nonsense", "malformed"),
        (b"[1]", "Expected `object`"),
        (LINE.replace(b"timestamp", b"time"), "missing required field `timestamp`"),
        (LINE.replace(b"27", b"-1"), ">= 0"),
        (LINE.replace(b"600", b'"600"'), r"Expected `int`, got `str` - at `\$.input_length`"),
        (LINE.replace(b"[0, 4]", b"[0, 4.5]"), r"\$.hash_ids"),
        (LINE.replace(b"[0, 4]", b"[0, -4]"), r">= 0 - at `\$.hash_ids"),
        (LINE.replace(b"[0, 4]", b"[0, 9223372036854775808]"), r"\$.hash_ids"),
        (LINE.replace(b"[0, 4]", b"[0]"), "1 hash_ids; 600 tokens are 2 blocks"),
        (LINE.replace(b"[0, 4]", b"[4, 4]"), "a block twice"),
        (LINE.replace(b"27", b"26"), "26 is before 27"),
        (LINE.replace(b"600", b"99999999999"), "<= 4294967296"),
        (b" " * (MAX_LINE_BYTES + 1), "more than 16,777,216 bytes"),
        (b"\xff\xfe", "malformed"),
    ],
)
def test_a_line_that_is_no_request_is_named(line: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"^line 2 of the trace .*{problem}"):
        list(read_requests([LINE, line]))


def test_a_trace_has_requests_but_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no requests"):
        list(read_requests([b"\n"]))
    monkeypatch.setattr(trace_requests, "MAX_REQUESTS", 3)
    assert len(list(read_requests([LINE] * 3))) == 3
    with pytest.raises(ConfigError, match=r"line 4 .*at most 3"):
        list(read_requests([LINE] * 4))
