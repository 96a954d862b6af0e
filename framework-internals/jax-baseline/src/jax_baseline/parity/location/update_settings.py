"""In which settings two optimizers may differ, and what distinguishes two that do, in words.

Each setting is declared once: how a cause is sought in it, and how it is said. Weight decay and the learning rate are
said from what a fit has of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jax_baseline.parity.location.update_rules import Clip, Fit, Rule, Trace, same_setting

Candidate = tuple[Rule, tuple[str, ...]]  # a rule, and its settings that are solved for

_CLOSE = 1e-8  # relative difference of two rates, or of two decays, that their fits allow
_NAMED = 3  # parameters or steps that a sentence lists

# Limits of clipping from which one is solved, in multiples of a typical norm or element.
_LIMITS = (0.1, 0.7, 3.0, 100.0)


@dataclass(frozen=True)
class Setting:
    """A setting of an optimizer."""

    name: str  # its field of :class:`Rule`
    words: str = ""  # what it is called
    belongs: Callable[[Rule], bool] = lambda rule: True  # whether a rule has it
    starts: Sequence[float] = ()  # values from which another one is solved
    values: Callable[[Rule], Sequence[Any]] = lambda rule: ()  # other values that are no matter of degree, by the rule
    # Rules in which it differs otherwise.
    others: Callable[[Rule, Trace], Iterator[Candidate]] = lambda rule, trace: iter(())
    parts: Callable[[Rule], Sequence[Any]] | None = None  # what of a rule belongs to it; by default its field
    shown: Callable[[Rule], str] | None = None  # a rule's value in words; by default its number
    form: str = "{words}, {torch} in torch and {jax} in JAX"  # the sentence on two values
    note: Callable[[Rule, Rule], str] = lambda torch, jax: ""  # what a sentence on two rules adds

    def edits(self, base: Rule, trace: Trace) -> Iterator[Candidate]:
        """Rules in which this setting alone differs."""
        if self.belongs(base):
            yield from solved_from(base, self.name, self.starts)
            yield from ((replace(base, **{self.name: value}), ()) for value in self.values(base))
            yield from self.others(base, trace)

    def differs(self, torch: Rule, jax: Rule) -> bool:
        """Whether two rules of one family differ in it."""
        parts = self.parts or (lambda rule: (getattr(rule, self.name),))
        return not all(same_setting(*pair) for pair in zip(parts(torch), parts(jax), strict=True))

    def said(self, torch: Rule, jax: Rule) -> str:
        """How two rules that differ in it differ, in words."""
        shown = self.shown or (lambda rule: f"{getattr(rule, self.name):.4g}")
        return self.form.format(words=self.words, torch=shown(torch), jax=shown(jax)) + self.note(torch, jax)


def solved_from(base: Rule, name: str, starts: Sequence[float]) -> Iterator[Candidate]:
    """The rule with a setting that is solved for, from its own value and from others."""
    own = getattr(base, name)
    for start in (*((own,) if own and starts else ()), *starts):
        yield replace(base, **{name: start}), (name,)


def limits(base: Rule, clip: Clip, added: float, trace: Trace) -> Iterator[Candidate]:
    """Rules that clip, from several limits."""
    norms = np.sqrt(trace.squares[0].sum(-1)[0]).mean()
    typical = np.sqrt(np.mean(trace.gradient[0] ** 2)) if clip == "element" else norms
    for limit in (*((base.limit,) if base.clip == clip else ()), *(times * typical for times in _LIMITS)):
        yield replace(base, clip=clip, limit=float(limit), added=added), ("limit",)


def _other_clipping(base: Rule, trace: Trace) -> Iterator[Candidate]:
    if base.clip:
        yield replace(base, clip="", limit=0.0, added=0.0), ()
    clips: Sequence[tuple[Clip, float]] = (("norm", 0.0), ("norm", 1e-6), ("element", 0.0), ("parameter", 0.0))
    for clip, added in clips:
        yield from limits(base, clip, added, trace)


def _other_momentum(base: Rule, trace: Trace) -> Iterator[Candidate]:
    if base.family == "SGD" or not base.momentum:
        yield from solved_from(base, "momentum", _MOMENTA)
    if base.momentum:
        yield replace(base, momentum=0.0, nesterov=False), ()
    elif base.family == "SGD":
        yield from solved_from(replace(base, nesterov=True), "momentum", _MOMENTA)


def _other_epsilons(base: Rule, trace: Trace) -> Iterator[Candidate]:
    yield from solved_from(replace(base, eps=0.0), "eps_root", _EPSILONS)
    yield from solved_from(base, "eps_root", _EPSILONS)


def _other_family(base: Rule, trace: Trace) -> Iterator[Candidate]:
    others = (Rule("SGD"), Rule("Adam", eps=1e-8), Rule("RMSprop", beta2=0.9, eps=1e-8), Rule("Adagrad", start=0.1))
    for other in (other for other in others if other.family != base.family):
        yield replace(other, clip=base.clip, limit=base.limit, added=base.added), ()


def _clipping(rule: Rule) -> str:
    if not rule.clip:
        return "does not clip"
    what = {"norm": "the norm of all gradients", "element": "each element", "parameter": "each parameter's norm"}
    added = f", to which it adds {rule.added:g} before dividing" if rule.added else ""
    return f"clips {what[rule.clip]} at {rule.limit:.4g}{added}"


def _epsilon(rule: Rule) -> str:
    parts = [f"{rule.eps:.4g} outside the root"] if rule.eps else []
    if rule.eps_root and rule.family != "Adagrad":
        parts.append(f"{rule.eps_root:.4g} inside the root")
    return " with ".join(parts) or "none"


def _acts_alike(torch: Rule, jax: Rule) -> str:
    scaled = torch.eps and jax.eps and same_setting(torch.eps_root, jax.eps_root)
    return "; a gradient scaled before would act alike" if scaled else ""


def _in_the_sum(rule: Rule) -> float:
    """What Adagrad adds to its sum of squares: both have the same place in the formula."""
    return rule.start + rule.eps_root if rule.family == "Adagrad" else 0.0


def _used(name: str) -> Callable[[Rule], str]:
    return lambda rule: "used" if getattr(rule, name) else "not used"


def _maximum(rule: Rule) -> str:
    of = {"raw": "of the second moment as it is", "corrected": "of the corrected second moment"}
    return of.get(rule.maximum, "not used")


def _flipped(name: str) -> Callable[[Rule], Sequence[bool]]:
    return lambda rule: (not getattr(rule, name),)


def _is(*families: str) -> Callable[[Rule], bool]:
    return lambda rule: rule.family in families


_EPSILONS, _MOMENTA = (1e-8, 1e-4), (0.9, 0.5)

SETTINGS = (
    Setting("family", "the optimizer", others=_other_family, shown=lambda rule: rule.family),
    Setting(
        "clip",
        "clipping",
        others=_other_clipping,
        parts=lambda rule: (rule.clip, rule.limit, rule.added),
        shown=_clipping,
        form="{words}: torch {torch}, JAX {jax}",
    ),
    Setting(
        "start",
        "what is added to the sum of squares (its first value, an epsilon inside the root)",
        belongs=_is("Adagrad"),
        starts=(0.1,),
        values=lambda rule: (0.0,),
        parts=lambda rule: (_in_the_sum(rule),),
        shown=lambda rule: f"{_in_the_sum(rule):.4g}",
    ),
    Setting(
        "eps",
        "epsilon",
        belongs=lambda rule: rule.family != "SGD",
        starts=_EPSILONS,
        values=lambda rule: (0.0,),
        others=_other_epsilons,
        parts=lambda rule: (rule.eps, rule.eps_root if rule.family != "Adagrad" else 0.0),
        shown=_epsilon,
        note=_acts_alike,
    ),
    Setting(
        "corrected",
        "bias correction of the moments",
        belongs=_is("Adam"),
        values=_flipped("corrected"),
        shown=_used("corrected"),
    ),
    Setting(
        "nesterov",
        "Nesterov's momentum",
        belongs=lambda rule: rule.family == "Adam" or bool(rule.momentum),
        values=_flipped("nesterov"),
        shown=_used("nesterov"),
    ),
    Setting("maximum", "AMSGrad", belongs=_is("Adam"), values=lambda rule: ("", "raw", "corrected"), shown=_maximum),
    Setting(
        "l2_clipped",
        "weight decay",
        belongs=lambda rule: bool(rule.l2 and rule.clip),
        values=_flipped("l2_clipped"),
        shown=lambda rule: "before" if rule.l2_clipped else "after",
        form="{words}, added {torch} clipping in torch and {jax} it in JAX",
    ),
    Setting(
        "l2",
        belongs=lambda rule: rule.family != "SGD" or bool(rule.momentum),
        starts=(0.1, 1e-3),
        values=lambda rule: (0.0,),
    ),
    Setting("momentum", "momentum", belongs=_is("SGD", "RMSprop"), others=_other_momentum),
    Setting(
        "dampening",
        "dampening of the momentum",
        belongs=lambda rule: bool(rule.momentum),
        starts=(0.5,),
        values=lambda rule: (0.0, rule.momentum),
    ),
    Setting(
        "beta1",
        "the decay of the first moment",
        belongs=_is("Adam"),
        starts=_MOMENTA,
        values=lambda rule: (0.0,),
    ),
    Setting("beta2", "the decay of the second moment", belongs=_is("Adam", "RMSprop"), starts=(0.99, 0.999)),
)


@dataclass(frozen=True)
class Differences:
    """What distinguishes two optimizers."""

    text: str
    count: int  # number of differences. An arbitrary schedule counts more than one setting, since it explains more


def differences(theirs: Fit, ours: Fit, names: Sequence[str]) -> Differences:
    """Describe what distinguishes JAX's optimizer from torch's."""
    different = [setting for setting in SETTINGS if setting.words and setting.differs(theirs.rule, ours.rule)]
    whole = [setting for setting in different if setting.name == "family"]  # nothing else compares
    settings = [setting.said(theirs.rule, ours.rule) for setting in whole or different]
    rate, count = _rate(theirs, ours, names)
    decay = _decay(theirs, ours, names)
    parts = [*settings, *filter(None, (decay, rate))]
    return Differences(" and ".join(parts), len(settings) + bool(decay) + count)


def _rate(theirs: Fit, ours: Fit, names: Sequence[str]) -> tuple[str, int]:
    """Describe how the rates differ, and count the differences."""
    torch, jax = theirs.rate, ours.rate
    known = np.isfinite(torch) & np.isfinite(jax)
    if _close(torch, jax)[known].all():
        return "", 0
    ratio = np.where(known, jax / np.where(torch == 0, np.nan, torch), np.nan)
    constant = [_constant(column) for column in ratio.T]
    if all(rate is not None for rate in constant):
        return _ratios(theirs, ours, [rate for rate in constant if rate is not None], names), 1
    for shift, words in ((1, "of the step before"), (-1, "of the step after")):
        later, earlier = (jax[1:], torch[:-1]) if shift == 1 else (jax[:-1], torch[1:])
        both = np.isfinite(later) & np.isfinite(earlier)
        if _close(earlier, later)[both].all():
            first = ", ".join(f"{rate:.4g}" for rate in np.nanmean(jax, axis=1)[:_NAMED])
            wanted = ", ".join(f"{rate:.4g}" for rate in np.nanmean(torch, axis=1)[:_NAMED])
            return (
                f"the schedule, off by one step: JAX takes torch's rate {words} ({first}, … instead of {wanted}, …)",
                1,
            )
    first, wanted = (", ".join(f"{rate:.4g}" for rate in np.nanmean(of, axis=1)[:6]) for of in (jax, torch))
    return f"the learning rates of the steps, {wanted}, … in torch and {first}, … in JAX", 3


def _ratios(theirs: Fit, ours: Fit, ratios: Sequence[float], names: Sequence[str]) -> str:
    if all(abs(ratio - ratios[0]) <= 1e-7 * abs(ratios[0]) for ratio in ratios):
        times = ratios[0]
        if abs(times + 1) < 1e-7:
            return "the sign: JAX's update is the opposite of torch's"
        torch, jax = (_constant(fit.rate.ravel()) for fit in (theirs, ours))
        if torch is not None and jax is not None:
            if np.isclose(jax, float(np.float32(torch)), rtol=1e-11, atol=0):
                return f"the learning rate, {torch:.10g} in torch and rounded to float32 in JAX"
            if np.isclose(torch, float(np.float32(jax)), rtol=1e-11, atol=0):
                return f"the learning rate, rounded to float32 in torch and {jax:.10g} in JAX"
        rates = "" if torch is None or jax is None else f" ({torch:.6g} in torch, {jax:.6g} in JAX)"
        averages = theirs.rule.momentum and abs(times - (1 - theirs.rule.momentum)) < 1e-7
        mean = f"; {times:.4g} is 1 − momentum, as if JAX averaged gradients" if averages else ""
        return f"the learning rate, JAX's update is {times:.6g} times torch's{rates}{mean}"
    listed = [
        f"{ratio:.6g} times torch's for {name}"
        for ratio, name in zip(ratios, names, strict=True)
        if abs(ratio - 1) > 1e-7
    ]
    rest = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return f"the learning rate by parameter, JAX's is {', '.join(listed[:_NAMED])}{rest}"


def _decay(theirs: Fit, ours: Fit, names: Sequence[str]) -> str:
    """Describe how weight decay differs: added to the gradient, or a part of the weight, times the rate or not."""
    known = np.isfinite(theirs.decay) & np.isfinite(ours.decay)
    relative = [_relative(fit) for fit in (theirs, ours)]
    plain = theirs.rule.family == "SGD" and not theirs.rule.momentum  # both forms are one
    same_l2 = "l2" not in theirs.rule.differences(ours.rule)
    kept = [(of[0][known], of[1][known]) for of in ((theirs.decay, ours.decay), relative)]
    if same_l2 and any(_close(one, other, 1e-12)[np.isfinite(one) & np.isfinite(other)].all() for one, other in kept):
        return ""
    by_words: dict[str, list[str]] = {}
    for index, name in enumerate(names):
        one, other = (
            _decay_in_words(fit, part[:, index], index, plain)
            for fit, part in zip((theirs, ours), relative, strict=True)
        )
        if one != other:
            by_words.setdefault(f"{one} in torch and {other} in JAX", []).append(name)
    if not by_words:
        return ""
    whole = len(by_words) == 1 and len(next(iter(by_words.values()))) == len(names)
    parts = [words if whole else f"{words} for {_listed(of)}" for words, of in by_words.items()]
    return f"weight decay, {'; '.join(parts)}"


def _decay_in_words(fit: Fit, relative: NDArray, index: int, plain: bool) -> str:
    parts = [f"{fit.rule.l2:.4g} times the weight added to the gradient (L2)"] if fit.rule.l2 else []
    part, absolute = _constant(relative), _constant(fit.decay[:, index])
    if absolute is not None and abs(absolute) < 1e-11:
        return parts[0] if parts else "none"
    if part is not None:
        parts.append(f"{part:.4g} of the weight times the learning rate" + ("" if plain else " (decoupled)"))
    elif absolute is not None:
        parts.append(f"{absolute:.4g} of the weight, whatever the learning rate")
    else:
        parts.append("a part of the weight that varies over the steps")
    return " with ".join(parts)


def _relative(fit: Fit) -> NDArray:
    return np.where(np.abs(fit.rate) > 0, fit.decay / np.where(fit.rate == 0, np.nan, fit.rate), np.nan)


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + rest


def _constant(numbers: NDArray) -> float | None:
    """The value of equal numbers; None if they differ, or are none."""
    known = numbers[np.isfinite(numbers)]
    if not known.size:
        return None
    middle = float(np.median(known))
    return middle if _close(np.full_like(known, middle), known, 1e-11).all() else None


def _close(one: NDArray, other: NDArray, least: float = 0.0) -> NDArray:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(one - other) <= _CLOSE * np.maximum(np.abs(one), np.abs(other)) + least)


def without_rules(torch: Trace, jax: Trace, names: Sequence[str]) -> str:
    """Describe the difference if torch's optimizer is none of those known: one factor, or a part of the weights."""
    difference = jax.update - torch.update
    for of, words in (
        (torch.update, "the learning rate, JAX's update is {:.6g} times torch's"),
        (torch.weight, "weight decay, JAX adds {:+.3g} times the weight"),
    ):
        factor = float((difference * of).sum() / max(float((of * of).sum()), 1e-300))
        left = np.abs(difference - factor * of)
        if factor and (left <= 1e-10 * np.abs(torch.update) + 1e-14 * np.abs(torch.weight)).all():
            return words.format(1 + factor if of is torch.update else factor)
    return ""
