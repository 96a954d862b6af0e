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

from .test_adamw_state import WRITES
from .test_cross_entropy import Operands, exact_and_bounds, reference

OPTIMIZERS = {
    "programs": "AdamW: options and groups × dtypes of parameters and gradients × layouts × steps, clipping, every way "
    "of writing a parameter, exchanges of state with torch",
    "oracle": "torch.optim.AdamW in float64",
}
LOSSES = {
    "programs": "linear_cross_entropy: modes × reductions × ignored targets × dtypes × layouts × bias × gradients that "
    "come in × ways of differentiating",
    "oracle": "F.linear and F.cross_entropy in float64, within derived bounds",
}
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Training:
    """What happens to the parameters of an optimizer, one event after the other.

    Attributes:
        dtype: Of the parameters.
        of_gradient: Dtype of their gradients.
        options: Of the optimizer.
        second: Options of a second group, which has all parameters but the first; None makes no second group.
        layouts: One for each parameter.
        events: In this order.
        seed: Of all values.
    """

    dtype: torch.dtype
    of_gradient: torch.dtype
    options: dict[str, Any]
    second: dict[str, Any] | None
    layouts: tuple[str, ...]
    events: tuple[str, ...]
    seed: int

    def groups(self, parameters: list[nn.Parameter]) -> list[Any]:
        """What an optimizer is made of."""
        if self.second is None:
            return parameters
        return [{"params": parameters[:1]}, {"params": parameters[1:], **self.second}]


EVENTS = (
    *("step", "step", "clipped step", "step without a gradient", "step with gradients of another layout"),
    *(f"write {part} {way}" for part in ("all", "a part") for way in WRITES),
    *(("from torch", "from an old torch", "to torch", "copied") * 2),
)
LAYOUTS = ("plain", "transposed", "a slice", "empty", "channels last", "a number")


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
    dtype = draw(st.sampled_from([torch.float64, torch.float32, *NARROW]))
    of_gradient = {torch.float64: (torch.float64,), torch.float32: (torch.float32, *NARROW)}.get(
        dtype, (dtype, torch.float32)
    )
    second = st.fixed_dictionaries(
        {}, optional={"weight_decay": st.just(0.3), "amsgrad": st.booleans(), "maximize": st.booleans()}
    )
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3))
    events = draw(st.lists(st.sampled_from(EVENTS), min_size=2, max_size=8))
    return Training(
        dtype,
        draw(st.sampled_from(of_gradient)),
        options,
        draw(st.none() | second) if len(layouts) > 1 else None,
        tuple(layouts),
        tuple(events),
        draw(st.integers(0, 999)),
    )


def parameter(layout: str, dtype: torch.dtype, of_gradient: torch.dtype) -> nn.Parameter:
    shape = {"empty": (0, 3), "channels last": (2, 3, 2, 2), "a number": ()}.get(layout, (3, 4))
    values = torch.rand(shape, dtype=torch.float64).add(0.5).to(dtype)
    if layout == "channels last":
        values = values.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        values = values.t()
    elif layout == "a slice":
        values = values[:, ::2]
    made = nn.Parameter(values)
    made.grad_dtype = of_gradient
    return made


def train(given: Training) -> str:
    """Take each step with both, and compare the parameters, or their masters, after it."""
    torch.manual_seed(given.seed)
    ours = [parameter(layout, given.dtype, given.of_gradient) for layout in given.layouts]
    theirs = [nn.Parameter(p.detach().to(torch.float64, copy=True)) for p in ours]
    own = custom_ops.AdamW(given.groups(ours), **given.options)
    peer = torch.optim.AdamW(given.groups(theirs), **given.options)
    # Each step rounds the parameter, and its change of at most 8 · lr a few times; the moments keep their errors.
    unit, steps = torch.finfo(wide(given.dtype)).eps, 1 + len(given.events)
    for event in given.events:
        if "step" in event:
            _step(event, own, peer, ours, theirs)
        elif event.startswith("write"):
            _write(own, ours, theirs, way=event.rpartition(" ")[2], part="a part" in event)
        elif event == "copied":
            ours, own = copy.deepcopy((ours, own))
            for mine in ours:
                mine.grad_dtype = given.of_gradient
        else:
            own, peer = _exchange(event, given, own, peer, ours, theirs)
        for mine, other in zip(ours, theirs, strict=True):
            master = _master(own, mine)
            bound = steps**2 * unit * (4 * other.abs() + 256 * given.options["lr"])
            assert ((master.double() - other).abs() <= bound).all(), (event, master, other)
    return "masters" if given.dtype in NARROW else "no masters"


