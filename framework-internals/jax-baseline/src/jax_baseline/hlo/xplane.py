"""Reads the bytes of a JAX profile (``*.xplane.pb``): HLO instructions, their timelines and their times.

``jax.profiler.ProfileData`` reads the same file in C++. From Python 3.12 on its first use is a DeprecationWarning
(``builtin type event_stats has no __module__ attribute``), and where warnings are errors the process aborts (seen with
jax 0.11.2). This reader also keeps the picoseconds of durations.

The messages are defined in ``tsl/profiler/protobuf/xplane.proto``. The encoding is protobuf's wire format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# Field numbers. A map is a repeated message with its key in field 1 and its value in field 2.
_SPACE_PLANE = 1
_PLANE_NAME, _PLANE_LINE, _PLANE_STAT_NAMES = 2, 3, 5
_KEY, _VALUE = 1, 2
_STAT_NAME = 2
_LINE_NAME, _LINE_EVENT = 2, 4
_EVENT_PICOSECONDS, _EVENT_STAT = 3, 4
_STAT_ID, _STAT_STRING, _STAT_REFERENCE = 1, 5, 7

_VARINT, _LENGTH = 0, 2  # wire types
_SIZES = {1: 8, 5: 4}  # bytes of a number by the wire types of fixed size

Value = int | memoryview
Fields = Mapping[int, list[Value]]


class ProfileEvent(NamedTuple):
    """One event of a profile."""

    plane: str  # a device (``/device:GPU:0``) or the host
    line: str  # a stream or a thread of the plane
    instruction: str  # name of the instruction in the optimised HLO
    seconds: float


def read_instructions(profile: bytes) -> Iterator[ProfileEvent]:
    """Yield the events that have the name of an HLO instruction (``hlo_op``).

    The profile is a serialised ``XSpace``.

    Raises:
        ValueError: If the bytes are not a serialised ``XSpace``.
    """
    for plane in map(_fields, _fields(memoryview(profile))[_SPACE_PLANE]):
        entries = map(_fields, plane[_PLANE_STAT_NAMES])
        names = {_number(entry, _KEY): _text(_fields(entry[_VALUE][0]), _STAT_NAME) for entry in entries}
        if "hlo_op" not in names.values():
            continue
        for line in map(_fields, plane[_PLANE_LINE]):
            for event in map(_fields, line[_LINE_EVENT]):
                stats = map(_fields, event[_EVENT_STAT])
                stat = next((stat for stat in stats if names.get(_number(stat, _STAT_ID)) == "hlo_op"), None)
                if stat is not None:
                    # A repeated string is a reference to the name of another statistic.
                    instruction = names.get(_number(stat, _STAT_REFERENCE)) or _text(stat, _STAT_STRING)
                    seconds = _number(event, _EVENT_PICOSECONDS) * 1e-12
                    yield ProfileEvent(_text(plane, _PLANE_NAME), _text(line, _LINE_NAME), instruction, seconds)


def _fields(message: Value) -> Fields:
    """Return the values of a message by the number of the field; all but integers are bytes."""
    if isinstance(message, int):
        # The bytes are wrong, not the type of an argument.
        raise ValueError("expected a serialised XSpace, got a number instead of a message")  # noqa: TRY004
    values: dict[int, list[Value]] = defaultdict(list)
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind not in (_VARINT, _LENGTH, *_SIZES):
            raise ValueError(f"expected a serialised XSpace, got a field of wire type {kind}")
        if kind == _VARINT:
            value, at = _varint(message, at)
            values[number].append(value)
            continue
        length, at = (_SIZES[kind], at) if kind in _SIZES else _varint(message, at)
        if at + length > end:
            raise ValueError("expected a serialised XSpace, got a truncated one")
        values[number].append(message[at : at + length])
        at += length
    return values


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return an integer of seven bits a byte, and the index after it."""
    value = shift = 0
    for index in range(at, len(message)):
        byte = message[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise ValueError("expected a serialised XSpace, got a truncated one")


def _number(fields: Fields, number: int) -> int:
    return next((value for value in fields[number] if isinstance(value, int)), 0)


def _text(fields: Fields, number: int) -> str:
    return next((str(value, "utf-8", "replace") for value in fields[number] if not isinstance(value, int)), "")
