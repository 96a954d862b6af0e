"""Kinds of records as frozen dataclasses: the writer makes one, the report reads the same one back.

A :class:`~benchkit.results.Record` holds labels, figures and plain data by name. A kind of record gives these names
once, as fields, so that no report spells a key and no writer composes one::

    @dataclass(frozen=True)
    class Memory(TypedRecord, name="memory", labels=("target", "mode")):
        target: str
        mode: str
        peak: Quantity
        note: str = ""

    run.add(Memory("gpt", "eager", Quantity(2**30, "B")).record())
    for memory in Memory.select(results, target="gpt"):
        print(memory.mode, memory.peak.value)

What a field becomes:

- a field named in ``labels`` becomes a label;
- a :class:`~benchkit.results.Quantity` becomes a figure under the field's name. In a nested dataclass, or in a mapping
  from strings, its name is the path to it: ``eager.step``;
- everything else becomes plain JSON in the record's data, again under the field's name: numbers, strings, None, and
  tuples, mappings and dataclasses of these. A ``NamedTuple`` becomes a list, the shortest form of a row.

A field that has its default is left out of the record, and a field that a record lacks takes its default.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from benchkit.errors import UserError
from benchkit.results import Json, Label, Quantity, Record, Results

Value = TypeVar("Value")
_ABSENT: Any = object()


@dataclass(frozen=True)
class TypedRecord:
    """Base class of a kind of record; a subclass is a frozen dataclass, see the module.

    Args of the subclass statement:
        name: Name of the records of this kind.
        labels: Fields that become labels; they say which variant a record is about.
    """

    record_name: ClassVar[str]
    record_labels: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls, *, name: str, labels: tuple[str, ...] = ()) -> None:
        super().__init_subclass__()
        cls.record_name, cls.record_labels = name, labels

    def record(self) -> Record:
        """This record with its fields sorted into labels, figures and data."""
        labels: dict[str, Label] = {name: getattr(self, name) for name in self.record_labels}
        values: dict[str, Quantity] = {}
        data = {}
        for name, value in _members(self).items():
            if name not in labels:
                plain = _encode(value, name, values)
                if plain is not _ABSENT:
                    data[name] = plain
        return Record(self.record_name, labels, values, data or None)

    @classmethod
    def of(cls, record: Record) -> Self:
        """Read a record of this kind.

        Raises:
            UserError: If the record has another name, lacks a field that has no default, or has one of another type.
        """
        if record.name != cls.record_name:
            raise UserError(f"expected a record {cls.record_name!r}, got {record.name!r}")
        try:
            return cls(**_arguments(cls, "", dict(record.values), {**(record.data or {}), **record.labels}))
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"record {record.name!r} {dict(record.labels)} does not fit {cls.__name__} ({error}); "
                "run the lens again to make a new one"
            ) from error

    @classmethod
    def select(cls, results: Results, **labels: Label) -> list[Self]:
        """The records of this kind whose labels include these, in the order they were taken."""
        return [cls.of(record) for record in results.select(cls.record_name, **labels)]

    @classmethod
    def one(cls, results: Results, **labels: Label) -> Self:
        """The only such record.

        Raises:
            LookupError: When there is none, or more than one.
        """
        return cls.of(results.one(cls.record_name, **labels))


def from_plain(kind: type[Value], plain: Json) -> Value:
    """The inverse of ``dataclasses.asdict`` for a dataclass that has been JSON, with dataclasses and tuples inside.

    Raises:
        KeyError: If a field that has no default is missing.
        AttributeError: If a list or a number stands where a dataclass should.
        TypeError: If something else stands where a list should.
    """
    value: Value = _decode(kind, "", {}, plain)
    return value


def _encode(value: Any, path: str, values: dict[str, Quantity]) -> Json:
    """The plain part of a field's value; its figures go into ``values``."""
    if isinstance(value, Quantity):
        values[path] = value
        return _ABSENT
    if is_dataclass(value):
        members = _members(value)
    elif isinstance(value, Mapping):
        members = dict(value)
    else:
        return _inline(value)
    encoded = {key: _encode(member, f"{path}.{key}", values) for key, member in members.items()}
    return {key: member for key, member in encoded.items() if member is not _ABSENT}


def _members(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that do not have their default."""
    members = {field: getattr(value, field.name) for field in fields(value)}
    return {field.name: member for field, member in members.items() if member != _default(field)}


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _inline(value: Any) -> Json:
    """Plain JSON of a value inside a sequence, figures included: they have no path."""
    if is_dataclass(value):
        return {name: _inline(member) for name, member in _members(value).items()}
    if isinstance(value, Mapping):
        return {key: _inline(member) for key, member in value.items()}
    return [_inline(member) for member in value] if isinstance(value, (tuple, list)) else value


def _arguments(kind: Any, path: str, values: dict[str, Quantity], data: Mapping[str, Json]) -> dict[str, Any]:
    """The arguments of a dataclass, those left out that have a default and are absent."""
    given = {}
    for field in fields(kind):
        value = _decode(_hints(kind)[field.name], path + field.name, values, data.get(field.name, _ABSENT))
        if value is not _ABSENT:
            given[field.name] = value
        elif field.default is MISSING and field.default_factory is MISSING:
            raise KeyError(f"{path}{field.name} is missing")
    return given


def _decode(kind: Any, path: str, values: dict[str, Quantity], plain: Json) -> Any:
    """A field's value from the figures below its path and from plain data; ``_ABSENT`` where there is neither."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        alternatives = [alternative for alternative in arguments if alternative is not types.NoneType]
        if plain is None or len(alternatives) != 1:
            return plain
        return _decode(alternatives[0], path, values, plain)
    if kind is Quantity:
        return Quantity(**plain) if isinstance(plain, Mapping) else values.get(path, _ABSENT)
    below = {key.removeprefix(f"{path}."): figure for key, figure in values.items() if key.startswith(f"{path}.")}
    if is_dataclass(kind):
        if plain is _ABSENT and not below:
            return _ABSENT
        return kind(**_arguments(kind, "", below, {} if plain is _ABSENT else plain))  # type: ignore[operator]
    if plain is _ABSENT:
        return _ABSENT
    if isinstance(plain, Mapping) and len(arguments) == 2:
        nested = arguments[1]
        keys = [*plain, *(key if nested is Quantity else key.partition(".")[0] for key in below)]
        return {key: _decode(nested, key, below, plain.get(key, _ABSENT)) for key in dict.fromkeys(keys)}
    if isinstance(plain, (list, tuple)) and isinstance(kind, type) and issubclass(kind, tuple) and not arguments:
        return kind(*plain)
    if isinstance(plain, (list, tuple)) and arguments:
        every = arguments if origin is tuple and arguments[-1] is not ... else (arguments[0],) * len(plain)
        return (origin or tuple)(_decode(inner, "", {}, item) for inner, item in zip(every, plain, strict=True))
    if origin in (list, tuple):
        raise TypeError(f"{path} is no list")
    return plain


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
