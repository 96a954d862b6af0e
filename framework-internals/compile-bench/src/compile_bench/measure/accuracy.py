"""Are compiled outputs and gradients as accurate as eager ones? Both are compared with float64.

The compiled error of a tensor, ‖x − x₆₄‖₂ / ‖x₆₄‖₂, may be at most::

    3 · (eager error of the same tensor) + u(dtype) + √(n / 2) · u(float32)

The first term is for two computations that differ only in the order of their operations. The second, u(dtype), is one
rounding in the dtype of the computation: eager may be exact by chance. The third is for sums over the batch. A sum of n
terms of random sign that is added in order has a relative error of about √(n / 2) · u (the probabilistic analysis of
Higham and Mary, 2019). Eager adds pairwise and Inductor's C++ loops add in order, so the gradients of biases and norm
weights are several times less accurate although nothing is wrong. n is at most the number of elements of the largest
argument. Where terms cancel altogether, as in the gradient of a bias before a batch norm, eager's error is larger than
the value, and the order of the sum multiplies it: the first term is then √(n / 2) times as large.

The gradient of ReLU, max pooling or a top-k choice jumps where its input changes sign or order. One of a million inputs
may lie so close to the jump that two correct computations are on different sides of it. Its term is then in one
gradient and not in the other. So if gradients are outside the bound and outputs within, all that has a gradient is
moved by about a percent and everything is compared again. A wrong computation stays wrong; a jump is then close to
another input, or to none.

Each of several outputs is compared by itself as well, since the largest one would hide the others, and in training each
output beside the loss. So would what fills masked places: infinities are compared by place and sign, and elements of
1e3 and more that are a thousand times larger than all others, such as -1e9, apart from these. Of an integer output, as
that of argmax, the share of elements that are not as in float64 may be 3 times eager's and one percent. A single number
may be off by chance, so these are compared with other weights, too. Every computation begins with the state of the
target's model and with arguments of its own.

What the call writes is compared like an output: parameters, buffers, tensors that modules keep as attributes, and
arguments, those inside objects such as a cache too. Only elements count that any of the computations changed, since
the others would hide one position of a long cache. What another seed changes is named and left out.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from benchkit import UserError
from benchkit.errors import first_line
from compile_bench.measure.records import WRITTEN, Accuracy, ErrorPair
from compile_bench.targets.randomness import changes_with_the_seed, seed_everything
from compile_bench.targets.regional import OwnRegions
from compile_bench.targets.target import Target, in_mode, named_tensors, tensors_in

# The norm of n independent roundings varies by a share of 1/√(2n), so a factor of 3 is never chance for a large tensor.
FACTOR = 3.0

# A ReLU network in float32 had a term across a jump in two of five batches; seven in a row have a chance of 1 in 600.
ATTEMPTS = 7
MOVED = 0.01

Values = dict[str, Tensor]
Result = TypeVar("Result")

# What torch itself keeps in every module.
_OF_TORCH = vars(nn.Module()).keys()


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
    _set_back(compiled_model, target.model)
    return accuracy


def _incomparable(target: Target, *, train: bool) -> str:
    """Why a target's numbers cannot be compared, in one sentence; empty if they can."""
    if target.is_step:
        return "a step function keeps its weights to itself"
    if any(map(is_lazy, (*target.model.parameters(), *target.model.buffers()))):
        return "the model's first call makes its parameters; let the target's function call it once"
    try:
        random = draws_random_numbers(target, train=train, fresh=True)
    except UserError as error:  # an output without floating-point numbers
        return str(error)
    why = "the model draws random numbers (dropout?), and the compiler draws others than eager does"
    return f"{why}; or its output changes from call to call" if random else ""


def _moved(target: Target, attempt: int) -> Target:
    """The target itself at the first attempt; later a copy with all that has a gradient moved by about a percent."""
    if attempt == 1:
        return target
    model = target.copied()
    generator = torch.Generator().manual_seed(attempt)

    def moved(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, device="cpu")
        return tensor * (1 + MOVED * noise.to(tensor.device, tensor.dtype))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(moved(parameter))
        arguments = target.mapped(lambda leaf: moved(leaf).requires_grad_() if leaf.requires_grad else leaf)
    return replace(arguments, model=model)


