"""Why two optimizers, one of torch and one of JAX, make different updates from the same gradients.

Both run on the same gradients: those of the model, and drawn ones that are a thousand times smaller and larger. A rule
(:mod:`jax_baseline.parity.location.update_rules`) with torch's settings has to give torch's updates to rounding. Then
one setting is changed, or two, until the rule gives JAX's. A cause is named if exactly one change does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import jax
import numpy as np
import optax
import torch
from numpy.typing import NDArray

from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN
from jax_baseline.parity.location.update_rules import Clip, Fit, Rule, Trace, active, fit
from jax_baseline.parity.location.update_settings import SETTINGS, Candidate, differences, limits, without_rules

UNKNOWN, LIKELY = "cause not identified", "likely cause"
_SCALES = (1e-3, 1e3)  # of the drawn gradients
_STEPS = 6  # at least: bias correction and schedules show
_ELEMENTS = 512  # of all parameters together
_NEARLY_ZERO = 1e-9
_BELOW_ONE = ("beta1", "beta2", "momentum", "dampening")

Weights = Mapping[str, NDArray]
Run = Callable[[Weights, Sequence[Weights]], Sequence[Weights]]  # weights after each step, from its gradients
MakeTorch = Callable[[Weights], tuple[Mapping[str, torch.nn.Parameter], torch.optim.Optimizer]]


@dataclass(frozen=True)
class Group:
    """Parameters that one group of torch's optimizer holds, by name, and its settings, such as ``lr``."""

    names: Sequence[str]
    settings: Mapping[str, Any]


def why_updates_differ(
    make_torch: MakeTorch,
    jax_optimizer: optax.GradientTransformation,
    converted: Callable[[Weights], Any],
    weights: Weights,
    gradients: Sequence[Weights],
    steps: int = 0,
) -> str:
    """Say why the updates of two optimizers differ.

    ``make_torch`` makes torch's parameters from weights, and their optimizer; ``converted`` makes JAX's tree from
    arrays by torch's names, with zeros for what torch does not train. Everything is in float64. Returns
    ``likely cause: …`` if one is known, else ``cause not identified`` with what is known. It is empty if the updates
    from these gradients do not differ.
    """
    torch_run, jax_run = _torch_run(make_torch), _jax_run(jax_optimizer, converted, weights)
    parameters, optimizer = make_torch(weights)
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        Group(trained, group)
        for group in optimizer.param_groups
        if (trained := [names[id(parameter)] for parameter in group["params"] if id(parameter) in names])
    ]
    sequences = _sequences(weights, gradients, max(_STEPS, steps + 1))
    of_torch, of_jax = ([_Path.of(run, *sequence) for sequence in sequences] for run in (torch_run, jax_run))
    causes: dict[str, list[str]] = {}
    for group in groups:
        theirs, ours = (_trace(paths, list(weights), group.names) for paths in (of_torch, of_jax))
        if cause := _cause(theirs, ours, group):
            causes.setdefault(cause, []).extend(group.names)
    if len(causes) == 1 and not (cause := next(iter(causes))).startswith(UNKNOWN):
        return f"{LIKELY}: {cause}"
    if not causes:
        return ""
    known = [f"{cause} (of {', '.join(names)})" for cause, names in causes.items() if not cause.startswith(UNKNOWN)]
    unknown = [cause for cause in causes if cause.startswith(UNKNOWN)]
    if known and not unknown:
        return f"{LIKELY}: {'; '.join(known)}"
    return "; ".join([*(unknown or [UNKNOWN]), *known])


def _torch_run(make_torch: MakeTorch) -> Run:
    def run(start: Weights, gradients: Sequence[Weights]) -> list[Weights]:
        parameters, optimizer = make_torch(start)
        after: list[Weights] = []
        for gradient in gradients:
            for name, parameter in parameters.items():
                parameter.grad = torch.from_numpy(gradient[name].copy())
            optimizer.step()
            after.append({name: parameter.detach().numpy().copy() for name, parameter in parameters.items()})
        return after

    return run


def _jax_run(optimizer: optax.GradientTransformation, converted: Callable[[Weights], Any], weights: Weights) -> Run:
    sizes = [array.size for array in weights.values()]
    ends = 1 + np.cumsum(sizes)  # 0 is the place of what torch does not train
    numbered = {
        name: np.arange(end - size, end, dtype=np.float64).reshape(array.shape)
        for (name, array), size, end in zip(weights.items(), sizes, ends, strict=True)
    }
    places = [np.asarray(leaf).astype(np.int64) for leaf in jax.tree.leaves(converted(numbered))]
    update = jax.jit(optimizer.update, compiler_options=ROUND_AS_WRITTEN)

    def named(params: Any) -> dict[str, NDArray]:
        flat = np.empty(int(ends[-1]))
        for place, leaf in zip(places, jax.tree.leaves(params), strict=True):
            flat[place] = np.asarray(leaf)
        _, *parts = np.split(flat, [1, *ends[:-1]])
        return {name: part.reshape(array.shape) for (name, array), part in zip(weights.items(), parts, strict=True)}

    def run(start: Weights, gradients: Sequence[Weights]) -> list[Weights]:
        params = converted(start)
        state = optimizer.init(params)
        after: list[Weights] = []
        for gradient in gradients:
            updates, state = update(converted(gradient), state, params)
            params = optax.apply_updates(params, updates)
            after.append(named(params))
        return after

    return run


