"""Are compiled outputs and gradients as accurate as eager ones? Both are compared with float64.

The compiled error of a tensor, ‖x − x₆₄‖₂ / ‖x₆₄‖₂, may be at most::

    3 · (eager error of the same tensor) + u(dtype) + √(n / 2) · u(float32)

The first term is for two computations that differ only in the order of their operations. The second, u(dtype), is one
rounding in the dtype of the computation: eager may be exact by chance. The third is for sums over the batch. A sum of n
terms of random sign that is added in order has a relative error of about √(n / 2) · u (the probabilistic analysis of
Higham and Mary, 2019). Eager adds pairwise and Inductor's C++ loops add in order, so the gradients of biases and norm
weights are several times less accurate although nothing is wrong. n is at most the number of elements of the largest
argument.

The gradient of ReLU, max pooling or a top-k choice jumps where its input changes sign or order. One of a million inputs
may lie so close to the jump that two correct computations are on different sides of it. Its term is then in one
gradient and not in the other. So if gradients are outside the bound and outputs within, all weights are moved by about
a percent and everything is compared again. A wrong computation stays wrong; a jump is then close to another input, or
to none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchkit import UserError
from benchkit.errors import first_line
from compile_bench.measure.records import Accuracy, ErrorPair
from compile_bench.targets.randomness import changes_with_the_seed
from compile_bench.targets.target import Target, tensors_in

# The norm of n independent roundings varies by a share of 1/√(2n), so a factor of 3 is never chance for a large tensor.
FACTOR = 3.0

# A ReLU network in float32 had a term across a jump in two of five batches; seven in a row have a chance of 1 in 600.
ATTEMPTS = 7
MOVED = 0.01

Values = dict[str, Tensor]


def compare_with_eager(
    target: Target, compiled: Callable[..., Any], compiled_model: nn.Module, *, train: bool
) -> Accuracy:
    """Run the same forward (and backward) pass eagerly, compiled and in float64, and compare."""
    reason = _incomparable(target, train=train)
    if reason:
        return Accuracy(skipped=reason)
    accuracy = Accuracy()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            accuracy = _compare(_moved(target, attempt), compiled, compiled_model, train=train)
        except torch.OutOfMemoryError:
            return Accuracy(skipped="the float64 computation does not fit in the GPU's memory")
        except _Incomparable as error:
            return Accuracy(skipped=str(error))
        accuracy = replace(accuracy, attempts=attempt)
        if accuracy.holds or accuracy.wrong or (accuracy.output is not None and not accuracy.output.holds):
            break
    compiled_model.load_state_dict(target.model.state_dict())
    return accuracy


def _incomparable(target: Target, *, train: bool) -> str:
    """Why a target's numbers cannot be compared, in one sentence; empty if they can."""
    if target.is_step:
        return "a step function keeps its weights to itself"
    try:
        random = draws_random_numbers(target, train=train)
    except UserError as error:  # an output without floating-point numbers
        return str(error)
    return "the model draws random numbers (dropout?), and the compiler draws others than eager does" if random else ""


def _moved(target: Target, attempt: int) -> Target:
    """The target itself at the first attempt; later a copy with every weight moved by about a percent."""
    if attempt == 1:
        return target
    model = target.copied()
    generator = torch.Generator().manual_seed(attempt)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
            parameter.mul_(1 + MOVED * noise)
    return replace(target, model=model)


def _compare(target: Target, compiled: Callable[..., Any], compiled_model: nn.Module, *, train: bool) -> Accuracy:
    compiled_model.load_state_dict(target.model.state_dict())
    try:
        ours = _values(target, compiled, compiled_model, train=train)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler or its code raises, eager does not
        return Accuracy(wrong=f"the compiled call raised {first_line(error)}")
    eager_model = target.copied()
    eager = _values(target, eager_model, eager_model, train=train)
    del eager_model
    exact = _exact(target, train=train)
    if unfinished := [name for name in exact if not (eager[name].isfinite().all() and exact[name].isfinite().all())]:
        raise _Incomparable(f"eager's own results are not finite: {_named(unfinished)}")
    if wrong := _wrong(ours, exact):
        return Accuracy(wrong=wrong, tensors=len(exact))
    allowance = rounding_allowance(target)
    pairs = [error_pair(name, eager[name], ours[name], exact[name], allowance) for name in exact]
    gradients = [pair for pair in pairs if pair.name != "output"]
    return Accuracy(
        output=pairs[0],
        gradient=max(gradients, key=lambda pair: pair.compiled / pair.bound, default=None),
        tensors=len(pairs),
    )


