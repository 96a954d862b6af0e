"""scale, bias_gelu, conv_bn_relu and flash_attention on a CPU: results, derivatives, registration, errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import custom_ops
import lowering
from custom_ops.builds import torch_internals
from custom_ops.builds.autograd_nodes import OPERATORS
from custom_ops.operators.calls import calls
from custom_ops.operators.checks import DTYPES, wide
from custom_ops.operators.flash_attention import reference
from custom_ops.operators.registration import NAMESPACES, SCHEMAS

from .activations import GELU_TANH


def rows(dtype: torch.dtype, *shape: int, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x, grad = (torch.randn(*shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype) for _ in range(2))
    return x, torch.randn(shape[-1], generator=generator, dtype=torch.float64).to(dtype), grad


def floor_of(dtype: torch.dtype) -> float:
    """The spacing of subnormal results, of which half may be lost."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (257, 100), (2, 3, 65), (40, 4096), (5000, 8), (9,)])
def test_bias_gelu_against_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_bias_gelu(*rows(dtype, *shape))


def check_bias_gelu(x: Tensor, bias: Tensor, grad: Tensor) -> None:
    dtype = x.dtype
    u = x.double() + bias.double()
    y, dx = GELU_TANH.value(u), grad.double() * GELU_TANH.slope(u)
    dbias = dx.view(-1, x.shape[-1]).sum(0)
    ours, (our_dx, our_dbias) = custom_ops.bias_gelu(x, bias), calls.bias_gelu_backward(grad, x, bias)
    unit, wide_unit, tiny = torch.finfo(dtype).eps, torch.finfo(wide(dtype)).eps, floor_of(dtype)
    # One rounding to the dtype; in the arithmetic, eight units of the wide type of u for the sum, its cube and the
    # gate. For bfloat16 on a CPU, the gate s has a relative error of its own, and s (1 + u 2z' p s) at most twice that:
    # the second summand is at most 1/4, and has the error of s twice and that of p, the half of it.
    short = 2.0**-12.8 if dtype == torch.bfloat16 and x.is_cpu else 0.0
    size = x.double().abs() + bias.double().abs() + 1
    assert ((ours.double() - y).abs() <= (unit / 2 + short) * y.abs() + 8 * wide_unit * size + tiny).all()
    of_gradient = (16 * wide_unit * size + 2 * short) * grad.double().abs()
    assert ((our_dx.double() - dx).abs() <= unit / 2 * dx.abs() + of_gradient + tiny).all()
    count = x.numel() // x.shape[-1]
    summed = (count**0.5 + 16) / 16 * of_gradient.view(-1, x.shape[-1]).sum(0)
    assert ((our_dbias.double() - dbias).abs() <= unit / 2 * dbias.abs() + summed + tiny).all()


def test_bias_gelu_keeps_the_digits_of_the_tail_that_tanh_cancels() -> None:
    x, zero = torch.linspace(-9, -5, 1001).view(-1, 1), torch.zeros(1)
    wide_x = x.double()
    exact = wide_x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide_x + 0.044715 * wide_x**3))
    of_formula = (x + zero) / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ours = ((custom_ops.bias_gelu(x, zero).double() - exact) / exact).abs().max()
    assert ours < 1e-4  # the argument, up to 2^7, is rounded in its 24th digit before it is an exponent
    assert ((of_formula.double() - exact) / exact).abs().max() > 0.1


