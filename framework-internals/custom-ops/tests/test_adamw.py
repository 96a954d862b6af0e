"""AdamW and the gradient norm over lists of tensors, on a CPU and on a GPU: results, state, registration, errors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import custom_ops
from custom_ops.operators.calls import calls
from custom_ops.operators.checks import check_gradient_norm
from custom_ops.operators.training.adamw import gradient_norm

CHUNK = 32768  # kChunk of csrc/adamw/kernels.h
SHAPES = ((CHUNK + 3,), (3, 5), (), (0, 4), (2 * CHUNK,), (129, 257), (1,))
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1


def drawn(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str, seed: int, offset: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape in shapes:
        values = torch.randn(math.prod(shape) + offset, generator=generator, dtype=torch.float64)
        found.append(values.to(device, dtype)[offset:].view(shape))
    return found


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_norm_against_float64(dtype: torch.dtype, offset: int, device: str) -> None:
    gradients = drawn(SHAPES, dtype, device, 0, offset)
    exact = torch.cat([g.double().flatten() for g in gradients]).norm()
    found = gradient_norm(gradients)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (found.dtype, found.shape, found.device) == (wide, (), gradients[0].device)
    # Four squares are added in the dtype: at most four roundings of each, half of that after the root. Eight squares of
    # 16 bits are exact, and have at most seven. float64 sums add less than one rounding of float32; in float64 a sum
    # has as many roundings as a thread has terms, and the threads.
    roundings = CHUNK if dtype == torch.float64 else 4 if dtype.itemsize == 2 else 3
    assert abs(found.double() - exact) <= roundings * torch.finfo(wide).eps * exact


def test_norm_of_gradients_of_several_dtypes(device: str) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    gradients = [g.to(dtypes[i % 3]) for i, g in enumerate(drawn([(33,)] * 130, torch.float32, device, 5))]
    exact = torch.cat([g.double() for g in gradients]).norm()
    assert abs(gradient_norm(gradients).double() - exact) <= 4 * torch.finfo(torch.float32).eps * exact


@pytest.mark.parametrize("count", [1, 53, 54, 55, 200, 330])
def test_lists_that_take_several_launches(count: int, device: str) -> None:
    gradients = drawn([(7 + i % 5,) for i in range(count)], torch.float64, device, count)
    parameters = [torch.ones_like(g) for g in gradients]
    means, squares = ([torch.zeros_like(g) for g in gradients] for _ in range(2))
    steps = [torch.ones((), device=device) for _ in gradients]
    calls.adamw_(parameters, gradients, means, squares, [], steps, [], None, None, 0.5, *BETAS, EPS, 0.0, 1.0, False)
    for p, g in zip(parameters, gradients, strict=True):  # the first step moves by the learning rate
        torch.testing.assert_close(p, 1 - 0.5 * g / (g.abs() + EPS), rtol=0, atol=1e-12)
    exact = torch.cat(gradients).norm()
    torch.testing.assert_close(gradient_norm(gradients), exact, rtol=1e-13, atol=0)


F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("step", "clip", "on_device", "betas", "amsgrad", "maximize", "offset"),
    [
        (1, False, False, BETAS, False, False, 0),
        (1, True, True, BETAS, True, False, 0),
        (1000, True, False, (0.3, 0.95), False, True, 1),
        (7, False, False, (0.0, 0.0), True, True, 1),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "of_gradient", "of_copy"),
    [
        (F32, F32, None), (F64, F64, None), (F32, BF16, BF16), (F32, F16, F16),
        (F32, BF16, None), (F32, F16, None), (F32, F32, BF16), (F32, F32, F16),
    ],
    ids=str,
)  # fmt: skip
def test_update_against_float64(
    dtype: torch.dtype, of_gradient: torch.dtype, of_copy: torch.dtype | None, step: int, clip: bool, on_device: bool,
    betas: tuple[float, float], amsgrad: bool, maximize: bool, offset: int, device: str,
) -> None:  # fmt: skip
    p, m = (drawn(SHAPES, dtype, device, seed, offset) for seed in (0, 2))
    g = drawn(SHAPES, of_gradient, device, 1, offset)
    copies = [x.to(of_copy) for x in p] if of_copy else []
    newer = drawn(SHAPES, of_copy or dtype, device, 5, offset)
    for copied, other in zip(copies, newer, strict=False):  # somebody writes every third element
        copied.flatten()[::3] = other.flatten()[::3]
    v = [x.square() for x in drawn(SHAPES, dtype, device, 3, offset)]
    w = [x.square() for x in drawn(SHAPES, dtype, device, 4, offset)] if amsgrad else []
    steps = [torch.tensor(float(step), device=device) for _ in p]
    norm = torch.tensor(37.0, dtype=dtype, device=device) if clip else None
    lr = torch.tensor(0.03, device=device) if on_device else 0.03
    rate = float(lr)
    first = [torch.where(c.to(dtype) == x.to(c.dtype), x, c) for c, x in zip(copies, p, strict=True)] if copies else p
    wanted = [[x.double() for x in part] for part in (first, g, m, v, w or v)]
    exact: list[list[Tensor]] = []
    bounds: list[list[Tensor]] = []
    eps = torch.finfo(dtype).eps
    for value, gradient, mean, square, most in zip(*wanted, strict=True):
        gradient = (-1 if maximize else 1) * gradient * (min(1.0, 1.0 / (37.0 + 1e-6)) if clip else 1)
        new_mean = betas[0] * mean + (1 - betas[0]) * gradient
        new_square = betas[1] * square + (1 - betas[1]) * gradient.square()
        new_most = torch.maximum(most, new_square) if amsgrad else new_square
        factor = rate / (1 - betas[0] ** step) / ((new_most / (1 - betas[1] ** step)).sqrt() + EPS)
        new_value = (1 - rate * DECAY) * value - factor * new_mean
        # A sum has the rounding of its terms; a factor that was rounded once or twice adds as many of its product.
        # The mean is computed from the nearer of its two ends, so the other counts with its weight.
        of_mean = 3 * eps * (min(1, 2 * betas[0]) * mean.abs() + gradient.abs())
        of_square = 6 * eps * new_square
        of_most = 6 * eps * new_most
        of_value = 2 * eps * value.abs() + factor * (of_mean + 8 * eps * new_mean.abs())
        exact.append([new_value, new_mean, new_square, new_most])
        bounds.append([of_value, of_mean, of_square, of_most])
    rates = lr if on_device else None, 0.0 if on_device else lr
    calls.adamw_(p, g, m, v, w, steps, copies, norm, *rates, *betas, EPS, DECAY, 1.0, maximize)
    for rounded, master in zip(copies, p, strict=bool(copies)):
        assert torch.equal(rounded, master.to(rounded.dtype))
    assert all(torch.equal(ours.double(), before) for ours, before in zip(g, wanted[1], strict=True))
    for ours, right, bound in zip(zip(p, m, v, w or v, strict=True), exact, bounds, strict=True):
        for one, other, allowed in zip(ours, right, bound, strict=True):
            assert ((one.double() - other).abs() <= allowed).all()


@pytest.mark.parametrize("narrow", [BF16, F16], ids=str)
def test_what_is_written_into_a_parameter_is_compared_bit_by_bit(narrow: torch.dtype, device: str) -> None:
    nan, infinity, least = math.nan, math.inf, torch.finfo(torch.float32).tiny * 2**-22
    written = torch.tensor([0.0, -0.0, 0.0, nan, 1.0, infinity, 2.0, nan, infinity], device=device).to(narrow)
    master = torch.tensor([-0.0, 0.0, least, 1.0, nan, 2.0, infinity, nan, 1e38], device=device)
    wanted = torch.tensor([0.0, -0.0, least, nan, 1.0, infinity, 2.0, nan, 1e38], device=device)
    if narrow is BF16:
        wanted[-1] = infinity  # of which 1e38 is no rounding
    zeros = [torch.zeros_like(master) for _ in range(2)]
    gradient, step = torch.zeros_like(written), torch.ones((), device=device)
    calls.adamw_(
        [master], [gradient], zeros[:1], zeros[1:], [], [step], [written], None, None, 0.0, *BETAS, EPS, 0.0, 1.0
    )
    assert torch.equal(master.view(torch.int32)[~wanted.isnan()], wanted.view(torch.int32)[~wanted.isnan()])
    assert torch.equal(master.isnan(), wanted.isnan())
    assert torch.equal(written.isnan(), wanted.isnan())


def test_a_nan_of_the_largest_second_moment_stays() -> None:
    for most, square in ((math.nan, 1.0), (1.0, math.nan)):
        p, m, v, w = (torch.tensor([x]) for x in (1.0, 0.0, square, most))
        calls.adamw_([p], [torch.ones(1)], [m], [v], [w], [torch.ones(())], [], None, None, 0.1, *BETAS, EPS, 0.0, 1.0)
        assert w.isnan()
        assert p.isnan()


def two_models(device: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).to(device)
    second = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 7)).to(device)
    second.load_state_dict(first.state_dict())
    return first, second


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1, "lr": 3e-2},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, device: str) -> None:
    for step in steps:
        x = torch.randn(16, 33, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().mul(50).backward()
        parameters = list(model.parameters())
        if isinstance(optimizer, custom_ops.AdamW):
            optimizer.step(norm=optimizer.gradient_norm(), max_norm=0.5)
        else:
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()


def test_learns_as_torchs_and_takes_its_state(device: str) -> None:
    ours, theirs = two_models(device)
    own = custom_ops.AdamW(groups_of(ours), lr=1e-2, betas=BETAS)
    peer = torch.optim.AdamW(groups_of(theirs), lr=1e-2, betas=BETAS, fused=True)
    train(ours, own, range(10), device)
    train(theirs, peer, range(10), device)
    # Changes places: each continues from the state of the other.
    states = own.state_dict(), peer.state_dict()
    own.load_state_dict(states[1])
    peer.load_state_dict(states[0])
    train(ours, own, range(10, 20), device)
    train(theirs, peer, range(10, 20), device)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert {key for state in own.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_learn_as_weights_that_autocast_casts(dtype: torch.dtype, device: str) -> None:
    cast, kept = (nn.Linear(64, 64, bias=False, device=device) for _ in range(2))
    kept.load_state_dict(cast.state_dict())
    optimizers = [
        custom_ops.AdamW(cast.parameters(), lr=1e-2, dtype=dtype),
        custom_ops.AdamW(kept.parameters(), lr=1e-2),
    ]
    assert cast.weight.dtype == dtype
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device)
        for model, optimizer in zip((cast, kept), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device, dtype):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step(norm=optimizer.gradient_norm(), max_norm=0.01)
    # The products and their gradients are the same, bit for bit; the norm adds eight squares instead of four.
    master = optimizers[0].state[cast.weight]["master"]
    torch.testing.assert_close(master, kept.weight.detach(), rtol=0, atol=1e-6)
    assert torch.equal(cast.weight, master.to(dtype))


def test_masters_survive_a_checkpoint(device: str) -> None:
    def made() -> tuple[nn.Module, custom_ops.AdamW]:
        torch.manual_seed(1)
        model = nn.Linear(33, 65).to(device)
        groups = [{"params": [model.weight], "dtype": torch.bfloat16}, {"params": [model.bias]}]
        return model, custom_ops.AdamW(groups, lr=1e-2)

    def advance(model: nn.Module, optimizer: custom_ops.AdamW, step: int) -> None:
        for p, g in zip(model.parameters(), drawn([(65, 33), (65,)], torch.float32, device, step), strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()

    model, optimizer = made()
    advance(model, optimizer, 0)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, restored = made()
    other.load_state_dict(saved[0])
    restored.load_state_dict(saved[1])
    for each in ((model, optimizer), (other, restored)):
        advance(*each, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        found = [o.state[m.weight][name] for m, o in ((model, optimizer), (other, restored))]
        assert found[0].dtype == torch.float32
        assert torch.equal(*found)


def test_a_state_without_masters_takes_the_weights_as_they_are() -> None:
    weight = torch.linspace(-1, 1, 7)
    theirs = weight.clone().requires_grad_()
    theirs.grad = torch.ones(7)
    peer = torch.optim.AdamW([theirs], fused=True)
    peer.step()
    ours = theirs.detach().clone().requires_grad_()
    optimizer = custom_ops.AdamW([ours], dtype=torch.bfloat16)
    optimizer.load_state_dict(peer.state_dict())
    ours.grad = torch.ones(7, dtype=torch.bfloat16)
    before = ours.detach().float()
    optimizer.step()
    state = optimizer.state[ours]
    assert state["step"] == 2
    assert state["exp_avg_sq"].dtype == torch.float32
    assert ((state["master"] - before).abs() > 0).all()


def test_only_float32_parameters_are_cast_and_only_to_16_bits() -> None:
    with pytest.raises(TypeError, match=r"expected parameters of torch\.float32 to cast, got torch\.float64"):
        custom_ops.AdamW([torch.ones(2, dtype=torch.float64, requires_grad=True)], dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16 or torch\.float16, got torch\.float64"):
        custom_ops.AdamW([torch.ones(2, requires_grad=True)], dtype=torch.float64)
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(TypeError, match=r"expected parameters of torch\.float32 to cast, got torch\.float64"):
        custom_ops.AdamW([{"params": [first]}, {"params": [second]}], dtype=torch.bfloat16)
    assert first.dtype == torch.float32  # of a group before the one that is refused


def test_parameters_without_a_gradient_stay() -> None:
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    optimizer = custom_ops.AdamW([first, second], lr=0.1)
    assert optimizer.gradient_norm() == 0
    first.grad = torch.ones(3)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(second, torch.ones(3))
    assert second not in optimizer.state
    assert (first < 1).all()


def test_a_norm_that_is_nan_makes_everything_nan() -> None:
    parameter = torch.ones(3, requires_grad=True)
    parameter.grad = torch.tensor([1.0, math.nan, 2.0])
    optimizer = custom_ops.AdamW([parameter])
    optimizer.step(norm=optimizer.gradient_norm(), max_norm=1.0)
    assert parameter.isnan().all()


def test_autograd_sees_that_the_parameter_changed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    custom_ops.AdamW([weight]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_do_not_depend_on_the_threads() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            parameters = [p.requires_grad_() for p in drawn(SHAPES, torch.float32, "cpu", 0)]
            optimizer = custom_ops.AdamW(parameters)
            for p, gradient in zip(parameters, drawn(SHAPES, torch.float32, "cpu", 1), strict=True):
                p.grad = gradient
            optimizer.step(norm=optimizer.gradient_norm(), max_norm=1.0)
            found.append([p.detach() for p in parameters])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_cuda_graph_counts_its_steps_and_follows_the_learning_rate() -> None:
    lr = torch.tensor(0.1, device="cuda")
    captured, plain = (torch.ones(CHUNK, device="cuda", requires_grad=True) for _ in range(2))
    optimizers = [custom_ops.AdamW([p], lr=lr) for p in (captured, plain)]
    for p, optimizer in zip((captured, plain), optimizers, strict=True):
        p.grad = torch.linspace(-1, 1, CHUNK, device="cuda")
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step(norm=optimizers[0].gradient_norm(), max_norm=1.0)
    for rate in (0.1, 0.01, 0.2):
        lr.fill_(rate)
        graph.replay()
        optimizers[1].step(norm=optimizers[1].gradient_norm(), max_norm=1.0)
    assert torch.equal(captured, plain)
    assert optimizers[0].state[captured]["step"] == 4


def operands() -> dict[str, Any]:
    lists: dict[str, Any] = {name: [torch.ones(4)] for name in ("parameters", "gradients", "means", "squares")}
    return {**lists, "maxima": [], "steps": [torch.ones(())], "copies": [], "norm": None, "device_lr": None}


SETTINGS = (0.1, *BETAS, EPS, DECAY, 1.0, False)


def test_opcheck() -> None:
    given = operands()
    torch.library.opcheck(torch.ops.custom_ops.gradient_norm.default, (given["gradients"],))
    torch.library.opcheck(torch.ops.custom_ops.adamw_.default, (*given.values(), *SETTINGS))
    narrow = {**operands(), **{name: [torch.ones(4, dtype=torch.bfloat16)] for name in ("gradients", "copies")}}
    torch.library.opcheck(torch.ops.custom_ops.adamw_.default, (*narrow.values(), *SETTINGS))


def test_the_norm_of_no_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="argument 'gradients': expected one tensor or more, got none"):
        check_gradient_norm([])
    with pytest.raises(TypeError, match=r"computed in torch\.float64, like the first, got torch\.float16"):
        gradient_norm([torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float16)])
