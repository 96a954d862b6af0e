"""Try changes of the source: does the break disappear, and does the changed model compute the same?

All candidates are tried in one process without a code generator. The accepted ones are then proved at once, in a fresh
process, with Inductor. Outputs and gradients are compared on several inputs: :func:`reference` writes the values of the
unchanged model to a file once, and :func:`refusal` compares every changed model with them. A wrong branch shows only
for inputs that take it, so every floating-point argument is also negated, scaled and set to 0, and whole numbers and
flags have their least and their largest values. A guard against NaN or infinity shows only for these, so one element is
that. Where the unchanged model raises an error, the changed one has to. What
no input shows is looked for, too: sides of a branch that are unlike, and numbers that became tensors. In training the
arguments need a gradient, as those of a part of a model do, unless the unchanged model refuses such arguments. The
bound is that of :mod:`compile_bench.measure.accuracy`. A model that draws random numbers is compared under the same
seed, with Inductor's random numbers equal to eager's. Its bound includes what compiling the unchanged model does to the
values.
"""

from __future__ import annotations

import ast
import difflib
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchkit import UserError
from benchkit.errors import first_line
from benchkit.processes import Stopwatch, send_message
from compile_bench.capture.collector import (
    Collector,
    empty_caches,
    prepare_toolchain,
    settings_restored,
    user_code_filter,
)
from compile_bench.capture.frames import plain_function
from compile_bench.capture.trace import RECOMPILE_LIMIT, Break
from compile_bench.catalogue.source import line_before
from compile_bench.fixes.observation import Observation, State, observe
from compile_bench.fixes.rewrites import CHANGED_SETTINGS
from compile_bench.fixes.types import Proposal, Refusal, TimedSteps, Trial, Tried
from compile_bench.measure.accuracy import (
    FACTOR,
    comparable,
    draws_random_numbers,
    error_pair,
    in_float64,
    rounding_allowance,
    widened,
)
from compile_bench.measure.records import Place, Survey, place_of
from compile_bench.measure.steps import load_again, load_case, sample
from compile_bench.measure.survey import own_model, run_until_settled, survey
from compile_bench.targets.case import FIRST_STEPS, Case
from compile_bench.targets.overlay import Overlay, forget_user_modules, overlaid, user_modules
from compile_bench.targets.randomness import seed_everything
from compile_bench.targets.regional import compile_case
from compile_bench.targets.target import FunctionModel, Step, Target, map_leaves