# Attributes that a step may change and that a copy can be given.
_PLAIN = (int, float, complex, str, type(None), Tensor, list, tuple, dict, set, deque)


def _set_back(model: nn.Module, to: nn.Module) -> None:
    """Give a model that has run the parameters, buffers and attributes of the one that it was copied from.

    A state dict may lack some of them: buffers that are not persistent, caches, counts.
    """
    modules = dict(model.named_modules())
    pairs = [(modules[path], other) for path, other in to.named_modules() if path in modules]
    counterparts: dict[int, Any] = {id(other): module for module, other in pairs}
    for module, other in pairs:
        counterparts |= _set_tensors_back(module, other)
    for module, other in pairs:
        if isinstance(other, OwnRegions):  # its attributes say that its regions are compiled
            continue
        before = {name: value for name, value in vars(other).items() if name not in _OF_TORCH}
        for name, value in [*vars(module).items()]:
            if name not in _OF_TORCH and name not in before and isinstance(value, _PLAIN):
                delattr(module, name)
        for name, value in before.items():
            if isinstance(value, _PLAIN) and not _same(vars(module).get(name), value):
                # A list of weights, as that of nn.LSTM, is one of the module's own weights.
                with suppress(Exception):  # whatever deepcopy raises for a lock or an open file in a list
                    setattr(module, name, copy.deepcopy(value, {**counterparts}))


def _set_tensors_back(module: nn.Module, other: nn.Module) -> dict[int, Tensor]:
    """Returns the module's own tensors by the identity of the other's."""
    counterparts: dict[int, Tensor] = {}
    for name, tensor in (*other._parameters.items(), *other._buffers.items()):
        current = module._parameters.get(name, module._buffers.get(name))
        if tensor is None or current is None or current.shape != tensor.shape:
            setattr(module, name, copy.deepcopy(tensor))
        else:
            counterparts[id(tensor)] = current
            with torch.no_grad():
                current.copy_(tensor)
    return counterparts


def _same(one: Any, other: Any) -> bool:
    """Whether two values are known to be equal."""
    try:
        return type(one) is type(other) and bool(torch.equal(one, other) if isinstance(one, Tensor) else one == other)
    except Exception:  # of containers with tensors, or whatever the user's objects raise
        return False


@dataclass(frozen=True)
class _Results:
    """What one forward pass, in training with its backward pass, computes."""

    # Under "output" all outputs as one vector, in training the loss; then each output, and in training the gradients,
    # those of arguments included.
    values: Values
    chosen: Values  # outputs without floating-point numbers
    signature: tuple[str, ...]  # dtype and shape of each output
    written: Values  # what the model and its arguments hold after the call and did not hold before, as copies


def _compare(target: Target, compiled: Callable[..., Any], compiled_model: nn.Module, *, train: bool) -> Accuracy:
    _set_back(compiled_model, target.model)
    try:
        ours = _results(target, compiled, compiled_model, train=train)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler or its code raises, eager does not
        return Accuracy(wrong=f"the compiled call raised {first_line(error)}")
    eager = _eager(target, train=train)
    exact = _exact(target, train=train)
    wrong, left_out = _add_written(target, ours, eager, exact, train=train)
    if wrong:
        return Accuracy(wrong=wrong, tensors=len(exact.values))
    if unfinished := [name for name, value in exact.values.items() if not comparable(name, eager.values[name], value)]:
        raise _Incomparable(f"eager's own results are not finite: {_named(unfinished)}")
    if wrong := _wrong(ours, eager, exact.values):
        return Accuracy(wrong=wrong, tensors=len(exact.values))
    allowance = rounding_allowance(target)
    in_order = max(sums_in_order(target), 1.0)
    pairs = [
        error_pair(name, eager.values[name], ours.values[name], value, allowance, in_order)
        for name, value in exact.values.items()
    ]
    others = pairs[1:] + [
        _unlike(name, eager.chosen[name], ours.chosen[name], value)
        for name, value in exact.chosen.items()
        if value.shape == eager.chosen[name].shape
    ]
    return Accuracy(
        output=pairs[0],
        gradient=max(others, key=lambda pair: pair.compiled / pair.bound, default=None),
        tensors=len(others) + (train or "output 1" not in exact.values),
        left_out=left_out,
    )


