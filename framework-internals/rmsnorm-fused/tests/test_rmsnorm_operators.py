"""The operators as PyTorch sees them: opcheck, gradcheck, torch.compile, double backward."""

from __future__ import annotations

import pytest
import torch

from rmsnorm_fused import RMSNorm, rms_norm


def family(kernel):
    return "triton" if kernel.backend == "triton" else "native"


def sample(device, *, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 24, generator=generator).to(device, dtype).requires_grad_(grad)
    weight = torch.randn(24, generator=generator).to(device, dtype).requires_grad_(grad)
    return x, weight


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_opcheck_forward(kernel, grad, with_weight):
    x, weight = sample(kernel.device, grad=grad)
    operator = getattr(torch.ops.rmsnorm_fused, f"{family(kernel)}_forward").default
    torch.library.opcheck(operator, (x, weight if with_weight else None, 1e-6))


@pytest.mark.parametrize("needs_dweight", [True, False])
def test_opcheck_backward(kernel, needs_dweight):
    x, weight = sample(kernel.device)
    forward = getattr(torch.ops.rmsnorm_fused, f"{family(kernel)}_forward")
    rstd = forward(x.detach(), weight.detach(), 1e-6)[1]
    operator = getattr(torch.ops.rmsnorm_fused, f"{family(kernel)}_backward").default
    dy = torch.ones_like(x, requires_grad=True)
    torch.library.opcheck(operator, (dy, x, weight, rstd, needs_dweight))


@pytest.mark.parametrize("with_weight", [True, False])
def test_gradcheck_once_and_twice(where, with_weight):
    x, weight = sample(where.device, dtype=torch.float64)
    x = x.detach()[:1, :3, :4].requires_grad_()  # strided, and small: gradcheck calls once per element
    inputs = (x, weight.detach()[:4].requires_grad_()) if with_weight else (x,)

    def function(*arguments):
        return rms_norm(*arguments, eps=1e-3, backend=where.backend)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_gradient_of_the_weight_alone_and_of_x_alone(where):
    x, weight = sample(where.device)
    rms_norm(x, weight.detach(), eps=1e-6, backend=where.backend).sum().backward()
    assert x.grad is not None
    both = x.grad.clone()
    rms_norm(x.detach(), weight, eps=1e-6, backend=where.backend).sum().backward()
    assert weight.grad is not None
    x.grad = None
    rms_norm(x, weight, eps=1e-6, backend=where.backend).sum().backward()
    assert torch.equal(x.grad, both)


def test_frozen_weight_skips_dweight(kernel, monkeypatch):
    import rmsnorm_fused.impl as impl

    module = __import__(f"rmsnorm_fused.impl.{kernel.backend}", fromlist=["backward"])
    assert module.__package__ == impl.__name__
    seen = []
    original = module.backward
    monkeypatch.setattr(module, "backward", lambda *arguments: seen.append(arguments[-1]) or original(*arguments))
    x, weight = sample(kernel.device)
    rms_norm(x, weight.detach(), eps=1e-6, backend=kernel.backend).sum().backward()
    rms_norm(x, weight, eps=1e-6, backend=kernel.backend).sum().backward()
    assert seen == [False, True]


class Counting:
    """A torch.compile backend that counts the graphs it is given."""

    def __init__(self):
        self.graphs = 0
        self.operators = []

    def __call__(self, graph, inputs):
        self.graphs += 1
        self.operators += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def test_compiles_whole_and_once_for_all_batches(where):
    torch.compiler.reset()
    counting = Counting()
    module = RMSNorm(24, eps=1e-6, backend=where.backend, device=where.device)
    compiled = torch.compile(module, fullgraph=True, backend=counting)
    for batch in (4, 7, 9):
        x = torch.randn(batch, 3, 24, device=where.device, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        y = compiled(x)
        y.sum().backward()
        reference = module(x)
        assert torch.allclose(y, reference, rtol=1e-5, atol=1e-6)
    assert counting.graphs == 1
    if where.backend != "pytorch":
        assert any(f"rmsnorm_fused.{family(where)}_forward" in name for name in counting.operators)


# Importing Inductor makes torch warn of its own code; on a GPU it recommends TensorFloat32, for products.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiles_with_inductor(where):
    if where.interpreted:
        pytest.skip(
            "Inductor generates no Triton where Triton is interpreted; the other compile test covers the operator"
        )
    torch.compiler.reset()
    x, weight = sample(where.device)

    def function(x, weight):
        return rms_norm(x * 2, weight, eps=1e-6, backend=where.backend).square()

    compiled = torch.compile(function, fullgraph=True)
    found = torch.autograd.grad(compiled(x, weight).sum(), (x, weight))
    plain = torch.autograd.grad(function(x, weight).sum(), (x, weight))
    for a, b in zip(found, plain, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_cuda_graph_and_side_stream(backend):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    rms_norm(x, weight, eps=1e-6, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rms_norm(x, weight, eps=1e-6, backend=backend)
    x.copy_(torch.randn_like(x))
    graph.replay()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = rms_norm(x, weight, eps=1e-6, backend=backend)
    torch.cuda.synchronize()
    assert torch.equal(y, beside)


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_another_device_than_the_current_one(backend):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    x = torch.randn(64, 1024, device="cuda:1", requires_grad=True)
    y = rms_norm(x, torch.ones(1024, device="cuda:1"), eps=1e-6, backend=backend)
    y.sum().backward()
    assert y.device == x.grad.device == x.device
    assert torch.cuda.current_device() == 0
    assert torch.allclose(y, torch.nn.functional.rms_norm(x, (1024,), eps=1e-6), rtol=1e-5, atol=1e-5)
