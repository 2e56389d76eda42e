"""The status page as one file, and what browsers are told that it may do: show itself, and ask its own peer."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Final

_STYLE: Final = "/*style*/"
_SCRIPT: Final = "/*script*/"


def _source(name: str) -> str:
    return (files("p2pstore.status") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


@cache
def page_bytes() -> bytes:
    """HTML with its style and its script in it; nothing is asked for elsewhere."""
    whole = _source("page.html")
    return whole.replace(_STYLE, _source("page.css")).replace(_SCRIPT, _source("page.js")).encode()


@cache
def page_headers() -> tuple[tuple[str, str], ...]:
    """For that page alone. No other script or style runs, even if some text of others became part of the page; and it
    sends what it shows nowhere."""
    policy = (
        "default-src 'none'",
        f"script-src {_hash(_source('page.js'))}",
        f"style-src {_hash(_source('page.css'))}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return (
        ("Content-Security-Policy", "; ".join(policy)),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Referrer-Policy", "no-referrer"),
    )
