"""linear_cross_entropy with smoothing, class weights, a penalty, a cap and the accuracy, in each combination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from custom_ops.operators.calls import calls
from custom_ops.operators.checks import DTYPES, wide
from custom_ops.operators.training import cross_entropy
from custom_ops.operators.training.cross_entropy import CrossEntropyOutput, linear_cross_entropy

MODES = ("fast", "least_memory")
EVERY = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "least_memory" go over several blocks of small operands."""
    monkeypatch.setattr(cross_entropy, "_SMALLEST_BLOCK", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(cross_entropy, "_PADDING", 8)


def operands(
    dtype: torch.dtype, device: str = "cpu", *, rows: int = 33, width: int = 12, classes: int = 41, seed: int = 0
) -> tuple[Tensor, ...]:
    """x, weight, bias, targets of which every third is ignored, and class weights."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in ((rows, width), (classes, width), (classes,))
    )
    targets = torch.randint(classes, (rows,), generator=generator)
    targets[1::3] = -100
    weights = torch.rand(classes, generator=generator, dtype=torch.float64).add(0.1)
    return *drawn, targets.to(device), weights.to(device, wide(dtype))


def reference(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, class_weight: Tensor | None = None,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    ignore_index: int = -100,
) -> CrossEntropyOutput:  # fmt: skip
    """The same by torch's operators; F.cross_entropy has the smoothing and the weights."""
    logits = F.linear(x, weight, bias)
    capped = softcap * (logits / softcap).tanh() if softcap else logits
    loss = F.cross_entropy(
        capped, targets, class_weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    counted = targets != ignore_index
    penalty = torch.where(counted, z_loss * capped.logsumexp(-1).square(), 0)
    hits = ((logits.argmax(-1) == targets) & counted).to(x.dtype)
    if reduction != "none":
        penalty, hits = penalty.sum() / (counted.sum() if reduction == "mean" else 1), hits.sum() / counted.sum()
    return CrossEntropyOutput(loss + penalty, penalty, hits)


def bounds(given: dict[str, Any], x: Tensor, weight: Tensor, grad: Tensor, unit: float, wide_unit: float) -> list[Any]:
    """How far loss and gradients of a dtype may be from those of float64, which the operands have here.

    The logits are rounded to the dtype, which moves them by at most ``shift``, with the cap no farther. A probability
    moves by that factor, the normaliser by that much, the slope of the cap by less than shift / softcap.
    """
    targets, bias = given["targets"], given["bias"]
    softcap, smoothing, penalty = given["softcap"], given["label_smoothing"], given["z_loss"]
    classes, counted = len(weight), (targets != given["ignore_index"])[:, None]
    size = F.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    logits = F.linear(x, weight, bias)
    capped = softcap * (logits / softcap).tanh() if softcap else logits
    spread = capped.amax(1, True) - capped.amin(1, True)
    sums = wide_unit * (classes / 32 + 16)
    shift = 2 * ((x.shape[1] + 2) * wide_unit * size + unit * logits.abs()).amax(1, True) + sums + wide_unit * spread
    weights = torch.ones(classes, dtype=x.dtype) if given["class_weight"] is None else given["class_weight"].double()
    chosen = torch.where(counted, targets[:, None], 0)
    of_target, share = (1 - smoothing) * weights[chosen], smoothing / classes * weights
    normaliser = capped.logsumexp(1, keepdim=True)
    rows = counted.sum() if given["reduction"] == "mean" else 1
    total = (weights[chosen] * counted).sum() if given["reduction"] == "mean" else 1
    penalties = penalty * total / rows
    factor = of_target + share.sum() + 2 * penalties * normaliser.abs()
    magnitude = (of_target + share.sum()) * capped.abs().amax(1, True) + factor * (normaliser.abs() + 1)
    loss = (shift * factor + 2 * sums * magnitude) * counted / total
    of_penalty = 2 * penalties * normaliser.abs() * (shift + sums * normaliser.abs()) * counted / total
    powers = capped.softmax(1)
    parts = powers * factor + share + of_target * (torch.arange(classes) == targets[:, None])
    per_row = (torch.expm1(shift) + sums) * powers * factor + 2 * powers * penalties * shift + 2 * sums * parts
    per_row = (per_row + parts * (shift / softcap if softcap else 0) + unit * parts + 2 * wide_unit) * counted
    in_sums = (parts * counted + per_row) * (2 * unit + sum(logits.shape) * wide_unit)
    scaled = grad.abs().expand(len(targets))[:, None] / total * (per_row + in_sums)
    results = [scaled @ weight.abs(), scaled.t() @ x.abs(), scaled.sum(0)]
    losses = (bound[:, 0] if given["reduction"] == "none" else bound.sum() for bound in (loss, of_penalty))
    return [*losses, *results]


def draw(choose: random.Random, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    rows, classes, seed = choose.choice((1, 7, 33)), choose.choice((1, 5, 64, 101)), choose.randrange(1000)
    x, weight, bias, targets, weights = operands(dtype, device, rows=rows, classes=classes, seed=seed)
    ignore_index = choose.choice((-100, 0))
    if choose.random() < 0.1:
        targets.fill_(ignore_index)
    targets[targets == -100] = ignore_index
    return x, weight, {
        "targets": targets, "bias": choose.choice((None, bias)), "ignore_index": ignore_index,
        "class_weight": choose.choice((None, weights)), "label_smoothing": choose.choice((0.0, 0.1, 1.0)),
        "z_loss": choose.choice((0.0, 1e-2)), "softcap": choose.choice((None, 2.0, 30.0)),
        "reduction": choose.choice(("mean", "sum", "none")),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_random_combinations_against_float64(dtype: torch.dtype, mode: Any, device: str) -> None:
    choose = random.Random(0)
    for _ in range(40):
        check(*draw(choose, dtype, device), mode)


def check(x: Tensor, weight: Tensor, given: dict[str, Any], mode: Any) -> None:
    leaves = [leaf for leaf in (x, weight, given["bias"]) if leaf is not None]
    ours = linear_cross_entropy(x, weight, **given, mode=mode, return_z_loss=True, return_token_accuracy=True)
    assert isinstance(ours, CrossEntropyOutput)
    assert ours.z_loss is not None
    grad = torch.linspace(0.5, 1.5, ours.loss.numel(), device=x.device).reshape(ours.loss.shape)
    gradients = torch.autograd.grad(ours.loss, leaves, grad.to(ours.loss.dtype))
    with torch.no_grad():
        alone = linear_cross_entropy(x, weight, **given, mode=mode)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    class_weight = given["class_weight"]
    exact = {**given, "class_weight": None if class_weight is None else class_weight.double()}
    exact["bias"] = exact_leaves[2] if len(leaves) == 3 else None
    wanted = reference(*exact_leaves[:2], **exact)
    assert wanted.z_loss is not None
    wanted_gradients = torch.autograd.grad(wanted.loss, exact_leaves, grad.double())
    exact["bias"] = None if exact["bias"] is None else exact["bias"].detach()
    unit, wide_unit = torch.finfo(x.dtype).eps, torch.finfo(wide(x.dtype)).eps
    on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in exact.items()}
    within = bounds(on_cpu, *(leaf.detach().cpu() for leaf in exact_leaves[:2]), grad.double().cpu(), unit, wide_unit)
    lost = 2 * torch.finfo(x.dtype).smallest_normal * len(weight)
    nothing = given["reduction"] == "mean" and bool((given["targets"] == given["ignore_index"]).all())
    ours_and_theirs = zip(
        (ours.loss, ours.z_loss, *gradients), (wanted.loss, wanted.z_loss, *wanted_gradients), within, strict=False
    )
    for place, (found, expected, bound) in enumerate(ours_and_theirs):
        error = (found.double() - expected).abs().detach().cpu()
        if nothing:  # 0 / 0, as torch's, and no gradient
            assert (found == 0).all() if place > 1 else found.isnan()
        else:
            assert (error <= bound + 2 * unit * expected.detach().abs().cpu() + lost).all(), (given, mode, place, error)
    torch.testing.assert_close(
        ours.loss.detach(), alone, equal_nan=True, rtol=1e-5, atol=float(within[0].nan_to_num().max())
    )
    assert not ours.z_loss.requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_accuracy_counts_the_first_of_equal_logits(
    dtype: torch.dtype, reduction: Any, mode: Any, device: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-1, 2, shape, generator=generator).to(device, dtype) for shape in ((200, 4), (77, 4))
    )  # logits that are whole numbers, of which the highest comes several times
    logits = F.linear(x, weight).double()
    first = (logits == logits.amax(1, True)).to(torch.int8).argmax(1)
    targets = torch.where(torch.arange(200, device=device) % 3 == 0, first, (first + 9) % 77)
    targets[::7] = -100
    for needed in (False, True):
        found = linear_cross_entropy(
            x.requires_grad_(needed), weight, targets, mode=mode, reduction=reduction, return_token_accuracy=True
        ).token_accuracy  # type: ignore[union-attr]
        hits = ((targets == first) & (targets != -100)).to(wide(dtype))
        expected = hits if reduction == "none" else hits.sum() / (targets != -100).sum()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck_twice_and_forward_mode(mode: Any, weighted: bool) -> None:
    *leaves, targets, weights = operands(torch.float64, rows=4, width=2, classes=3)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        class_weight = weights if weighted else None
        return linear_cross_entropy(x, weight, targets, bias=bias, mode=mode, class_weight=class_weight, **EVERY)

    assert torch.autograd.gradcheck(loss, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", [*EVERY, "class_weight", "every"])
def test_transforms_of_torch_func(mode: Any, part: str) -> None:
    x, weight, bias, targets, weights = (
        tensor.detach() for tensor in operands(torch.float64, rows=4, width=3, classes=5)
    )
    parts: dict[str, Any] = {**EVERY, "class_weight": weights}
    parts = parts if part == "every" else {part: parts[part]}
    many, shifted = torch.stack([x, x + 1, -x]), torch.stack([targets, targets.roll(1), targets])

    def results(function: Callable[..., Any]) -> list[Any]:
        loss: Callable[..., Any] = lambda x, t=targets: function(x, weight, t, bias=bias, **parts)  # noqa: E731
        return [
            torch.func.grad(loss)(x),
            torch.func.jvp(loss, (x,), (x + 1,)),
            torch.func.vmap(loss)(many, shifted),
            torch.func.vmap(torch.func.grad(loss))(many, shifted),
            torch.func.vmap(lambda w: function(x, w, targets, bias=bias, **parts))(torch.stack([weight, -weight])),
            torch.func.hessian(loss)(x),
        ]

    def theirs(
        x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor, class_weight: Tensor | None = None,
        label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        # F.cross_entropy with smoothing and weights does not work under vmap.
        logits = F.linear(x, weight, bias)
        logits = softcap * (logits / softcap).tanh() if softcap else logits
        weights = torch.ones(5, dtype=x.dtype) if class_weight is None else class_weight
        kept, chosen = targets != -100, targets.clamp(min=0)
        lacks = logits.logsumexp(-1, keepdim=True) - logits
        losses = (1 - label_smoothing) * weights[chosen] * lacks.gather(-1, chosen[:, None])[:, 0]
        losses = losses + label_smoothing / 5 * (weights * lacks).sum(-1)
        penalty = torch.where(kept, z_loss * logits.logsumexp(-1).square(), 0).sum() / kept.sum()
        return torch.where(kept, losses, 0).sum() / torch.where(kept, weights[chosen], 0).sum() + penalty

    ours = lambda *given, **parts: linear_cross_entropy(*given, **parts, mode=mode)  # noqa: E731
    for found, wanted in zip(results(ours), results(theirs), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("mode", "needed"), [pytest.param("fast", False, marks=pytest.mark.slow), ("least_memory", True)]
)
def test_one_graph_for_every_number_of_rows(mode: Any, needed: bool) -> None:
    _, weight, _, _, weights = operands(torch.float32, width=6, classes=31)
    weight = weight.detach().requires_grad_(needed)
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def call(x: Tensor, targets: Tensor) -> Any:
        return linear_cross_entropy(
            x, weight, targets, mode=mode, class_weight=weights, return_z_loss=True, return_token_accuracy=True, **EVERY
        )

    torch.compiler.reset()
    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend=backend)
    compiled(torch.ones(4, 6), torch.arange(4))
    at_first = len(graphs)  # Dynamo traces again where a number that it took for a symbol is none
    for rows in (5, 17, 29):
        x, targets = torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)), torch.arange(rows) % 31
        outputs = compiled(x, targets), call(x, targets)
        torch.testing.assert_close(*(tuple(output) for output in outputs))
        if needed:
            torch.testing.assert_close(*(torch.autograd.grad(output.loss, weight)[0] for output in outputs))
    assert len(graphs) == at_first


class Names(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
def test_parts_that_are_given_as_none_cost_nothing(mode: Any) -> None:
    x, weight, _, targets, _ = operands(torch.float32)
    found = []
    for parts in ({}, {"class_weight": None, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None}):
        with Names() as names:
            loss = linear_cross_entropy(x, weight, targets, mode=mode, **parts)  # type: ignore[arg-type]
            torch.autograd.grad(loss, (x, weight))
        found.append(names.names)
    assert found[0] == found[1]
    assert not any("general" in name for name in found[0])


@pytest.mark.parametrize("mode", MODES)
def test_no_penalty_on_a_normaliser_whose_square_is_infinite(mode: Any) -> None:
    x, weight, targets = torch.full((2, 1), 1e20), torch.ones(3, 1), torch.tensor([0, 1])
    found = linear_cross_entropy(x, weight, targets, mode=mode, return_z_loss=True)
    torch.testing.assert_close(found.loss, torch.tensor(3.0).log())
    assert found.z_loss == 0


@pytest.mark.parametrize("mode", MODES)
def test_no_rows_and_rows_that_are_all_ignored(mode: Any) -> None:
    x, weight, bias, targets, weights = operands(torch.float32)
    ignored = torch.full_like(targets, -100)
    for given_x, given_targets, reduction in itertools.product((x[:0], x), (targets[:0], ignored), ("mean", "sum")):
        if len(given_x) != len(given_targets):
            continue
        loss = linear_cross_entropy(
            given_x, weight, given_targets, bias=bias, class_weight=weights, mode=mode, reduction=reduction, **EVERY  # type: ignore[arg-type]
        )  # fmt: skip
        assert loss.isnan() if reduction == "mean" else loss == 0  # 0 / 0, as torch's
        for create_graph in (False, True):
            gradients = torch.autograd.grad(loss, (weight, bias), retain_graph=True, create_graph=create_graph)
            assert all((gradient == 0).all() for gradient in gradients)


def test_class_weights_of_any_floating_dtype_and_autocast() -> None:
    x, weight, _, targets, weights = operands(torch.float32)
    exact = linear_cross_entropy(x, weight, targets, class_weight=weights.bfloat16().float())
    assert torch.equal(linear_cross_entropy(x, weight, targets, class_weight=weights.bfloat16()), exact)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets, class_weight=weights)
    assert torch.equal(loss, linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets, class_weight=weights))