class SidesCompared(TorchFunctionMode):
    """Inside, both sides of every ``torch.where`` that an overlay adds have to be alike in shape and dtype.

    ``torch.where`` broadcasts its sides and promotes their dtypes. The branch that it replaces gave one of them as is.
    """

    def __init__(self, overlay: Overlay) -> None:
        super().__init__()
        self.difference = ""  # the first one, in one sentence; empty if there is none
        self._lines = {(file, line) for file, content in overlay.items() for line in _changed_lines(file, content)}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, and look at the sides if it chooses between the sides of a branch."""
        result = func(*args, **(kwargs or {}))
        if func is torch.where and len(args) == 3 and not self.difference:
            caller = sys._getframe(1)
            if (caller.f_code.co_filename, caller.f_lineno) in self._lines:
                self.difference = _unlike(args[0], args[1:], result)
        return result


def _unlike(condition: Tensor, sides: tuple[Any, ...], chosen: Tensor) -> str:
    if condition.ndim:  # a branch raises an error for more than one element
        return f"torch.where chooses element by element, since the condition has the shape {list(condition.shape)}"
    first, other = (_described(side) for side in sides)
    if first != other:
        return f"the branch gives {first} or {other}, and torch.where gives {_described(chosen)}"
    needing = {isinstance(side, Tensor) and side.requires_grad for side in sides}
    return "one side of the branch needs a gradient, and the other does not" if len(needing) > 1 else ""


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a number of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _changed_lines(file: str, content: bytes) -> Iterator[int]:
    matcher = difflib.SequenceMatcher(None, Path(file).read_bytes().splitlines(), content.splitlines(), autojunk=False)
    for tag, _, _, start, end in matcher.get_opcodes():
        if tag != "equal":
            yield from range(start + 1, end + 1)


# How an argument, a tensor or a number, is varied, by what messages call it. The first is the argument as it is.
Variation = Callable[[Any], Any]


def _times(factor: float) -> Variation:
    return lambda value: value * factor if isinstance(value, Tensor) and value.is_floating_point() else value


def _at_end(*, largest: bool) -> Variation:
    def changed(value: Any) -> Any:
        if isinstance(value, bool):
            return largest
        if isinstance(value, int):  # not less: a step of 0 may never end
            return value + 1 if largest else value
        if not isinstance(value, Tensor) or value.dtype not in (torch.bool, *_INTEGERS) or not value.numel():
            return value
        if value.dtype == torch.bool:
            end: Any = largest
        else:
            least, most = value.min(), value.max()
            # One less, since one more may be no index any more.
            end = most if largest else least - int(least == most > 0)
        return value if bool((value == end).all()) else torch.full_like(value, end)

    return changed


def _with_element(number: float) -> Variation:
    """The first element of every floating-point tensor becomes ``number``."""

    def changed(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype not in _FLOATS or value.layout != torch.strided:
            return value
        if not value.numel() or value.is_nested:
            return value
        other = value.detach().clone()
        other[(0,) * other.ndim] = number
        return other.requires_grad_(value.requires_grad)

    return changed


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SCALED = {f"arguments × {factor:.3g}": _times(factor) for factor in (-1.0, 30.0, 1.0 / 30.0, 0.0)}
# These are tried without a code generator: each may compile the model once more.
_WHOLE = {
    "whole numbers and flags at their least": _at_end(largest=False),
    "whole numbers and flags at their largest": _at_end(largest=True),
}
# Always on the CPU: on a GPU an index or a probability that is made from NaN ends the process.
_UNFINISHED = {"one element is NaN": _with_element(math.nan), "one element is infinite": _with_element(math.inf)}
_VARIATIONS: dict[str, Variation] = {"": lambda value: value, **_SCALED, **_UNFINISHED, **_WHOLE}
# A step that a GPU takes longer for would take a CPU minutes.
_SECONDS_ON_GPU = 0.05
# A bound above this, relative to the value, would let a wrong value pass.
_LARGEST_ALLOWANCE = 0.1
# What is smaller than this part of the largest value, or differs by less from run to run, may be rounding errors alone.
_LARGEST_NOISE = 1e-3


@dataclass(frozen=True)
class Expected:
    """The results of the unchanged model for one variation of the arguments."""

    variation: str  # one of _VARIATIONS
    eager: Observation  # results of the eager model
    exact: Observation  # results in float64; eager if the model draws random numbers or does not run in float64
    allowance: dict[str, float]  # what the bound adds to the eager error, by name of the value


@dataclass(frozen=True)
class Reference:
    """The results of the unchanged model."""

    random: bool  # whether it draws random numbers
    graded: bool  # whether its arguments need a gradient
    anew: bool  # whether it is loaded again for each step, see :func:`_keeps_globals`
    variants: list[Expected]  # one for each variation of the arguments for which it gives finite results
    raising: tuple[tuple[str, str], ...] = ()  # variations for which it raises, each with the error's type
    # What differs between two runs of it, such as an attribute that holds the time of day.
    unsteady: tuple[str, ...] = ()


def reference(case: Case, *, path: Path, calibrated: bool = False) -> bool:
    """Write the results of the unchanged model of a case, for :func:`refusal`.

    ``calibrated`` adds to the bound what compiling the unchanged model does to the values, since sums in another order
    may exceed it where they cancel, as in batch norm; for a model that draws random numbers this is always so. Returns
    False, and writes nothing, if ``calibrated`` would change nothing.
    """
    target = load_case(case)
    random = target.is_step or draws_random_numbers(target, train=case.train, fresh=True)
    if random and calibrated:
        return False
    # Some models refuse arguments that need a gradient, for which they call numpy().
    graded = case.train and not target.is_step and _raised(lambda: _eager(target, case, "", graded=True)) == "nothing"
    anew = _keeps_globals(target, _eager(target, case, "", graded))
    variants, raising = list[Expected](), list[tuple[str, str]]()
    start = time.perf_counter()
    again = _eager(target, case, "", graded, anew)
    quick = case.device == "cpu" or (
        time.perf_counter() - start < _SECONDS_ON_GPU
        and _raised(lambda: _eager(*_placed(target, case, on_cpu=True), "", graded, anew)) == "nothing"
    )
    left_out = () if quick and not _may_not_end() else _UNFINISHED.keys()
    for variation in [name for name in _VARIATIONS if name not in left_out and _is_other(target, name)]:
        placed = _placed(target, case, on_cpu=variation in _UNFINISHED)
        try:
            eager = _eager(*placed, variation, graded, anew)
        except Exception as error:  # the model checks its arguments
            if not variation:
                raise
            raising.append((variation, type(error).__name__))
            continue
        by_compiler = (random or calibrated) and variation not in _WHOLE and placed[1] == case
        expected = _expected(*placed, variation, eager, random, by_compiler, graded, anew)
        variants += [] if expected is None else [expected]
    unsteady = _unsteady(variants[0].eager, again) if variants and not variants[0].variation else ()
    torch.save(Reference(random, graded, anew, variants, tuple(raising), unsteady), path)
    return True


def _placed(target: Target, case: Case, *, on_cpu: bool) -> tuple[Target, Case]:
    """The target and its case, or copies of both on the CPU."""
    if case.device == "cpu" or not on_cpu:
        return target, case
    return replace(target, model=target.copied()).moved("cpu"), replace(case, device="cpu")


def references(case: Case, *, kinds: Sequence[bool], path: Path, calibrated: bool = False) -> bool:
    """:func:`reference` for kinds of step, each in a file of its own. Returns whether any was written."""
    written = False
    for train in kinds:
        kind = replace(case, train=train)
        # Of a file that is loaded twice the first module stays the one that its globals are looked up in.
        forget_user_modules(user_code_filter())
        written |= reference(kind, path=_of_kind(path, kind), calibrated=calibrated)
    return written


def _of_kind(path: Path, case: Case) -> Path:
    return path.with_name(f"{case.kind}-{path.name}")


def read_reference(path: Path) -> Reference:
    """What :func:`reference` has written."""
    with torch.serialization.safe_globals([Reference, Expected, Observation, State]):
        known = torch.load(path, weights_only=True)
    assert isinstance(known, Reference)
    return known


def _is_other(target: Target, variation: str) -> bool:
    """Whether a variation changes any argument. A step has no arguments, and its state may change from call to call."""
    others = []

    def compared(leaf: Any) -> Any:
        others.append(_VARIATIONS[variation](leaf) is not leaf)
        return leaf

    map_leaves(compared, (target.args, dict(target.kwargs)))
    return not variation or any(others)


def _may_not_end() -> bool:
    """Whether a file of the user's has a loop that NaN or infinity, which never becomes smaller, may keep running."""
    for module in user_modules(user_code_filter()).values():
        with suppress(OSError, SyntaxError, ValueError):  # no Python, or changed since it was loaded
            tree = ast.parse(Path(str(module.__file__)).read_bytes())
            if any(isinstance(node, ast.While) for node in ast.walk(tree)):
                return True
    return False