def test_bias_gelu_of_every_bfloat16() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    zero = torch.zeros(64, dtype=torch.bfloat16)
    wide_x, y = x.double(), custom_ops.bias_gelu(x, zero)
    exact = wide_x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (wide_x + 0.044715 * wide_x**3))
    # The argument of the power, up to 2^8, is rounded in its 24th digit. Cubics may be wrong by 2^-24, as
    # torch's formula is in float32 for u = -4: tanh(z), rounded to a multiple of 2^-24, has u / 2 as a factor.
    bound = (2.0**-8 + 2.0**-12.8) * exact.abs() + 2.0**-14 * exact.abs() + 2.0**-24
    near = wide_x.abs() < 10  # beyond, exp(-2 z) may be infinite in float32, and y is -0 or u
    assert ((y.double() - exact).abs() <= bound)[near].all()
    assert torch.equal(y[wide_x >= 10], x[wide_x >= 10])
    assert y[(wide_x <= -10) & wide_x.isfinite()].float().abs().max() < 2.0**-122
    assert torch.equal(y.isnan(), torch.nn.functional.gelu(x, approximate="tanh").isnan())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_gelu_has_the_sign_of_zero_that_torch_gives(dtype: torch.dtype) -> None:
    x = torch.tensor([[-0.0, 0.0, -0.0, 0.0] * 40], dtype=dtype)
    bias = torch.tensor([-0.0, -0.0, 0.0, 0.0] * 40, dtype=dtype)
    expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
    for found in (custom_ops.bias_gelu(x, bias), custom_ops.bias_gelu(x[:, :3], bias[:3])):
        assert torch.equal(found.signbit(), expected.signbit()[:, : found.shape[1]])
        assert torch.equal(found, expected[:, : found.shape[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_gelu_far_out(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e30], [-1e30], [100.0], [-100.0], [float("inf")], [float("nan")]], dtype=dtype)
    zero, one = torch.zeros(1, dtype=dtype), torch.ones_like(x)
    y = custom_ops.bias_gelu(x, zero)
    assert torch.allclose(y[:4], x[:4].clamp(min=0), atol=1e-30)
    assert y[4].isinf()
    assert y[5].isnan()
    dx, _ = calls.bias_gelu_backward(one, x, zero)
    assert torch.allclose(dx[:5], torch.tensor([[1.0], [0.0], [1.0], [0.0], [1.0]], dtype=dtype), atol=1e-30)
    assert dx[5].isnan()


def test_gradients_do_not_depend_on_the_threads() -> None:
    x, bias, grad = rows(torch.float32, 3001, 96)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(calls.bias_gelu_backward(grad, x, bias))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for each in found[1:] for one, other in zip(found[0], each, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 65, 100_003])
def test_scale_is_rounded_once(dtype: torch.dtype, count: int) -> None:
    x = torch.randn(count, dtype=torch.float64).to(dtype)
    alpha = torch.tensor(1.23, dtype=wide(dtype))
    assert torch.equal(custom_ops.scale(x), (x.to(wide(dtype)) * alpha).to(dtype))


def fold() -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8).eval()
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        assert tensor is not None
        tensor.data.uniform_(0.5, 2)
    return conv, norm


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("side", [8, 7, 1])
def test_conv_bn_relu_against_float64(dtype: torch.dtype, layout: torch.memory_format, side: int) -> None:
    conv, norm = fold()
    x = torch.randn(2, 3, side, side).to(dtype).contiguous(memory_format=layout)
    weight = conv.weight.detach().to(dtype)
    scale, shift = (tensor.detach().to(wide(dtype)) for tensor in custom_ops.fold_batch_norm(norm, conv.bias))
    y = custom_ops.conv_bn_relu(x, weight, scale, shift, stride=2, padding=1)
    convolved = torch.conv2d(x, weight, stride=2, padding=1)
    exact = torch.relu(convolved.double() * scale.double().view(-1, 1, 1) + shift.double().view(-1, 1, 1))
    bound = torch.finfo(dtype).eps * exact + 2 * torch.finfo(wide(dtype)).eps * (convolved.double().abs() * 3 + 3)
    assert ((y.double() - exact).abs() <= bound).all()
    assert y.shape == convolved.shape