def general_arguments(name: str) -> tuple[Any, ...]:
    logits, targets = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, -100, 7, 2])
    weights = torch.rand(20)
    if "block" not in name:
        return logits, targets, 8, -100, torch.rand(5, 3), weights, 0.1, 2.0, True
    block = logits, targets, 3, 8, -100, weights, 0.1, 2.0
    return (*block, True, torch.zeros(5, 5), torch.zeros(5)) if "sums" in name else (*block, torch.rand(5, 3))


@pytest.mark.parametrize(
    "name", ["", "_gradient_", "_block_sums_", "_block_gradient_"], ids=lambda name: f"general_cross_entropy{name}"
)
def test_opcheck(name: str) -> None:
    name = f"general_cross_entropy{name}"
    torch.library.opcheck(getattr(torch.ops.custom_ops, name).default, general_arguments(name))


def test_a_target_that_is_no_class(device: str) -> None:
    x, weight, _, targets, _ = operands(torch.float32, device)
    targets[0] = 41
    for mode in MODES:
        if device == "cpu":
            with pytest.raises(ValueError, match=r"argument 'targets': expected classes from 0 to 40 or .+, got 41"):
                linear_cross_entropy(x, weight, targets, mode=mode, **EVERY)  # type: ignore[arg-type]
            continue
        losses = linear_cross_entropy(x, weight, targets, mode=mode, reduction="none", **EVERY)  # type: ignore[arg-type]
        assert losses.isnan().nonzero().tolist() == [[0]]
        assert torch.autograd.grad(losses[0], x)[0][0].isnan().all()


def test_a_kernel_refuses_factors_that_do_not_fit() -> None:
    logits, targets, *rest = general_arguments("")
    rest[2] = torch.rand(4, 3)
    with pytest.raises(RuntimeError, match=r"general_cross_entropy: argument 'factors': expected shape \[5, 3\]"):
        calls.general_cross_entropy(logits, targets, *rest)