# Rounding decides a few elements of an argmax or of a comparison otherwise.
_MOST_UNLIKE = 0.01


def _unlike(name: str, eager: Tensor, compiled: Tensor, exact: Tensor) -> ErrorPair:
    """The shares of the elements of an integer tensor that are not as in float64."""
    of_eager, of_compiled = (
        (tensor != exact).double().mean().item() if exact.numel() else 0.0 for tensor in (eager, compiled)
    )
    return ErrorPair(name, of_eager, of_compiled, FACTOR * of_eager + _MOST_UNLIKE)


class _Incomparable(Exception):
    """The results cannot be compared; the message says why."""


def _eager(target: Target, *, train: bool, seed: int = 0) -> _Results:
    model = target.copied()
    return _results(target, model, model, train=train, seed=seed)


def _exact(target: Target, *, train: bool) -> _Results:
    """The results in float64."""

    def compute() -> _Results:
        wide = widened(target)
        return _results(wide, wide.model, wide.model, train=train, before=_held(target.model, target))

    try:
        return in_float64(compute)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the model sets a dtype, or an operator has no float64 kernel
        raise _Incomparable(f"the model does not run in float64: {first_line(error)}") from error


def in_float64(compute: Callable[[], Result]) -> Result:
    """What a computation with a widened target gives.

    A model may make tensors itself, such as a mask or a first state, in the default dtype, and not run with others. So
    if it raises, float64 is the default dtype for another try.
    """
    try:
        return compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return compute()
        finally:
            torch.set_default_dtype(default)


def _wrong(ours: _Results, eager: _Results, exact: Values) -> str:
    """What is wrong apart from rounding; empty if nothing is."""
    if ours.signature != eager.signature:
        return f"the compiled step gives {_named(ours.signature)} instead of {_named(eager.signature)}"
    values = ours.values
    if missing := [name for name in exact if name not in values]:
        return f"the compiled step gives no gradient of {_named(missing)}"
    if more := [name for name in values if name not in exact]:
        return f"the compiled step gives a gradient, and eager none, of {_named(more)}"
    if shapes := [name for name in exact if values[name].shape != exact[name].shape]:
        return f"the compiled step gives another number of values: {_named(shapes)}"
    if unfinished := [name for name in exact if (exact[name].isfinite() & ~values[name].isfinite()).any()]:
        return f"the compiled step gives NaN or infinity where eager does not: {_named(unfinished)}"
    return ""


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _held(model: nn.Module, target: Target) -> Values:
    """The tensors that a call may write, by name: those of a model and of a target's arguments."""
    named: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    seen: dict[int, Any] = {}
    named += named_tensors(target.args, "args", seen)
    named += named_tensors(dict(target.kwargs), "kwargs", seen)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                named += named_tensors(value, f"{path}.{name}".lstrip("."), seen)
    held: Values = {}
    known = set[int]()
    for name, tensor in named:
        plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not (tensor.is_nested or tensor.is_quantized)
        if plain and id(tensor) not in known:
            known.add(id(tensor))
            held[name] = tensor
    return held


