"""What makes a function compile again, and again up to the limit."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.catalogue.cause import Repro, Theme

shapes = Theme("Recompiled: another tensor", "recompile")
values = Theme("Recompiled: another value", "recompile")
limits = Theme("Recompiled until the limit, then eager", "recompile")
_VECTOR = (torch.ones(4),)


def _doubled_sine(x: Tensor) -> Tensor:
    return x.sin() * 2


def _marked(*sizes: int) -> list[tuple[Tensor]]:
    """A batch of each size, the first with its size marked as one that changes."""
    batches = [(torch.ones(size, 8),) for size in sizes]
    torch._dynamo.mark_dynamic(batches[0][0], 0)
    return batches


@shapes.cause(
    "last-batch",
    "a last, smaller batch",
    pattern="tensor size",
    why="The first size is compiled in; a second one compiles again, with the size as a symbol from then on.",
    advice="mark_dynamic(x, 0) before the first call, drop the last batch, or pad it.",
)
def _batch() -> Repro:
    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(n, 8),) for n in (32, 32, 20)], _marked(32, 32, 20))


@shapes.cause(
    "growing-sequence",
    "a sequence that grows",
    pattern="tensor size",
    equal=False,
    why="Appending with torch.cat gives another size with every step.",
    advice="A preallocated cache with a mask or a position, as static KV caches are.",
)
def _growing() -> Repro:
    def broken(x: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([cache, x]).sum(0)

    def mended(x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        return cache.index_copy(0, position, x).sum(0)

    growing = [(torch.ones(1, 4), torch.ones(length, 4)) for length in range(2, 6)]
    static = [(torch.ones(1, 4), torch.zeros(8, 4), torch.tensor([position])) for position in range(4)]
    return Repro(broken, mended, growing, static)


@shapes.cause(
    "batch-of-one",
    "a batch of one",
    pattern="tensor size|symbolic shape",
    why="Sizes 0 and 1 are never symbols: broadcasting and contiguity differ there.",
    advice="Pad to two, or accept the one compilation more.",
)
def _one() -> Repro:
    def padded(x: Tensor) -> Tensor:
        return _doubled_sine(x)[:1]

    calls = [(torch.ones(n, 8),) for n in (1, 4)]
    return Repro(lambda x: _doubled_sine(x)[:1], padded, calls, [(torch.ones(4, 8),), (torch.ones(4, 8),)])


@shapes.cause(
    "shape-tested",
    "a branch on a size",
    pattern="symbolic shape|tensor size|Python value",
    equal=False,
    why="The branch becomes a condition on the symbol: sizes on the other side compile again.",
    advice="Pad to a size on one side of it.",
)
def _tested() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] % 8 == 0 else x.cos()

    def mended(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, mended, [(torch.ones(n, 8),) for n in (16, 24, 21)], [(torch.ones(24, 8),)] * 3)


@shapes.cause(
    "dtype",
    "another dtype",
    pattern="dtype",
    equal=False,
    why="Code is generated for a dtype.",
    advice="Cast before the call.",
)
def _dtype() -> Repro:
    calls = [(torch.ones(8, dtype=dtype),) for dtype in (torch.float32, torch.float64)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.float(),) for (x,) in calls])


@shapes.cause(
    "layout",
    "another memory layout",
    pattern="tensor layout",
    why="Strides are compiled in.",
    advice=".contiguous() before the call, or channels_last everywhere.",
)
def _layout() -> Repro:
    calls = [(torch.ones(4, 8),), (torch.ones(8, 4).t(),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.contiguous(),) for (x,) in calls])


@shapes.cause(
    "rank",
    "another number of dimensions",
    pattern="tensor rank|tensor size",
    why="The number of loops is compiled in.",
    advice="Give every call the same number of dimensions.",
)
def _rank() -> Repro:
    calls = [(torch.ones(8),), (torch.ones(1, 8),)]
    return Repro(
        lambda x: _doubled_sine(x).flatten(), lambda x: _doubled_sine(x).flatten(), calls, [(torch.ones(8),)] * 2
    )


@shapes.cause(
    "requires-grad",
    "requires_grad of an input changes",
    pattern="requires_grad",
    equal=False,
    why="With it there is a backward graph too.",
    advice="Be consistent: detach, or always track.",
)
def _requires_grad() -> Repro:
    calls = [(torch.ones(8),), (torch.ones(8, requires_grad=True),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.detach(),) for (x,) in calls])


@shapes.cause(
    "aliased",
    "the same tensor passed twice",
    pattern=".",
    why="Inputs that are one tensor make other code than inputs that are two.",
    advice="Clone one, or always pass two.",
)
def _aliased() -> Repro:
    def added(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    same = torch.ones(4)
    return Repro(added, added, [(torch.ones(4), torch.ones(4)), (same, same)], [(torch.ones(4), torch.ones(4))] * 2)


@shapes.cause(
    "parameter-or-tensor",
    "a Parameter here, a tensor there",
    pattern=".",
    equal=False,
    why="Type and requires_grad are guarded.",
    advice="Pass the same kind with every call.",
)
def _parameter() -> Repro:
    calls: list[tuple[Any, ...]] = [(torch.ones(4),), (nn.Parameter(torch.ones(4)),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.detach(),) for (x,) in calls])


@shapes.cause(
    "inference-mode",
    "inference_mode() here, no_grad() there",
    pattern=r"dispatch keys|GLOBAL_STATE|global state|grad",
    why="Tensors of inference mode have other dispatch keys.",
    advice="One mode everywhere.",
)
def _inference() -> Repro:
    modes = (torch.no_grad, torch.inference_mode)

    def made(x: Tensor) -> Tensor:
        return _doubled_sine(x + 1)

    return Repro(made, made, [_VECTOR] * 2, around=lambda index: modes[index % 2]())


@values.cause(
    "grad-mode",
    "with and without gradients",
    pattern="global state",
    why="Two compilations, one for training and one for evaluation: expected, once.",
    advice="Warm both up.",
)
def _grad_mode() -> Repro:
    contexts = (contextlib.nullcontext, torch.no_grad)
    return Repro(_doubled_sine, _doubled_sine, [_VECTOR] * 2, around=lambda index: contexts[index % 2]())


@values.cause(
    "autocast",
    "autocast on and off",
    pattern="global state",
    equal=False,
    why="Autocast is state that is compiled in.",
    advice="One autocast state for every call.",
)
def _autocast() -> Repro:
    return Repro(
        _doubled_sine,
        _doubled_sine,
        [_VECTOR] * 2,
        around=lambda index: torch.autocast("cpu", torch.bfloat16, enabled=bool(index % 2)),
    )


@values.cause(
    "train-and-eval",
    "model.train() and model.eval()",
    pattern=r"train / eval|Python value",
    equal=False,
    why="Dropout and batch norm read .training: one compilation more, expected once.",
    advice="Warm both up.",
)
def _training() -> Repro:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return Repro(model, model, [_VECTOR] * 2, around=lambda index: contextlib.nullcontext(model.train(index % 2 == 0)))


@values.cause(
    "deterministic-flag",
    "use_deterministic_algorithms() switched",
    pattern="global state",
    why="A global flag that is compiled in.",
    advice="Set it once.",
)
def _deterministic() -> Repro:
    @contextlib.contextmanager
    def switched(index: int) -> Any:
        torch.use_deterministic_algorithms(bool(index % 2))
        yield
        torch.use_deterministic_algorithms(False)

    return Repro(_doubled_sine, _doubled_sine, [_VECTOR] * 2, around=switched)


@values.cause(
    "integer-argument",
    "an int argument that counts up",
    pattern="Python value",
    why="The first value is compiled in, the second makes it a symbol; values 0 and 1 stay constants.",
    advice="Pass it as a tensor.",
)
def _integer() -> Repro:
    def scaled(x: Tensor, step: Any) -> Tensor:
        return x * (1.0 / (step + 1.0))

    numbers = (2, 3, 4)
    return Repro(
        scaled, scaled, [(*_VECTOR, n) for n in numbers], [(*_VECTOR, torch.tensor(float(n))) for n in numbers]
    )


@values.cause(
    "float-argument",
    "a float argument that changes, such as a learning rate",
    pattern="Python value",
    why="As for integers; a float becomes a symbol with the second value.",
    advice="Pass it as a tensor without dimensions.",
)
def _float() -> Repro:
    def scaled(x: Tensor, rate: Any) -> Tensor:
        return x * rate

    rates = (0.5, 0.25, 0.125)
    return Repro(scaled, scaled, [(*_VECTOR, r) for r in rates], [(*_VECTOR, torch.tensor(r)) for r in rates])


@values.cause(
    "text-argument",
    "a string or an enumeration as a mode",
    pattern="Python value",
    why="Each value is compiled for itself: specialisation, wanted or not.",
    advice="One compiled function a mode, so that each keeps its own budget of recompilations.",
)
def _text() -> Repro:
    def chosen(x: Tensor, mode: str = "sin") -> Tensor:
        return x.sin() if mode == "sin" else x.cos()

    def sine(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(
        lambda x, mode: chosen(x, mode) * 0,
        lambda x: sine(x) * 0,
        [(*_VECTOR, "sin"), (*_VECTOR, "cos")],
        [_VECTOR] * 2,
    )


@values.cause(
    "optional-argument",
    "an argument that is sometimes None",
    pattern=".",
    why="None is a type of its own.",
    advice="Pass a neutral value: a mask of ones.",
)
def _optional() -> Repro:
    def masked(x: Tensor, mask: Tensor | None) -> Tensor:
        return x.sin() if mask is None else x.sin() * mask

    ones = torch.ones(4)
    return Repro(masked, masked, [(ones, None), (ones, ones)], [(ones, ones)] * 2)


@values.cause(
    "configuration-object",
    "a configuration object with a changing field",
    pattern="Python value",
    why="Attributes that are read are guarded by value.",
    advice="Keep what changes in tensors.",
)
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
        [(*_VECTOR, Options(scale)) for scale in scales],
        [(*_VECTOR, Options(torch.tensor(scale))) for scale in scales],
    )


@values.cause(
    "global-changed",
    "a global that changes between calls",
    pattern="Python value",
    why="Globals that are read are guarded by value.",
    advice="Pass it as a tensor argument.",
)
def _global() -> Repro:
    settings = {"scale": 1}

    def broken(x: Tensor) -> Tensor:
        return x * settings["scale"]

    def mended(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @contextlib.contextmanager
    def changed(index: int) -> Any:
        settings["scale"] = index + 2
        yield

    return Repro(broken, mended, [_VECTOR] * 3, [(*_VECTOR, torch.tensor(n)) for n in (2, 3, 4)], around=changed)


@values.cause(
    "dictionary-keys",
    "a dict argument with other keys",
    pattern="container length|another",
    why="The keys are part of the code.",
    advice="The same keys with every call, or one stacked tensor.",
)
def _keys() -> Repro:
    def broken(x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return x + sum(extra.values())

    def mended(x: Tensor, extra: Tensor) -> Tensor:
        return x + extra.sum(0)

    ones = torch.ones(4)
    calls = [(ones, {str(key): ones for key in range(size)}) for size in (1, 2, 3)]
    stacked = [(ones, torch.cat([torch.ones(size, 4), torch.zeros(3 - size, 4)])) for size in (1, 2, 3)]
    return Repro(broken, mended, calls, stacked)


@limits.cause(
    "counter",
    "self.calls += 1, and the count is used",
    pattern="Python value",
    code=r"\.\w+ \+= ",
    why="An int attribute is compiled in, for every value anew; after 8 the function runs eagerly for good, and only "
    "a warning says so.",
    advice="A buffer: register_buffer and .add_(1).",
)
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
            self.calls.add_(1)
            return x * self.calls

    return Repro(Counting(), Buffered(), [_VECTOR] * 12)


@limits.cause(
    "annealed-attribute",
    "a float attribute that is annealed",
    pattern="Python value",
    why="As for a counter, until Dynamo makes it a symbol with the second value.",
    advice="A buffer.",
)
def _annealed() -> Repro:
    class Annealed(nn.Module):
        def __init__(self, temperature: Any) -> None:
            super().__init__()
            self.temperature = temperature

        def forward(self, x: Tensor) -> Tensor:
            self.temperature = self.temperature * 0.5
            return x * self.temperature

    return Repro(Annealed(1.0), Annealed(torch.tensor(1.0)), [_VECTOR] * 6)


@limits.cause(
    "static-shapes",
    "dynamic=False and shapes that change",
    pattern="tensor size",
    options={"dynamic": False},
    why="Every size compiles; after 8 the function runs eagerly.",
    advice="Leave dynamic unset, mark what changes, or pad to a few sizes.",
)
def _static() -> Repro:
    sizes = range(2, 14)
    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(n, 8),) for n in sizes], _marked(*sizes))


@limits.cause(
    "growing-list",
    "a list of tensors that grows",
    pattern="container length",
    equal=False,
    why="The length of a list is compiled in.",
    advice="One preallocated tensor.",
)
def _list() -> Repro:
    def broken(x: Tensor, cache: list[Tensor]) -> Tensor:
        return x + torch.stack(cache).sum(0)

    def mended(x: Tensor, cache: Tensor) -> Tensor:
        return x + cache.sum(0)

    ones = torch.ones(4)
    return Repro(broken, mended, [(ones, [ones] * n) for n in range(1, 13)], [(ones, torch.zeros(16, 4))] * 12)


@limits.cause(
    "kept-activations",
    "activations appended to a list of the model",
    pattern=r"container length|.",
    why="The list is an input of the graph, longer with every call; it also keeps every tensor alive.",
    advice="Return the activations.",
)
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

    return Repro(Keeping(keep=True), Keeping(keep=False), [_VECTOR] * 12)