def test_fuse_replaces_what_stands_in_a_row() -> None:
    conv, norm = fold()
    odd = nn.Sequential(nn.Conv2d(8, 8, 3, padding="same"), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(
        conv,
        norm,
        nn.ReLU(),
        nn.Sequential(nn.Conv2d(8, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Conv2d(4, 8, 1),
        nn.ReLU(),
        odd,
    )
    with pytest.raises(ValueError, match="expected a model in evaluation mode"):
        custom_ops.fuse(model.train())
    with pytest.raises(TypeError, match=r"fuse: argument 'model': expected a torch\.nn\.Module, got list"):
        custom_ops.fuse([model])
    x = torch.randn(2, 3, 9, 9)
    fused, count = custom_ops.fuse(model.eval())
    assert count == 2
    assert sum(isinstance(module, custom_ops.ConvBnRelu2d) for module in fused.modules()) == 2
    torch.testing.assert_close(fused(x), model(x))
    assert isinstance(model[0], nn.Conv2d)
    with pytest.raises(ValueError, match="expected running statistics"):
        custom_ops.fold_batch_norm(nn.BatchNorm2d(3, track_running_stats=False))


def triple() -> list[nn.Module]:
    conv, norm = fold()
    return [conv, norm, nn.ReLU()]


UNFIT: dict[str, Callable[[nn.Sequential], object]] = {
    "a batch-norm that still learns": lambda model: model[1].train(),
    "a hook of the convolution": lambda model: model[0].register_forward_hook(lambda module, x, y: 2 * y),
    "a hook before the batch-norm": lambda model: model[1].register_forward_pre_hook(lambda module, x: (2 * x[0],)),
    "a hook of the ReLU": lambda model: model[2].register_forward_hook(lambda module, x, y: y + 1),
    "a forward of the convolution's own": lambda model: setattr(model[0], "forward", model[1].forward),
    "a backward hook": lambda model: model[1].register_full_backward_hook(lambda module, dx, dy: None),
    "a parametrization": lambda model: nn.utils.parametrizations.weight_norm(model[0]),
    "a parametrization of the norm": lambda model: nn.utils.parametrizations.weight_norm(model[1], dim=None),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_fuse_leaves_a_triple_that_does_more_than_its_parts(reason: str) -> None:
    model = nn.Sequential(*triple()).eval()
    UNFIT[reason](model)
    said: list[str] = []
    fused, count = custom_ops.fuse(model, on_skip=said.append)
    assert count == 0
    assert len(said) == 1
    assert re.fullmatch(
        r"0 to 2: Conv2d, BatchNorm2d and ReLU stay: .+(hooks|parametrization|forward of its own|training mode).*",
        said[0],
    )
    assert [type(module) for module in fused] == [type(module) for module in model]


def test_fuse_reads_a_module_in_two_places_twice() -> None:
    conv, norm, relu = triple()
    again = [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)]
    twice = nn.Sequential(conv, norm, relu, *again, relu).eval()
    apart = nn.Sequential(relu, conv, relu, norm, nn.ReLU()).eval()  # the second relu is no new name of a child
    x = torch.randn(2, 3, 9, 9)
    for model, expected in ((twice, 2), (apart, 0)):
        fused, count = custom_ops.fuse(model)
        assert count == expected
        torch.testing.assert_close(fused(x), model(x))


def test_fuse_leaves_modules_in_their_mode() -> None:
    model = nn.Sequential(*triple(), nn.Dropout(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    model[3].train()  # samples in evaluation too
    model[5].train()  # normalises by the batch
    x = torch.randn(2, 3, 9, 9)
    fused, count = custom_ops.fuse(model)
    assert count == 1
    assert [module.training for module in fused.modules()] == [module.training for module in model.modules()]
    torch.manual_seed(0)
    y = fused(x)
    torch.manual_seed(0)
    torch.testing.assert_close(y, model(x))


class FirstOnly(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


def test_fuse_leaves_a_sequential_that_calls_its_parts_itself() -> None:
    by_class, by_instance = FirstOnly(*triple()).eval(), nn.Sequential(*triple()).eval()
    by_instance.forward = by_instance[0].forward
    x = torch.randn(2, 3, 9, 9)
    for model in (by_class, by_instance):
        fused, count = custom_ops.fuse(model)
        assert count == 0
        assert torch.equal(fused(x), model(x))


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_fused_model_changes_its_precision(cast: torch.dtype) -> None:
    fused, _ = custom_ops.fuse(nn.Sequential(*triple()).eval())
    layer = fused[0]
    before, x = layer.scale.clone(), torch.randn(2, 3, 9, 9)
    exact = fused(x)
    y = fused.to(cast)(x.to(cast))
    assert y.dtype == cast
    assert (layer.scale.dtype, layer.shift.dtype) == (wide(cast),) * 2
    assert torch.equal(layer.scale.float(), before)  # not by way of the cast's few digits
    torch.testing.assert_close(y.float(), exact, rtol=4 * torch.finfo(cast).eps + 1e-6, atol=0.05)
    torch.testing.assert_close(fused.float()(x), exact, rtol=0.02, atol=0.05)
    assert fused.to("meta")[0].scale.dtype == torch.float32


def heads(dtype: torch.dtype = torch.float64, heads_kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, heads_kv, 7, 8), (2, heads_kv, 7, 8))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, -2.0, 0.0])
def test_flash_attention_against_float64(dtype: torch.dtype, causal: bool, scale: float | None) -> None:
    q, k, v = heads(dtype)
    out, lse = custom_ops.flash_attention(q, k, v, causal, scale)
    exact, exact_lse = reference(q.double(), k.double(), v.double(), causal, scale)
    unit = torch.finfo(dtype).eps
    # The weights sum to one: an error of the scores moves the result by no more than it times the values' size.
    assert ((out.double() - exact).abs() <= (unit + 64 * torch.finfo(wide(dtype)).eps) * v.double().abs().max()).all()
    assert lse.dtype == wide(dtype)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=64 * torch.finfo(wide(dtype)).eps * 16)


def test_flash_attention_takes_strided_heads() -> None:
    packed = torch.randn(2, 5, 3, 4, 8)  # (batch, sequence, which, heads, size), as one projection makes them
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    expected = custom_ops.flash_attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(custom_ops.flash_attention(q, k, v), expected, strict=True))


def conv_arguments(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 4, 4), (3, 2, 2, 2), (3,), (3,))
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[torch.dtype], tuple[Tensor, ...]]]] = {
    "vector_add": (custom_ops.vector_add, lambda dtype: rows(dtype, 3, 5)[::2]),
    "axpb": (lambda x, b: custom_ops.axpb(x, b, 2.5), lambda dtype: rows(dtype, 3, 5)[::2]),
    "scale": (custom_ops.scale, lambda dtype: rows(dtype, 3, 5)[:1]),
    "bias_gelu": (custom_ops.bias_gelu, lambda dtype: rows(dtype, 3, 5, scale=1.0)[:2]),
    "conv_bn_relu": (lambda *a: custom_ops.conv_bn_relu(*a, padding=1), conv_arguments),
    "flash_attention": (lambda *a: custom_ops.flash_attention(*a, True), heads),
}