class _Incomparable(Exception):
    """The results cannot be compared; the message says why."""


def _exact(target: Target, *, train: bool) -> Values:
    """The results in float64."""
    try:
        wide = widened(target)
        return _values(wide, wide.model, wide.model, train=train)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the model sets a dtype, or an operator has no float64 kernel
        raise _Incomparable(f"the model does not run in float64: {first_line(error)}") from error


def _wrong(ours: Values, exact: Values) -> str:
    """What is wrong apart from rounding; empty if nothing is."""
    if missing := [name for name in exact if name not in ours]:
        return f"the compiled step gives no gradient of {_named(missing)}"
    if more := [name for name in ours if name not in exact]:
        return f"the compiled step gives a gradient, and eager none, of {_named(more)}"
    if unfinished := [name for name in exact if not ours[name].isfinite().all()]:
        return f"the compiled step gives NaN or infinity where eager does not: {_named(unfinished)}"
    if shapes := [name for name in exact if ours[name].shape != exact[name].shape]:
        return f"the compiled step gives another number of values: {_named(shapes)}"
    return ""


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _values(target: Target, call: Callable[..., Any], model: nn.Module, *, train: bool) -> Values:
    """The outputs as one vector under ``"output"``, and every parameter's gradient."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with torch.set_grad_enabled(train):
        output = target.forward(call)
    if not train:
        return {"output": flat(output)}
    loss = target.backward(output)
    gradients = {name: vector(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"output": flat(loss), **gradients}


def flat(output: Any) -> Tensor:
    """All floating-point and complex tensors of an output as one vector of float64."""
    tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point() or tensor.is_complex()]
    if not tensors:
        raise UserError(
            f"the model's output, of type {type(output).__name__}, holds no floating-point tensor to compare; let the "
            "target's model return one, in a tuple, a list, a dict or a dataclass"
        )
    return torch.cat([vector(tensor) for tensor in tensors])


def output_names(output: Any) -> list[str]:
    """A name for each tensor of an output."""
    count = len(tensors_in(output))
    return ["output"] if count == 1 else [f"output {number}" for number in range(1, count + 1)]


def vector(tensor: Tensor) -> Tensor:
    """All elements of a tensor in float64. A sparse tensor is made dense; a complex one has two elements for each."""
    elements = tensor.detach()
    if elements.layout != torch.strided:
        elements = elements.to_dense()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    return elements.double().flatten()


def error_pair(name: str, eager: Tensor, compiled: Tensor, exact: Tensor, allowance: float) -> ErrorPair:
    """The eager and the compiled error of a tensor against float64, and the bound of the compiled one."""
    size = torch.linalg.vector_norm(exact).item() or 1.0

    def error(values: Tensor) -> float:
        return torch.linalg.vector_norm(values - exact).item() / size

    return ErrorPair(name, error(eager), error(compiled), FACTOR * error(eager) + allowance)


def widened(target: Target) -> Target:
    """The target in float64, without autocast."""
    wide = target.mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    return replace(wide, model=target.copied().double(), autocast=None)


def rounding_allowance(target: Target) -> float:
    """What the bound adds to the eager error: one rounding, and the error of a sum over the batch in order of terms."""
    dtype = target.autocast or next(
        (p.dtype for p in target.model.parameters() if p.is_floating_point()), torch.float32
    )
    terms = max((tensor.numel() for tensor in target.tensors), default=1)
    # Sums are accumulated in float32, or in the dtype if that is wider.
    accumulator = torch.promote_types(dtype, torch.float32)
    return torch.finfo(dtype).eps / 2 + math.sqrt(terms / 2) * torch.finfo(accumulator).eps / 2


def draws_random_numbers(target: Target, *, train: bool, fresh: bool = False) -> bool:
    """Whether the output depends on random numbers.

    Unless each call is the first of a copy (``fresh``), a model that counts its calls and computes with the count looks
    as if it did.
    """
    kept = target.copied().train(train)

    def output(model: nn.Module) -> Tensor:
        with torch.set_grad_enabled(train):  # the model may do its own backward pass
            return flat(target.with_own_arguments().forward(model))

    if not changes_with_the_seed(lambda: output(kept)):
        return False
    return not fresh or changes_with_the_seed(lambda: output(target.copied().train(train)))
