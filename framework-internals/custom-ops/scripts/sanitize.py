"""Runs every operator, forward and backward, under NVIDIA's compute-sanitizer.

    ./scripts/python.sh framework-internals/custom-ops/scripts/sanitize.py --tool memcheck

It finds out-of-bounds accesses, races and uninitialised memory. It needs a GPU and the CUDA toolkit's
compute-sanitizer, and uses the same library as `custom_ops` (CUSTOM_OPS_LIBRARY names another). The exit status is 1 if
anything is reported. NOTES.md explains racecheck's false reports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Annotated

import typer

TOOLS = ("memcheck", "initcheck", "racecheck")

# torch's caching allocator would hide an access beyond a tensor, so each tensor gets its own allocation.
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

WORK = """
import itertools, os, torch, custom_ops
torch.manual_seed(0)
assert custom_ops.load().cuda is not None, custom_ops.build_info()
def drawn(*shape, dtype, offset=0):
    size = torch.Size(shape).numel()
    return torch.randn(size + offset, device="cuda").to(dtype)[offset:].view(shape).requires_grad_()
def backward(*results):
    torch.autograd.backward(results, [torch.randn_like(result) for result in results])
dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
calls = 0
for dtype, offset, (rows, columns) in itertools.product(dtypes, (0, 1), ((1, 1), (3, 7), (65, 1000), (33, 4096))):
    x, other = (drawn(rows, columns, dtype=dtype, offset=offset) for _ in range(2))
    bias = drawn(columns, dtype=dtype, offset=offset)
    backward(custom_ops.vector_add(x, other), custom_ops.axpb(x, other, 0.5), custom_ops.scale(x))
    backward(custom_ops.bias_gelu(x, bias))
    targets = torch.randint(columns, (rows,), device="cuda")
    if os.environ["SANITIZER"] == "initcheck":  # it misses what cuBLAS's products store (NOTES.md)
        logits = drawn(rows, columns, dtype=dtype, offset=offset).detach()
        sums = torch.ones(rows, 2, device="cuda", dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        ops = torch.ops.custom_ops
        ops.cross_entropy_block_sums_(logits, targets, 0, columns, -100, sums, sums[:, 0].clone())
        ops.cross_entropy_block_gradient_(logits.clone(), targets, 0, columns, -100, sums)
        ops.cross_entropy_gradient_(logits, targets, columns, -100)
    else:
        for mode in ("fast", "least_memory"):
            x, weight = drawn(rows, 8, dtype=dtype), drawn(columns, 8, dtype=dtype)
            backward(custom_ops.linear_cross_entropy(x, weight, targets, mode=mode))
    calls += 6
for dtype, side in itertools.product(dtypes, (7, 16)):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    image, weight = drawn(2, 3, side, side, dtype=dtype), drawn(5, 3, 3, 3, dtype=dtype)
    scale, shift = (torch.randn(5, device="cuda", dtype=wide) for _ in range(2))
    custom_ops.conv_bn_relu(image.detach(), weight.detach(), scale, shift, padding=1)
    calls += 1
for deterministic in (False, True):
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    for dtype, head_size, causal in itertools.product(dtypes, (32, 64, 96, 128, 256), (False, True)):
        for queries, keys in ((1, 1), (130, 130), (67, 259)):
            q = drawn(1, 4, queries, head_size, dtype=dtype)
            k, v = (drawn(1, 2, keys, head_size, dtype=dtype) for _ in range(2))
            backward(custom_ops.flash_attention(q, k, v, causal)[0])
            bias, sinks = drawn(1, 4, queries, keys, dtype=dtype), torch.randn(4, device="cuda", requires_grad=True)
            backward(custom_ops.flash_attention(q, k, v, causal, window_size=(40, -1), softcap=5.0, sinks=sinks)[0])
            backward(custom_ops.flash_attention(q, k, v, causal, attn_mask=bias, alibi_slopes=torch.rand(4).cuda())[0])
            starts = torch.tensor([[0, n // 3, n // 3, n] for n in (queries, keys)], dtype=torch.int32).cuda()
            rows = [x.detach()[0].transpose(0, 1).requires_grad_() for x in (q, k, v)]
            packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
            backward(custom_ops.flash_attention(*rows, causal, **packed)[0])
            calls += 4
torch.cuda.synchronize()
print("calls:", calls)
"""


def main(
    tool: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(TOOLS)}; repeat for several. Default: all three.")
    ] = None,
) -> None:
    """Run every operator under compute-sanitizer."""
    tools = tool or list(TOOLS)
    if unknown := [name for name in tools if name not in TOOLS]:
        sys.exit(f"sanitize.py: --tool: expected {', '.join(TOOLS)}, got {unknown[0]!r}")
    program = shutil.which("compute-sanitizer")
    if program is None:
        sys.exit(
            "sanitize.py: no compute-sanitizer on PATH; it comes with the CUDA toolkit (its bin folder goes on PATH)"
        )
    failed = []
    for name in tools:
        print(f"sanitize.py: {name}", flush=True)
        command = [program, "--tool", name, "--error-exitcode", "1", "--print-limit", "30", sys.executable, "-c", WORK]
        environment = {**os.environ, **ENVIRONMENT, "SANITIZER": name}
        if subprocess.run(command, env=environment, check=False).returncode != 0:
            failed.append(name)
    print("sanitize.py:", f"reports or an error in {', '.join(failed)}" if failed else "nothing reported")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