def _step(
    event: str, own: custom_ops.AdamW, peer: torch.optim.AdamW, ours: list[nn.Parameter], theirs: list[nn.Parameter]
) -> None:
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if event.endswith("without a gradient") and index == 0:
            mine.grad = other.grad = None
            continue
        gradient = torch.rand(mine.shape).add(0.5) * torch.randint(0, 2, mine.shape).mul(2).sub(1)
        gradient = gradient.to(mine.grad_dtype)
        if event.endswith("another layout") and mine.dim() > 1:
            gradient = gradient.mT.contiguous().mT
        mine.grad = gradient
        # In the parameter's layout: torch's fused step on a CPU mixes up elements whose gradient has another.
        other.grad = torch.empty_like(other).copy_(gradient)
    if event.startswith("clipped"):
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        own.step(norm=own.gradient_norm(), max_norm=1.0)
    else:
        own.step()
    peer.step()


def _master(own: custom_ops.AdamW, mine: nn.Parameter) -> Tensor:
    """What the next step starts from: the master, or the parameter where it was written since."""
    master = own.state.get(mine, {}).get("master", mine)
    return torch.where(master.to(mine.dtype) == mine, master, mine.to(master.dtype)).detach()


@torch.no_grad()
def _write(
    own: custom_ops.AdamW, ours: list[nn.Parameter], theirs: list[nn.Parameter], *, way: str, part: bool
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        before = mine.detach().clone()
        values = torch.where(torch.rand(mine.shape) < (0.5 if part else 1), torch.rand(mine.shape).add(2), before)
        fills_memory = mine.is_contiguous() and mine.numel() == mine.untyped_storage().nbytes() // mine.itemsize
        possible = way if fills_memory or way != "in_memory" else "in_data"
        with torch.enable_grad():
            WRITES[possible](mine, values.to(mine.dtype))
        # A master whose rounding is written stays; so does one whose rounding is there again after two writes.
        other.copy_(torch.where(mine == before, other, _master(own, mine).double()))


def _exchange(
    event: str,
    given: Training,
    own: custom_ops.AdamW,
    peer: torch.optim.AdamW,
    ours: list[nn.Parameter],
    theirs: list[nn.Parameter],
) -> tuple[custom_ops.AdamW, torch.optim.AdamW]:
    """Give one a new optimizer of other options, and load the state of the other."""
    if event == "to torch":
        peer = torch.optim.AdamW(given.groups(theirs), lr=7.0)
        peer.load_state_dict(copy.deepcopy(own.state_dict()))
        for other, state in peer.state.items():
            state.pop("master", None)
            # As for gradients: torch's fused step wants the layout of the parameter, which a write may have changed.
            for name in state.keys() - {"step"}:
                state[name] = torch.empty_like(other).copy_(state[name])
        return own, peer
    state = copy.deepcopy(peer.state_dict())
    if event == "from an old torch":
        for of_parameter in state["state"].values():
            of_parameter["step"] = int(of_parameter["step"])
    own = custom_ops.AdamW(given.groups(ours), lr=7.0)
    own.load_state_dict(state)
    for mine, other in zip(ours, theirs, strict=True):
        other.data.copy_(mine.detach().double())  # the other has no masters
    for group, its in zip(own.param_groups, peer.param_groups, strict=True):
        for name in ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"):
            assert group[name] == its[name]
    return own, peer


@dataclass(frozen=True)
class Loss:
    """A call of the loss.

    Attributes:
        sizes: Rows, columns and classes.
        dtype: Of all operands.
        mode: Argument of the call, as is ``reduction``.
        ignored: How many targets are ignored: none, some or all.
        ignore_index: A class, or none.
        layout: Of ``x`` and of the weight.
        upstream: What comes back into the loss.
        way: How the loss is differentiated.
        biased: Whether there is a bias.
        seed: Of all values.
    """

    sizes: tuple[int, int, int]
    dtype: torch.dtype
    mode: Any
    reduction: Any
    ignored: str
    ignore_index: int
    layout: str
    upstream: float
    way: str
    biased: bool
    seed: int


@st.composite
def losses(draw: st.DrawFn) -> Loss:
    mode = draw(st.sampled_from(["fast", "least_memory"]))
    reductions = ["mean", "sum"] if mode == "least_memory" else ["mean", "sum", "none"]
    rows, columns, classes = (draw(st.integers(least, most)) for least, most in ((0, 40), (1, 30), (1, 70)))
    return Loss(
        (rows, columns, classes),
        draw(st.sampled_from(DTYPES)),
        mode,
        draw(st.sampled_from(reductions)),
        draw(st.sampled_from(["none", "some", "all"])),
        draw(st.sampled_from([-100, -1, 0, classes - 1, 10**6])),
        draw(st.sampled_from(["contiguous", "transposed", "every second column"])),
        draw(st.sampled_from([1.0, 0.37, 0.0, float("nan"), float("inf")])),
        draw(st.sampled_from(["autograd", "autograd", "twice", "vjp", "vmap"])),
        draw(st.booleans()),
        draw(st.integers(0, 999)),
    )


def _drawn(shape: tuple[int, ...], layout: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if layout == "transposed":
        return torch.randn(shape[::-1], generator=generator).to(dtype).t()
    step = 2 if layout == "every second column" else 1
    return torch.randn((*shape[:-1], shape[-1] * step), generator=generator).to(dtype)[..., ::step]


def lose(given: Loss) -> str:
    """Compare the loss and its gradients; where torch's are no numbers, so are ours, and in the same rows."""
    generator = torch.Generator().manual_seed(given.seed)
    rows, columns, classes = given.sizes
    x, weight, bias = (
        _drawn(shape, layout, given.dtype, generator)
        for shape, layout in (
            ((rows, columns), given.layout),
            ((classes, columns), given.layout),
            ((classes,), "contiguous"),
        )
    )
    bias = bias if given.biased else torch.zeros_like(bias)
    targets = torch.randint(classes, (rows,), generator=generator)
    share = {"none": 0.0, "some": 0.5, "all": 1.0}[given.ignored]
    targets[torch.rand(rows, generator=generator) < share] = given.ignore_index
    needed = (x, weight, bias)[: 3 if given.biased else 2]
    found = _loss_and_gradients(given, needed, targets)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    right = reference(*exact[:2], targets, exact[2], given.ignore_index, given.reduction)
    grad = torch.full_like(found[0], given.upstream)
    wanted = [right.detach(), *torch.autograd.grad(right, exact[: len(needed)], grad.double())]
    # The derived bounds know one number for targets that do not count.
    counted = targets != given.ignore_index
    _, bounds = exact_and_bounds(Operands(x, weight, bias, torch.where(counted, targets, -100)), given.reduction, grad)
    for index, (ours, value, bound) in enumerate(zip(found, wanted, bounds, strict=False)):
        if not counted.any():
            assert torch.equal(ours.double(), value) or (index == 0 and ours.isnan().all() and value.isnan().all())
        elif index == 0 or value.isfinite().all():
            assert ((ours.double() - value).abs() <= bound).all(), (index, ours, value)
        else:  # inf · 0 and inf − inf depend on the order of the sum
            assert torch.equal(ours.isfinite(), value.isfinite()), (index, ours, value)
    return f"{given.mode}, {given.way}"


def _loss_and_gradients(given: Loss, needed: tuple[Tensor, ...], targets: Tensor) -> list[Tensor]:
    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        options = {"mode": given.mode, "reduction": given.reduction, "ignore_index": given.ignore_index}
        return custom_ops.linear_cross_entropy(x, weight, targets, bias=bias, **options)

    def pulled_back(*operands: Tensor) -> tuple[Tensor, ...]:
        loss, pull = torch.func.vjp(call, *operands)
        return loss, *pull(torch.full_like(loss, given.upstream))

    if given.way == "vjp":
        return list(pulled_back(*needed))
    if given.way == "vmap":  # the operands between others
        several = (torch.stack([torch.zeros_like(tensor), tensor, -tensor]) for tensor in needed)
        return [result[1] for result in torch.func.vmap(pulled_back)(*several)]
    leaves = [tensor.detach().requires_grad_() for tensor in needed]
    loss = call(*leaves)
    gradients = torch.autograd.grad(
        loss, leaves, torch.full_like(loss, given.upstream), create_graph=given.way == "twice"
    )
    return [loss.detach(), *(gradient.detach() for gradient in gradients)]
