"""The measurements of calls, layouts, correctness and the fused convolution, each as a stream of records."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import custom_ops
from benchkit import Quantity, Record, compare
from benchkit.device import Device
from benchkit.results import Label
from benchkit.timing import rotating_inputs
from custom_ops.bench.accounting import count_launches, vector_add_traffic
from custom_ops.bench.cases import ALPHA, OURS, benchmark_cases
from custom_ops.bench.speed import launches, name_of
from custom_ops.builds.torch_internals import graph_break
from custom_ops.operators.bias_gelu import bias_gelu
from custom_ops.operators.calls import calls
from custom_ops.operators.conv_bn_relu import fuse
from custom_ops.operators.elementwise import axpb, vector_add
from custom_ops.operators.linear import linear, slow_in_torch
from custom_ops.roads.wrappers import AddFunction, wrappers


def call_times(device: Device, counts: Sequence[int], *, seconds: float) -> Iterator[Record]:
    """Time one call from Python through every wrapper: records ``call``, labels ``form``, ``count``, ``grad``.

    On a GPU, this measures host time and does not wait for the kernel: the overhead of the call itself.

    All calls are timed in the same rounds, so that those with a gradient can be compared with those without.

    Yields:
        The values ``time`` and ``ratio``, the time divided by that of ``torch.add``. The first count is also measured
        with an operand that requires a gradient.
    """
    functions: dict[str, AddFunction] = {}
    inputs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    labels: dict[str, dict[str, str | int]] = {}
    for count, grad in [(counts[0], True), *((count, False) for count in counts)]:
        operands = torch.randn(count, device=device, requires_grad=grad), torch.randn(count, device=device)
        for form, function in wrappers().items():
            name = f"{form}, {count}, {grad}"
            functions[name], inputs[name] = function, [operands]
            labels[name] = {"form": form, "count": count, "grad": grad}
    comparison = compare(
        functions, device=device, inputs=inputs, clock="wall-clock", block=lambda result: result, seconds=seconds
    )
    for name, which in labels.items():
        torchs = f"torch.add, {which['count']}, {which['grad']}"
        values = {"time": comparison[name].quantity(), "ratio": comparison.speedup(torchs, over=name)}
        yield Record("call", which, values)


def one_element(device: Device, *, seconds: float) -> Iterator[Record]:
    """Time a call from Python on one element, beside torch's, on the host: records ``one element``.

    Yields:
        The value ``time``; for :data:`~.cases.OURS` also ``speedup`` over torch's operators.
    """
    one, heads = torch.randn(1, 1, device=device), torch.randn(1, 1, 1, 1, device=device)
    cases = benchmark_cases()
    calls_of: dict[str, tuple[Mapping[str, Callable[..., object]], tuple[Tensor, ...]]] = {
        "vector_add": (cases["vector_add"].forms, (one[0], one[0])),
        "bias_gelu": (cases["bias_gelu"].forms, (one, one[0])),
        "flash_attention": (
            {OURS: custom_ops.flash_attention, "torch": F.scaled_dot_product_attention},
            (heads, heads, heads),
        ),
    }
    for op, (forms, operands) in calls_of.items():
        comparison = compare(
            forms, device=device, inputs=[operands], clock="wall-clock", block=lambda result: result, seconds=seconds
        )
        for form in forms:
            values = {"time": comparison[form].quantity()}
            if form == OURS:
                values["speedup"] = comparison.speedup(OURS, over="torch")
            yield Record("one element", {"op": op, "form": form}, values)


def capabilities(device: Device) -> Iterator[Record]:
    """Test what each wrapper supports: records ``wrapper``, labels ``form``, ``differentiable``, ``compilable``."""
    a, b = torch.ones(4, device=device), torch.ones(4, device=device)
    for name, function in wrappers().items():
        yield Record(
            "wrapper",
            {
                "form": name,
                "differentiable": gradients_flow(function, a, b),
                "compilable": compiles_whole(function, a, b),
            },
        )


def gradients_flow(function: AddFunction, a: Tensor, b: Tensor) -> bool:
    """Whether a backward pass through ``function`` reaches its first operand.

    A result that requires a gradient is not enough: an operator without an autograd kernel returns such a result, but
    its backward pass warns and omits the gradient.
    """
    operand = a.detach().clone().requires_grad_()
    result = function(operand, b)
    if not result.requires_grad:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result.sum().backward()
    return operand.grad is not None


def compiles_whole(function: AddFunction, a: Tensor, b: Tensor) -> bool:
    """Whether ``torch.compile(fullgraph=True)`` can trace ``function`` (with the back end ``eager``)."""
    torch.compiler.reset()  # torch traces every operator through one wrapper and recompiles it eight times at most
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer warns before it raises
        try:
            torch.compile(function, fullgraph=True, backend="eager")(a, b)
        except graph_break():
            return False
    return True


def layouts(device: Device, side: int, dtype: torch.dtype, *, seconds: float) -> Iterator[Record]:
    """Time operands that are unaligned or not contiguous: records ``layout``, labels ``layout``, ``form``.

    Yields:
        The value ``time`` for ``torch.add`` and for ``custom_ops.vector_add``; for the latter also ``speedup`` over
        the former, ``launches``, ``predicted_launches`` and ``bytes``.
    """

    def operands(layout: str) -> tuple[Tensor, Tensor]:
        first, second = (torch.randn(side * side + 1, device=device).to(dtype) for _ in range(2))
        if layout == "from the second element on":  # contiguous, but not aligned to a vector
            return first[1:].view(side, side), second[1:].view(side, side)
        square = first[:-1].view(side, side)
        return square.t() if layout == "first operand transposed" else square, second[:-1].view(side, side)

    functions: dict[str, AddFunction] = {"torch.add": torch.add, "custom_ops.vector_add": vector_add}
    for layout in ("contiguous", "from the second element on", "first operand transposed"):
        inputs = rotating_inputs(partial(operands, layout), device=device)
        a, b = inputs[0]
        comparison = compare(functions, device=device, inputs=inputs, seconds=seconds)
        labels = {"layout": layout, "dtype": name_of(dtype), "count": side * side}
        yield Record("layout", {**labels, "form": "torch.add"}, {"time": comparison["torch.add"].quantity()})
        yield Record(
            "layout",
            {**labels, "form": "custom_ops.vector_add"},
            {
                "time": comparison["custom_ops.vector_add"].quantity(),
                "speedup": comparison.speedup("custom_ops.vector_add", over="torch.add"),
                **launches(vector_add_traffic(a, b), partial(vector_add, a, b), device),
            },
        )


def correctness(device: Device, count: int, dtypes: Sequence[torch.dtype]) -> Iterator[Record]:
    """Compare ``vector_add`` and ``axpb`` with torch and with extended precision: records ``correctness``.

    Yields:
        Labels ``op`` and ``dtype``. Values ``elements``; ``differing``, how many elements differ from torch's result;
        and the largest errors ``error`` and ``torch_error``, in units in the last place of the exact result.
    """
    for dtype in dtypes:
        a, b = hard_operands(count, dtype, device)
        for op, ours, theirs, alpha in (
            ("vector_add", vector_add(a, b), a + b, 1.0),
            ("axpb", axpb(a, b, ALPHA), ALPHA * a + b, ALPHA),
        ):
            yield Record(
                "correctness",
                {"op": op, "dtype": name_of(dtype)},
                {
                    "elements": Quantity(count, ""),
                    "differing": Quantity(differing(ours, theirs), ""),
                    "error": Quantity(largest_error(ours, a, b, alpha), "ulp"),
                    "torch_error": Quantity(largest_error(theirs, a, b, alpha), "ulp"),
                },
            )


def accuracy(device: Device, dtypes: Sequence[torch.dtype], *, rows: int, columns: int) -> Iterator[Record]:
    """Compare bias_gelu and its gradients, and torch's, with float64: records ``accuracy``.

    Yields:
        Labels ``result`` and ``dtype``; values ``error`` and ``torch_error``, ‖result − exact‖ / ‖exact‖.
    """
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(0)
        x, grad = (torch.randn(rows, columns, generator=generator).to(device, dtype) for _ in range(2))
        bias = torch.randn(columns, generator=generator).to(device, dtype)
        exact = _gelu_results(*(tensor.double() for tensor in (x, bias, grad)))
        theirs = _gelu_results(x, bias, grad)
        ours = (bias_gelu(x, bias), *calls.bias_gelu_backward(grad, x, bias))
        for name, right, own, other in zip(("y", "dx", "dbias"), exact, ours, theirs, strict=True):
            errors = [float((result.double() - right).norm() / right.norm()) for result in (own, other)]
            yield Record(
                "accuracy",
                {"result": name, "dtype": name_of(dtype)},
                {"error": Quantity(errors[0], ""), "torch_error": Quantity(errors[1], "")},
            )


def _gelu_results(x: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x, bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
    y = torch.nn.functional.gelu(x + bias, approximate="tanh")
    return y.detach(), *torch.autograd.grad(y, (x, bias), grad)


def convolutions(device: Device, *, batch: int, side: int, seconds: float) -> Iterator[Record]:
    """Time convolution, batch-norm and ReLU in inference, as modules and fused: records ``convolution``, label
    ``form``.

    Yields:
        The values ``time``, ``speedup`` over the modules, ``launches``, and ``bytes``, the traffic after the
        convolution.
    """
    modules = torch.nn.Sequential(
        torch.nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
    ).to(device).eval()  # fmt: skip
    fused, _ = fuse(modules)
    x = torch.randn(batch, 64, side, side, device=device)
    with torch.no_grad():
        forms = {"modules": modules, "fused": fused, "convolution alone": modules[0]}
        comparison = compare(forms, device=device, inputs=[(x,)], seconds=seconds)
        size = x.numel() * x.element_size()
        for form, passes in (("modules", 4), ("fused", 2), ("convolution alone", 0)):
            values = {
                "time": comparison[form].quantity(),
                "speedup": comparison.speedup(form, over="modules"),
                "bytes": Quantity(passes * size, "B"),
                "launches": Quantity(count_launches(partial(forms[form], x), device=device), ""),
            }
            yield Record("convolution", {"form": form, "batch": batch, "side": side}, values)


FLOAT32 = "torch in float32"


def linears(rows: int, depth: int, columns: int, *, seconds: float) -> Iterator[Record]:
    """Time a linear layer in each 16-bit dtype whose products torch sums in plain loops here: records ``linear``.

    Yields:
        Labels ``dtype``, ``direction``, ``form`` (:data:`~.cases.OURS`, ``torch`` or :data:`FLOAT32`) and the sizes;
        values ``time``, ``rate``, and for ours ``speedup`` over torch and ``share``, the speed over float32's.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, depth), (columns, depth), (columns,), (rows, columns)
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    for dtype in sorted(slow_in_torch(), key=str):
        kinds: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
            OURS: (linear, dtype), "torch": (F.linear, dtype), FLOAT32: (F.linear, torch.float32)
        }  # fmt: skip
        passes = {form: _both_passes(layer, [x.to(kind) for x in drawn]) for form, (layer, kind) in kinds.items()}
        for index, direction in enumerate(("forward", "backward")):
            comparison = compare(
                {form: calls[index] for form, calls in passes.items()}, device="cpu", seconds=seconds
            )  # fmt: skip
            for form in kinds:
                time = comparison[form].quantity()
                values = {"time": time, "rate": time.per(2 * rows * depth * columns * (1 + index), "FLOP/s")}
                if form == OURS:
                    values |= {
                        "speedup": comparison.speedup(OURS, over="torch"),
                        "share": comparison.speedup(OURS, over=FLOAT32),
                    }
                labels: dict[str, Label] = {
                    "dtype": name_of(dtype), "direction": direction, "form": form, "rows": rows, "depth": depth,
                    "columns": columns,
                }  # fmt: skip
                yield Record("linear", labels, values)