def leaves(name: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in CALLS[name][1](dtype)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "flash_attention" else []) for name in CALLS]
)
def test_gradcheck_twice(name: str) -> None:
    assert torch.autograd.gradcheck(CALLS[name][0], leaves(name))
    assert torch.autograd.gradgradcheck(CALLS[name][0], leaves(name))


# q, k and v of one leaf.
RELATED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "tied": lambda x: (x, x, x),
    "derived": lambda x: (x, x * x, (x * x).sin()),
    "queries alone": lambda x: (x, x.detach(), x.detach()),
    "keys alone": lambda x: (x.detach(), x, x.detach()),
    "values alone": lambda x: (x.detach(), x.detach(), x),
}


@pytest.mark.parametrize("relation", RELATED)
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_flash_attention_gradients_with_a_graph_are_those_without(relation: str, of: str) -> None:
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out, lse = custom_ops.flash_attention(*RELATED[relation](x), True)
    loss = {"out": out.sin().sum(), "lse": lse.sin().sum(), "both": out.sin().sum() + lse.sin().sum()}[of]
    (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
    (with_graph,) = torch.autograd.grad(loss, x, create_graph=True)
    torch.testing.assert_close(with_graph, plain, rtol=1e-12, atol=1e-12)


def test_flash_attention_of_one_tensor_has_right_second_derivatives() -> None:
    x = torch.randn(1, 1, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: custom_ops.flash_attention(x, x, x, True), x)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", ["as made", "strided", "without gradients"])
def test_opcheck(name: str, layout: str) -> None:
    operands = leaves(name, torch.float32)
    if layout == "strided":
        operands = [torch.stack([x.detach()] * 2, -1)[..., 0].requires_grad_() for x in operands]
    elif layout == "without gradients":
        operands = [x.detach() for x in operands]
    more = {"axpb": (2.5,), "flash_attention": (True,)}.get(name, ())
    torch.library.opcheck(getattr(torch.ops.custom_ops, name).default, (*operands, *more))


@pytest.mark.parametrize("chosen", ["formula", "kernel"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, "all") for name in CALLS if name not in ("flash_attention", "conv_bn_relu")),
        # With a symbol for each of its sizes, its formula takes ten seconds, and with one three.
        *(pytest.param("flash_attention", sizes, marks=pytest.mark.slow) for sizes in ("one", "all")),
        pytest.param("conv_bn_relu", "all", marks=pytest.mark.slow),
    ],
)
def test_both_lowerings_compile_whole_with_gradients(name: str, sizes: str, chosen: lowering.Choice) -> None:
    call = CALLS[name][0]
    torch.compiler.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    operands = leaves(name)
    for x in operands if sizes == "one" else ():
        torch._dynamo.maybe_mark_dynamic(x, 2)
    compiled = torch.compile(
        lambda *a: call(*a), fullgraph=True, dynamic=True if sizes == "all" else None, backend=backend
    )
    first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
    with lowering.choose(chosen):
        result, expected = first(compiled(*operands)), first(call(*operands))
    torch.testing.assert_close(result, expected)
    graph = graphs[-1]  # Dynamo traces again where a number that it took for a symbol is none
    assert lowering.in_graph(graph) == {name: {chosen}}
    ours = [node for node in graph.graph.nodes if str(node.target).startswith("custom_ops.")]
    assert len(ours) == (chosen == "kernel")
    gradients, others = (torch.autograd.grad(one.sum(), operands) for one in (result, expected))
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "name",
    [
        *("vector_add", "axpb", "bias_gelu"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("conv_bn_relu", "flash_attention")),
    ],
)
def test_both_lowerings_follow_autocast(name: str) -> None:
    operands = [x.float() for x in CALLS[name][1](torch.float64)]
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: CALLS[name][0](*a), fullgraph=True, backend="aot_eager")
    found = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for chosen in ("formula", "kernel"):
            with lowering.choose(chosen):
                found.append(pytree.tree_leaves(compiled(*operands)))
        expected = pytree.tree_leaves(CALLS[name][0](*operands))
    for results in found:
        for result, right in zip(results, expected, strict=True):
            assert result.dtype == right.dtype
            # Each rounds its intermediates its own way: a few units in the last place of the largest element, and of
            # lse, which is no product of 16 bits, those of a sum in float32.
            roundings = 32 if right.dtype == torch.float32 and name == "flash_attention" else 4
            bound = roundings * torch.finfo(right.dtype).eps * right.abs().max().item()
            torch.testing.assert_close(result, right, rtol=0, atol=bound)


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_lowering_is_an_error_in_eager_mode_too(name: str) -> None:
    function = getattr(custom_ops, name)
    more = {"axpb": (2.5,)}.get(name, ())
    with pytest.raises(ValueError, match="lowering: expected one of formula, kernel, measured, got 'open'"):
        function(*CALLS[name][1](torch.float32), *more, lowering="open")


