"""Functions that run eagerly although no log says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compile_bench.catalogue.programs import Repro, program


@program("empty-first-call")
def _empty() -> Repro:
    def broken(x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else (x * mask).sin()

    def fixed(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sin()

    ones = torch.ones(4)
    return Repro(broken, fixed, [(ones, None), (ones, ones)], [(ones, ones)] * 2)


@program("other-method")
def _method() -> Repro:
    class Encoder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

        def encode(self, x: Tensor) -> Tensor:
            return x.sin().cos()

    return Repro(Encoder(), Encoder().encode, [(torch.ones(4),)] * 2, method="encode")


@program("recompile-limit-reached")
def _limit() -> Repro:
    def doubled(x: Tensor) -> Tensor:
        return x.sin() * 2

    calls = [(torch.ones(size),) for size in range(2, 14)]
    dynamic = [(torch.ones(size),) for size in range(2, 14)]
    torch._dynamo.mark_dynamic(dynamic[0][0], 0)
    return Repro(doubled, doubled, calls, dynamic)
