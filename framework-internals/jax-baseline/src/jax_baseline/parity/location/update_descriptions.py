"""In words: what distinguishes the rules, rates and decays of two optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jax_baseline.parity.location.update_rules import Fit, Rule, Trace
from jax_baseline.parity.location.update_settings import differing_settings

_CLOSE = 1e-8  # relative difference of two rates, or of two decays, that their fits allow
_NAMED = 3  # parameters or steps that a sentence lists


@dataclass(frozen=True)
class Differences:
    """What distinguishes two optimizers.

    Attributes:
        text: In words; empty if nothing does.
        count: Number of differences. An arbitrary schedule counts more than one setting, since it explains more.
    """

    text: str
    count: int


def differences(theirs: Fit, ours: Fit, names: Sequence[str]) -> Differences:
    """Describe what distinguishes JAX's optimizer from torch's."""
    settings = differing_settings(theirs.rule, ours.rule)
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
        if torch is not None and jax is not None and np.isclose(jax, float(np.float32(torch)), rtol=1e-11, atol=0):
            return f"the learning rate, {torch:.10g} in torch and rounded to float32 in JAX"
        rates = "" if torch is None or jax is None else f" ({torch:.6g} in torch, {jax:.6g} in JAX)"
        mean = f"; {times:.4g} is 1 − momentum: JAX averages gradients" if _averages(theirs.rule, times) else ""
        return f"the learning rate, JAX's update is {times:.6g} times torch's{rates}{mean}"
    listed = [
        f"{ratio:.6g} times torch's for {name}"
        for ratio, name in zip(ratios, names, strict=True)
        if abs(ratio - 1) > 1e-7
    ]
    rest = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return f"the learning rate by parameter, JAX's is {', '.join(listed[:_NAMED])}{rest}"


def _averages(rule: Rule, times: float) -> bool:
    return bool(rule.momentum) and abs(times - (1 - rule.momentum)) < 1e-7


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
