"""Random operands of every kind on a CPU against float64, within the bounds that the other tests derive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import custom_ops
from custom_ops.operators.checks import DTYPES, wide
from custom_ops.operators.flash_attention import reference
from custom_ops.operators.rotary import formula

from .random_training import LOSSES, OPTIMIZERS, lose, losses, train, trainings
from .test_cross_entropy import IGNORED, check_rows
from .test_glu import FORMS
from .test_glu import check as check_glu
from .test_operators import check_bias_gelu, floor_of

PROGRAMS = {
    "programs": "operators × shapes × strides × alignments × dtypes × flags, forward and backward",
    "oracle": "float64, within derived bounds",
}
LAYOUTS = ("contiguous", "misaligned", "transposed", "every second column", "expanded")


@dataclass(frozen=True)
class Operands:
    """How the operands of a call are drawn."""

    operator: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layouts: tuple[str, ...]
    seed: int
    flag: bool

    def tensor(self, index: int, shape: tuple[int, ...] | None = None) -> Tensor:
        """A tensor in its layout, with magnitudes from 2^-6 to 2^3."""
        *lead, n = self.shape if shape is None else shape
        layout = self.layouts[index % len(self.layouts)]
        memory: tuple[int, ...] = (*lead, n)
        if layout == "transposed":
            memory = (n, *lead)
        elif layout == "every second column":
            memory = (*lead, 2 * n)
        elif layout == "expanded":
            memory = (*(1 if (place + self.seed) % 3 else size for place, size in enumerate(lead)), n)
        generator = torch.Generator().manual_seed(1000 * index + self.seed)
        count, offset = torch.Size(memory).numel(), int(layout == "misaligned")
        values = torch.randn(count + offset, generator=generator, dtype=torch.float64)
        values *= 2.0 ** torch.randint(-6, 4, (1,), generator=generator)
        drawn = values.to(self.dtype)[offset:].view(memory)
        if layout == "transposed":
            return drawn.movedim(0, -1)
        return drawn[..., ::2] if layout == "every second column" else drawn.expand(*lead, n)


@st.composite
def operands(draw: st.DrawFn) -> Operands:
    operator = draw(st.sampled_from(list(CHECKS)))
    size = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 768, 1030]))
    if operator == "attention":
        heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
        queries, keys = (draw(st.one_of(st.integers(1, 80), st.sampled_from([64, 130, 257]))) for _ in range(2))
        head_size = draw(st.one_of(st.integers(1, 256), st.sampled_from([64, 128])))
        shape: tuple[int, ...] = (*heads, queries, keys, head_size)
    elif operator == "rotary":
        sizes = (
            st.integers(1, 3),
            st.integers(1, 40),
            st.integers(1, 5),
            st.integers(1, 130).map(lambda half: 2 * half),
        )
        shape = tuple(draw(each) for each in sizes)
    elif operator == "linear":  # rows around a tile of 6 and a block of 480, a sum in registers of 176
        sizes = (st.integers(1, 3), st.sampled_from([1, 5, 6, 7, 16, 61, 480]), size, st.one_of(size, st.just(177)))
        shape = tuple(draw(each) for each in sizes)
    elif operator == "conv_bn_relu":
        shape = (*(draw(st.integers(1, most)) for most in (3, 3, 3, 3)), *(draw(st.integers(7, 12)) for _ in "hw"))
    else:
        shape = (*draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)), draw(size))
    layouts = tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=3, max_size=3)))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 999))
    return Operands(operator, dtype, shape, layouts, seed, draw(st.booleans()))


def near(found: Tensor, exact: Tensor, size: Tensor, dtype: torch.dtype) -> None:
    """One rounding to the dtype, and in its arithmetic four of the size of the terms."""
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 2 * torch.finfo(wide(dtype)).eps * size + floor_of(dtype)
    assert found.is_contiguous()
    assert ((found.double() - exact).abs() <= bound).all()


def elementwise(given: Operands) -> None:
    a, b = (given.tensor(index).detach().requires_grad_() for index in range(2))
    grad, alpha = given.tensor(2), 0.37
    exact_a, exact_b, exact_grad = (x.detach().double() for x in (a, b, grad))
    size = exact_a.abs() + exact_b.abs()
    near(custom_ops.vector_add(a, b), exact_a + exact_b, size, given.dtype)
    out = custom_ops.axpb(a, b, alpha)
    near(out, alpha * exact_a + exact_b, size, given.dtype)
    near(custom_ops.scale(a, alpha), alpha * exact_a, size, given.dtype)
    da, db = torch.autograd.grad(out, (a, b), grad)
    near(da.contiguous(), alpha * exact_grad, exact_grad.abs(), given.dtype)
    assert torch.equal(db, grad)


def bias_gelu(given: Operands) -> None:
    check_bias_gelu(given.tensor(0), given.tensor(1, given.shape[-1:]), given.tensor(2))


def glu(given: Operands) -> None:
    gate, up, grad = (given.tensor(index) for index in range(3))
    name = "geglu" if given.flag else "swiglu"
    packed = torch.cat((gate, up), -1).requires_grad_()
    check_glu(name, packed, packed.chunk(2, -1), grad)
    op = FORMS[name][0]
    assert torch.equal(op(gate, up), op(gate.contiguous(), up.contiguous()))


def rotary(given: Operands) -> None:
    """Two products and a sum, each rounded, of a vector whose length bounds all three; then the result."""
    _, tokens, _, size = given.shape
    x, grad = given.tensor(0).detach().requires_grad_(), given.tensor(1)
    angle = torch.arange(tokens, dtype=torch.float64)[:, None] * 10000.0 ** -(torch.arange(size // 2) / size)
    cos, sin = (each.to(wide(given.dtype)) for each in (angle.cos(), angle.sin()))
    y = custom_ops.rotary(x, cos, sin)
    (dx,) = torch.autograd.grad(y, x, grad)
    for found, turned, way in ((y, x.detach(), 1.0), (dx, grad, -1.0)):
        exact = formula(turned.double(), cos.double(), way * sin.double())
        length = torch.hypot(*turned.double().chunk(2, -1)).repeat(1, 1, 1, 2)
        near(found, exact, 1.5 * length, given.dtype)


def linear(given: Operands) -> None:
    """A sum of n products has an error of n roundings at most (Higham, 2002, section 3.1), as has the reference."""
    *lead, columns, depth = given.shape
    dtype = given.dtype
    shapes = (*lead, depth), (columns, depth), (*lead, columns)
    x, weight, grad = (given.tensor(index, shape) for index, shape in enumerate(shapes))
    leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
    if dtype == wide(dtype):
        y = custom_ops.linear(*leaves)
    else:  # the layer takes torch's products where they are fast
        y = torch.ops.custom_ops.mm(leaves[0].flatten(0, -2), leaves[1].t()).unflatten(0, lead)
    found = (y, *torch.autograd.grad(y, leaves, grad))
    rows, flat = x.double().flatten(0, -2), grad.double().flatten(0, -2)
    products = ((rows, weight.double().t()), (flat, weight.double()), (flat.t(), rows))
    for ours, (a, b) in zip(found, products, strict=True):
        exact = a @ b
        bound = 2 * a.shape[1] * torch.finfo(wide(dtype)).eps / 2 * 1.01 * (a.abs() @ b.abs()) + floor_of(dtype)
        bound += torch.finfo(dtype).eps / 2 * (exact.abs() + bound)
        assert ((ours.double().flatten(0, -2) - exact).abs() <= bound).all()


def conv_bn_relu(given: Operands) -> None:
    """The convolution is torch's; the kernel scales, shifts and clips its result."""
    batch, groups, per_group, filters, *image = given.shape
    stride, padding, dilation = (1 + given.seed % 2, given.seed % 3, 1 + given.seed // 2 % 2)
    x = given.tensor(0, (batch, groups * per_group, *image))
    if given.flag:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = given.tensor(1, (groups * filters, per_group, 3, 2)).contiguous()
    generator = torch.Generator().manual_seed(given.seed)
    scale, shift = torch.randn(2, groups * filters, generator=generator, dtype=wide(given.dtype))
    geometry = (stride, padding, dilation, groups)
    y = custom_ops.conv_bn_relu(x, weight, scale, shift, *geometry)
    convolved = torch.conv2d(x, weight, None, *geometry).double()
    scaled, shift = convolved * scale.double().view(-1, 1, 1), shift.double().view(-1, 1, 1)
    bound = torch.finfo(given.dtype).eps / 2 * (scaled + shift).abs() + floor_of(given.dtype)
    bound += 2 * torch.finfo(wide(given.dtype)).eps * (scaled.abs() + shift.abs())
    assert ((y.double() - torch.relu(scaled + shift)).abs() <= bound).all()


def cross_entropy(given: Operands) -> None:
    rows = torch.Size(given.shape[:-1]).numel()
    logits = given.tensor(0, (rows, given.shape[-1])).contiguous()
    generator = torch.Generator().manual_seed(given.seed)
    targets = torch.randint(given.shape[-1], (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.2] = IGNORED
    check_rows(logits, targets, padding=given.seed % 9 if given.flag else 0)


def attention(given: Operands) -> None:
    """p has the errors of its score, a sum of D products, and of its row's sum; 16-bit operands of products round it.

    out = p v, dv = pᵀ dO, dq = s (p ∘ (dO vᵀ − δ)) k, dk the same with q, δ = rowsum(dO ∘ out); p's error acts on each
    term, so the terms count with their magnitudes.
    """
    heads_q, heads_kv, queries, keys, head_size = given.shape
    q, grad = (given.tensor(index, (2, heads_q, queries, head_size)) for index in (0, 3))
    k, v = (given.tensor(index, (2, heads_kv, keys, head_size)) for index in (1, 2))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = custom_ops.flash_attention(*leaves, given.flag)[0]
    found = (out, *torch.autograd.grad(out, leaves, grad))

    exact = [x.detach().double().requires_grad_() for x in leaves]
    right = reference(*exact, given.flag, None)[0]
    wanted = (right, *torch.autograd.grad(right, exact, grad.double()))
    groups, scale = heads_q // heads_kv, head_size**-0.5
    q, grad, right = (x.detach().double().abs() for x in (q, grad, right))
    signed_k = k.double().repeat_interleave(groups, 1)
    k, v = (x.double().abs().repeat_interleave(groups, 1) for x in (k, v))
    size = scale * q @ k.mT
    scores = scale * exact[0].detach() @ signed_k.mT
    if given.flag:
        unseen = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
        scores = scores.masked_fill(unseen, float("-inf"))
    unit, narrow = torch.finfo(wide(given.dtype)).eps, torch.finfo(given.dtype).eps
    relative = unit * ((head_size + 4) * size.amax(-1, keepdim=True) + keys + 16)
    p = scores.softmax(-1).nan_to_num(0.0) * (
        relative + (narrow if given.dtype in (torch.float16, torch.bfloat16) else 0)
    )
    terms = 2 * p * (grad @ v.mT + (grad * right).sum(-1, keepdim=True))

    def of_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads_kv, groups)).sum(2)

    bounds = (p @ v, scale * terms @ k, of_group(scale * terms.mT @ q), of_group(p.mT @ grad))
    lost = floor_of(given.dtype) * keys * queries * (1 + grad.max() * v.max() * max(k.max(), q.max()))
    for ours, value, bound in zip(found, wanted, bounds, strict=True):
        assert ((ours.double() - value).abs() <= 2 * bound + narrow * value.abs() + lost).all()


