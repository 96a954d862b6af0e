"""Random programs over tensors: operators × dtypes × views × modes, and what such a program computes.

A program is a list of expressions over ``v0, v1, …``: first its inputs, then the result of each expression. An
expression that torch refuses is a result too: its error. As a script, this file runs programs without a tracer: it
reads one as JSON a line, and answers with its results and with the operators that the profiler saw.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dispatcher_trace.capture import dispatcher, profile

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "complex64")
SHAPES = ((4, 4), (4,), (), (1, 4), (2, 4, 4), (0, 4))
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")
MODES = (
    *("no_grad", "inference_mode", "autocast", "backward", "vmap", "func.grad", "func.jvp", "functionalize"),
    *("wrapper subclass", "plain subclass", "dispatch mode", "dual numbers"),
)
# Transforms that calculate with the numbers of an expression too: with their tangents, or once a sample.
TRANSFORMS = ("func.jvp", "dual numbers", "func.jacfwd", "func.hessian", "func.grad", "vmap")

# Torch itself crashes where a wrapper subclass holds a functional tensor.
CRASHES = ["functionalize", "wrapper subclass"]

UNARY = """
{0}.neg() | {0}.exp() | {0}.sin() | torch.sigmoid({0}) | {0}.abs() | {0}.sqrt() | {0}.round() | {0}.logical_not()
{0}.sign() | {0}.isnan() | {0}.clamp(-1, 1) | {0}.pow(2) | {0} ** 0.5 | torch.nan_to_num({0}) | {0}.tril()
F.relu({0}) | F.gelu({0}) | F.silu({0}) | torch.softmax({0}, -1) | F.layer_norm({0}, {0}.shape[-1:])
F.dropout({0}, 0.5) | {0}.cumsum(0) | {0}.sum() | {0}.sum(0) | {0}.mean(-1, keepdim=True) | {0}.amax() | {0}.std()
{0}.var(0) | {0}.norm() | {0}.prod() | {0}.argmax() | {0}.sort(-1)[0] | {0}.topk(1)[0] | {0}.max(0)[0]
torch.logsumexp({0}, -1) | {0}.nonzero() | {0}.unique() | {0}.clone() | {0}.contiguous() | {0}.detach()
torch.ones_like({0}) | torch.rand_like({0}) | {0}.new_zeros(2) | {0}.new_tensor([1, 2]) | torch.tensor({0}.sum().item())
{0}.conj() | {0}.real | {0}.imag | torch.view_as_real({0}) | {0}.resolve_conj() | {0}.to_sparse().to_dense()
{0}.float() | {0}.double() | {0}.bfloat16() | {0}.half() | {0}.long() | {0}.bool() | {0}.to(torch.complex64)
torch.linalg.det({0}) | torch.linalg.inv({0}) | torch.linalg.qr({0})[1] | torch.linalg.svdvals({0})
{0} + 1 | {0} * 0.3 | 2 - {0} | {0} / 3 | 1 / {0} | {0} % 2 | {0} // 2 | {0} > 0 | {0} * True | {0} + 2j | {0} & 1
"""
NUMBERS = """
{0} + 1 | {0} * 0.3 | 2 - {0} | {0} / 3 | 1 / {0} | {0} % 2 | {0} // 2 | 2.5 % {0} | {0} * True | {0} * False | {0} + 2j
{0} * (1 + 2j) | {0} * 0.0 | {0} ** 2 | {0} ** 0.5 | 2.0 ** {0} | torch.sin({0}) * 0.1 + 0.9 * {1} | {0} * {1} * 0.5
{0}.sum() / {0}.numel() | torch.add({0}, {1}, alpha=0.5) | torch.where({0} > 0, {0}, 0.5) | torch.sub({0}, 0.5)
torch.clamp({0}, min=0.5) | torch.lerp({0}, {1}, 0.3) | torch.rsub({0}, 0.5) | torch.fmod({0}, 2)
torch.xlogy({0}, 2.0) | torch.copysign({0}, -1.0) | torch.float_power({0}, 2)
torch.addcmul({0}, {0}, {1}, value=0.5) | {0} * torch.tensor(2.0)
{0}.clone().mul_(0.5) | {0}.clone().add_(1) | {0}.clone().div_(3) | {0}.clone().pow_(2) | {0}.abs().sqrt()
"""
VIEWS = """
{0}.t() | {0}.mT | {0}.transpose(0, -1) | {0}[0] | {0}[1:] | {0}[..., ::2] | {0}.flip(0) | {0}.roll(1, 0)
{0}.unsqueeze(0) | {0}.squeeze() | {0}.expand(2, *{0}.shape) | {0}.view(-1) | {0}.reshape(-1) | {0}.flatten()
{0}.unfold(0, 2, 1) | {0}.diagonal() | {0}.split(2)[0] | {0}.chunk(2, -1)[1] | {0}.select(0, 1) | {0}.narrow(0, 1, 2)
{0}.as_strided((2, 2), (1, 2)) | {0}.movedim(0, -1) | {0}.unbind(0)[0] | {0}.view_as({1}) | {0}.expand_as({1})
"""
BINARY = """
{0} + {1} | {0} - {1} | {0} * {1} | {0} / {1} | {0} // {1} | {0} @ {1} | {0} == {1} | {0} < {1}
torch.maximum({0}, {1}) | torch.where({0} > 0, {0}, {1}) | torch.atan2({0}, {1}) | torch.add({0}, {1}, alpha=2)
torch.cat([{0}, {1}]) | torch.stack([{0}, {1}]) | torch.outer({0}, {1}) | F.linear({0}, {1}) | torch.mm({0}, {1})
torch.addmm({0}, {1}, {2}) | torch.addcmul({0}, {1}, {2}) | torch.lerp({0}, {1}, 0.5) | F.mse_loss({0}, {1})
torch.einsum("ij,jk->ik", {0}, {1}) | torch.baddbmm({0}, {1}, {2}) | F.conv1d({0}[None], {1}[None]) | {0}.to({1}.dtype)
F.scaled_dot_product_attention({0}[None, None], {1}[None, None], {2}[None, None]) | F.cross_entropy({0}, {1})
{0}[{1} > 0] | {0}.gather(0, {1}.long() % 2) | {0}[torch.tensor([0, 1])] | {0}.masked_fill({1} > 0, 0.5)
{0}.index_select(0, torch.tensor([0, 1])) | torch._foreach_add([{0}, {1}], 1.5)[0]
torch.sparse.mm({0}.to_sparse(), {1}) | torch.autograd.grad({0}.sum(), {1}, retain_graph=True)[0]
"""
IN_PLACE = """
{0}.add_({1}) | {0}.mul_(2) | {0}.mul_({1}) | {0}.sub_(0.5) | {0}.div_({1}) | {0}.zero_() | {0}.fill_(1)
{0}.copy_({1}) | {0}.relu_() | {0}.exp_() | {0}.clamp_(-1, 1) | {0}.t_() | {0}.squeeze_() | {0}.unsqueeze_(0)
{0}.transpose_(0, -1) | {0}.masked_fill_({1} > 0, 0) | {0}.index_fill_(0, torch.tensor([0]), 2) | {0}.uniform_()
{0}.normal_() | {0}.bernoulli_(0.5) | {0}.detach_() | {0}.requires_grad_() | {0}.addcmul_({1}, {2}) | {0}.set_({1})
torch.add({0}, {1}, out={2}) | torch.exp({0}, out={1}) | torch._foreach_add_([{0}, {1}], 1)
torch._foreach_mul_([{0}], {1}) | {0}.diagonal().zero_() | {0}[0].add_(1) | {0}.view(-1).mul_(2) | {0}.__setitem__(0, 1)
{0}.__setitem__(0, {1}) | {0}.__setitem__({1} > 0, 1) | F.relu({0}, inplace=True)
{0}.index_add_(0, torch.tensor([0]), {1}) | {0}.cumsum_(0) | {0}.tril_()
"""


def _templates(text: str) -> list[str]:
    return [template.strip() for template in re.split(r"[|\n]", text) if template.strip()]


TEMPLATES = tuple(template for text in (UNARY, VIEWS, BINARY, IN_PLACE) for template in _templates(text))


@dataclass(frozen=True)
class Input:
    """An input of a program.

    Attributes:
        dtype: One of :data:`DTYPES`.
        shape: Its sizes.
        layout: One of :data:`LAYOUTS`.
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        inputs: Its inputs, ``v0`` and so on.
        modes: What it runs under, some of :data:`MODES`, outermost first.
        steps: Its expressions; the first makes the value after the last input.
    """

    inputs: tuple[Input, ...]
    modes: tuple[str, ...]
    steps: tuple[str, ...]

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Program:
        """Rebuild a program from the result of :func:`dataclasses.asdict`."""
        inputs = tuple(Input(each["dtype"], tuple(each["shape"]), each["layout"]) for each in document["inputs"])
        return cls(inputs, tuple(document["modes"]), tuple(document["steps"]))

    def __str__(self) -> str:
        given = [f"v{index} = {each.dtype}{list(each.shape)} {each.layout}" for index, each in enumerate(self.inputs)]
        made = [f"v{index} = {step}" for index, step in enumerate(self.steps, len(self.inputs))]
        return "\n".join([f"under {', '.join(self.modes) or 'no mode'}:", *given, *made])


def programs() -> SearchStrategy[Program]:
    """Draws programs of one to three inputs, up to two modes and one to twelve expressions."""
    from hypothesis import strategies as st

    inputs = st.builds(Input, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.sampled_from(LAYOUTS))
    modes = st.lists(st.sampled_from(MODES), max_size=2, unique=True).filter(lambda modes: modes != CRASHES)
    return _programs(inputs, modes, TEMPLATES, 12)


def programs_of_numbers() -> SearchStrategy[Program]:
    """Draws programs that calculate with Python numbers and small tensors, under one or two transforms and autocast."""
    from hypothesis import strategies as st

    dtypes = ("float32", "bfloat16", "float64", "int64", "complex64")
    inputs = st.builds(Input, st.sampled_from(dtypes), st.sampled_from(((), (2,))), st.just("contiguous"))
    transforms = st.lists(st.sampled_from(TRANSFORMS), min_size=1, max_size=2)
    around = st.sampled_from(([], ["autocast"], ["backward"]))
    modes = st.tuples(around, transforms).map(lambda parts: [*parts[0], *parts[1]])
    return _programs(inputs, modes, _templates(NUMBERS), 3)  # a program under two transforms has thousands of hops


def _programs(
    inputs: SearchStrategy[Input], modes: SearchStrategy[list[str]], templates: Sequence[str], steps_at_most: int
) -> SearchStrategy[Program]:
    from hypothesis import strategies as st

    @st.composite
    def program(draw: Any) -> Program:
        given = tuple(draw(st.lists(inputs, min_size=1, max_size=3)))
        under = tuple(draw(modes))
        steps: list[str] = []
        for template in draw(st.lists(st.sampled_from(templates), min_size=1, max_size=steps_at_most)):
            values = st.integers(0, len(given) + len(steps) - 1)
            steps.append(template.format(*(f"v{draw(values)}" for _ in range(3))))
        return Program(given, under, tuple(steps))

    return program()


# -- what a program computes ------------------------------------------------------------------------------------------

Function = Callable[..., tuple[Tensor, ...]]


@dataclass
class Body:
    """The expressions of a program as one function of its inputs.

    Attributes:
        errors: The errors of the expressions that torch refused, by their number.
    """

    program: Program

    def __post_init__(self) -> None:
        self.errors: list[str] = []

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = {f"v{index}": value for index, value in enumerate(inputs)}
        for index, step in enumerate(self.program.steps, len(inputs)):
            values[f"v{index}"] = values["v0"]
            try:
                value = eval(step, {"torch": torch, "F": F}, values)
            except Exception as error:
                self.errors.append(f"v{index}: {error_text(error)}")
            else:
                if isinstance(value, Tensor):
                    values[f"v{index}"] = value
        return tuple(values.values())


def error_text(error: Exception) -> str:
    """Type and first line of an error, without addresses."""
    return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '0x…', str(error).partition(chr(10))[0])}"


class Wrapper(torch.Tensor):
    """A wrapper subclass that passes every call on to the tensor inside."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def inside(value):
            return value.inner if isinstance(value, cls) else value

        result = function(*tree_map(inside, args), **tree_map(inside, kwargs or {}))
        if function._schema.name.endswith("_"):  # in place: the result is the argument
            return args[0]
        return tree_map(lambda value: cls(value) if isinstance(value, Tensor) else value, result)


