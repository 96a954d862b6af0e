"""The settings in which two optimizers may differ, each declared once: how a cause is sought in it, and how it is said.

Weight decay and the learning rate are not among the words: what a fit has of them says more
(:mod:`jax_baseline.parity.location.update_descriptions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jax_baseline.parity.location.update_rules import Clip, Rule, Trace, same_setting

Candidate = tuple[Rule, tuple[str, ...]]  # a rule, and its settings that are solved for

# Limits of clipping from which one is solved, in multiples of a typical norm or element.
_LIMITS = (0.1, 0.7, 3.0, 100.0)


@dataclass(frozen=True)
class Setting:
    """A setting of an optimizer.

    Attributes:
        name: Its field of :class:`Rule`.
        words: What it is called.
        belongs: Whether a rule has it.
        starts: Values from which another one is solved.
        values: Other values that are no matter of degree, by the rule.
        others: Rules in which it differs otherwise.
        parts: What of a rule belongs to it; by default its field.
        shown: A rule's value in words; by default its number.
        form: The sentence on two values.
        note: What a sentence on two rules adds.
    """

    name: str
    words: str = ""
    belongs: Callable[[Rule], bool] = lambda rule: True
    starts: Sequence[float] = ()
    values: Callable[[Rule], Sequence[Any]] = lambda rule: ()
    others: Callable[[Rule, Trace], Iterator[Candidate]] = lambda rule, trace: iter(())
    parts: Callable[[Rule], Sequence[Any]] | None = None
    shown: Callable[[Rule], str] | None = None
    form: str = "{words}, {torch} in torch and {jax} in JAX"
    note: Callable[[Rule, Rule], str] = lambda torch, jax: ""

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


def differing_settings(torch: Rule, jax: Rule) -> list[str]:
    """Describe the settings that differ, except weight decay."""
    different = [setting for setting in SETTINGS if setting.words and setting.differs(torch, jax)]
    whole = [setting for setting in different if setting.name == "family"]  # nothing else compares
    return [setting.said(torch, jax) for setting in whole or different]


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
        values=lambda rule: (rule.momentum,),
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