def _eager(target: Target, case: Case, variation: str, graded: bool, anew: bool = False) -> Observation:
    """The results of the first step of a model that no other step has changed."""
    target = _loaded(target, case, anew)
    model = own_model(target, case)
    return observe(varied(target, variation), model, model, case, graded=graded)


def _loaded(target: Target, case: Case, anew: bool) -> Target:
    return load_again(case) if anew else target


def _keeps_globals(target: Target, seen: Observation) -> bool:
    """Whether a step changes what no copy has: globals of the user's files, or what a function closes over."""
    files = tuple(f"{file}." for file in user_modules(user_code_filter()))
    changed = (*seen.values, *seen.facts, *seen.chosen)
    return isinstance(target.model, FunctionModel) or any(place.startswith(files) for place in changed)


def _unsteady(one: Observation, other: Observation) -> tuple[str, ...]:
    """What differs between two observations of one model, by more than atomic additions change it."""
    first, second = ({**seen.facts, **seen.chosen} for seen in (one, other))
    names = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    names |= one.values.keys() ^ other.values.keys()
    for name in one.values.keys() & other.values.keys():
        a, b = one.values[name], other.values[name]
        if a.shape != b.shape or error_pair(name, a, b, a, 0.0).compiled > _LARGEST_NOISE:
            names.add(name)
    return tuple(sorted(names))