def _sequences(weights: Weights, gradients: Sequence[Weights], steps: int) -> list[tuple[Weights, list[Weights]]]:
    """Weights and gradients of every step: the model's own, and drawn ones of other sizes, which clip or do not."""
    generator = np.random.default_rng(0)
    sizes = {name: _size([step[name] for step in gradients]) for name in weights}
    typical = _size(list(sizes.values())) or 1.0
    own = [gradients[step % len(gradients)] for step in range(steps)]
    drawn: list[tuple[Weights, list[Weights]]] = []

    def normal(scales: Mapping[str, float]) -> Weights:
        return {name: np.asarray(scales[name] * generator.standard_normal(of.shape)) for name, of in weights.items()}

    for scale in _SCALES:
        factors = scale * 10 ** generator.uniform(-1, 1, steps)
        start = normal(dict.fromkeys(weights, 0.5))
        steps_of = [{name: factor * (size or typical) for name, size in sizes.items()} for factor in factors]
        drawn.append((start, [normal(scales) for scales in steps_of]))
    return [(weights, own), *drawn]


def _size(arrays: Sequence[Any]) -> float:
    squares = [np.mean(np.square(array, dtype=np.float64)) for array in arrays if np.size(array)]
    return float(np.sqrt(np.mean(squares))) if squares else 0.0


@dataclass(frozen=True)
class _Path:
    """Gradients, weights before and after each step of one run."""

    gradients: Sequence[Weights]
    before: Sequence[Weights]
    after: Sequence[Weights]

    @classmethod
    def of(cls, run: Run, weights: Weights, gradients: Sequence[Weights]) -> _Path:
        after = run(weights, gradients)
        return cls(gradients, [weights, *after[:-1]], after)


