"""Optimizers as formulas in float64, to compute again what an optimizer did.

Every rule gives a direction d from the gradients so far. The update of the weights w at step t is
−rate(t) · d − decay(t) · w: a learning rate, a schedule and decoupled weight decay are two numbers per parameter and
step, which least squares determines. Everything else is a field of :class:`Rule`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Family = Literal["SGD", "Adam", "RMSprop", "Adagrad"]
Clip = Literal["", "norm", "element", "parameter"]

# Part of an update that rounding may leave unexplained: the formulas of the frameworks order their operations
# differently, and 1 − 0.999 alone loses three digits. The weights round too, and an update is a difference of weights.
_RELATIVE, _OF_WEIGHTS = 1e-11, 64 * float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Rule:
    """How an optimizer makes a direction from gradients."""

    family: Family  # SGD, Adam, RMSprop or Adagrad
    # What of a gradient is clipped: the norm of all, each element, the norm of each parameter, or nothing.
    clip: Clip = ""
    limit: float = 0.0  # largest norm or element
    added: float = 0.0  # number that is added to the norm in limit / (norm + added)
    l2: float = 0.0  # factor of the weight that is added to the gradient
    l2_clipped: bool = False  # whether it is added before clipping
    momentum: float = 0.0  # of SGD and RMSprop
    dampening: float = 0.0  # of SGD's momentum, from the second step
    nesterov: bool = False  # whether the momentum looks ahead
    beta1: float = 0.9  # decay of Adam's first moment
    beta2: float = 0.999  # decay of the second moment of Adam and RMSprop
    eps: float = 0.0  # added to the root
    eps_root: float = 0.0  # added inside the root
    corrected: bool = True  # whether Adam's moments are corrected for their start at zero
    # Of AMSGrad: the largest second moment as it is (``raw``) or corrected for its start; empty without.
    maximum: Literal["", "raw", "corrected"] = ""
    start: float = 0.0  # first value of Adagrad's sum

    def differences(self, other: Rule) -> set[str]:
        """Names of the fields that differ by more than the precision of a fit."""
        return {
            setting.name
            for setting in fields(self)
            if not same_setting(getattr(self, setting.name), getattr(other, setting.name))
        }


def same_setting(one: Any, other: Any) -> bool:
    """Whether two settings are equal, numbers to seven digits."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-7 * max(abs(one), abs(other))
    return bool(one == other)


@dataclass(frozen=True)
class Trace:
    """Steps of one optimizer over several sequences of gradients: some elements of each parameter."""

    gradient: NDArray  # gradients, (sequences, steps, elements)
    weight: NDArray  # weights before each step, of the same shape
    update: NDArray  # weights after each step minus those before, of the same shape
    starts: NDArray  # index of each parameter's first element
    # Σ g², Σ g · w and Σ w² over all elements of each parameter of the model, (3, sequences, steps, parameters).
    squares: NDArray
    mine: NDArray  # indices of the parameters of ``starts`` among them
    owner: NDArray = field(init=False)  # number of each element's parameter

    def __post_init__(self) -> None:
        sizes = np.diff([*self.starts, self.gradient.shape[-1]])
        object.__setattr__(self, "owner", np.repeat(np.arange(len(sizes)), sizes))

    def sums(self, one: NDArray, other: NDArray) -> NDArray:
        """Products of two arrays, summed over the elements of each parameter and over the sequences."""
        return np.add.reduceat(one * other, self.starts, axis=-1).sum(0)


@dataclass(frozen=True)
class Fit:
    """The best rates and decays of a rule for a trace."""

    rule: Rule
    rate: NDArray  # by step and parameter; NaN where the direction is zero
    decay: NDArray  # by step and parameter; NaN where the weights are zero, or along the direction
    residual: NDArray  # what is left of each update, in multiples of what rounding may leave

    @property
    def exact(self) -> bool:
        """Whether the rule explains every update to rounding."""
        return bool(np.isfinite(self.residual).all() and np.abs(self.residual).max() <= 1)


