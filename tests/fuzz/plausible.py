"""Messages of any type with plausible content, made from what the type declares. Pure.

So every message that is added to a protocol is fuzzed without further code.
"""

from random import Random
from typing import Any, TypeVar

import msgspec

from p2pstore.wire import Message

M = TypeVar("M", bound=Message)


def plausible(message_type: type[M], rng: Random, hints: dict[str, Any] | None = None) -> M:
    """A message of this type. `hints` give values to fields by name, wherever they occur in it; a callable
    hint is called for every occurrence."""
    made: M = _struct(message_type, rng, hints or {})
    return made


def _struct(message_type: Any, rng: Random, hints: dict[str, Any]) -> Any:
    info: Any = msgspec.inspect.type_info(message_type)
    values = {}
    for field in info.fields:
        hint = hints.get(field.name)
        if hint is None:
            hint = _value(field.type, rng, hints)
        values[field.name] = hint() if callable(hint) else hint
    try:
        return message_type(**values)
    except TypeError:  # a hint that does not fit this type
        return message_type(**{f.name: _value(f.type, rng, {}) for f in info.fields})


def _value(kind: Any, rng: Random, hints: dict[str, Any]) -> Any:
    inspected = msgspec.inspect
    if isinstance(kind, inspected.StructType):
        return _struct(kind.cls, rng, hints)
    if isinstance(kind, inspected.BoolType):
        return rng.random() < 0.5
    if isinstance(kind, inspected.IntType):
        return rng.choice((0, 1, 2, 3, 16, 1000, 4096))
    if isinstance(kind, inspected.FloatType):
        return rng.choice((0.0, 0.25, 3.0))
    if isinstance(kind, inspected.StrType):
        return rng.choice(("default", "k", "k1", "float32", ""))
    if isinstance(kind, inspected.BytesType):
        return rng.randbytes(rng.choice((0, 8, 16, 16, 16, 32)))
    if isinstance(kind, inspected.ListType | inspected.VarTupleType):
        made = [_value(kind.item_type, rng, hints) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        return tuple(made) if isinstance(kind, inspected.VarTupleType) else made
    if isinstance(kind, inspected.UnionType):
        return _value(rng.choice(kind.types), rng, hints)
    if isinstance(kind, inspected.NoneType):
        return None
    if isinstance(kind, inspected.TupleType):
        return tuple(_value(each, rng, hints) for each in kind.item_types)
    raise TypeError(f"no plausible value for {kind}: teach tests/fuzz/plausible.py")