def _changed(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Which elements of a tensor are not those of another, as a vector; NaN is equal to NaN."""
    if before is None or tensor.shape != before.shape:
        return torch.ones_like(vector(tensor), dtype=torch.bool)
    now, then = vector(tensor), vector(before)
    return (now != then) & ~(now.isnan() & then.isnan())


def _add_written(
    target: Target, ours: _Results, eager: _Results, exact: _Results, *, train: bool
) -> tuple[str, tuple[str, ...]]:
    """Add what the three computations wrote to their values, as vectors.

    Returns what is wrong apart from rounding, and the names of what cannot be compared.
    """
    names = {name: None for results in (eager, ours, exact) for name in results.written}
    if not names:
        return "", ()
    left_out = []
    before, allowance = _held(target.model, target), rounding_allowance(target)
    other_seed = _eager(target, train=train, seed=1)
    for name in names:
        tensors = [results.written.get(name, before.get(name)) for results in (ours, eager, exact, other_seed)]
        own, plain, wide, again = tensors
        if (described := _described(own)) != _described(plain):
            return f"the compiled step leaves {described} in {name} instead of {_described(plain)}", ()
        if own is None or plain is None or wide is None or again is None or {wide.shape, again.shape} != {plain.shape}:
            left_out.append(name)
            continue
        old = before.get(name)
        changed = _changed(own, old) | _changed(plain, old) | _changed(wide, old)
        vectors = [vector(tensor)[changed] for tensor in (plain, own, wide)]
        label = f"{WRITTEN} {name}"
        seeded = (label, vectors[0], vector(again)[changed], vectors[2])
        if (
            not comparable(label, vectors[0], vectors[2])
            or not (error_pair(*seeded, allowance) if has_rounding(plain) else _unlike(*seeded)).holds
        ):
            left_out.append(name)
            continue
        for results, values in zip((eager, ours, exact), vectors, strict=True):
            (results.values if has_rounding(plain) else results.chosen)[label] = values
    return "", tuple(left_out)


def _described(tensor: Tensor | None) -> str:
    if tensor is None:
        return "no tensor"
    # Two ragged sizes that are equal have different symbols, and another nested tensor has no sizes.
    sizes = [list(part.shape) for part in tensor.unbind()] if tensor.is_nested else list(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{sizes}"


def _results(
    target: Target,
    call: Callable[..., Any],
    model: nn.Module,
    *,
    train: bool,
    seed: int = 0,
    before: Mapping[str, Tensor] | None = None,
) -> _Results:
    """The results of a call with copies of the arguments, since it may write into them.

    ``before`` is what model and arguments hold, where the call changes the target's own.
    """
    seed_everything(seed)
    before = _held(target.model, target) if before is None else before
    asked = target.with_own_arguments()
    learned: Values = dict(model.named_parameters())
    learned |= {f"argument {number}": tensor for number, tensor in enumerate(asked.tensors, 1) if tensor.is_leaf}
    for tensor in learned.values():  # a copy of an argument has the gradients of the steps before
        tensor.grad = None
    with torch.set_grad_enabled(train):
        output = asked.forward(call)
    held = _held(model, asked).items()
    written = {name: tensor.detach().clone() for name, tensor in held if _changed(tensor, before.get(name)).any()}
    tensors = dict(zip(output_names(output), tensors_in(output), strict=True))
    signature = tuple(map(_described, tensors.values()))
    chosen = {name: tensor for name, tensor in tensors.items() if not has_rounding(tensor)}
    single = {name: vector(tensor) for name, tensor in tensors.items() if has_rounding(tensor)}
    if not train:
        return _Results({"output": flat(output), **single}, chosen, signature, written)
    # A loss may hide what is wrong with an output: a mean square its sign. What is detached has no part in it.
    loss = asked.backward(output)
    is_loss = target.loss is None and [tensors[name].ndim for name in single] == [0]
    beside = {} if is_loss else {f"{name} of the model": values for name, values in single.items()}
    gradients = {name: vector(tensor.grad).clone() for name, tensor in learned.items() if tensor.grad is not None}
    model.zero_grad(set_to_none=True)
    return _Results({"output": flat(loss), **beside, **gradients}, chosen, signature, written)


def has_rounding(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor have rounding errors: it is of a floating-point or complex dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def flat(output: Any) -> Tensor:
    """All floating-point and complex tensors of an output as one vector of float64."""
    tensors = [tensor for tensor in tensors_in(output) if has_rounding(tensor)]
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
    """All elements of a tensor in float64. Sparse ones are made dense; a complex one is two elements."""
    elements = tensor.detach()
    if elements.is_nested:
        elements = torch.cat([part.flatten() for part in elements.unbind()])
    if elements.layout != torch.strided:
        elements = elements.to_dense()
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    return elements.double().flatten()


# Larger numbers, such as the least of a dtype, stand for infinities: in float64 they are others.
_ENDLESS = 1e30
_FILLING = 1e3


def comparable(name: str, eager: Tensor, exact: Tensor) -> bool:
    """Whether a tensor is finite; of an output or what is written, whether infinities are float64's and none is NaN."""
    if eager.shape != exact.shape:
        return False
    if not name.startswith(("output", WRITTEN)):
        return bool((eager.isfinite() & exact.isfinite()).all())
    ends = [torch.where(values.abs() > _ENDLESS, values.sign(), 0.0) for values in (eager, exact)]
    return torch.equal(*ends) and not (eager.isnan() | exact.isnan()).any()


def error_pair(
    name: str, eager: Tensor, compiled: Tensor, exact: Tensor, allowance: float, in_order: float = 1.0
) -> ErrorPair:
    """The eager and the compiled error of a tensor against float64, and the bound of the compiled one.

    ``in_order`` is how the error of a sum grows that is added in order; it counts where no digit of eager's is right.
    For an output with masked places these are the errors of the part that is closest to its bound, or furthest over it.
    """
    vectors = [eager, compiled, exact]
    if not name.startswith(("output", WRITTEN)):
        return _errors(name, vectors, allowance, in_order)
    vectors = [torch.where(values.abs() > _ENDLESS, values.sign() * math.inf, values) for values in vectors]
    pairs = (_errors(name, [values[part] for values in vectors], allowance) for part in _parts(vectors[2]))
    none = ErrorPair(name, 0.0, 0.0, allowance)
    return max(pairs, key=lambda pair: (not pair.holds, pair.compiled - pair.bound), default=none)


def _errors(name: str, vectors: Sequence[Tensor], allowance: float, in_order: float = 1.0) -> ErrorPair:
    eager, compiled, exact = vectors
    size = torch.linalg.vector_norm(exact).item() or 1.0

    def error(values: Tensor) -> float:
        if math.isinf(size):
            return 0.0 if torch.equal(values, exact) else math.inf
        return torch.linalg.vector_norm(values - exact).item() / size

    of_eager = error(eager)
    factor = FACTOR * (in_order if of_eager > 1.0 else 1.0)
    return ErrorPair(name, of_eager, error(compiled), factor * of_eager + allowance)


def _parts(exact: Tensor) -> Iterator[Tensor]:
    """Masks of the elements that are compared together: those that fill masked places, then the others."""
    magnitude, waiting = exact.abs(), torch.ones_like(exact, dtype=torch.bool)
    while waiting.any():
        largest = magnitude[waiting].max().item()
        others = waiting & (magnitude < largest / 2)
        below = magnitude[others].max().item() if others.any() else 0.0
        if math.isfinite(largest) and not (largest >= _FILLING and 0 < _FILLING * below <= largest):
            others = torch.zeros_like(waiting)
        yield waiting & ~others
        waiting = others


def widened(target: Target) -> Target:
    """The target in float64, without autocast."""
    wide = target.mapped(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, elementwise=True)
    return replace(wide, model=target.copied().double(), autocast=None)


def rounding_allowance(target: Target) -> float:
    """What the bound adds to the eager error: one rounding, and the error of a sum over the batch in order of terms."""
    dtype = target.autocast or next(
        (p.dtype for p in target.model.parameters() if p.is_floating_point()), torch.float32
    )
    # Sums are accumulated in float32, or in the dtype if that is wider.
    accumulator = torch.promote_types(dtype, torch.float32)
    return torch.finfo(dtype).eps / 2 + sums_in_order(target) * torch.finfo(accumulator).eps / 2


def sums_in_order(target: Target) -> float:
    """How many roundings the error of a sum over the batch has, if its terms are added in order."""
    return math.sqrt(max((tensor.numel() for tensor in target.tensors), default=1) / 2)


def draws_random_numbers(target: Target, *, train: bool, fresh: bool = False) -> bool:
    """Whether the output depends on random numbers.

    Unless each call is the first of a copy (``fresh``), a model that counts its calls and computes with the count looks
    as if it did.
    """
    kept = in_mode(target.copied(), train=train)

    def output(model: nn.Module) -> Tensor:
        with torch.set_grad_enabled(train):  # the model may do its own backward pass
            return flat(target.with_own_arguments().forward(model))

    if not changes_with_the_seed(lambda: output(kept)):
        return False
    return not fresh or changes_with_the_seed(lambda: output(in_mode(target.copied(), train=train)))