def refusal(case: Case, *, path: Path, with_inductor: bool, overlay: Overlay | None = None) -> Refusal | None:
    """Compare the model of a case, as it is now, with the unchanged model.

    None if all results are within their bounds. Without Inductor, the sides of branches that the ``overlay`` computes
    both are compared as well, and integer tensors.
    """
    target = load_case(case)
    known = read_reference(path)
    if not known.variants:
        return Refusal("the unchanged model gave no finite output to compare with")
    if unsteady := [name for name in known.unsteady if name.startswith("output")]:
        return Refusal(f"the unchanged model gives another {unsteady[0]} in each run")
    sides = SidesCompared({} if with_inductor or overlay is None else overlay)

    def observed(variation: str) -> Observation:
        again, place = _placed(_loaded(target, case, known.anew), case, on_cpu=variation in _UNFINISHED)
        model = own_model(again, place)  # a new one, as for the reference: a model may keep state outside its buffers
        call = compiled(model, place, random=known.random) if with_inductor else model
        with nullcontext() if with_inductor else sides:
            return observe(varied(again, variation), call, model, place, graded=known.graded)

    # Of those, what a CPU computes says nothing about the code that Inductor makes for a GPU.
    of_cpu = _UNFINISHED.keys() if case.device != "cpu" else set[str]()
    tried = _VARIATIONS.keys() - (_WHOLE.keys() | of_cpu if with_inductor else ())
    for variant in [variant for variant in known.variants if variant.variation in tried]:
        try:
            seen = observed(variant.variation)
        except Exception as error:  # whatever the changed model or the compiler raises
            return _refused(f"the changed model raised {first_line(error)}", variant.variation)
        difference = Refusal(sides.difference) if sides.difference else None
        difference = difference or _difference(variant, seen, known.unsteady, with_inductor=with_inductor)
        if difference is not None:
            return replace(difference, why=_refused(difference.why, variant.variation).why)
    if with_inductor and case.device != "cpu":  # a check that fails on a GPU ends the process
        return None
    for variation, error_type in known.raising:
        raised = _raised(partial(observed, variation)) if variation in tried else error_type
        if raised != error_type and (raised == "nothing" or not with_inductor):  # compiled, some errors are others
            return _refused(f"the changed model raises {raised} instead of {error_type}", variation)
    return None


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # whatever the model raises
        return type(error).__name__
    return "nothing"


def _refused(why: str, variation: str) -> Refusal:
    return Refusal(f"{why} ({variation})" if variation else why)


def compiled(model: nn.Module, case: Case, *, random: bool) -> Callable[..., Any]:
    """The model compiled with Inductor; ``random`` makes its random numbers equal to eager's."""
    return compile_case(model, case, options={"fallback_random": True} if random else None)


def varied(target: Target, variation: str) -> Target:
    """The target with its arguments varied."""
    args, kwargs = map_leaves(_VARIATIONS[variation], (target.args, dict(target.kwargs)))
    return replace(target, args=args, kwargs=kwargs)


