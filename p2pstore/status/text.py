"""Text of others, fit to be shown. Pure.

The page shows text as text, whatever it says. What is left to do here: letters that nobody sees or that turn the
direction of others around are made visible, and nobody's name fills the screen.
"""

from __future__ import annotations

from typing import Final

from p2pstore.objects import printable

MAX_NAME_LETTERS: Final = 80
MAX_KEY_LETTERS: Final = 200
MAX_TEXT_LETTERS: Final = 400


def shown(text: str, letters: int = MAX_NAME_LETTERS) -> str:
    """At most so many letters of it, the last one an ellipsis where it was longer."""
    visible = printable(text[: letters + 1])
    return visible if len(visible) <= letters else visible[: letters - 1] + "\u2026"