CHECKS: dict[str, Callable[[Operands], None]] = {
    "elementwise": elementwise,
    "bias_gelu": bias_gelu,
    "glu": glu,
    "cross_entropy": cross_entropy,
    "attention": attention,
    "rotary": rotary,
    "linear": linear,
    "conv_bn_relu": conv_bn_relu,
}


def agree(given: Operands) -> str:
    CHECKS[given.operator](given)
    return given.operator


@pytest.mark.fuzz
def test_every_operator_is_within_its_bound(fuzz):
    fuzz.run(operands(), agree, **PROGRAMS, wanted=2500)


def test_some_operands_are_within_their_bounds(fuzz):
    fuzz.run(operands(), agree, **PROGRAMS, wanted=40)


@pytest.mark.fuzz
def test_every_optimizer_is_torchs(fuzz):
    fuzz.run(trainings(), train, **OPTIMIZERS, wanted=1500)


def test_some_optimizers_are_torchs(fuzz):
    fuzz.run(trainings(), train, **OPTIMIZERS, wanted=25)


@pytest.mark.fuzz
def test_every_loss_is_within_its_bound(fuzz):
    fuzz.run(losses(), lose, **LOSSES, wanted=1500)


def test_some_losses_are_within_their_bounds(fuzz):
    fuzz.run(losses(), lose, **LOSSES, wanted=25)
