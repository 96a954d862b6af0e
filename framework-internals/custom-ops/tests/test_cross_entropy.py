"""linear_cross_entropy and its kernel, on a CPU and on a GPU: results, derivatives, registration, errors."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import fresh_cache, get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import custom_ops
from custom_ops.operators import linear
from custom_ops.operators.calls import calls
from custom_ops.operators.checks import DTYPES, wide
from custom_ops.operators.training import cross_entropy
from custom_ops.operators.training.cross_entropy import linear_cross_entropy

IGNORED = -100


def reference(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, ignore_index: int = IGNORED,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """The same by torch's operators."""
    logits = F.linear(x, weight, bias).to(wide(x.dtype))
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)


def tiny(dtype: torch.dtype) -> float:
    """What underflow may lose: half the spacing of subnormals in the dtype, or a result that exp2 flushes."""
    information = torch.finfo(dtype)
    return max(information.smallest_normal * information.eps, 2 * torch.finfo(wide(dtype)).smallest_normal)


def logits_of(dtype: torch.dtype, rows: int, columns: int, device: str, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    logits = torch.randn(rows, columns, generator=generator).mul(scale).to(device, dtype)
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[3::5] = IGNORED
    return logits, targets.to(device)


def exact_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses and the gradients of the logits in float64."""
    logits = logits.double().detach().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]


def rounding(logits: Tensor) -> Tensor:
    """Bounds the relative error of each row's sum of exponentials, in the arithmetic of the logits' dtype.

    An exponential inherits the rounding of its argument, at most the spread of the row; a sum is rounded at each step,
    and a thread or a vector lane adds at most a 32nd of the row.
    """
    spread = logits.double().amax(1) - logits.double().amin(1)
    return torch.finfo(wide(logits.dtype)).eps * (logits.shape[1] / 32 + 16 + spread)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "padding"), [(1, 1, 0), (5, 7, 1), (33, 100, 28), (9, 4099, 5), (2, 70_001, 0)]
)
def test_rows_against_float64(dtype: torch.dtype, rows: int, columns: int, padding: int, device: str) -> None:
    check_rows(*logits_of(dtype, rows, columns, device), padding)


def check_rows(logits: Tensor, targets: Tensor, padding: int) -> None:
    dtype, columns = logits.dtype, logits.shape[1]
    losses, gradients = exact_rows(logits, targets)
    padded = F.pad(logits, (0, padding), value=float("nan"))
    ours = calls.cross_entropy(padded, targets, columns, IGNORED)
    unit, error = torch.finfo(dtype).eps, rounding(logits)
    assert ours.dtype == wide(dtype)
    assert ((ours.double() - losses).abs() <= error * (1 + losses)).all()
    assert torch.equal(calls.cross_entropy_gradient_(padded, targets, columns, IGNORED), ours)
    size = gradients.abs() + (gradients < 0)  # of the softmax before the one is subtracted, at most
    assert (
        (padded[:, :columns].double() - gradients).abs()
        <= unit / 2 * gradients.abs() + error[:, None] * size + tiny(dtype)
    ).all()
    assert (padded[:, columns:] == 0).all()
    assert (padded[targets == IGNORED] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_aligned(dtype: torch.dtype, device: str) -> None:
    logits, targets = logits_of(dtype, 6, 999, device)
    memory = torch.empty(logits.numel() + 1, dtype=dtype, device=device)
    unaligned = memory[1:].view_as(logits).copy_(logits)
    losses = calls.cross_entropy_gradient_(logits, targets, 999, IGNORED)
    assert torch.equal(calls.cross_entropy_gradient_(unaligned, targets, 999, IGNORED), losses) or device == "cuda"
    # On a GPU another address divides the row among other threads, so the sum may differ in its last digits.
    torch.testing.assert_close(unaligned, logits, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_extreme_logits(dtype: torch.dtype, device: str) -> None:
    infinity, nan = float("inf"), float("nan")
    rows = torch.tensor(
        [[1e4, -1e4, 0], [-1e30, -1e30, -1e30], [-infinity, 2, 2], [2, -infinity, -infinity],
         [infinity, 0, 0], [nan, 0, 0], [-infinity, -infinity, -infinity]],
        dtype=dtype, device=device,
    )  # fmt: skip
    targets = torch.tensor([0, 1, 2, 0, 0, 1, 0], device=device)
    losses = calls.cross_entropy_gradient_(rows, targets, 3, IGNORED).tolist()
    assert losses[:4] == pytest.approx([0, math.log(3), math.log(2), 0], rel=1e-6)
    assert all(math.isnan(loss) for loss in losses[4:])
    third = 1 / 3
    expected = torch.tensor([[0, 0, 0], [third, -2 * third, third], [0, 0.5, -0.5], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(rows[:4].double().cpu(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert rows[4:].isnan().any(1).all()


def test_results_do_not_depend_on_the_threads() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            logits, targets = logits_of(torch.float32, 1000, 96, "cpu")
            found.append((calls.cross_entropy_gradient_(logits, targets, 96, IGNORED), logits))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor


def operands(dtype: torch.dtype, device: str = "cpu", rows: int = 33, width: int = 24, classes: int = 101) -> Operands:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for shape in ((rows, width), (classes, width), (classes,))
    )
    targets = torch.randint(classes, (rows,), generator=generator)
    targets[::6] = IGNORED
    return Operands(x, weight, bias, targets.to(device))


def exact_and_bounds(given: Operands, reduction: Any, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients in float64, and how far those of the dtype may be from them.

    The logits are rounded to the dtype, after a sum in the wide one. Their errors shift the loss by at most twice the
    largest, and a probability by that factor. The gradient of the logits, the scaled operand and each result are
    rounded once more.
    """
    dtype = given.x.dtype
    unit, wide_unit, lost = torch.finfo(dtype).eps, torch.finfo(wide(dtype)).eps, tiny(dtype)
    x, weight, bias = (tensor.detach().double().requires_grad_() for tensor in given[:3])
    targets = given.targets
    loss = reference(x, weight, targets, bias, IGNORED, reduction)
    exact = [loss.detach(), *torch.autograd.grad(loss, (x, weight, bias), grad.double())]
    x, weight, bias = x.detach().abs(), weight.detach(), bias.detach()
    logits = F.linear(given.x.detach().double(), weight, bias)
    _, gradient = exact_rows(logits, targets)
    counted = targets != IGNORED
    scale = grad.double() / (counted.sum() if reduction == "mean" else 1)
    each = scale.abs().expand(len(targets))[:, None]
    size = F.linear(x, weight.abs(), bias.abs())
    shift = 2 * ((len(weight[0]) + 2) * wide_unit * size + unit * logits.abs()).amax(1) + rounding(logits.to(dtype))
    shift = shift * counted
    per_row = torch.expm1(shift)[:, None] * logits.softmax(1) + unit / 2 * gradient.abs() + 2 * wide_unit + lost
    per_row = per_row * counted[:, None]
    absolute = gradient.abs() + per_row
    in_sums = absolute * (unit + (sum(logits.shape) + 4) * wide_unit)
    losses = {"mean": shift.sum() / counted.sum(), "sum": shift.sum(), "none": shift}[reduction]
    bounds = [
        losses + (len(targets) + 4) * wide_unit * exact[0].abs(),
        each * ((per_row + in_sums) @ weight.abs()) + 2 * unit * exact[1].abs() + lost,
        (each * (per_row + in_sums)).t() @ x + 2 * unit * exact[2].abs() + lost * (1 + absolute.sum(0)[:, None]),
        (each * (per_row + in_sums)).sum(0) + 2 * unit * exact[3].abs() + lost,
    ]
    return exact, bounds


def blocks_of(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let "least_memory" go over several blocks of small operands, whose lengths are multiples of ``lines``."""
    monkeypatch.setattr(cross_entropy, "_SMALLEST_BLOCK", {"cpu": 1, "cuda": 1})
    monkeypatch.setattr(cross_entropy, "_PADDING", lines)


WAYS = [(mode, reduction) for mode in ("fast", "least_memory") for reduction in ("mean", "sum", "none")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("mode", "reduction"), WAYS)
@pytest.mark.parametrize("classes", [101, 64, 1])
def test_against_float64(
    dtype: torch.dtype, mode: Any, reduction: Any, classes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks_of(8, monkeypatch)
    given = operands(dtype, device, classes=classes)
    loss = linear_cross_entropy(*given[:2], given.targets, bias=given.bias, mode=mode, reduction=reduction)
    generator = torch.Generator().manual_seed(1)
    grad = torch.rand(loss.shape, generator=generator).add(0.5).to(loss)
    results = [loss.detach(), *torch.autograd.grad(loss, given[:3], grad)]
    for result, exact, bound in zip(results, *exact_and_bounds(given, reduction, grad), strict=True):
        error = (result.double() - exact).abs()
        assert (error <= bound).all(), f"error {error.max():.3g}, bound {bound.flatten()[error.argmax()]:.3g}"
    assert loss.dtype == wide(dtype)
    with torch.no_grad():
        alone = linear_cross_entropy(*given[:2], given.targets, bias=given.bias, mode=mode, reduction=reduction)
    torch.testing.assert_close(
        alone, loss.detach(), rtol=1e-6, atol=float(exact_and_bounds(given, reduction, grad)[1][0].max())
    )


@pytest.mark.parametrize("slow", [True, False], ids=["slow in torch", "fast in torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_products_in_16_bits_are_those_of_linear(
    mode: Any, dtype: torch.dtype, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one rule: the kernel where oneDNN has no products of the dtype, torch's where it has them."""
    monkeypatch.setattr(linear, "onednn_multiplies", lambda asked: not slow)
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(linear, "slow_in_torch", linear.slow_in_torch.__wrapped__)
    blocks_of(8, monkeypatch)
    given = operands(dtype)
    with torch.profiler.profile() as profile:
        loss = linear_cross_entropy(*given[:2], given.targets, bias=given.bias, mode=mode)
        gradients = torch.autograd.grad(loss, given[:3])
    names = {event.key for event in profile.key_averages()}
    assert ("custom_ops::mm" in names or "custom_ops_kernels::mm" in names) == slow
    assert bool(names & {"aten::mm", "aten::addmm"}) != slow
    exact, bounds = exact_and_bounds(given, "mean", torch.ones(()))
    for found, value, bound in zip((loss, *gradients), exact, bounds, strict=True):
        assert ((found.double() - value).abs() <= bound).all()
    assert linear.has_narrow_kernel(given.x, given.weight.t()) == slow
    twice = torch.autograd.grad(linear_cross_entropy(*given[:2], given.targets, mode=mode), given.x, create_graph=True)
    assert twice[0].dtype == dtype  # float32's products carry second derivatives


class Memory(TorchDispatchMode):
    """The bytes of the storages that operators have made and that live at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if not isinstance(result, Tensor):
                continue
            storage = result.untyped_storage()
            if storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata)
        return results

    def forget(self, key: int) -> None:
        self.now -= self.live.pop(key)


def peak_of(mode: Any, x: Tensor, weight: Tensor, targets: Tensor) -> int:
    with Memory() as memory:
        loss = linear_cross_entropy(x, weight, targets, mode=mode)
        torch.autograd.grad(loss, (x, weight))
    return memory.peak


@pytest.mark.parametrize(
    ("rows", "width", "classes"), [(512, 32, 4096), (4096, 32, 512), (64, 128, 6000), (1024, 64, 1024)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_least_memory_is_what_its_name_says(
    rows: int, width: int, classes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks_of(64, monkeypatch)
    given = operands(dtype, rows=rows, width=width, classes=classes)
    least = peak_of("least_memory", given.x, given.weight, given.targets)
    # Both gradients, the smaller one once more in float32, the scaled x, and a block of logits with its product.
    sizes = given.x.nbytes, given.weight.nbytes
    block = max(max(sizes), 64 * min(rows, classes) * dtype.itemsize)
    assert least <= sum(sizes) + 2 * 4 // dtype.itemsize * min(sizes) + 2 * sizes[0] + 2 * block + 64 * rows
    assert least < peak_of("fast", given.x, given.weight, given.targets)


def test_a_single_block_of_logits_needs_what_fast_needs() -> None:
    given = operands(torch.float32, rows=64, width=32, classes=64)
    peaks = [peak_of(mode, given.x, given.weight, given.targets) for mode in ("fast", "least_memory")]
    assert peaks[1] <= peaks[0] + 64 * 64  # and the sums of each row


def test_float16_keeps_the_digits_of_small_probabilities() -> None:
    x, weight, _, targets = operands(torch.float16, rows=2048, width=16, classes=300)
    grad = torch.tensor(2.0**16)
    _, bounds = exact_and_bounds(Operands(x, weight, torch.zeros(300, dtype=torch.float16), targets), "mean", grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    # Divided by the number of rows, as the gradient of the mean, a probability of 1/300 would be subnormal.
    wanted = torch.autograd.grad(reference(*exact, targets), exact, grad.double())
    found = torch.autograd.grad(linear_cross_entropy(x, weight, targets), (x, weight), grad)
    for one, other, bound in zip(found, wanted, bounds[1:], strict=False):
        assert ((one.double() - other).abs() <= bound).all()


@pytest.mark.parametrize(("mode", "reduction"), WAYS)
def test_gradcheck_twice(mode: Any, reduction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of(2, monkeypatch)
    given = operands(torch.float64, rows=5, width=2, classes=4)

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, given.targets, bias=bias, mode=mode, reduction=reduction)

    assert torch.autograd.gradcheck(loss, given[:3])
    assert torch.autograd.gradgradcheck(loss, given[:3])


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_a_second_backward_pass_gives_the_same_gradients(mode: Any) -> None:
    given = operands(torch.bfloat16)
    loss = linear_cross_entropy(*given[:2], given.targets, mode=mode)
    first = torch.autograd.grad(loss, given[:2], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, given[:2]), strict=True))


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_one_operand_alone_may_need_a_gradient(mode: Any, wanted: str) -> None:
    given = operands(torch.float64)
    frozen = given._replace(
        **{name: getattr(given, name).detach() for name in ("x", "weight", "bias") if name != wanted}
    )
    gradients = [
        torch.autograd.grad(linear_cross_entropy(o.x, o.weight, o.targets, bias=o.bias, mode=mode), getattr(o, wanted))[
            0
        ]
        for o in (given, frozen)
    ]
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("ways", "rows"), [("plain", 33), ("twice", 33), ("compiled", 33), ("plain", 0), ("twice", 0)])
@pytest.mark.parametrize(("mode", "reduction"), WAYS)
def test_rows_that_are_all_ignored_have_no_gradient(mode: Any, reduction: Any, ways: str, rows: int) -> None:
    x, weight, bias, targets = operands(torch.float32, rows=rows)
    targets.fill_(IGNORED)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, bias=bias, mode=mode, reduction=reduction)

    torch.compiler.reset()
    loss = (torch.compile(call, backend="aot_eager") if ways == "compiled" else call)(x, weight, bias)
    exact = reference(x, weight, targets, bias, reduction=reduction)
    torch.testing.assert_close(loss, exact, equal_nan=True)  # the mean is 0 / 0, as torch's
    for upstream in (1.0, math.nan, math.inf):  # which a mean over no rows may send back too
        grad = torch.full_like(loss, upstream)
        gradients = torch.autograd.grad(loss, (x, weight, bias), grad, retain_graph=True, create_graph=ways == "twice")
        assert all((gradient == 0).all() for gradient in gradients), upstream


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_checkpoints_and_batched_gradients(mode: Any, smoothing: float) -> None:
    x, weight, bias, targets = operands(torch.float64, rows=5, width=3, classes=4)

    def call(x: Tensor) -> Tensor:
        options: Any = {"mode": mode, "reduction": "none", "label_smoothing": smoothing}
        return linear_cross_entropy(x, weight, targets, bias=bias, **options)

    (wanted,) = torch.autograd.grad(call(x).sum(), x)
    for again in (False, True):
        kept = checkpoint(call, x, use_reentrant=False)  # lets saved tensors be read once
        torch.testing.assert_close(torch.autograd.grad(kept.sum(), x, create_graph=again)[0], wanted)
    losses = call(x)
    (by_row,) = torch.autograd.grad(losses, x, torch.eye(5, dtype=torch.float64), is_grads_batched=True)
    torch.testing.assert_close(by_row.sum(0), wanted)


@pytest.mark.parametrize("kind", ["fake", "meta"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_tensors_without_values_have_shapes(kind: str, smoothing: float) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        x, weight, targets = torch.ones(4, 3, requires_grad=True), torch.ones(5, 3), torch.zeros(4, dtype=torch.int64)
        for mode in ("fast", "least_memory"):
            loss = linear_cross_entropy(x, weight, targets, mode=mode, label_smoothing=smoothing)
            assert torch.autograd.grad(loss, x)[0].shape == x.shape


def test_a_mean_of_ones_own_over_no_rows() -> None:
    x, weight, _, targets = operands(torch.float32)
    targets.fill_(IGNORED)
    losses = linear_cross_entropy(x, weight, targets, reduction="none")
    kept = targets != IGNORED
    gradients = torch.autograd.grad((losses * kept).sum() / kept.sum(), (x, weight))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize(
    ("mode", "needed"),
    [
        ("fast", False),
        pytest.param("fast", True, marks=pytest.mark.slow),
        pytest.param("least_memory", False, marks=pytest.mark.slow),
        ("least_memory", True),
    ],
)
def test_one_graph_for_every_number_of_rows(mode: Any, needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks_of(8, monkeypatch)
    weight = operands(torch.float32, classes=31, width=6).weight.detach().requires_grad_(needed)
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def call(x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, mode=mode)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(call, dynamic=True, fullgraph=True, backend=backend)
    for rows in range(5, 30, 3):
        x, targets = torch.randn(rows, 6), torch.arange(rows) % 31
        losses = compiled(x, targets), call(x, targets)
        torch.testing.assert_close(*losses)
        if needed:
            torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in losses))
    assert len(graphs) == 1


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_transform_of_torch_func(mode: Any, reduction: Any) -> None:
    x, weight, bias, targets = (tensor.detach() for tensor in operands(torch.float64, rows=5, width=3, classes=4))
    many = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    func = torch.func

    def results(loss: Callable[..., Tensor]) -> list[Any]:
        by_x: Callable[..., Tensor] = lambda x, t=targets: loss(x, weight, t, bias)  # noqa: E731
        by_all: Callable[..., Tensor] = lambda *given: loss(given[0], given[1], targets, given[2])  # noqa: E731
        shifted = torch.stack([targets, targets.roll(1), torch.full_like(targets, IGNORED)])
        return [
            func.grad(by_all, argnums=(0, 1, 2))(x, weight, bias),
            func.jvp(by_all, (x, weight, bias), (x + 1, weight - 1, bias * 2)),
            func.jvp(by_x, (x,), (x,)),
            func.vmap(by_x)(many, shifted),
            func.vmap(by_x, (None, 0))(x, shifted),
            func.vmap(func.grad(by_x))(many, shifted),
            func.vmap(func.grad(lambda w, x: loss(x, w, targets, bias)), (0, None))(torch.stack([weight, -weight]), x),
            func.vmap(lambda b: loss(x, weight, targets, b), 1)(torch.stack([bias, -bias], 1)),
            func.hessian(by_x)(x),
            func.jacfwd(func.jacfwd(by_x))(x),
            func.jacrev(func.jacfwd(by_x))(x),
            func.grad(lambda x: func.grad(by_x)(x).square().sum())(x),
            func.grad(lambda x: func.jvp(by_x, (x,), (x.detach() + 1,))[1])(x),
        ]

    def ours(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets, bias=bias, mode=mode, reduction=reduction)

    def theirs(x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor) -> Tensor:
        # F.cross_entropy under vmap takes no targets that are all ignored.
        logits, kept = F.linear(x, weight, bias), targets != IGNORED
        losses = logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        total = torch.where(kept, losses, 0).sum()
        return total / kept.sum() if reduction == "mean" else total

    for found, wanted in zip(results(ours), results(theirs), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_forward_mode_beside_reverse_mode(mode: Any) -> None:
    given = operands(torch.float64, rows=5, width=2, classes=4)
    call: Callable[..., Tensor] = lambda x, w, b: linear_cross_entropy(x, w, given.targets, bias=b, mode=mode)  # noqa: E731
    assert torch.autograd.gradcheck(call, given[:3], check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, given[:3], check_fwd_over_rev=True)


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_no_rows(mode: Any) -> None:
    x, weight, _, targets = operands(torch.float32)
    loss = linear_cross_entropy(x[:0], weight, targets[:0], mode=mode, reduction="sum")
    assert loss == 0
    assert torch.equal(torch.autograd.grad(loss, weight)[0], torch.zeros_like(weight))


def test_leading_dimensions_and_int32_targets() -> None:
    x, weight, _, targets = operands(torch.float64, rows=12)
    shaped = linear_cross_entropy(x.view(3, 4, -1), weight, targets.view(3, 4).int(), reduction="none")
    assert shaped.shape == (3, 4)
    assert torch.equal(shaped.flatten(), linear_cross_entropy(x, weight, targets, reduction="none"))
    assert linear_cross_entropy(x[0], weight, targets[1], reduction="none").shape == ()


def test_autocast_computes_in_its_dtype_and_returns_float32() -> None:
    given = operands(torch.float32)
    low = [tensor.detach().bfloat16() for tensor in given[:2]]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(*given[:2], given.targets)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, linear_cross_entropy(*low, given.targets))
    gradients = torch.autograd.grad(loss, given[:2])
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


@pytest.mark.parametrize("again", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_a_backward_pass_under_autocast_is_that_of_its_forward_pass(mode: Any, again: bool) -> None:
    given = operands(torch.float32)
    found = []
    for casts in (False, True):
        loss = linear_cross_entropy(*given[:2], given.targets, bias=given.bias, mode=mode)
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            found.append(torch.autograd.grad(loss, given[:3], create_graph=again))
    assert all(map(torch.equal, *found))


# In 16 bits the product asks for the kind of its tensors in an autograd.Function, where Dynamo bans some questions.
@pytest.mark.parametrize(
    ("mode", "dtype"), [("fast", torch.float64), ("fast", torch.bfloat16), ("least_memory", torch.float64)]
)
def test_compiles_whole_with_gradients(mode: Any, dtype: torch.dtype, device: str) -> None:
    given = operands(dtype, device)
    call: Callable[..., Tensor] = lambda x, w, t: linear_cross_entropy(x.tanh(), w, t, mode=mode)  # noqa: E731
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=False, backend="aot_eager")
    losses = [one(*given[:2], given.targets) for one in (compiled, call)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, given[:2]) for loss in losses]
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.slow
def test_inductor_replaces_the_logits_in_place() -> None:
    given = operands(torch.float32)  # on a GPU, Inductor pads 101 columns and must copy them
    torch.compiler.reset()
    with fresh_cache():  # a graph from the cache generates no code
        forward, *_ = get_code(torch.compile(linear_cross_entropy, fullgraph=True), *given[:2], given.targets)
    assert "custom_ops.cross_entropy_gradient_.default(" in forward
    assert len(re.findall(r"empty_strided_\w+\(\(33, 101\)", forward)) == 1  # the logits, and no copy of them


@pytest.mark.parametrize("name", ["cross_entropy", "cross_entropy_gradient_"])
def test_opcheck(name: str) -> None:
    logits, targets = logits_of(torch.float32, 5, 9, "cpu")
    torch.library.opcheck(getattr(torch.ops.custom_ops, name).default, (logits, targets, 8, IGNORED))


def test_a_target_that_is_no_class() -> None:
    x, weight, _, targets = operands(torch.float32)
    targets[2] = 101
    with pytest.raises(
        ValueError, match=r"argument 'targets': expected classes from 0 to 100 or ignore_index \(-100\), got 101"
    ):
        linear_cross_entropy(x, weight, targets)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_target_that_is_no_class_is_nan_on_a_gpu() -> None:
    logits, targets = logits_of(torch.bfloat16, 5, 100, "cuda")
    targets[0], targets[1] = 100, -1
    losses = calls.cross_entropy_gradient_(logits, targets, 100, IGNORED)
    assert losses.isnan().tolist() == [True, True, False, False, False]
    assert logits[:2].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_row_that_is_longer_than_shared_memory() -> None:
    for dtype, columns in ((torch.bfloat16, 128_256), (torch.float32, 50_257), (torch.float32, 70_000)):
        check_rows(*logits_of(dtype, 5, columns, "cuda"), padding=3)


@pytest.mark.parametrize("parts", [{}, {"class_weight": torch.linspace(0.5, 2, 300)}], ids=["plain", "with parts"])
@pytest.mark.parametrize("target", [3, 4], ids=["of others", "of the target"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_classes_that_a_bias_of_minus_infinity_rules_out(
    mode: Any, dtype: torch.dtype, target: int, parts: dict[str, Any], device: str
) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, dtype=dtype, device=device, requires_grad=True) for shape in ((4, 5), (300, 5)))
    bias = torch.full((300,), -math.inf, dtype=dtype, device=device)
    bias[[3, 270]] = 0.5
    targets = torch.tensor([270, target, -100, 3], device=device)
    operands, parts = (x, weight, bias.requires_grad_()), {n: part.to(device, dtype) for n, part in parts.items()}
    losses = (
        linear_cross_entropy(x, weight, targets, bias=bias, mode=mode, **parts),
        F.cross_entropy(F.linear(x, weight, bias), targets, parts.get("class_weight")),
    )
    for own, peer in zip(*(torch.autograd.grad(loss, operands) for loss in losses), strict=True):
        torch.testing.assert_close(own, peer)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("over_weight", [None, 0])
@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_vmap_of_no_samples(mode: Any, over_weight: int | None) -> None:
    weight = torch.ones((0, 7, 5) if over_weight == 0 else (7, 5), requires_grad=True)
    call = torch.vmap(
        lambda x, weight, targets: linear_cross_entropy(x, weight, targets, mode=mode), (0, over_weight, 0)
    )
    losses = call(torch.ones(0, 3, 5), weight, torch.zeros(0, 3, dtype=torch.long))
    assert losses.shape == (0,)
    assert torch.equal(torch.autograd.grad(losses.sum(), weight)[0], torch.zeros_like(weight))


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_targets_of_any_stride(mode: Any) -> None:
    x, weight = torch.randn(6, 5), torch.randn(7, 5)
    for targets in (torch.arange(12)[::2] % 7, torch.tensor(3).expand(6)):
        own = linear_cross_entropy(x, weight, targets, mode=mode)
        torch.testing.assert_close(own, F.cross_entropy(F.linear(x, weight), targets))


@pytest.mark.parametrize("mode", ["fast", "least_memory"])
def test_rows_without_columns_have_the_loss_of_a_guess(mode: Any) -> None:
    loss = linear_cross_entropy(torch.ones(3, 0), torch.ones(5, 0), torch.arange(3), mode=mode)
    torch.testing.assert_close(loss, torch.tensor(5.0).log())


def test_a_sharded_operand_is_refused_with_the_remedy() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x, weight = torch.ones(3, 4), distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)])
        remedy = r"expected a plain tensor \(gather it with \.full_tensor\(\), or take .+\), got DTensor"
        for mode in ("fast", "least_memory"):
            with pytest.raises(TypeError, match=f"linear_cross_entropy: argument 'weight': {remedy}"):
                linear_cross_entropy(x, weight, torch.arange(3), mode=mode)
        with pytest.raises(TypeError, match=f"linear: argument 'weight': {remedy}"):
            custom_ops.linear(x, weight)
        with pytest.raises(TypeError, match=f"bias_gelu: argument 'bias': {remedy}"):
            custom_ops.bias_gelu(x, weight[0])
        gathered = linear_cross_entropy(x, weight.full_tensor(), torch.arange(3))
        torch.testing.assert_close(gathered, torch.tensor(5.0).log())
    finally:
        dist.destroy_process_group()
