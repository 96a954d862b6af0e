"""Functions that run eagerly although no log says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compile_bench.catalogue.cause import Repro, Theme
from compile_bench.catalogue.conditions import of_guards, of_values

theme = Theme("Eager without a message", "silent")


@theme.cause(
    "empty-first-call",
    "a first call that does nothing with tensors",
    pattern="did nothing with tensors",
    equal=False,
    why="Dynamo never compiles a function that had no tensor operation in its first call.",
    advice="Warm up with a call that takes the usual path, or split the function.",
    when=of_guards.HAS_BRANCH,
)
def _empty() -> Repro:
    def broken(x: Tensor, mask: Tensor | None) -> Tensor:
        return x if mask is None else (x * mask).sin()

    def fixed(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sin()

    ones = torch.ones(4)
    return Repro(broken, fixed, [(ones, None), (ones, ones)], [(ones, ones)] * 2)


@theme.cause(
    "other-method",
    "a call of a method other than forward",
    pattern="compiles forward",
    why="torch.compile(model) compiles forward. model.encode(x) runs eagerly.",
    advice="Use model.encode = torch.compile(model.encode), or call the method from forward.",
    when=of_guards.APART_FROM_FORWARD,
)
def _method() -> Repro:
    class Encoder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

        def encode(self, x: Tensor) -> Tensor:
            return x.sin().cos()

    return Repro(Encoder(), Encoder().encode, [(torch.ones(4),)] * 2, method="encode")


@theme.cause(
    "recompile-limit-reached",
    "a function past the recompile limit",
    pattern="recompile.limit",
    options={"dynamic": False},
    why="Past torch._dynamo.config.recompile_limit, new inputs run eagerly. One warning says so; the structured trace "
    "does not.",
    advice="Keep {value} constant, or put it into a tensor.",
    when=of_values.STATE,
)
def _limit() -> Repro:
    def doubled(x: Tensor) -> Tensor:
        return x.sin() * 2

    calls = [(torch.ones(size),) for size in range(2, 14)]
    dynamic = [(torch.ones(size),) for size in range(2, 14)]
    torch._dynamo.mark_dynamic(dynamic[0][0], 0)
    return Repro(doubled, doubled, calls, dynamic)
