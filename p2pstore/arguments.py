"""Checks of arguments other than values, before anything is sent. Pure.

A `TypeError` or `ValueError` names the argument and says what is allowed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from numbers import Real
from typing import Any, Final, get_args

from p2pstore.results import Framework, OnConflict, PinName

PIN_NAMES: Final[tuple[PinName, ...]] = get_args(PinName)
CONFLICT_POLICIES: Final[tuple[OnConflict, ...]] = get_args(OnConflict)
FRAMEWORKS: Final[tuple[Framework, ...]] = get_args(Framework)
MAX_COUNT: Final = 2**31 - 1
_KEY: Final = operator.itemgetter(0)
_BUFFER: Final = operator.itemgetter(1)
MAX_SECONDS: Final = 1e9
"""31 years; longer times are mistakes, such as milliseconds, or infinity."""


def possible_keys(
    keys: Sequence[str], digests_of: Callable[[Sequence[str]], list[bytes]]
) -> tuple[list[bytes], list[int] | None]:
    """The digests of those that an object can have as its key, and their places, None for all; the others (empty, or
    too long) name nothing, so that one of them ends no batch. Raises `TypeError` for what is no text."""
    try:
        return digests_of(keys), None
    except ValueError:
        digests: list[bytes] = []
        places: list[int] = []
        for place, key in enumerate(keys):
            with suppress(ValueError):
                digests += digests_of([key])
                places.append(place)
        return digests, places


def whole_number(name: str, value: Any, *, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
    """A count of at least `minimum`; numpy's whole numbers too."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {_shown(value)}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{name} must be {minimum:,} to {maximum:,}, not {number:,}")
    return number


def seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """A length of time in seconds: 0 or more, or more than 0."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be a number of seconds, not {_shown(value)}")
    number = float(value)
    if math.isnan(number) or number < 0 or number > MAX_SECONDS or (above_zero and number == 0):
        least = "above 0" if above_zero else "0 or more"
        raise ValueError(f"{name} must be {least} and at most 1e9 seconds, not {number:g}")
    return number


def milliseconds(name: str, value: Any) -> int:
    """A time to live in seconds (above 0, or None for none) as milliseconds; 0 for none."""
    if value is None:
        return 0
    return max(1, round(seconds(name, value, above_zero=True) * 1000))


def flag(name: str, value: Any) -> bool:
    """True or False, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {_shown(value)}")
    return value


def text(name: str, value: Any) -> str:
    """A str."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {_shown(value)}")
    return value


def pin_number(value: Any) -> int:
    """The number of a pin on the wire."""
    if not isinstance(value, str):
        raise TypeError(f"pin must be 'none', 'soft' or 'hard', not {_shown(value)}")
    if value not in PIN_NAMES:
        raise ValueError(f"pin must be 'none', 'soft' or 'hard', not {value!r}")
    return PIN_NAMES.index(value)


def framework(value: Any) -> Framework | None:
    """Which library a tensor is to come back in; None for the one that it was put with."""
    if value is None:
        return None
    if value not in FRAMEWORKS:
        raise ValueError(f"framework must be 'numpy', 'torch' or None, not {_shown(value)}")
    found: Framework = value
    return found


def conflict_policy(overwrite: Any, on_conflict: Any) -> OnConflict:
    """The policy of a put for a key that exists with other bytes. `overwrite=True` is short for "overwrite"."""
    overwrites = flag("overwrite", overwrite)
    if on_conflict is None:
        return "overwrite" if overwrites else "keep"
    if not isinstance(on_conflict, str):
        shown = _shown(on_conflict)
        raise TypeError(f"on_conflict must be 'keep', 'overwrite' or 'error', not {shown}")
    if on_conflict not in CONFLICT_POLICIES:
        raise ValueError(
            f"on_conflict must be 'keep', 'overwrite' or 'error', not {_shown(on_conflict)}"
        )
    if overwrites and on_conflict != "overwrite":
        raise ValueError(f"overwrite=True contradicts on_conflict={on_conflict!r}: give one of the two")
    found: OnConflict = on_conflict
    return found


def key_list(keys: Any) -> list[str]:
    """The keys of a batch. One str is not a batch of its letters."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise TypeError(f"keys must be a sequence of str, not {_shown(keys)}")
    return list(keys)


def item_columns(items: Any) -> tuple[list[str], list[Any]]:
    """The keys, and the buffers, of a batch's (key, buffer) pairs."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise TypeError(f"items must be a sequence of (key, buffer) pairs, not {_shown(items)}")
    pairs = list(items)
    # A look at each takes as long as all else that is done for it.
    if not set(map(type, pairs)) <= {tuple, list} or not set(map(len, pairs)) <= {2}:
        for position, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                shown = _shown(pair)
                raise TypeError(f"items[{position}] must be a (key, buffer) pair, not {shown}")
    return list(map(_KEY, pairs)), list(map(_BUFFER, pairs))


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown if len(shown) <= 40 else shown[:37] + '...'} ({type(value).__name__})"
