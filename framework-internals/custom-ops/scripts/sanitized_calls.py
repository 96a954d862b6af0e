"""Calls every operator, forward and backward, on small operands: what sanitize.py runs under compute-sanitizer.

It also runs alone, on a CPU too: `sanitized_calls.py --device cpu decode`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import custom_ops
from custom_ops.operators.checks import wide

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Operands:
    """Draws tensors on a device, and takes backward passes."""

    def __init__(self, device: str, short: bool) -> None:
        self.device, self.short = device, short

    def drawn(self, *shape: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A leaf, ``offset`` elements behind the start of its memory."""
        size = torch.Size(shape).numel()
        return torch.randn(size + offset, device=self.device).to(dtype)[offset:].view(shape).requires_grad_()

    def starts(self, *ends: int) -> Tensor:
        """The first row of each packed sequence, and the number of rows."""
        return torch.tensor([0, *ends], dtype=torch.int32, device=self.device)


def backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.randn_like(result) for result in results])


def elementwise(on: Operands, products: bool) -> None:
    for dtype, offset, (rows, columns) in itertools.product(DTYPES, (0, 1), ((1, 1), (3, 7), (65, 1000), (33, 4096))):
        x, other = (on.drawn(rows, columns, dtype=dtype, offset=offset) for _ in range(2))
        backward(custom_ops.vector_add(x, other), custom_ops.axpb(x, other, 0.5), custom_ops.scale(x))
        backward(custom_ops.vector_add(x, on.drawn(rows, columns, dtype=dtype, offset=1 - offset)))
        backward(custom_ops.vector_add(on.drawn(columns, rows, dtype=dtype, offset=offset).t(), other))
        backward(custom_ops.bias_gelu(x, on.drawn(columns, dtype=dtype, offset=offset)))
        backward(custom_ops.swiglu(x, other), custom_ops.geglu(x, other, approximate="tanh"))
        backward(custom_ops.geglu(on.drawn(rows, 2 * columns, dtype=dtype, offset=offset)))
    for dtype, size, batch, interleaved in itertools.product(DTYPES, (6, 64), ((), (2,)), (False, True)):
        angles = torch.randn(*batch, 5, size // 2, device=on.device, dtype=wide(dtype))
        for pairs in (size // 2, size // 2 - 1):
            tables = angles[..., :pairs].contiguous()
            x = on.drawn(2, 5, 3, size, dtype=dtype)
            backward(custom_ops.rotary(x, tables.cos(), tables.sin(), interleaved=interleaved))


def loss(on: Operands, products: bool) -> None:
    for dtype, (rows, columns) in itertools.product(DTYPES, ((1, 1), (3, 7), (65, 1000), (33, 4096))):
        targets = torch.randint(columns, (rows,), device=on.device)
        weights = torch.rand(columns, device=on.device, dtype=wide(dtype))
        if products:
            parts: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 5.0, "class_weight": weights}
            for mode, options in itertools.product(("fast", "least_memory"), ({}, parts)):
                x, weight = on.drawn(rows, 8, dtype=dtype), on.drawn(columns, 8, dtype=dtype)
                backward(custom_ops.linear_cross_entropy(x, weight, targets, mode=mode, **options))
            continue
        for offset in (0, 1):
            _kernels_of_loss(on.drawn(rows, columns, dtype=dtype, offset=offset).detach(), targets, weights)


def _kernels_of_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> None:
    (rows, columns), ops = logits.shape, torch.ops.custom_ops
    two, three, five = (torch.ones(rows, count, device=logits.device, dtype=weights.dtype) for count in (2, 3, 5))
    ops.cross_entropy_block_sums_(logits, targets, 0, columns, -100, two, two[:, 0].clone())
    ops.cross_entropy_block_gradient_(logits.clone(), targets, 0, columns, -100, two)
    ops.cross_entropy_gradient_(logits.clone(), targets, columns, -100)
    parts = (weights, 0.1 / columns, 5.0)
    ops.general_cross_entropy(logits, targets, columns, -100, three, *parts, True)
    ops.general_cross_entropy_gradient_(logits.clone(), targets, columns, -100, three, *parts, True)
    ops.general_cross_entropy_block_sums_(logits, targets, 0, columns, -100, *parts, True, five, five[:, 0].clone())
    ops.general_cross_entropy_block_gradient_(logits, targets, 0, columns, -100, *parts, three)


def convolution(on: Operands, products: bool) -> None:
    for dtype, side in itertools.product(DTYPES, (7, 16)):
        image, weight = on.drawn(2, 3, side, side, dtype=dtype), on.drawn(5, 3, 3, 3, dtype=dtype)
        scale, shift = (torch.randn(5, device=on.device, dtype=wide(dtype)) for _ in range(2))
        custom_ops.conv_bn_relu(image.detach(), weight.detach(), scale, shift, padding=1)


def optimizer(on: Operands, products: bool) -> None:
    for dtype, count, amsgrad in itertools.product(DTYPES, (1, 17, 70_001), (False, True)):
        parameters = [on.drawn(count, dtype=dtype), on.drawn(3, 5, dtype=dtype)]
        optimizer = custom_ops.AdamW(parameters, amsgrad=amsgrad)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.step(norm=optimizer.gradient_norm())


def problems(
    on: Operands, sizes: tuple[int, ...], lengths: Iterable[tuple[int, int]], heads: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    """Operands of attention and whether it is causal, in every dtype; for a short run, of every kind of kernel."""
    dtypes, masks = ((torch.float32, torch.bfloat16), (False,)) if on.short else (DTYPES, (False, True))
    for dtype, size, (queries, keys), causal in itertools.product(dtypes, sizes, lengths, masks):
        k, v = (on.drawn(1, heads[1], keys, size, dtype=dtype) for _ in range(2))
        yield on.drawn(1, heads[0], queries, size, dtype=dtype), k, v, causal


def attention(on: Operands, products: bool) -> None:
    lengths = ((130, 264),) if on.short else ((1, 1), (130, 130), (67, 259), (130, 264))
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        for q, k, v, causal in problems(on, (64, 128, 256) if on.short else (32, 64, 96, 128, 256), lengths, (4, 2)):
            backward(custom_ops.flash_attention(q, k, v, causal)[0])
        for operands in problems(on, (64, 96, 256), lengths, (4, 2)):
            features(on, *operands)


def features(on: Operands, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """What attention may have beside the mask, forward and backward."""
    queries, keys, slopes = q.shape[2], k.shape[2], torch.rand(4, device=on.device)
    sinks = on.drawn(4, dtype=torch.float32)
    bent = {"window_size": (40, -1), "softcap": 5.0, "sinks": sinks}
    biases = [on.drawn(*shape, dtype=q.dtype) for shape in ((1, 4, queries, keys), (1, 1, 1, keys), (queries, 1))]
    hidden = torch.rand(queries, keys, device=on.device) < 0.5
    for options in (
        bent,
        *({"attn_mask": x} for x in (*biases, hidden)),
        {"attn_mask": biases[0], "alibi_slopes": slopes},
    ):
        backward(custom_ops.flash_attention(q, k, v, causal, **options)[0])
    packed = {f"cu_seqlens_{name}": on.starts(n // 3, n // 3, n) for name, n in (("q", queries), ("k", keys))}
    rows = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
    for window in ((-1, -1), (17, 9)):
        backward(custom_ops.flash_attention(*rows, causal, window_size=window, softcap=5.0, **packed)[0])


def decode(on: Operands, products: bool) -> None:
    """Few queries beside keys that several blocks take in parts; more than sixteen heads that share them."""
    lengths = list(
        itertools.product((1, 40), (1000,)) if on.short else itertools.product((1, 3, 40), (1, 127, 1000, 4100))
    )
    with torch.no_grad():
        for heads, sizes in (((8, 2), (64, 128, 256) if on.short else (64, 80, 128, 256)), ((20, 1), (64,))):
            sinks = torch.randn(heads[0], device=on.device)
            for q, k, v, causal in problems(on, sizes, lengths, heads):
                custom_ops.flash_attention(q, k, v, causal)
                custom_ops.flash_attention(q, k, v, causal, softcap=5.0, sinks=sinks, window_size=(600, 0))


GROUPS = {group.__name__: group for group in (elementwise, loss, convolution, optimizer, attention, decode)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="*", help=f"{', '.join(GROUPS)}; all of them by default")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--short", action="store_true", help="attention and decode: one problem of each kind of kernel")
    parser.add_argument("--no-products", action="store_true", help="the loss without cuBLAS's products")
    given = parser.parse_args()
    if unknown := set(given.groups) - set(GROUPS):
        parser.error(f"expected {', '.join(GROUPS)}, got {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    assert given.device == "cpu" or custom_ops.load().cuda is not None, custom_ops.build_info()
    for name in given.groups or GROUPS:
        GROUPS[name](Operands(given.device, given.short), not given.no_products)
        if given.device == "cuda":
            torch.cuda.synchronize()
        print(f"{name}: every call returned", flush=True)


if __name__ == "__main__":
    main()
