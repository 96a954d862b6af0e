"""Random programs for the optimizer and the loss: what a training run does to them, against torch's in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import custom_ops
from custom_ops.operators.checks import DTYPES, wide

from .test_cross_entropy import IGNORED, Operands, exact_and_bounds, reference

OPTIMIZERS = {
    "programs": "options of AdamW × dtypes × layouts × steps, writes into parameters, exchanges of state with torch",
    "oracle": "torch.optim.AdamW in float64",
}
LOSSES = {
    "programs": "linear_cross_entropy: modes × reductions × ignored targets × dtypes × bias × gradients that come in",
    "oracle": "F.linear and F.cross_entropy in float64, within derived bounds",
}


@dataclass(frozen=True)
class Training:
    """What happens to the parameters of an optimizer, one event after the other."""

    dtype: torch.dtype
    options: dict[str, Any]
    layouts: tuple[str, ...]
    events: tuple[str, ...]
    seed: int


EVENTS = (
    "step",
    "step",
    "step without a gradient",
    "write",
    "write a part",
    "from torch",
    "from an old torch",
    "to torch",
)


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    options = {
        "lr": draw(st.sampled_from([0.0, 1e-3, 0.1])),
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.99), (0.3, 0.3), (0.9, 0.9), (0.0, 0.0)])),
        "eps": draw(st.sampled_from([1e-8, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "amsgrad": draw(st.booleans()),
        "maximize": draw(st.booleans()),
        **draw(st.sampled_from([{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": False}])),
    }
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    layouts = draw(st.lists(st.sampled_from(["plain", "transposed", "a slice", "empty"]), min_size=1, max_size=3))
    events = draw(st.lists(st.sampled_from(EVENTS), min_size=2, max_size=7))
    return Training(dtype, options, tuple(layouts), tuple(events), draw(st.integers(0, 999)))


def parameter(layout: str, dtype: torch.dtype) -> nn.Parameter:
    if layout == "empty":
        return nn.Parameter(torch.zeros(0, 3, dtype=dtype))
    values = torch.rand(3, 4, dtype=torch.float64).add(0.5).to(dtype)
    return nn.Parameter({"plain": values, "transposed": values.t(), "a slice": values[:, ::2]}[layout])


def train(given: Training) -> str:
    """Take each step with both, and compare the parameters, or their masters, after it."""
    torch.manual_seed(given.seed)
    ours = [parameter(layout, given.dtype) for layout in given.layouts]
    theirs = [nn.Parameter(p.detach().double()) for p in ours]
    own = custom_ops.AdamW(ours, **given.options)
    peer = torch.optim.AdamW(theirs, **given.options)
    # Each step rounds the parameter, and its change of at most 8 · lr a few times; the moments keep their errors.
    unit, steps = torch.finfo(wide(given.dtype)).eps, 1 + len(given.events)
    for event in given.events:
        if event.startswith("step"):
            for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                gradient = torch.rand(mine.shape).add(0.5) * torch.randint(0, 2, mine.shape).mul(2).sub(1)
                none = "without" in event and index == 0
                mine.grad = None if none else gradient.to(given.dtype)
                # In the parameter's layout: torch's fused step on a CPU mixes up elements whose gradient has another.
                other.grad = None if none else torch.empty_like(other).copy_(mine.grad)
            own.step()
            peer.step()
        elif event.startswith("write"):
            _write(own, ours, theirs, part=event.endswith("part"))
        else:
            own, peer = _exchange(event, own, peer, ours, theirs)
        for mine, other in zip(ours, theirs, strict=True):
            master = _master(own, mine)
            bound = steps**2 * unit * (4 * other.abs() + 256 * given.options["lr"])
            assert ((master.double() - other).abs() <= bound).all(), (event, master, other)
    return "a master" if given.dtype in (torch.float16, torch.bfloat16) else "no master"


def _master(own: custom_ops.AdamW, mine: nn.Parameter) -> Tensor:
    """What the next step starts from: the master, or the parameter where it was written since."""
    master = own.state.get(mine, {}).get("master", mine)
    return torch.where(master.to(mine.dtype) == mine, master, mine.to(master.dtype)).detach()


@torch.no_grad()
def _write(own: custom_ops.AdamW, ours: list[nn.Parameter], theirs: list[nn.Parameter], *, part: bool) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        values = torch.rand(mine.shape).add(2).to(mine.dtype)
        places = torch.rand(mine.shape) < (0.5 if part else 1)
        mine.data[places] = values[places]
        # A master whose rounding is written stays.
        other.copy_(torch.where(_master(own, mine) == mine, mine.double(), other))


def _exchange(
    event: str, own: custom_ops.AdamW, peer: torch.optim.AdamW, ours: list[nn.Parameter], theirs: list[nn.Parameter]
) -> tuple[custom_ops.AdamW, torch.optim.AdamW]:
    """Give one a new optimizer of other options, and load the state of the other."""
    if event == "to torch":
        peer = torch.optim.AdamW(theirs, lr=7.0)
        peer.load_state_dict(copy.deepcopy(own.state_dict()))
        for state in peer.state.values():
            state.pop("master", None)
        return own, peer
    state = copy.deepcopy(peer.state_dict())
    if event == "from an old torch":
        for of_parameter in state["state"].values():
            of_parameter["step"] = int(of_parameter["step"])
    own = custom_ops.AdamW(ours, lr=7.0)
    own.load_state_dict(state)
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine.detach().double())  # the other has no masters
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"):
        assert own.param_groups[0][name] == peer.param_groups[0][name]
    return own, peer


@dataclass(frozen=True)
class Loss:
    """A call of the loss."""

    rows: int
    width: int
    classes: int
    dtype: torch.dtype
    mode: Any
    reduction: Any
    ignored: str
    upstream: float
    seed: int
    biased: bool


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    mode = draw(st.sampled_from(["fast", "least_memory"]))
    reductions = ["mean", "sum", "none"]
    return Loss(
        *(draw(st.integers(least, most)) for least, most in ((0, 40), (1, 30), (1, 70))),
        draw(st.sampled_from(DTYPES)),
        mode,
        draw(st.sampled_from(reductions)),
        draw(st.sampled_from(["none", "some", "all"])),
        draw(st.sampled_from([1.0, 0.37, 0.0, float("nan"), float("inf")])),
        draw(st.integers(0, 999)),
        draw(st.booleans()),
    )


def lose(given: Loss) -> str:
    """Compare the loss and its gradients; where torch's are no numbers, so are ours, and in the same rows."""
    generator = torch.Generator().manual_seed(given.seed)
    shapes = ((given.rows, given.width), (given.classes, given.width), (given.classes,))
    leaves = [torch.randn(s, generator=generator).to(given.dtype).requires_grad_() for s in shapes]
    leaves = leaves if given.biased else [*leaves[:2], torch.zeros_like(leaves[2])]
    targets = torch.randint(given.classes, (given.rows,), generator=generator)
    share = {"none": 0.0, "some": 0.5, "all": 1.0}[given.ignored]
    targets[torch.rand(given.rows, generator=generator) < share] = IGNORED
    options = {"mode": given.mode, "reduction": given.reduction, "bias": leaves[2] if given.biased else None}
    loss = custom_ops.linear_cross_entropy(leaves[0], leaves[1], targets, **options)
    grad = torch.full_like(loss, given.upstream)
    needed = leaves[: 3 if given.biased else 2]
    found = [loss.detach(), *torch.autograd.grad(loss, needed, grad)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = reference(exact[0], exact[1], targets, exact[2], reduction=given.reduction)
    wanted = [right.detach(), *torch.autograd.grad(right, exact[: len(needed)], grad.double())]
    _, bounds = exact_and_bounds(Operands(*leaves, targets), given.reduction, grad)
    counted = bool((targets != IGNORED).any())
    for index, (ours, value, bound) in enumerate(zip(found, wanted, bounds, strict=False)):
        if not counted:
            assert torch.equal(ours.double(), value) or (index == 0 and ours.isnan().all() and value.isnan().all())
        elif index == 0 or value.isfinite().all():
            assert ((ours.double() - value).abs() <= bound).all()
        else:  # inf · 0 and inf − inf depend on the order of the sum
            assert torch.equal(ours.isfinite(), value.isfinite())
    return given.mode
