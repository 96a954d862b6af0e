"""Attention with the instruction set that CUSTOM_OPS_CPU names: prints what is wrong, for test_cpu_levels.py."""

import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import custom_ops
from custom_ops.builds.loading import load

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-24, FP64: 2.0**-53}
# head size, heads of queries and of keys, queries, keys, causal. Blocks have 64 rows, tiles 6, vectors 2 to 16 lanes.
SHAPES = (
    (64, 4, 2, 200, 200, True),
    (128, 2, 2, 130, 333, False),
    (65, 2, 1, 70, 133, True),
    (33, 3, 1, 133, 70, True),
    (256, 1, 1, 64, 65, False),
    (1, 2, 2, 5, 3, False),
    (24, 1, 1, 1, 100, False),
    (80, 1, 1, 100, 2, False),
    (16, 2, 1, 257, 257, True),
    (32, 1, 1, 3, 1100, False),  # the keys in parts
    (64, 2, 1, 300, 1100, True),
)
Result = tuple[Tensor, list[Tensor]]


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ours(leaves: Sequence[Tensor], grad: Tensor, causal: bool) -> Result:
    q, k, v = leaves
    out = custom_ops.flash_attention(q, k, v, causal)[0]
    return out, list(torch.autograd.grad(out, leaves, grad))


def torchs(leaves: Sequence[Tensor], grad: Tensor, causal: bool) -> Result:
    q, k, v = leaves
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)  # is_causal would align the first keys, not the last
    mask = seen.tril(k.shape[2] - q.shape[2]) if causal else None
    out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return out, list(torch.autograd.grad(out, leaves, grad))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


def against_float64(dtype: torch.dtype, shape: tuple[int, int, int, int, int, bool]) -> Iterator[str]:
    """The error is at most PyTorch's on the same operands, and two roundings of the result more."""
    head_size, heads_q, heads_kv, queries, keys, causal = shape
    q = drawn(2, heads_q, queries, head_size, dtype=dtype)
    k, v = (drawn(2, heads_kv, keys + i, head_size, dtype=dtype)[:, :, i:] for i in range(2))
    grad = drawn(2, heads_q, queries, head_size + 1, dtype=dtype)[..., 1:]  # strided, and not aligned
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = torchs([x.detach().double().requires_grad_() for x in leaves], grad.double(), causal)
    peer = torchs(leaves, grad.contiguous(), causal)
    found = ours(leaves, grad, causal)
    for name, x, y, right in zip(
        ("out", "dq", "dk", "dv"), (found[0], *found[1]), (peer[0], *peer[1]), (exact[0], *exact[1]), strict=True
    ):
        bound = error(y, right) + 2 * ROUNDOFF[dtype] * (8 if dtype == FP64 else 1)
        if not error(x, right) <= bound:
            yield f"{dtype} {shape} {name}: error {error(x, right):.2e}, expected at most {bound:.2e}"


def special_values(dtype: torch.dtype) -> Iterator[str]:
    """Scores of -inf have no weight; a row without another, or with NaN or +inf, is NaN; other rows are not touched."""
    q, k, v = (drawn(1, 1, 40, 16, dtype=dtype) for _ in range(3))
    q[..., 0], k[..., 0] = 1, 0
    for name, key, value in (("-inf", slice(0, 20), -math.inf), ("nan", 3, math.nan), ("inf", 3, math.inf)):
        keys = k.clone()
        keys[0, 0, key, 0] = value
        for causal in (False, True):
            out, lse = custom_ops.flash_attention(q, keys, v, causal)
            scores = (q.double() @ keys.double().mT / 4).squeeze()
            if causal:
                scores = scores.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -math.inf)
            right = scores.softmax(-1) @ v[0, 0].double()
            if not torch.equal(out[0, 0].isnan(), right.isnan()) or not torch.allclose(
                out[0, 0].double(), right, atol=16 * ROUNDOFF[dtype], equal_nan=True
            ):
                yield f"{dtype} {name} {causal}: {(out[0, 0].double() - right).abs().max()}"
            if value == -math.inf and not torch.equal(lse.isinf()[0, 0], scores.logsumexp(-1).isinf()):
                yield f"{dtype} {name} {causal}: lse {lse}"


def low_scores(dtype: torch.dtype) -> Iterator[str]:
    """Powers that underflow without the row's maximum; the row that fills up an odd number of queries has no weight."""
    q, k, v, grad = (drawn(1, 1, rows, 16, dtype=dtype) for rows in (3, 40, 40, 3))
    q[..., 0], k[..., 0] = 30, -30
    found = ours([x.requires_grad_() for x in (q, k, v)], grad, False)
    exact = torchs([x.detach().double().requires_grad_() for x in (q, k, v)], grad.double(), False)
    for name, x, right in zip(("out", "dq", "dk", "dv"), (found[0], *found[1]), (exact[0], *exact[1]), strict=True):
        # The scores have nine bits before the point.
        if not error(x, right) <= ROUNDOFF[dtype] * (8 if dtype in (BF16, FP16) else 2**10):
            yield f"{dtype} low scores {name}: error {error(x, right):.2e}"


def any_layout(dtype: torch.dtype) -> Iterator[str]:
    """One key has all the weight; strides, alignment, threads and a repetition change no bit."""
    shape = (2, 3, 130, 40)
    q, k, v, grad = (drawn(*shape, dtype=dtype) + i for i in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first = ours(leaves, grad, True)
    moved = [
        torch.empty(2, 130, 3, 43, dtype=dtype)[..., 3:].transpose(1, 2).copy_(x.detach()) for x in (*leaves, grad)
    ]
    alone = custom_ops.flash_attention(q, k[:, :, :1], v[:, :, :1])[0]
    if not torch.allclose(alone, v[:, :, :1].expand_as(q), rtol=4 * ROUNDOFF[dtype], atol=0):
        yield f"{dtype}: the result of one key is not its value"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    second = ours([x.requires_grad_() for x in moved[:3]], moved[3], True)
    torch.set_num_threads(threads)
    if not all(torch.equal(x, y) for x, y in zip((first[0], *first[1]), (second[0], *second[1]), strict=True)):
        yield f"{dtype}: strided operands or threads change the result"


def main() -> None:
    level = os.environ["CUSTOM_OPS_CPU"]
    wrong = [] if load().instructions == level else [f"uses {load().instructions}"]
    for dtype, shape in itertools.product((FP32, BF16, FP16, FP64), SHAPES):
        wrong += against_float64(dtype, shape)
    for dtype in (FP32, BF16, FP16, FP64):
        wrong += special_values(dtype)
        wrong += low_scores(dtype)
        wrong += any_layout(dtype)
    print("\n".join(f"{level}: {one}" for one in wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
