"""Causes of recompilations, and of functions that reach the recompile limit."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.catalogue.programs import Repro, broken, program
from compile_bench.catalogue.programs.shared import VECTOR, sine

_scale = 1  # the global that the cause "global-changed" changes


def _doubled_sine(x: Tensor) -> Tensor:
    return x.sin() * 2


def _marked(*sizes: int) -> list[tuple[Tensor]]:
    """A batch of each size. The first dimension of the first batch is marked as dynamic."""
    batches = [(torch.ones(size, 8),) for size in sizes]
    torch._dynamo.mark_dynamic(batches[0][0], 0)
    return batches


@program("last-batch")
def _batch() -> Repro:
    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(n, 8),) for n in (32, 32, 20)], _marked(32, 32, 20))


@program("growing-sequence")
def _growing() -> Repro:
    def broken(x: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([cache, x]).sum(0)

    def fixed(x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        return cache.index_copy(0, position, x).sum(0)

    growing = [(torch.ones(1, 4), torch.ones(length, 4)) for length in range(2, 6)]
    static = [(torch.ones(1, 4), torch.zeros(8, 4), torch.tensor([position])) for position in range(4)]
    return Repro(broken, fixed, growing, static)


@program("sequence-length")
def _length() -> Repro:
    def marked() -> list[tuple[Tensor]]:
        batches = [(torch.ones(4, length),) for length in (8, 16, 24)]
        torch._dynamo.mark_dynamic(batches[0][0], 1)
        return batches

    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(4, length),) for length in (8, 16, 24)], marked())


@program("batch-of-one")
def _one() -> Repro:
    def padded(x: Tensor) -> Tensor:
        return _doubled_sine(x)[:1]

    calls = [(torch.ones(n, 8),) for n in (1, 4)]
    return Repro(lambda x: _doubled_sine(x)[:1], padded, calls, [(torch.ones(4, 8),), (torch.ones(4, 8),)])


@broken(
    "shape-tested",
    fixed=sine,
    calls=[(torch.ones(n, 8),) for n in (16, 24, 21)],
    fixed_calls=[(torch.ones(24, 8),)] * 3,
)
def _tested(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] % 8 == 0 else x.cos()


@program("dtype")
def _dtype() -> Repro:
    calls = [(torch.ones(8, dtype=dtype),) for dtype in (torch.float32, torch.float64)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.float(),) for (x,) in calls])


@program("layout")
def _layout() -> Repro:
    calls = [(torch.ones(4, 8),), (torch.ones(8, 4).t(),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.contiguous(),) for (x,) in calls])


@program("rank")
def _rank() -> Repro:
    calls = [(torch.ones(8),), (torch.ones(1, 8),)]
    return Repro(
        lambda x: _doubled_sine(x).flatten(), lambda x: _doubled_sine(x).flatten(), calls, [(torch.ones(8),)] * 2
    )


@program("requires-grad")
def _requires_grad() -> Repro:
    calls = [(torch.ones(8),), (torch.ones(8, requires_grad=True),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.detach(),) for (x,) in calls])


@program("aliased")
def _aliased() -> Repro:
    def added(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    same = torch.ones(4)
    return Repro(added, added, [(torch.ones(4), torch.ones(4)), (same, same)], [(torch.ones(4), torch.ones(4))] * 2)


@program("parameter-or-tensor")
def _parameter() -> Repro:
    calls: list[tuple[Any, ...]] = [(torch.ones(4),), (nn.Parameter(torch.ones(4)),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.detach(),) for (x,) in calls])


@program("device")
def _device() -> Repro:
    calls = [(torch.ones(8, device=device),) for device in ("cpu", "meta")]
    return Repro(_doubled_sine, _doubled_sine, calls, [calls[0]] * 2)


@program("inference-mode")
def _inference() -> Repro:
    modes = (torch.no_grad, torch.inference_mode)

    def made(x: Tensor) -> Tensor:
        return _doubled_sine(x + 1)

    return Repro(made, made, [VECTOR] * 2, around=lambda index: modes[index % 2]())


@program("grad-mode")
def _grad_mode() -> Repro:
    contexts = (contextlib.nullcontext, torch.no_grad)
    return Repro(_doubled_sine, _doubled_sine, [VECTOR] * 2, around=lambda index: contexts[index % 2]())


@program("autocast")
def _autocast() -> Repro:
    return Repro(
        _doubled_sine,
        _doubled_sine,
        [VECTOR] * 2,
        around=lambda index: torch.autocast("cpu", torch.bfloat16, enabled=bool(index % 2)),
    )


@program("train-and-eval")
def _training() -> Repro:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return Repro(model, model, [VECTOR] * 2, around=lambda index: contextlib.nullcontext(model.train(index % 2 == 0)))


@program("deterministic-flag")
def _deterministic() -> Repro:
    @contextlib.contextmanager
    def switched(index: int) -> Any:
        torch.use_deterministic_algorithms(bool(index % 2))
        yield
        torch.use_deterministic_algorithms(False)

    return Repro(_doubled_sine, _doubled_sine, [VECTOR] * 2, around=switched)


@program("torch-setting")
def _setting() -> Repro:
    @contextlib.contextmanager
    def changed(index: int) -> Any:
        torch.set_default_dtype(torch.float64 if index % 2 else torch.float32)
        yield
        torch.set_default_dtype(torch.float32)

    return Repro(_doubled_sine, _doubled_sine, [VECTOR] * 2, around=changed)


@program("integer-argument")
def _integer() -> Repro:
    def scaled(x: Tensor, step: Any) -> Tensor:
        return x * (1.0 / (step + 1.0))

    numbers = (2, 3, 4)
    return Repro(scaled, scaled, [(*VECTOR, n) for n in numbers], [(*VECTOR, torch.tensor(float(n))) for n in numbers])


@program("float-argument")
def _float() -> Repro:
    def scaled(x: Tensor, rate: Any) -> Tensor:
        return x * rate

    rates = (0.5, 0.25, 0.125)
    return Repro(scaled, scaled, [(*VECTOR, r) for r in rates], [(*VECTOR, torch.tensor(r)) for r in rates])


@program("text-argument")
def _text() -> Repro:
    def chosen(x: Tensor, mode: str = "sin") -> Tensor:
        return x.sin() if mode == "sin" else x.cos()

    def sine(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(
        lambda x, mode: chosen(x, mode) * 0,
        lambda x: sine(x) * 0,
        [(*VECTOR, "sin"), (*VECTOR, "cos")],
        [VECTOR] * 2,
    )


@program("another-function")
def _function() -> Repro:
    def applied(x: Tensor, function: Any) -> Tensor:
        return function(x) + 1

    def sine(x: Tensor) -> Tensor:
        return x.sin()

    def cosine(x: Tensor) -> Tensor:
        return x.cos()

    return Repro(applied, applied, [(*VECTOR, sine), (*VECTOR, cosine)], [(*VECTOR, sine)] * 2)


@program("filled-by-first-call")
def _filled() -> Repro:
    class Filling(nn.Module):
        def __init__(self, positions: Tensor | None) -> None:
            super().__init__()
            self.positions = positions

        def forward(self, x: Tensor) -> Tensor:
            if self.positions is None:
                self.positions = torch.arange(4.0)
            return x * self.positions

    return Repro(Filling(None), Filling(torch.arange(4.0)), [VECTOR] * 3)


@program("optional-argument")
def _optional() -> Repro:
    def masked(x: Tensor, mask: Tensor | None) -> Tensor:
        return x.sin() if mask is None else x.sin() * mask

    ones = torch.ones(4)
    return Repro(masked, masked, [(ones, None), (ones, ones)], [(ones, ones)] * 2)


@program("configuration-object")
def _configuration() -> Repro:
    class Options:
        def __init__(self, scale: Any) -> None:
            self.scale = scale

    def scaled(x: Tensor, options: Options) -> Tensor:
        return x * options.scale

    scales = (2.0, 3.0)
    return Repro(
        scaled,
        scaled,
        [(*VECTOR, Options(scale)) for scale in scales],
        [(*VECTOR, Options(torch.tensor(scale))) for scale in scales],
    )


@program("global-changed")
def _global() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * _scale

    def fixed(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @contextlib.contextmanager
    def changed(index: int) -> Any:
        global _scale
        _scale = index + 2
        yield

    return Repro(broken, fixed, [VECTOR] * 3, [(*VECTOR, torch.tensor(n)) for n in (2, 3, 4)], around=changed)


@program("value-across-break")
def _across() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * round(x.sum().item())

    def fixed(x: Tensor) -> Tensor:
        return x * x.sum().round()

    return Repro(broken, fixed, [(torch.full((4,), float(n)),) for n in (2, 3, 4)])


@program("dictionary-keys")
def _keys() -> Repro:
    def broken(x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return x + sum(extra.values())

    ones = torch.ones(4)
    calls = [(ones, {str(key): ones for key in range(size)}) for size in (1, 2, 3)]
    stacked = [(ones, torch.cat([torch.ones(size, 4), torch.zeros(3 - size, 4)])) for size in (1, 2, 3)]
    return Repro(broken, lambda x, extra: x + extra.sum(0), calls, stacked)


@program("counter")
def _counter() -> Repro:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    class Buffered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.calls: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return x * self.calls

    return Repro(Counting(), Buffered(), [VECTOR] * 12)


@program("annealed-attribute")
def _annealed() -> Repro:
    class Annealed(nn.Module):
        def __init__(self, temperature: Any) -> None:
            super().__init__()
            self.temperature = temperature

        def forward(self, x: Tensor) -> Tensor:
            self.temperature = self.temperature * 0.5
            return x * self.temperature

    return Repro(Annealed(1.0), Annealed(torch.tensor(1.0)), [VECTOR] * 6)


@program("static-shapes")
def _static() -> Repro:
    sizes = range(2, 14)
    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(n, 8),) for n in sizes], _marked(*sizes))


@program("growing-list")
def _list() -> Repro:
    def broken(x: Tensor, cache: list[Tensor]) -> Tensor:
        return x + torch.stack(cache).sum(0)

    def fixed(x: Tensor, cache: Tensor) -> Tensor:
        return x + cache.sum(0)

    ones = torch.ones(4)
    return Repro(broken, fixed, [(ones, [ones] * n) for n in range(1, 13)], [(ones, torch.zeros(16, 4))] * 12)


@program("kept-activations")
def _kept() -> Repro:
    class Keeping(nn.Module):
        def __init__(self, keep: bool) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            self.keep = keep

        def forward(self, x: Tensor) -> Tensor:
            if self.keep:
                self.kept.append(x.mean())
            return x.sin()

    return Repro(Keeping(keep=True), Keeping(keep=False), [VECTOR] * 12)