def test_wrong_arguments_of_a_formula_are_refused() -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x, bias: custom_ops.bias_gelu(x, bias, lowering="formula"), backend="eager")
    with pytest.raises(ValueError, match="bias_gelu: argument 'bias': expected shape"):
        compiled(torch.ones(2, 3), torch.ones(4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_operands(dtype: torch.dtype) -> None:
    empty = torch.empty(0, 5, dtype=dtype, requires_grad=True)
    bias = torch.ones(5, dtype=dtype, requires_grad=True)
    custom_ops.bias_gelu(empty, bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.zeros_like(bias))
    narrow, nothing = (torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in ((3, 0), (0,)))
    custom_ops.bias_gelu(narrow, nothing).sum().backward()
    assert narrow.grad is not None
    assert narrow.grad.shape == (3, 0)
    assert custom_ops.scale(empty).shape == (0, 5)
    assert custom_ops.conv_bn_relu(
        torch.empty(0, 2, 4, 4, dtype=dtype),
        torch.ones(3, 2, 2, 2, dtype=dtype),
        *(torch.ones(3, dtype=wide(dtype)),) * 2,
    ).shape == (0, 3, 3, 3)
    out, lse = custom_ops.flash_attention(*(torch.empty(1, 2, 0, 8, dtype=dtype),) * 3)
    assert (out.shape, lse.shape) == ((1, 2, 0, 8), (1, 2, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 0, 5, 8), (2, 4, 0, 8)], ids=["no heads", "no queries"])
def test_keys_that_no_query_reads_have_zero_gradients(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    q = torch.empty(shape, dtype=dtype, requires_grad=True)
    k, v = (torch.ones(2, 2, 7, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    for create_graph in (False, True):
        out, lse = custom_ops.flash_attention(q, k, v)
        dq, dk, dv = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), create_graph=create_graph)
        assert (out.shape, lse.shape, dq.shape) == (shape, shape[:3], shape)
        assert torch.equal(dk, torch.zeros_like(k))
        assert torch.equal(dv, torch.zeros_like(v))


def test_autocast_takes_its_dtype_or_the_widest() -> None:
    x, bias, _ = rows(torch.float32, 3, 5)
    q, k, v = heads(torch.float32)
    image, weight, scale, shift = conv_arguments(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert custom_ops.bias_gelu(x, bias).dtype == torch.bfloat16
        assert torch.equal(custom_ops.bias_gelu(x.bfloat16(), bias), custom_ops.bias_gelu(x, bias))
        assert custom_ops.flash_attention(q, k, v)[0].dtype == torch.bfloat16
        assert custom_ops.conv_bn_relu(image, weight, scale, shift).dtype == torch.bfloat16
        assert custom_ops.vector_add(x, x.bfloat16()).dtype == torch.float32
        assert custom_ops.scale(x).dtype == torch.float32
        assert custom_ops.bias_gelu(x.double(), bias.double()).dtype == torch.float64
        y = custom_ops.bias_gelu(x.requires_grad_(), bias)
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_backward_passes_under_autocast_are_those_of_their_forward_passes() -> None:
    for call, given in (
        (custom_ops.conv_bn_relu, conv_arguments(torch.float32)),
        (lambda *heads: custom_ops.flash_attention(*heads)[0], heads(torch.float32)),
    ):
        leaves = [x.detach().requires_grad_() for x in given]
        for again in (False, True):
            y, found = call(*leaves), []
            for casts in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                    found.append(torch.autograd.grad(y.sum(), leaves, create_graph=again, retain_graph=True))
            assert all(map(torch.equal, *found))


ONE, IMAGE, WEIGHT, Q = torch.ones(1), torch.ones(1, 3, 4, 4), torch.ones(1, 3, 2, 2), torch.ones(1, 3, 4, 8)
FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "flash_attention": lambda x: custom_ops.flash_attention(x, x, x)[0],
    "conv_bn_relu": lambda x: custom_ops.conv_bn_relu(x, WEIGHT, ONE, ONE),
}
GEOMETRY = ([1, 1], [0, 0], [1, 1], 1)
ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "vector_add": lambda x: (x, x),
    "axpb": lambda x: (x, x, 2.0),
    "scale": lambda x: (x,),
    "bias_gelu": lambda x: (x, torch.ones(4)),
    "bias_gelu.access": lambda x: (x, torch.ones(4), 0),
    "bias_gelu_backward": lambda x: (x, x, torch.ones(4)),
    "bias_gelu_backward.plan": lambda x: (x, x, torch.ones(4), 0, 0, 0),
    "swiglu": lambda x: (x, x),
    "swiglu_backward": lambda x: (x, x, x),
    "geglu": lambda x: (x, x),
    "geglu_backward": lambda x: (x, x, x),
    "rotary": lambda x: (x, torch.ones(3, 2), torch.ones(3, 2)),
    "mm": lambda x: (x.flatten(1), torch.ones(48, 2)),
    "conv_bn_relu": lambda x: (x, WEIGHT, ONE, ONE, *GEOMETRY),
    "cross_entropy": lambda x: (x.flatten(1), torch.tensor([0]), 48, -100),
    "cross_entropy_gradient_": lambda x: (x.flatten(1), torch.tensor([0]), 48, -100),
    "cross_entropy_block_sums_": lambda x: (
        x.flatten(1), torch.tensor([0]), 0, 48, -100, torch.zeros(1, 2), torch.zeros(1)
    ),
    "cross_entropy_block_gradient_": lambda x: (x.flatten(1), torch.tensor([0]), 0, 48, -100, torch.ones(1, 2)),
    "general_cross_entropy": lambda x: (
        x.flatten(1), torch.tensor([0]), 48, -100, torch.ones(1, 3), None, 0.0, 0.0, False
    ),
    "general_cross_entropy_gradient_": lambda x: (
        x.flatten(1), torch.tensor([0]), 48, -100, torch.ones(1, 3), None, 0.0, 0.0, False
    ),
    "general_cross_entropy_block_sums_": lambda x: (
        x.flatten(1), torch.tensor([0]), 0, 48, -100, None, 0.0, 0.0, False, torch.zeros(1, 5), torch.zeros(1)
    ),
    "general_cross_entropy_block_gradient_": lambda x: (
        x.flatten(1), torch.tensor([0]), 0, 48, -100, None, 0.0, 0.0, torch.ones(1, 3)
    ),
    "flash_attention": lambda x: (x, x, x, False, None),
    "flash_attention.algorithm": lambda x: (x, x, x, False, None, 0),
    "flash_attention_backward": lambda x: (x, None, x, x, x, x, torch.ones(1, 3, 4), False, None),
    "gradient_norm": lambda x: ([x, ONE],),
    "adamw_": lambda x: (
        [x], [x], [torch.ones_like(x)], [torch.ones_like(x)], [], [ONE], [], None, None, 0.1, 0.9, 0.9, 1e-8, 0.0, 1.0
    ),
}  # fmt: skip


def call_by_name(namespace: str, name: str, x: Tensor) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")(*ARGUMENTS[name](x))


@pytest.mark.parametrize("transposed", [True, False])
def test_results_of_attention_lie_as_its_operands_do(transposed: bool, device: str) -> None:
    """A layer's projections are (B, S, H, D) in memory, and the next product reads the result as a matrix."""
    torch.manual_seed(0)
    drawn = [torch.randn(2, 6, heads, 8, device=device) for heads in (4, 2, 2)]
    q, k, v = (x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous() for x in drawn)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = custom_ops.flash_attention(*leaves, True)
    results = out, *torch.autograd.grad(out, leaves, torch.randn_like(out))
    for result in results:
        assert result.transpose(1, 2).is_contiguous() if transposed else result.is_contiguous()
    assert lse.is_contiguous()
    copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    assert torch.equal(out, custom_ops.flash_attention(*copies, True)[0])
    torch.library.opcheck(torch.ops.custom_ops.flash_attention.default, (q, k, v, True))


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_refused_and_not_dropped(name: str) -> None:
    function, x = FORWARD[name], IMAGE + 1
    refused = pytest.raises(NotImplementedError, match=f"custom_ops::{name} has no forward-mode derivative; use rev")
    with refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))
    with refused:
        torch.func.jvp(function, (x,), (x,))
    with refused:
        torch.func.jvp(torch.vmap(function), (x[None],), (x[None],))
    with forward_ad.dual_level():  # a tangent of another tensor does not matter
        forward_ad.make_dual(ONE, ONE)
        assert torch.equal(function(x), function(x.clone()))
    if name in OPERATORS and custom_ops.load().autograd == "compiled nodes":
        return  # torch.func supports these (test_autograd_nodes.py)
    with pytest.raises(
        NotImplementedError, match=f"custom_ops::{name}: torch.func does not support derivatives that Python"
    ):
        torch.func.grad(lambda x: function(x).sum())(x)
    with pytest.raises(NotImplementedError, match=f"custom_ops::{name}: torch.func does not support"):
        torch.func.grad(lambda x: torch.vmap(function)(x).sum())(x[None])


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("name", [schema.split("(")[0] for schema in SCHEMAS])
def test_a_registered_name_refuses_forward_mode_too(name: str, namespace: str) -> None:
    function, x = partial(call_by_name, namespace, name), IMAGE + 1
    function(x.clone())
    refused = pytest.raises((NotImplementedError, RuntimeError), match="forward")
    with refused, forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))
    with refused:
        torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("name", ["bias_gelu.access", "bias_gelu_backward", "cross_entropy", "gradient_norm"])
