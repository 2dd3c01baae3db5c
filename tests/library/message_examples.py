"""A valid message of any type of the protocol, made from its annotations."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from msgspec import inspect

from lensemble.edge.spec import EdgeSpec
from lensemble.ids import EdgeId, NodeId

Made = TypeVar("Made")
EDGE = EdgeSpec(EdgeId(1), NodeId("a" * 64), NodeId("b" * 64), 4096, 2)


def example(kind: type[Made], **fields: Any) -> Made:
    """A ``kind`` with the smallest values that its fields allow, and ``fields``."""
    facts = inspect.type_info(kind)
    assert isinstance(facts, inspect.StructType)
    made = {
        field.name: _value(field.type)
        for field in facts.fields
        if field.required and field.name not in fields
    }
    return kind(**made, **fields)


def _text(facts: Any) -> str:
    found = re.search(r"\{(\d+)\}", facts.pattern or "")
    return "a" * int(found[1]) if found else ""


def _either(facts: Any) -> Any:
    optional = any(isinstance(each, inspect.NoneType) for each in facts.types)
    return None if optional else _value(facts.types[0])


_VALUES: dict[type, Callable[[Any], Any]] = {
    inspect.IntType: lambda facts: facts.ge or 0,
    inspect.FloatType: lambda facts: facts.ge or (0.0 if facts.gt is None else facts.gt + 1.0),
    inspect.StrType: _text,
    inspect.BytesType: lambda facts: bytes(facts.min_length or 0),
    inspect.BoolType: lambda _: False,
    inspect.LiteralType: lambda facts: facts.values[0],
    inspect.VarTupleType: lambda facts: (_value(facts.item_type),) * (facts.min_length or 0),
    inspect.TupleType: lambda facts: tuple(map(_value, facts.item_types)),
    inspect.StructType: lambda facts: EDGE if facts.cls is EdgeSpec else example(facts.cls),
    inspect.DataclassType: lambda facts: EDGE if facts.cls is EdgeSpec else facts.cls(),
    inspect.UnionType: _either,
}


def _value(facts: inspect.Type) -> Any:
    return _VALUES[type(facts)](facts)