def _both_passes(layer: Callable[..., Tensor], drawn: Sequence[Tensor]) -> tuple[Callable[[], object], ...]:
    leaves, grad = [x.requires_grad_() for x in drawn[:-1]], drawn[-1]
    y = layer(*leaves)
    return partial(layer, *leaves), lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)


def hard_operands(count: int, dtype: torch.dtype, device: Device) -> tuple[Tensor, Tensor]:
    """Two seeded vectors over many binades, with infinities, NaNs, zeros of both signs and subnormals."""
    generator = torch.Generator().manual_seed(0)
    smallest, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), smallest, -smallest / 2, largest, -largest],
        dtype=torch.float64,
    )

    def values() -> Tensor:
        mantissa = torch.randn(count, dtype=torch.float64, generator=generator)
        exponent = torch.randint(-12, 13, (count,), generator=generator)
        return torch.ldexp(mantissa, exponent)

    a, b = values(), values()
    pairs = torch.cartesian_prod(special, special)[:count]
    a[: len(pairs)], b[: len(pairs)] = pairs.unbind(1)
    return a.to(dtype).to(device), b.to(dtype).to(device)


def differing(result: Tensor, other: Tensor) -> int:
    """Count the elements that differ in any bit, including the sign of zero; two NaNs count as equal."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[result.element_size()]
    differ = result.contiguous().view(integer) != other.contiguous().view(integer)
    return int((differ & ~(result.isnan() & other.isnan())).sum())


def largest_error(result: Tensor, x: Tensor, b: Tensor, alpha: float) -> float:
    """The largest |result − (α·x + b)|, in units in the last place, over elements where both are finite.

    With at most three binary digits of α the reference, in numpy's longdouble, is exact to 64 bits.
    """
    information = torch.finfo(result.dtype)
    wide = [np.asarray(tensor.detach().cpu().double().numpy(), dtype=np.longdouble) for tensor in (result, x, b)]
    with np.errstate(invalid="ignore"):
        exact = np.longdouble(alpha) * wide[1] + wide[2]
    finite = np.isfinite(wide[0]) & np.isfinite(exact)
    exact, got = exact[finite], wide[0][finite]
    binade = np.frexp(np.maximum(np.abs(exact), information.smallest_normal))[1] - 1
    return float(np.max(np.abs(got - exact) / np.ldexp(np.longdouble(information.eps), binade)))