def test_a_gradient_that_does_not_exist_is_an_error(name: str) -> None:
    results = call_by_name("custom_ops", name, (IMAGE + 1).requires_grad_())
    first = results[0] if isinstance(results, tuple) else results
    with pytest.raises((NotImplementedError, RuntimeError), match=f"derivative for custom_ops::{name}.* is not impl"):
        first.sum().backward()


def test_a_nan_lets_the_gradient_pass_as_in_torch() -> None:
    x = torch.tensor([-1.0, 0.0, 2.0, float("nan")]).view(1, 1, 1, 4).requires_grad_()
    one = torch.ones(1, 1, 1, 1)
    for y in (custom_ops.conv_bn_relu(x, one, ONE, 0 * ONE), torch.relu(x)):
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert gradient.flatten().tolist() == [0, 0, 1, 1]


def far_apart(count: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    """Tensors in one memory whose first dimension has two entries 2³¹ elements apart; only these are touched."""
    size = torch.Size(shape[1:]).numel()
    memory = torch.empty(2**31 + count * size, dtype=dtype)
    strides = (2**31, *torch.empty(shape[1:], device="meta").stride())
    found = [memory.as_strided(shape, strides, number * size) for number in range(count)]
    return [x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0))) for x in found]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", ["bias_gelu", "flash_attention", "vector_add"])