class Plain(torch.Tensor):
    """A subclass without behaviour of its own."""


class PassThrough(TorchDispatchMode):
    """A mode that passes every call on."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def total(values: Sequence[Tensor]) -> Tensor:
    """The sum of all elements that have a derivative."""
    found = [value.abs().sum().double() for value in values if value.is_floating_point() or value.is_complex()]
    return sum(found[1:], found[0])


def _within(context: Callable[[], Any]) -> Callable[[Function], Function]:
    def under(function: Function) -> Function:
        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            with context():
                return function(*inputs)

        return run

    return under


def _backward(function: Function) -> Function:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().clone() for value in inputs]
        for leaf in leaves:
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        results = function(*(leaf * 1 for leaf in leaves))
        total(results).backward()
        return *results, *(leaf.grad for leaf in leaves if leaf.grad is not None)

    return run


def _grad(function: Function) -> Function:
    def scalar(*inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        results = function(*inputs)
        return total(results), results

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        gradient, results = torch.func.grad(scalar, has_aux=True)(*inputs)
        return gradient, *results

    return run


def _jvp(function: Function) -> Function:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        results, tangents = torch.func.jvp(function, inputs, tuple(torch.ones_like(value) for value in inputs))
        return *results, *tangents

    return run


def _dual(function: Function) -> Function:
    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        with forward_ad.dual_level():
            results = function(*(_with_tangent(value) for value in inputs))
            halves = [half for value in results for half in forward_ad.unpack_dual(value)]
        return tuple(half for half in halves if half is not None)

    return run


def _with_tangent(value: Tensor) -> Tensor:
    differentiable = value.is_floating_point() or value.is_complex()
    return forward_ad.make_dual(value, torch.ones_like(value)) if differentiable else value


def _jacfwd(function: Function) -> Function:
    return lambda *inputs: tuple(tree_leaves(torch.func.jacfwd(function, tuple(range(len(inputs))))(*inputs)))


def _hessian(function: Function) -> Function:
    return lambda *inputs: tuple(tree_leaves(torch.func.hessian(lambda *values: total(function(*values)))(*inputs)))


UNDER: dict[str, Callable[[Function], Function]] = {
    "no_grad": _within(torch.no_grad),
    "inference_mode": _within(torch.inference_mode),
    "autocast": _within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "backward": _backward,
    "vmap": lambda function: (
        lambda *inputs: torch.vmap(function, randomness="different")(*(torch.stack([x, x]) for x in inputs))
    ),
    "func.grad": _grad,
    "func.jvp": _jvp,
    "func.jacfwd": _jacfwd,
    "func.hessian": _hessian,
    "dual numbers": _dual,
    "functionalize": lambda function: lambda *inputs: torch.func.functionalize(function)(*inputs),
    "wrapper subclass": lambda function: lambda *inputs: function(*(Wrapper(value) for value in inputs)),
    "plain subclass": lambda function: lambda *inputs: function(*(value.as_subclass(Plain) for value in inputs)),
    "dispatch mode": _within(PassThrough),
}


def make(number: int, given: Input) -> Tensor:
    """Make an input; its values depend on its number alone."""
    generator = torch.Generator().manual_seed(number)
    dtype = getattr(torch, given.dtype)
    shape = given.shape[::-1] if given.layout == "transposed" else given.shape
    if given.layout == "strided":
        shape = (*shape[:-1], 2 * shape[-1]) if shape else shape
    if given.layout == "expanded" and shape:
        shape = (1, *shape[1:])
    values = torch.randint(-3, 4, shape, generator=generator) / 2
    tensor = values.to(dtype) if dtype.is_floating_point or dtype.is_complex else values.abs().to(dtype)
    if given.layout == "transposed":
        return tensor.permute(list(range(tensor.dim()))[::-1])
    if given.layout == "strided" and given.shape:
        return tensor[..., ::2]
    return tensor.expand(given.shape)


def describe(value: Tensor) -> str:
    """All that a program can see of a tensor, with the bits of its elements."""
    if value.layout != torch.strided:
        return f"{value.layout} of {describe(value.detach().to_dense())}"
    plain = value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    bits = bytes(plain.clone(memory_format=torch.contiguous_format).untyped_storage().tolist()).hex()
    facts = [str(value.dtype), str(list(value.shape)), str(value.stride()), f"offset {value.storage_offset()}"]
    facts += [f"requires_grad {value.requires_grad}", f"leaf {value.is_leaf}", type(value.grad_fn).__name__]
    facts += [f"conj {value.is_conj()}", f"inference {value.is_inference()}"]
    if not value.is_inference():
        facts.append(f"version {value._version}")
    return ", ".join([*facts, bits])


def prepared(program: Program) -> Callable[[], list[Any]]:
    """Return a function that runs the program and returns each tensor and each error.

    The inputs are made beforehand. The caller turns the results into text with :func:`described`, outside of the trace.
    """
    body = Body(program)
    function: Function = body
    for mode in reversed(program.modes):
        function = UNDER[mode](function)
    inputs = [make(number, given) for number, given in enumerate(program.inputs)]

    def run() -> list[Any]:
        torch.default_generator.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                results: list[Any] = list(function(*inputs))
            except Exception as error:
                results = [f"ended: {error_text(error)}"]
        return [*results, *body.errors, *inputs]

    return run


def described(results: list[Any]) -> list[str]:
    """The results of a program as text, with the aliases among them."""
    results = [value.inner if isinstance(value, Wrapper) else value for value in results]
    tensors = [value for value in results if isinstance(value, Tensor) and value.layout == torch.strided]
    storages = [dispatcher.storage_address(value) for value in tensors]
    aliases = [storages.index(storage) for storage in storages]
    return [*(describe(value) if isinstance(value, Tensor) else value for value in results), f"aliases {aliases}"]


def without_tracer(lines: Iterator[str]) -> Iterator[str]:
    """Run programs as they are.

    Args:
        lines: Each a program as JSON.

    Yields:
        Results and operators of each as JSON.
    """
    for line in lines:
        program = Program.from_json(json.loads(line))
        run = prepared(program)
        with profile.profiled() as profiled:
            results = run()
        yield json.dumps({"results": described(results), "operators": profile.operator_names(profiled.events)})


def as_json(program: Program) -> str:
    """A program as one line."""
    return json.dumps(asdict(program))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for answer in without_tracer(iter(sys.stdin)):
        print(answer, flush=True)
