"""Reads the bytes of a JAX profile (``*.xplane.pb``): HLO instructions, their timelines and their times.

``jax.profiler.ProfileData`` reads the same file in C++. NVIDIA's profiling library (CUPTI) can damage the heap of the
profiled process (jax-ml/jax#15384 and #40260, pytorch/pytorch#195207), and the many small allocations of that reader
then abort the process. This reader also keeps the picoseconds of durations.

The messages are defined in ``tsl/profiler/protobuf/xplane.proto``. The encoding is protobuf's wire format.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

# Field numbers. A map is a repeated message with its key in field 1 and its value in field 2.
_SPACE_PLANE = 1
_PLANE_NAME, _PLANE_LINE, _PLANE_STAT_NAMES = 2, 3, 5
_KEY, _VALUE = 1, 2
_STAT_NAME = 2
_LINE_NAME, _LINE_EVENT = 2, 4
_EVENT_PICOSECONDS, _EVENT_STAT = 3, 4
_STAT_ID, _STAT_STRING, _STAT_REFERENCE = 1, 5, 7

# Wire types.
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


class ProfileEvent(NamedTuple):
    """One event of a profile.

    Attributes:
        plane: A device (``/device:GPU:0``) or the host.
        line: A stream or a thread of the plane.
        instruction: Name of the instruction in the optimised HLO.
    """

    plane: str
    line: str
    instruction: str
    seconds: float


def read_instructions(profile: bytes) -> Iterator[ProfileEvent]:
    """Yield the events that have the name of an HLO instruction (``hlo_op``).

    The profile is a serialised ``XSpace``.

    Raises:
        ValueError: If the bytes are not a serialised ``XSpace``.
    """
    view = memoryview(profile)
    for number, plane in _fields(view):
        if number == _SPACE_PLANE:
            yield from _plane_events(_message(plane))


def _plane_events(plane: memoryview) -> Iterator[ProfileEvent]:
    name, lines, names = "", [], {}
    for number, value in _fields(plane):
        if number == _PLANE_NAME:
            name = _text(value)
        elif number == _PLANE_LINE:
            lines.append(_message(value))
        elif number == _PLANE_STAT_NAMES:
            entry = dict(_fields(_message(value)))
            names[entry.get(_KEY, 0)] = _text(dict(_fields(_message(entry[_VALUE]))).get(_STAT_NAME, memoryview(b"")))
    wanted = {key for key, stat in names.items() if stat == "hlo_op"}
    if not wanted:
        return
    for line in lines:
        fields = list(_fields(line))
        line_name = next((_text(value) for number, value in fields if number == _LINE_NAME), "")
        for number, event in fields:
            if number != _LINE_EVENT:
                continue
            instruction, picoseconds = "", 0
            for field, value in _fields(_message(event)):
                if field == _EVENT_PICOSECONDS and isinstance(value, int):
                    picoseconds = value
                elif field == _EVENT_STAT and not instruction:
                    stat = dict(_fields(_message(value)))
                    if stat.get(_STAT_ID) in wanted:
                        instruction = _stat_text(stat, names)
            if instruction:
                yield ProfileEvent(name, line_name, instruction, picoseconds * 1e-12)


def _stat_text(stat: dict[int, int | memoryview], names: dict[int | memoryview, str]) -> str:
    """Return the string of a statistic. A repeated string is a reference to the name of another statistic."""
    if _STAT_REFERENCE in stat:
        return names.get(stat[_STAT_REFERENCE], "")
    return _text(stat.get(_STAT_STRING, memoryview(b"")))


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a message in order. Fixed-size numbers are returned as bytes."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _LENGTH:
            length, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"expected a serialised XSpace, got a field of wire type {kind}")
        if at + length > end:
            raise ValueError("expected a serialised XSpace, got a truncated one")
        yield number, message[at : at + length]
        at += length


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


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        # The bytes are wrong, not the type of an argument.
        raise ValueError("expected a serialised XSpace, got a number instead of a message")  # noqa: TRY004
    return value


def _text(value: int | memoryview) -> str:
    return str(_message(value), "utf-8", "replace")
