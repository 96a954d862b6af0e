"""layer_norm as PyTorch sees it: arguments, opcheck, gradcheck, torch.func, torch.compile, its module."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

import lowering
from rmsnorm_fused import LayerNorm, backends, layer_norm
from rmsnorm_fused.ops import operators
from rmsnorm_fused.options import Options


def sample(device, *, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_(grad)
        for shape in ((3, 5, 24), (24,), (24,))
    )


@pytest.mark.parametrize("residual", [True, False])
def test_gradcheck_once_and_twice(where, residual):
    x, weight, bias = sample(where.device, dtype=torch.float64)
    leaves = (x[0, :3, :5].detach(), weight[:5].detach(), bias[:5].detach(), *([x[1, :3, :5].detach()] * residual))
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)

    def function(x, weight, bias, residual=None):
        return layer_norm(x, weight, bias, residual=residual, backend=where.backend)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_the_gradient_of_one_argument_alone(where, wanted):
    x, weight, bias = sample(where.device, grad=False)
    named = {"x": x, "weight": weight, "bias": bias}
    named[wanted].requires_grad_()
    (alone,) = torch.autograd.grad(layer_norm(**named, backend=where.backend).square().sum(), named[wanted])
    for tensor in named.values():
        tensor.requires_grad_()
    (together,) = torch.autograd.grad(layer_norm(**named, backend=where.backend).square().sum(), named[wanted])
    torch.testing.assert_close(alone, together)


def test_the_gradient_through_the_sum_alone_passes_on(where):
    x, weight, _ = sample(where.device)
    residual = torch.ones_like(x, requires_grad=True)
    _, s = layer_norm(x, weight, residual=residual, backend=where.backend)
    assert all((gradient == 1).all() for gradient in torch.autograd.grad(s.sum(), (x, residual)))


def test_forward_mode_is_refused_by_the_kernels_and_taken_by_the_formula(kernel):
    x, weight, bias = sample(kernel.device, grad=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer_norm(dual, weight, bias, backend=kernel.backend)
        assert forward_ad.unpack_dual(layer_norm(dual, weight, bias)).tangent is not None


@pytest.mark.parametrize("over", ["x", "weight", "bias", "all"])
def test_vmap_is_a_loop(kernel, over):
    x, weight, bias = sample(kernel.device, grad=False)
    stacked = {"x": x, "weight": weight.expand(3, 24) * torch.arange(1, 4, device=x.device)[:, None]}
    stacked["bias"] = bias.expand(3, 24) + torch.arange(3, device=x.device)[:, None]
    plain = {"x": x[0], "weight": weight, "bias": bias}
    arguments = {name: stacked[name] if over in (name, "all") else plain[name] for name in plain}
    dims = tuple(0 if over in (name, "all") else None for name in plain)

    def function(x, weight, bias):
        family = "triton" if kernel.backend == "triton" else "native"
        return torch.cat(operators.normalise(family, x, x, weight, bias, Options(1e-5, centred=True)))

    backends.resolve(kernel.backend, kernel.device)
    together = torch.vmap(function, dims)(*arguments.values())
    for i, result in enumerate(together):
        one = (arguments[name] if dim is None else arguments[name][i] for name, dim in zip(plain, dims, strict=True))
        torch.testing.assert_close(result, function(*one))


def test_torch_func_takes_gradients(where):
    if where.backend == "triton":
        pytest.skip("torch.func takes no derivative that Python registered; rms_norm's test says so")
    x, weight, bias = sample(where.device, grad=False)

    def loss(x, weight, bias):
        return layer_norm(x, weight, bias, backend=where.backend).square().sum()

    gradients = torch.func.grad(loss, (0, 1, 2))(x, weight, bias)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    for a, b in zip(gradients, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("residual", "name"), [(False, "layer_norm"), (True, "layer_norm_add")])
@pytest.mark.parametrize("choice", ["formula", "kernel"])
def test_compiles_in_one_graph_with_either_lowering(choice, residual, name):
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(lowering.in_graph(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    leaves = sample("cpu")

    def function(x, weight, bias):
        result = layer_norm(x, weight, bias, residual=x if residual else None)
        return torch.cat(result) if residual else result

    with lowering.choose(choice, name):
        y = torch.compile(function, fullgraph=True, backend=backend)(*leaves)
    assert graphs == [{name: {choice}}]
    found, plain = (torch.autograd.grad(one.square().sum(), leaves) for one in (y, function(*leaves)))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiles_with_inductor(where):
    if where.interpreted:
        pytest.skip("Inductor generates no Triton where Triton is interpreted")
    torch.compiler.reset()
    leaves = sample(where.device, dtype=torch.float64)

    def function(x, weight, bias):
        return layer_norm(x * 2, weight, bias, backend=where.backend).square()

    found = torch.autograd.grad(torch.compile(function, fullgraph=True)(*leaves).sum(), leaves)
    for a, b in zip(found, torch.autograd.grad(function(*leaves).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13 * b.abs().max().item())


@pytest.mark.parametrize("shape", [24, (24,), [5, 24]])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_the_module_stands_in_for_torchs(where, shape, options):
    module, torchs = (kind(shape, 1e-3, **options).to(where.device) for kind in (LayerNorm, torch.nn.LayerNorm))
    module.backend = where.backend
    for parameter in torchs.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(torchs.state_dict())
    x = sample(where.device)[0]
    torch.testing.assert_close(module(x), torchs(x), rtol=1e-5, atol=1e-5)
    y, s = module(x, x)
    assert torch.equal(s, x + x)
    torch.testing.assert_close(y, torchs(s), rtol=1e-5, atol=1e-5)


def test_the_arguments_of_torchs_function_in_its_order(where):
    x, weight, bias = sample(where.device, grad=False)
    for arguments in (((5, 24), None, None, 1e-3), ((24,), weight, bias), (24, weight, bias, 0.1)):
        shape = (arguments[0],) if isinstance(arguments[0], int) else arguments[0]
        torchs = torch.nn.functional.layer_norm(x, shape, *arguments[1:])
        torch.testing.assert_close(layer_norm(x, *arguments, backend=where.backend), torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(2, 4, dtype=torch.int32),), {}, TypeError, "x: expected float32, bfloat16"),
        ((torch.ones(2, 4), torch.ones(3)), {}, ValueError, r"weight: expected shape \(4,\)"),
        ((torch.ones(2, 4), None, torch.ones(3)), {}, ValueError, r"bias: expected shape \(4,\)"),
        (
            (torch.ones(2, 4), torch.ones(4), torch.ones(4).bfloat16()),
            {},
            TypeError,
            "bias: expected torch.float32, the dtype of the weight, got torch.bfloat16; convert one of them",
        ),
        ((torch.ones(2, 4), None, torch.ones(4).double()), {}, TypeError, "bias: a float64 bias needs a float64 x"),
        ((torch.ones(2, 4),), {"eps": -1.0}, ValueError, "eps: expected a finite number"),
        ((torch.ones(2, 4),), {"residual": torch.ones(4)}, ValueError, "residual: expected shape"),
        ((torch.ones(2, 4), torch.ones(4), torch.ones(4), 1e-5), {}, TypeError, "layer_norm: expected at most 3"),
        ((torch.ones(2, 4), 4), {"normalized_shape": 4}, TypeError, "normalized_shape: expected one value"),
        ((torch.ones(2, 4), (4,), None, torch.ones(2)), {}, ValueError, "bias: expected shape .*normalized_shape"),
        ((torch.ones(2, 4),), {"backend": "gpu"}, ValueError, "backend: expected one of"),
    ],
)
def test_bad_input_is_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        layer_norm(*arguments, **options)