def test_operands_may_span_more_than_2_31_elements(operator: str, dtype: torch.dtype) -> None:
    shape = (2, 2, 70, 40) if operator == "flash_attention" else (2, 70, 40)
    operands = far_apart(3 if operator == "flash_attention" else 1, *shape, dtype=dtype)
    if operator == "vector_add":
        operands = operands * 2
    forward = getattr(calls, operator)
    backward = getattr(calls, f"{operator}_backward", None)
    rest = (torch.randn(40).to(dtype),) if operator == "bias_gelu" else (True, None) if backward else ()
    found, expected = [], []
    for tensors, results in ((operands, found), ([x.contiguous() for x in operands], expected)):
        out = forward(*tensors, *rest)
        results += out if isinstance(out, tuple) else [out]
        if operator == "bias_gelu":
            results += backward(tensors[0], tensors[0], *rest)
        elif backward:
            results += backward(tensors[0], None, *tensors, out[0], out[1], *rest)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_an_operator_without_the_python_around_it_is_the_operator() -> None:
    overload, a = torch.ops.aten.add.Tensor, torch.arange(3.0)
    call = torch_internals.in_cpp(overload)
    assert not hasattr(call, "__code__")  # nothing of Python is left in it
    assert torch.equal(call(a, a), overload(a, a))
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), keywords=None):
            seen.append(function)
            return super().__torch_function__(function, types, arguments, keywords or {})

    call(a.as_subclass(Watched), a)
    assert overload in seen