def _expected(
    target: Target,
    case: Case,
    variation: str,
    eager: Observation,
    random: bool,
    calibrated: bool,
    graded: bool,
    anew: bool,
) -> Expected | None:
    """What a changed model has to give for one variation of the arguments, for which ``eager`` are the results.

    None if they are not finite, or if the compiler alone changes them, such as a norm of zeros.
    """
    exact = eager.values
    if not random:
        with suppress(RuntimeError):  # a dtype written into the model, or an operator without a float64 kernel
            wide = partial(_wide, target, case, variation, graded, anew)
            exact = (wide() if anew else in_float64(wide)).values  # loaded in float64, it would have other weights
    unfinished = variation in _UNFINISHED
    if unfinished and not all(name in exact and _same_ends(value, exact[name]) for name, value in eager.values.items()):
        return None
    if not unfinished and not all(
        value.isfinite().all() or (name in exact and comparable(name, value, exact[name]))
        for name, value in eager.values.items()
    ):
        return None
    allowance = dict.fromkeys(eager.values, rounding_allowance(varied(target, variation)))
    if calibrated:
        with suppress(Exception):  # of a model that raises only when it is compiled, which the change may repair
            again = _loaded(target, case, anew)
            model = own_model(again, case)
            call = compiled(model, case, random=random)
            compiled_values = observe(varied(again, variation), call, model, case, graded=graded).values
            for name in eager.values.keys() & compiled_values.keys():
                value, other = eager.values[name], compiled_values[name]
                if unfinished and not _same_ends(value, other):
                    return None
                if value.shape == other.shape:
                    value, other = map(_finite, (value, other)) if unfinished else (value, other)
                    allowance[name] += FACTOR * error_pair(name, value, other, value, 0.0).compiled  # against eager
    if variation and any(_is_vague(name, eager, allowance[name]) for name in eager.values):
        return None
    return Expected(variation, eager, replace(eager, values=_as_exact(eager.values, exact)), allowance)


def _wide(target: Target, case: Case, variation: str, graded: bool, anew: bool) -> Observation:
    wide = widened(varied(_loaded(target, case, anew), variation))
    return observe(wide, wide.model, wide.model, case, graded=graded)


