"""The keys of the compiler's caches with their parts, from events of the structured trace. torch is not imported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from compile_bench.capture.parsing import Event

Cache = Literal["fx_graph", "aotautograd"]

_EVENT = re.compile(r"(?P<cache>fx_graph|aotautograd)_cache_(?P<state>hit|miss|bypass)")
_PART = re.compile(r"\[(?P<digest>\w+)\] (?P<name>.+?): (?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class KeyPart:
    """One part of a key."""

    name: str  # PyTorch's name of it, such as "example_inputs[0]" or "inductor_config[max_autotune]"
    digest: str  # its hash. Parts are equal if and only if their hashes are; the text may contain addresses
    text: str  # its value as text


@dataclass(frozen=True)
class CacheKey:
    """The key under which a cache looked for one graph."""

    cache: Cache  # "aotautograd" keeps whole graphs with their backward pass, "fx_graph" Inductor's code of one
    compile_id: str  # id of the compilation
    state: str  # "hit", "miss", or "bypass" if PyTorch cannot cache the graph
    key: str = ""  # the key; empty for a bypass
    parts: tuple[KeyPart, ...] = ()  # its parts, in PyTorch's order
    reason: str = ""  # why PyTorch cannot cache the graph; empty if it can

    @property
    def backward(self) -> bool:
        """Whether the graph is a backward pass."""
        return any(part.name == "fx_kwargs[is_backward]" and part.text == "True" for part in self.parts)


def is_cache_event(kind: str) -> bool:
    """Whether an event says what a cache did."""
    return _EVENT.fullmatch(kind) is not None


def read_cache_keys(events: Iterable[Event]) -> tuple[CacheKey, ...]:
    """The keys of all cache look-ups, in order."""
    return tuple(
        _key(event, match["cache"], match["state"]) for event in events if (match := _EVENT.fullmatch(event.kind))
    )


def _key(event: Event, cache: str, state: str) -> CacheKey:
    content = json.loads(event.payload)
    lines = (_PART.fullmatch(line) for line in content.get("components") or ())
    return CacheKey(
        cast(Cache, cache),
        event.compile_id,
        state,
        content.get("key") or "",
        tuple(KeyPart(line["name"], line["digest"], line["text"]) for line in lines if line is not None),
        str(content.get("cache_bypass_reason") or ""),
    )