def _trace(paths: Sequence[_Path], names: Sequence[str], mine: Sequence[str]) -> Trace:
    """Draw elements of the parameters ``mine``, with the sums over all elements of all parameters."""
    generator = np.random.default_rng(1)
    most = max(8, _ELEMENTS // len(mine))
    first = paths[0].before[0]
    drawn = {name: generator.permutation(first[name].size)[:most] for name in mine}

    def elements(steps: Sequence[Weights]) -> NDArray:
        return np.stack([np.concatenate([step[name].ravel()[drawn[name]] for name in mine]) for step in steps])

    def sums(path: _Path) -> NDArray:
        pairs = list(zip(path.gradients, path.before, strict=True))
        return np.array([
            [[float(np.vdot(pair[one][name], pair[other][name])) for name in names] for pair in pairs]
            for one, other in ((0, 0), (0, 1), (1, 1))
        ])  # fmt: skip

    before, after = (np.stack([elements(steps) for steps in of]) for of in (
        [path.before for path in paths], [path.after for path in paths],
    ))  # fmt: skip
    return Trace(
        np.stack([elements(path.gradients) for path in paths]),
        before,
        after - before,
        np.cumsum([0, *(len(drawn[name]) for name in mine)])[:-1],
        np.stack([sums(path) for path in paths], axis=1),
        np.array([list(names).index(name) for name in mine]),
    )


def _cause(of_torch: Trace, of_jax: Trace, group: Group) -> str:
    """Say why the updates of one group differ; empty if they do not."""
    difference = np.abs(of_torch.update - of_jax.update)
    if (difference <= 1e-12 * (np.abs(of_torch.weight) + np.abs(of_torch.update).max())).all():
        return ""
    solved = (_solved(*candidate, of_torch) for candidate in _rules_of_torch(group.settings, of_torch))
    theirs = next((solution for solution in solved if solution.exact), None)
    if theirs is None:
        return without_rules(of_torch, of_jax, group.names) or UNKNOWN
    edits = [(setting.name, rule, free) for setting in SETTINGS for rule, free in setting.edits(theirs.rule, of_jax)]
    texts = _simplest(theirs, [(theirs.rule, ()), *(edit[1:] for edit in edits)], of_jax, group.names)
    if not texts:
        texts = _simplest(theirs, list(_pairs(edits, theirs.rule)), of_jax, group.names)
    if len(texts) == 1:
        return texts[0]
    return f"{UNKNOWN}: {', or '.join(texts)}" if texts else UNKNOWN


def _simplest(theirs: Fit, candidates: Sequence[Candidate], of_jax: Trace, names: Sequence[str]) -> list[str]:
    """What distinguishes torch's rule from those that give JAX's updates, where fewest settings differ."""
    said: dict[str, int] = {}
    for candidate in candidates:
        ours = _solved(*candidate, of_jax)
        if ours.exact and (difference := differences(theirs, ours, names)).text:
            said[difference.text] = difference.count
    return [text for text, count in said.items() if count == min(said.values())]


def _rules_of_torch(settings: Mapping[str, Any], trace: Trace) -> Iterator[Candidate]:
    """The rule of torch's settings; then with clipping, which torch's optimizers lack and a subclass may add."""
    base = rule_of(settings)
    if base is None:
        return
    yield base, ()
    clips: Sequence[tuple[Clip, float]] = (
        ("norm", 1e-6),
        ("norm", 0.0),
        ("element", 0.0),
        ("parameter", 1e-6),
        ("parameter", 0.0),
    )
    for clip, added in clips:
        yield from limits(base, clip, added, trace)


def rule_of(settings: Mapping[str, Any]) -> Rule | None:
    """The rule of a parameter group of torch's SGD, Adam, AdamW, RMSprop or Adagrad; None for another optimizer."""
    try:
        return _rule_of(settings)
    except (TypeError, ValueError):  # other settings of the same names, such as Adafactor's two epsilons
        return None


def _rule_of(settings: Mapping[str, Any]) -> Rule | None:
    decay, eps = float(settings.get("weight_decay", 0.0)), float(settings.get("eps", 0.0))
    coupled = 0.0 if settings.get("decoupled_weight_decay") else decay
    if "betas" in settings and len(settings["betas"]) == 2:
        beta1, beta2 = map(float, settings["betas"])
        maximum: Any = "raw" if settings.get("amsgrad") else ""
        return Rule("Adam", l2=coupled, beta1=beta1, beta2=beta2, eps=eps, maximum=maximum)
    momentum = float(settings.get("momentum", 0.0))
    if "alpha" in settings and not settings.get("centered"):
        return Rule("RMSprop", l2=coupled, momentum=momentum, beta2=float(settings["alpha"]), eps=eps)
    if "initial_accumulator_value" in settings:
        return Rule("Adagrad", l2=coupled, eps=eps, start=float(settings["initial_accumulator_value"]))
    if "dampening" in settings:
        # Without momentum, a decay in the gradient and one of the weight are the same.
        return Rule(
            "SGD",
            l2=coupled if momentum else 0.0,
            momentum=momentum,
            dampening=float(settings["dampening"]),
            nesterov=bool(settings.get("nesterov")),
        )
    return None


def _pairs(edits: Sequence[tuple[str, Rule, tuple[str, ...]]], base: Rule) -> Iterator[Candidate]:
    """Rules in which two settings differ, each from its first start alone."""
    any_start: Any = 0.5
    firsts = {
        (kind, replace(rule, **dict.fromkeys(free, any_start)), free): rule for kind, rule, free in reversed(edits)
    }
    chosen = [(kind, rule, free) for (kind, _, free), rule in firsts.items() if kind != "family"]
    for (kind, one, free), (other_kind, other, other_free) in combinations(reversed(chosen), 2):
        if kind != other_kind:
            changes = {name: getattr(other, name) for name in other.differences(base)}
            yield replace(one, **changes), (*free, *other_free)


def _solved(rule: Rule, free: Sequence[str], trace: Trace) -> Fit:
    """Solve for settings by Gauss and Newton's method, in their logarithm or in that of their distance from 1."""
    best = fit(rule, trace)
    for _ in range(25 if free else 0):
        if best.exact or not np.isfinite(best.residual).all():
            break
        small = 1e-6
        moved = [fit(_moved(best.rule, {name: small}), trace).residual for name in free]
        slopes = np.stack([(residual - best.residual).ravel() / small for residual in moved], axis=1)
        step = np.linalg.lstsq(slopes, -best.residual.ravel(), rcond=None)[0]
        step = step / max(1.0, float(np.abs(step).max()) / 2)
        size = np.linalg.norm(best.residual)
        trials = (fit(_moved(best.rule, dict(zip(free, step * part, strict=True))), trace) for part in (1.0, 0.4, 0.1))
        better = next((trial for trial in trials if np.linalg.norm(trial.residual) < 0.95 * size), None)
        if better is None:
            break
        best = better
    # Steps only approach zero, each from its start to another number.
    if zeros := {name: 0.0 for name in free if name in _BELOW_ONE and 0 < getattr(best.rule, name) < _NEARLY_ZERO}:
        rounded = fit(_with(best.rule, zeros), trace)
        best = rounded if rounded.exact else best
    # Where every gradient is clipped, another rate would hide another limit; a limit that none reaches is none.
    clipped = active(best.rule, trace) if best.rule.clip else np.zeros(0)
    if clipped.size and (clipped.all() or ("limit" in free and not clipped.any())):
        return replace(best, residual=np.full_like(best.residual, math.inf))
    return best


def _moved(rule: Rule, steps: Mapping[str, float]) -> Rule:
    changes: dict[str, Any] = {}
    for name, step in steps.items():
        given = getattr(rule, name)
        factor = math.exp(min(step, 30.0))
        changes[name] = max(0.0, 1 - (1 - given) * factor) if name in _BELOW_ONE else given * factor
    return _with(rule, changes)


def _with(rule: Rule, changes: Mapping[str, Any]) -> Rule:
    return replace(rule, **changes)