def _as_exact(eager: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values in float64, or eager's own where float64 took another branch: far from it, anything is in a bound."""
    near = {
        name: value
        for name, value in exact.items()
        if name in eager
        and value.shape == eager[name].shape
        and error_pair(name, _finite(value), _finite(eager[name]), _finite(value), 0.0).compiled <= _LARGEST_ALLOWANCE
    }
    return {**eager, **near}


def _difference(
    expected: Expected, observed: Observation, unsteady: Collection[str], *, with_inductor: bool
) -> Refusal | None:
    """The first difference that is not allowed; None if there is none."""
    if observed.signature != expected.eager.signature:
        return Refusal(f"the output is {_outputs(observed)} instead of {_outputs(expected.eager)}")
    before, after = expected.eager.state, observed.state
    if became := sorted(set(before.numbers) & set(after.tensors) - set(before.tensors)):
        return Refusal(f"{became[0]} is a tensor instead of a number")
    # A counter may have become a tensor. What rounding decides may differ with a code generator.
    facts, chosen = expected.eager.facts, {} if with_inductor else expected.eager.chosen
    texts = {**observed.chosen, **observed.facts}
    for name in sorted((facts.keys() | chosen.keys()) - set(unsteady)):
        text = facts.get(name, chosen.get(name))
        if texts.get(name) != text:
            return Refusal(f"{name} is {texts.get(name, 'not changed')} instead of {text}")
    known = facts.keys() | expected.eager.chosen.keys()
    if more := sorted(texts.keys() - known - set(unsteady)):
        return Refusal(f"{more[0]} is {texts[more[0]]}, and was not changed")
    missing = sorted((expected.eager.values.keys() ^ observed.values.keys()) - set(unsteady))
    if missing:
        return Refusal(f"{missing[0]} is there in one of the two only")
    for name, value in observed.values.items():
        if name in unsteady:
            continue
        eager, exact = expected.eager.values[name], expected.exact.values[name]
        if value.shape != exact.shape:
            return Refusal(f"{name} has {value.numel()} elements instead of {exact.numel()}")
        allowance = expected.allowance[name]
        if _is_vague(name, expected.eager, allowance):
            change = f"{allowance / FACTOR:.2g}"
            return Refusal(f"compiling the unchanged model changes {name} by {change}, so nothing can be compared")
        if expected.variation in _UNFINISHED:
            if not _same_ends(eager, value):
                return Refusal(f"{name} is NaN or infinite at other places", out_of_bound=True)
            eager, value, exact = map(_finite, (eager, value, exact))
        pair = error_pair(name, eager, value, exact, allowance)
        if not pair.holds:
            return Refusal(f"{name} is off by {pair.compiled:.2g}; the bound is {pair.bound:.2g}", out_of_bound=True)
    return None


def _same_ends(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are NaN and infinite at the same places."""
    ends = (torch.where(tensor.isfinite(), 0.0, tensor).nan_to_num(nan=1.0) for tensor in (one, other))
    return torch.equal(*ends)


def _finite(tensor: Tensor) -> Tensor:
    """The tensor with zeros in the place of NaN and infinity."""
    return torch.where(tensor.isfinite(), tensor, 0.0)


def _is_vague(name: str, eager: Observation, allowance: float) -> bool:
    """Whether a bound would let a wrong value pass, and not because all of the value is rounding errors."""
    if allowance <= _LARGEST_ALLOWANCE:
        return False
    sizes = {name: torch.linalg.vector_norm(_finite(value)).item() for name, value in eager.values.items()}
    return sizes[name] >= _LARGEST_NOISE * max(sizes.values())  # smaller is the gradient of a bias before a norm


def _outputs(observation: Observation) -> str:
    return (
        ", ".join(f"{dtype.removeprefix('torch.')}{list(shape)}" for shape, dtype in observation.signature) or "empty"
    )


# How long the unchanged and the changed model are sampled together.
_SECONDS = 2.0


def trials(
    case: Case, *, kinds: Sequence[bool], seeds: Sequence[int], proposals: Sequence[Proposal], path: Path
) -> list[list[Trial]]:
    """Try the candidates of every proposal until one is accepted.

    An accepted candidate is the last one. The unchanged model's values in all ``kinds`` of step go to files beside
    ``path``, which :func:`prove` reads, too.
    """
    references(case, kinds=kinds, path=path)
    load_again(case)  # raises where every change would be refused for another reason than its own
    results = []
    for proposal in proposals:
        tried: list[Trial] = []
        for overlay in proposal.overlays:
            seen = _traced(case, proposal, overlay, proposal.kinds[:1], seeds)
            tried.append(_compared(case, proposal.kinds, overlay, seen, path, with_inductor=False))
            send_message(Tried(next(iter(proposal.places)), len(tried) - 1, tried[-1].verdict))
            if not tried[-1].verdict:
                break
        results.append(tried)
    return results


def prove(
    case: Case, *, kinds: Sequence[bool], seeds: Sequence[int], proposal: Proposal, path: Path, timed: bool
) -> Trial:
    """Try the first candidate of a proposal with Inductor.

    If it is accepted and ``timed``, steps before and after are timed.
    """
    overlay = proposal.overlays[0]
    seen = _traced(case, proposal, overlay, kinds, seeds)
    # Timed first: the comparison finds the code in the caches that this compiles.
    steps = _timed_steps(case, overlay) if timed and not seen.verdict else None
    return replace(_compared(case, proposal.compiled, overlay, seen, path, with_inductor=True), timed=steps)


def _traced(case: Case, proposal: Proposal, overlay: Overlay, kinds: Sequence[bool], seeds: Sequence[int]) -> Trial:
    """The breaks of the changed model."""
    with settings_restored(CHANGED_SETTINGS), overlaid(overlay):
        surveys = []
        for train in kinds:
            forget_user_modules(user_code_filter())
            try:
                surveys.append(survey(replace(case, train=train), seeds=seeds, behind=False))
            except UserError as error:
                return Trial(f"the changed model fails: {error}")
        seen = _seen(surveys, overlay, proposal)
    failures = [failure for survey in surveys for failure in survey.failures]
    return replace(seen, verdict=f"the changed model fails: {failures[0]}") if failures and not seen.verdict else seen


def _compared(
    case: Case, kinds: Sequence[bool], overlay: Overlay, seen: Trial, path: Path, *, with_inductor: bool
) -> Trial:
    """The trial with the comparison of outputs and gradients."""
    for own in [replace(case, train=train) for train in kinds if not seen.verdict]:
        with settings_restored(CHANGED_SETTINGS), overlaid(overlay):
            forget_user_modules(user_code_filter())
            torch.compiler.reset()
            refused = refusal(own, path=_of_kind(path, own), with_inductor=with_inductor, overlay=overlay)
        if refused is not None:
            return replace(seen, verdict=refused.why, out_of_bound=refused.out_of_bound)
    return seen


def _seen(surveys: Sequence[Survey], overlay: Overlay, proposal: Proposal) -> Trial:
    """The breaks of the changed model; refused if there are others than the proposal allows."""
    remaining = {_place_before(met, overlay): met for other in surveys for met in other.breaks}
    unexpected = {key: met for key, met in remaining.items() if key not in proposal.allowed}
    revealed = {
        key: replace(met, line=key[1])
        for key, met in unexpected.items()
        if key[1] and key not in proposal.places and _was_hidden(met, proposal.untraced)
    }
    seen = Trial(
        "",
        frozenset(remaining),
        tuple(revealed.values()),
        any(met.whole_frame for met in remaining.values()),
        len(surveys[0].trace.graphs),
    )
    for (file, line), other in unexpected.items():
        if (file, line) not in revealed:
            place = f"{Path(file).name}:{line}" if line else f"{Path(file).name}, in `{other.source}`"
            return replace(seen, verdict=f"it still breaks: {place}, {other.reason}")
    return seen


def _was_hidden(met: Break, untraced: frozenset[tuple[str, str]]) -> bool:
    """Whether a break is in a function that was not traced to its end, or in a function called there."""
    frames = [(met.file, met.function), *((frame.file, frame.function) for frame in met.stack)]
    return any((file, plain_function(function)) in untraced for file, function in frames)


def _place_before(met: Break, overlay: Overlay) -> Place:
    """The place of a break in the unchanged sources."""
    file, line = place_of(met)
    return (file, line_before(Path(file).read_bytes(), overlay[file], line)) if file in overlay else (file, line)


def _timed_steps(case: Case, overlay: Overlay) -> TimedSteps:
    """Compile a case with Inductor without and with changed sources, in empty caches, and time both.

    Both run until they compile nothing more, and the process keeps the caches of the changed model.
    """
    prepare_toolchain(case.device)
    torch.compiler.reset()
    after, first_after, eager_after = _compiled_step(case, overlay)
    with empty_caches():
        before, first_before, eager_before = _compiled_step(case, {})
    steady = sample(before, after, case, _SECONDS)
    return TimedSteps(steady, first_before, first_after, eager_before, eager_after)


def _compiled_step(case: Case, overlay: Overlay) -> tuple[Step, float, tuple[str, ...]]:
    """The compiled step, seconds of its first calls, and the lines that keep it eager."""
    with settings_restored(CHANGED_SETTINGS), overlaid(overlay), Collector() as collector:
        forget_user_modules(user_code_filter())
        target = load_case(case)
        step = target.step(compile_case(own_model(target, case), case), train=case.train)
        seed_everything(0)
        with Stopwatch(None) as watch:
            for _ in range(FIRST_STEPS):
                step()
            if case.device == "cuda":
                torch.cuda.synchronize()
        run_until_settled(step, collector)
    limits = (met.place for met in collector.trace().breaks if met.category == RECOMPILE_LIMIT)
    return step, watch.seconds, tuple(dict.fromkeys(limits))
