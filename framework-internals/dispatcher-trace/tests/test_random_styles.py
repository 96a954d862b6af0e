"""Random uses of operators of every style of torch.library, before, inside and after a trace."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from dispatcher_trace import installed, record

from .library_styles import STYLES, USES, outcome, state

PROGRAMS = {
    "programs": "operators of every style of torch.library × uses before, inside and after a trace × an exception at "
    "its end",
    "oracle": "the same uses of an operator that was never traced; tables, second map, caches and questions",
}
_DRAWN = tuple(use for use in USES if use not in ("compile", "opcheck"))  # which take a second
# Of these nothing may stay that came inside; operators that are called for the first time have empty ones.
_CACHES = ("_dispatch_cache", "cached operators", "fake tensors")
_CALLED = ("aten::mul.Tensor", "aten::add.Tensor", "aten::empty_like", "aten::sum", "aten::detach", "aten::neg")


@dataclass(frozen=True)
class Program:
    """What is done with operators around one trace.

    Attributes:
        styles: Style of each operator.
        before: Uses of each before the trace; None for those of ``inside``.
        inside: Uses inside.
        after: Uses after it, ahead of those of ``inside``.
        raises: Whether the traced code raises at its end.
    """

    styles: tuple[str, ...]
    before: tuple[str, ...] | None
    inside: tuple[str, ...]
    after: tuple[str, ...]
    raises: bool


def programs() -> st.SearchStrategy[Program]:
    """Programs of up to three operators."""
    styles = st.lists(st.sampled_from(list(STYLES)), min_size=1, max_size=3, unique=True).map(tuple)
    uses = st.lists(st.sampled_from(_DRAWN), min_size=1, max_size=5, unique=True).map(tuple)
    return st.builds(Program, styles, st.none() | uses | st.just(()), uses, uses, st.booleans())


@functools.cache
def untraced(style: str, use: str) -> str:
    """What a use of a new operator gives."""
    return outcome(use, STYLES[style]())


def check(program: Program) -> str:
    gc.collect()  # the operators of earlier programs leave the tables here, not inside the trace
    made = [(style, STYLES[style]()) for style in program.styles]
    names = [operator.name for _, operator in made]

    def same(uses: tuple[str, ...], when: str) -> None:
        for style, operator in made:
            for use in uses:
                given = outcome(use, operator)
                assert given == untraced(style, use), f"{program}: {use} of {style!r} {when} the trace: {given}"

    for style in program.styles:
        for use in {*program.inside, *program.after, *(program.before or ())}:
            untraced(style, use)  # here, since it must not be computed inside
    same(program.inside if program.before is None else program.before, "before")
    state_before = state(names)
    try:
        with installed("all", only=[*names, *_CALLED]) as shims, record(shims, kernels=False):
            same(program.inside, "inside")
            if program.raises:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    state_after = state(names)
    for part in _CACHES:
        assert _entries(state_after.pop(part)).items() <= _entries(state_before[part]).items(), f"{program}: {part}"
    for part in state_after.keys() - {"torch.Tensor"}:
        assert state_after[part] == state_before[part], f"{program}: {part}"
    same((*program.after, *program.inside), "after")
    return "raises" if program.raises else "ends"


def _entries(caches: Any) -> dict[Any, Any]:
    of_each = dict(enumerate(caches)) if isinstance(caches, list) else caches
    return {
        (owner, key): value
        for owner, cache in of_each.items()
        for key, value in (cache.items() if isinstance(cache, dict) else [("", cache)])
    }


@pytest.mark.fuzz
def test_random_uses_of_every_style(fuzz) -> None:
    fuzz.run(programs(), check, **PROGRAMS, wanted=300)


def test_an_operator_that_writes_is_used_after_a_trace_in_ways_that_it_was_not_before() -> None:
    uses = ("fake tensor", "make_fx, fake")
    assert check(Program(("impl that writes",), (), ("call",), uses, raises=True)) == "raises"