MAPPED: dict[str, tuple[Callable[..., Tensor], tuple[int | None, ...], tuple[tuple[int, ...], ...]]] = {
    "vector_add": (custom_ops.vector_add, (0, None), ((3, 4, 8), (4, 8))),
    "axpb": (lambda x, b: custom_ops.axpb(x, b, 0.5), (1, 2), ((4, 3, 8), (4, 8, 3))),
    "scale": (custom_ops.scale, (2,), ((4, 8, 3),)),
    "bias_gelu": (custom_ops.bias_gelu, (0, None), ((3, 4, 8), (8,))),
    "bias_gelu, a bias for each": (custom_ops.bias_gelu, (1, 0), ((4, 3, 8), (3, 8))),
    "attention": (
        lambda q, k, v: custom_ops.flash_attention(q, k, v)[0], (0, None, 4),
        ((3, 2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8, 3)),
    ),
    # What is mapped over does not tell whether it needs a gradient, and here nothing else is given.
    "attention of one operand": (lambda q: custom_ops.flash_attention(q, q, q)[0], (0,), ((3, 2, 2, 5, 8),)),
    "attention with features": (
        lambda q: custom_ops.flash_attention(q, q, q, softcap=2.0)[0], (0,), ((3, 2, 2, 5, 8),)
    ),
    "conv_bn_relu": (
        lambda x: custom_ops.conv_bn_relu(x, WEIGHT.double(), ONE.double(), ONE.double()), (0,), ((3, 1, 3, 4, 4),)
    ),
    "linear_cross_entropy": (
        lambda x: custom_ops.linear_cross_entropy(x, x[:2], torch.tensor([0, 1, 1])), (0,), ((3, 3, 5),)
    ),
    "linear_cross_entropy in blocks": (
        lambda x: custom_ops.linear_cross_entropy(x, x[:2], torch.tensor([0, 1, 1]), mode="least_memory"),
        (0,), ((3, 3, 5),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_loop_over_samples_without_a_warning(name: str) -> None:
    function, dims, shapes = MAPPED[name]
    operands = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    found = torch.vmap(function, dims)(*operands)  # a warning would be an error
    samples = [
        function(*(x if dim is None else x.select(dim, i) for x, dim in zip(operands, dims, strict=True)))
        for i in range(3)
    ]
    torch.testing.assert_close(found, torch.stack(samples))
    if not name.startswith("linear_cross_entropy"):  # torch cannot divide no samples by a number of rows
        none = [x if dim is None else x.narrow(dim, 0, 0) for x, dim in zip(operands, dims, strict=True)]
        assert torch.equal(torch.vmap(function, dims)(*none), found[:0])  # Poisson sampling draws such batches
    grad = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, operands, grad),
        torch.autograd.grad(torch.stack(samples), operands, grad),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_vmap_takes_operators_with_lists_among_their_arguments() -> None:
    x, weight, scale, shift = conv_arguments(torch.float32)
    images = torch.stack([x, 2 * x], 1)
    found = torch.vmap(lambda x: custom_ops.conv_bn_relu(x, weight, scale, shift, stride=2, padding=1), 1)(images)
    each = [custom_ops.conv_bn_relu(image, weight, scale, shift, stride=2, padding=1) for image in (x, 2 * x)]
    assert torch.equal(found, torch.stack(each))
    norm = torch.ops.custom_ops.gradient_norm
    gradients = torch.randn(3, 5)
    found = torch.vmap(lambda mapped: norm([mapped, shift]))(gradients)
    assert torch.equal(found, torch.stack([norm([gradient, shift]) for gradient in gradients]))


def test_a_flag_that_is_no_bool_is_named() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="flash_attention: argument 'causal': expected True or False, got str"):
        custom_ops.flash_attention(q, q, q, causal="yes")  # type: ignore[arg-type]


OF_A_SIZE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], Tensor]]] = {
    "vector_add": (lambda x: custom_ops.vector_add(x, x), lambda n: torch.ones(n, 8)),
    "axpb": (lambda x: custom_ops.axpb(x, x, 2.0), lambda n: torch.ones(n, 8)),
    "scale": (custom_ops.scale, lambda n: torch.ones(n, 8)),
    "bias_gelu": (lambda x: custom_ops.bias_gelu(x, torch.ones(8)), lambda n: torch.ones(n, 8)),
    "swiglu": (lambda x: custom_ops.swiglu(x, x), lambda n: torch.ones(n, 8)),
    "geglu": (custom_ops.geglu, lambda n: torch.ones(n, 8)),
    "linear": (lambda x: custom_ops.linear(x, torch.ones(3, 8)), lambda n: torch.ones(n, 8)),
    "rotary": (
        lambda x: custom_ops.rotary(x, torch.ones(x.shape[1], 4), torch.ones(x.shape[1], 4)),
        lambda n: torch.ones(1, n, 2, 8),
    ),
    "flash_attention": (lambda q: custom_ops.flash_attention(q, q, q, True)[0], lambda n: torch.ones(1, 2, n, 8)),
    "conv_bn_relu": (
        lambda x: custom_ops.conv_bn_relu(x, torch.ones(5, 3, 1, 1), torch.ones(5), torch.ones(5)),
        lambda n: torch.ones(n, 3, 4, 4),
    ),
}


@pytest.mark.parametrize("name", OF_A_SIZE)
def test_one_graph_for_every_size(name: str) -> None:
    function, operand = OF_A_SIZE[name]
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
    for size in (20, 21, 27, 40):  # of linear, sixteen rows and more have the kernel, and fewer another graph
        compiled(operand(size).requires_grad_())
    assert len(graphs) == 1
