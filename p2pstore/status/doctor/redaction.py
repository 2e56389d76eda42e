"""Takes secrets out of text that is to be shown to others: cluster keys, invites, identities, tickets. Pure.

Secrets that are known are found in every form that text gives them. Text that only looks like a secret is removed as
well: rather a hash too many than a key too few.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

REMOVED: Final = "(removed)"
LEAST_SECRET_BYTES: Final = 16
"""Shorter ones would be found in any text."""

_INVITE: Final = re.compile(r"p2pstore1:[A-Za-z0-9_=-]{8,}")
_KEY: Final = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{64}(?![0-9A-Fa-f])")
"""Cluster keys and seeds of identities; hashes of 32 bytes look the same."""
_NAMED: Final = re.compile(
    r"(?i)(\b\w*(?:secret|password|passwd|token|api_?key)\w*[\"']?\s*[=:]\s*)(\"[^\"]*\"|'[^']*'|[^\s,;}]+)"
)
_DENSE: Final = re.compile(r"(?<![A-Za-z0-9_+-])[A-Za-z0-9_+-]{40,}={0,2}")
"""May be a secret in base64."""
_PEER_ID: Final = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")


class Redactor:
    """Removes what is known to be secret, and what looks like it."""

    def __init__(self, secrets: Iterable[bytes] = ()) -> None:
        """`secrets` are raw bytes: of a key those that its hexadecimal digits stand for, of a text its own."""
        forms = {form for secret in secrets for form in _forms(secret)}
        longest_first = sorted(forms, key=lambda form: (-len(form), form))
        self._known = re.compile("|".join(map(re.escape, longest_first)), re.I) if forms else None

    def clean(self, text: str) -> str:
        """The text without them."""
        if self._known is not None:
            text = self._known.sub(REMOVED, text)
        text = _INVITE.sub("p2pstore1:" + REMOVED, text)
        text = _KEY.sub(REMOVED, text)
        text = _NAMED.sub(_without_value, text)
        return _DENSE.sub(_unless_harmless, text)


def _forms(secret: bytes) -> list[str]:
    """How text may have it."""
    if len(secret) < LEAST_SECRET_BYTES:
        return []
    forms = [secret.hex(), repr(secret)[2:-1]]
    for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
        forms.append(encode(secret).decode().rstrip("="))
    with suppress(UnicodeDecodeError):
        forms.append(secret.decode())
    return forms


def _without_value(match: re.Match[str]) -> str:
    """The name alone. What was JSON stays JSON: a value of a quoted name is quoted."""
    quote = match[2][0] if match[2][0] in "\"'" else '"' if '"' in match[1] else ""
    return f"{match[1]}{quote}{REMOVED}{quote}"


def _unless_harmless(match: re.Match[str]) -> str:
    """Peer ids are public; a word without small letters, capitals or digits is a name."""
    word = match[0]
    if _PEER_ID.fullmatch(word):
        return word
    dense = all(re.search(letters, word) for letters in ("[a-z]", "[A-Z]", "[0-9]"))
    return REMOVED if dense else word