def fit(rule: Rule, trace: Trace) -> Fit:
    """Compute the rates and decays that fit a rule to a trace: least squares in units of what rounding leaves."""
    squares = np.add.reduceat(np.stack([trace.update, trace.weight]) ** 2, trace.starts, axis=-1)
    allowed = _RELATIVE * np.sqrt(squares[0]) + _OF_WEIGHTS * np.sqrt(squares[1])
    unit = 1 / np.maximum(allowed, 1e-300)[..., trace.owner]
    with np.errstate(all="ignore"):
        direction, weight, rest = unit * directions(rule, trace), unit * trace.weight, unit * trace.update
        dd, dw, ww = trace.sums(direction, direction), trace.sums(direction, weight), trace.sums(weight, weight)
        determinant = dd * ww - dw * dw
        both, alone = determinant > 1e-8 * dd * ww, (dd == 0) & (ww > 0)
        rate, decay = np.zeros_like(dd), np.zeros_like(dd)
        for _ in range(2):  # the second pass corrects the rounding of the first
            du, wu = trace.sums(direction, rest), trace.sums(weight, rest)
            by_d = np.where(both, (ww * du - dw * wu) / determinant, np.where(dd == 0, 0.0, du / dd))
            by_w = np.where(both, (dd * wu - dw * du) / determinant, np.where(alone, wu / ww, 0.0))
            rate, decay = rate - by_d, decay - by_w
            rest = rest - by_d[:, trace.owner] * direction - by_w[:, trace.owner] * weight
    return Fit(rule, np.where(dd > 0, rate, np.nan), np.where(both | alone, decay, np.nan), rest)


def directions(rule: Rule, trace: Trace) -> NDArray:
    """Return the direction of a rule at every step."""
    gradient = _clipped(rule, trace)
    made = {"SGD": _sgd, "Adam": _adam, "RMSprop": _rmsprop, "Adagrad": _adagrad}[rule.family](rule, gradient)
    return np.stack(made, axis=1)


def active(rule: Rule, trace: Trace) -> NDArray:
    """Whether the rule clips, by sequence and step."""
    if rule.clip == "element":
        return np.asarray((np.abs(trace.gradient) > rule.limit).any(-1))
    return np.asarray((_factors(rule, trace) < 1).any(-1))


def _clipped(rule: Rule, trace: Trace) -> NDArray:
    decayed = rule.l2 * trace.weight
    gradient = trace.gradient + decayed if rule.l2_clipped else trace.gradient
    if rule.clip == "element":
        gradient = np.clip(gradient, -rule.limit, rule.limit)
    elif rule.clip:
        gradient = gradient * _factors(rule, trace)[..., trace.owner]
    return gradient if rule.l2_clipped else gradient + decayed


def _factors(rule: Rule, trace: Trace) -> NDArray:
    gg, gw, ww = trace.squares
    l2 = rule.l2 if rule.l2_clipped else 0.0
    squares = gg + 2 * l2 * gw + l2 * l2 * ww
    if rule.clip == "norm":
        squares = np.broadcast_to(squares.sum(-1, keepdims=True), squares.shape)
    return np.minimum(1, rule.limit / (np.sqrt(squares[..., trace.mine]) + rule.added))


def _steps(gradient: NDArray) -> NDArray:
    return np.moveaxis(gradient, 1, 0)


def _sgd(rule: Rule, gradient: NDArray) -> list[NDArray]:
    made: list[NDArray] = []
    kept = np.zeros_like(gradient[:, 0])
    for g in _steps(gradient):
        kept = rule.momentum * kept + (1 - rule.dampening if made else 1.0) * g
        made.append(g + rule.momentum * kept if rule.nesterov else kept)
    return made


def _adam(rule: Rule, gradient: NDArray) -> list[NDArray]:
    made = []
    m, v, largest = (np.zeros_like(gradient[:, 0]) for _ in range(3))
    for t, g in enumerate(_steps(gradient), 1):
        m, v = rule.beta1 * m + (1 - rule.beta1) * g, rule.beta2 * v + (1 - rule.beta2) * g * g
        of_m, of_v = (1 - rule.beta1**t, 1 - rule.beta2**t) if rule.corrected else (1.0, 1.0)
        ahead = rule.beta1 * m / (1 - rule.beta1 ** (t + 1)) + (1 - rule.beta1) * g / of_m
        largest = np.maximum(largest, v / of_v if rule.maximum == "corrected" else v)
        second = {"": v / of_v, "raw": largest / of_v, "corrected": largest}[rule.maximum]
        made.append((ahead if rule.nesterov else m / of_m) / (np.sqrt(second + rule.eps_root) + rule.eps))
    return made


def _rmsprop(rule: Rule, gradient: NDArray) -> list[NDArray]:
    made = []
    v, kept = np.zeros_like(gradient[:, 0]), np.zeros_like(gradient[:, 0])
    for g in _steps(gradient):
        v = rule.beta2 * v + (1 - rule.beta2) * g * g
        kept = rule.momentum * kept + g / (np.sqrt(v + rule.eps_root) + rule.eps)
        made.append(kept)
    return made


def _adagrad(rule: Rule, gradient: NDArray) -> list[NDArray]:
    made = []
    total = np.full_like(gradient[:, 0], rule.start)
    for g in _steps(gradient):
        total = total + g * g
        made.append(g / (np.sqrt(total + rule.eps_root) + rule.eps))
    return made
