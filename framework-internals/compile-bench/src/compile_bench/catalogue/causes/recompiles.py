"""Causes of recompilations, and of functions that reach the recompile limit."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.catalogue.cause import Repro, Theme
from compile_bench.catalogue.conditions import of_guards, of_places, of_values

shapes = Theme("Recompilations for a different tensor", "recompile")
values = Theme("Recompilations for a different value", "recompile")
limits = Theme("Recompilations up to the limit, then eager", "recompile")
_VECTOR = (torch.ones(4),)
# Sizes 0 and 1 are a separate cause.
_BOTH_LARGE = r"expected (?![01]\b)\d+, actual (?![01]\b)"
# Dynamo writes the long form for attributes of classes that define __getattribute__.
_OF_MODEL = r"^(object\.__getattribute__\()?self\b"
_scale = 1  # the global that the cause "global-changed" changes


def _doubled_sine(x: Tensor) -> Tensor:
    return x.sin() * 2


def _marked(*sizes: int) -> list[tuple[Tensor]]:
    """A batch of each size. The first dimension of the first batch is marked as dynamic."""
    batches = [(torch.ones(size, 8),) for size in sizes]
    torch._dynamo.mark_dynamic(batches[0][0], 0)
    return batches


@shapes.cause(
    "last-batch",
    "a last, smaller batch",
    pattern=rf"size mismatch at index 0\. {_BOTH_LARGE}",
    why="The first size is compiled in as a constant. A second size compiles again, and makes the size a symbol.",
    advice="Call mark_dynamic(x, 0) before the first call, drop the last batch, or pad it.",
    when=of_guards.FREE_SIZE,
)
def _batch() -> Repro:
    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(n, 8),) for n in (32, 32, 20)], _marked(32, 32, 20))


@shapes.cause(
    "growing-sequence",
    "a sequence that grows",
    pattern="size mismatch",
    code=r"\b(cat|concat|concatenate|hstack|vstack)\(",
    equal=False,
    why="torch.cat gives a new size in every step.",
    advice="Use a preallocated cache with a mask or a position, as static KV caches do.",
    when=of_guards.JOINED,
)
def _growing() -> Repro:
    def broken(x: Tensor, cache: Tensor) -> Tensor:
        return torch.cat([cache, x]).sum(0)

    def fixed(x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        return cache.index_copy(0, position, x).sum(0)

    growing = [(torch.ones(1, 4), torch.ones(length, 4)) for length in range(2, 6)]
    static = [(torch.ones(1, 4), torch.zeros(8, 4), torch.tensor([position])) for position in range(4)]
    return Repro(broken, fixed, growing, static)


@shapes.cause(
    "sequence-length",
    "a different sequence length or image size",
    pattern=rf"size mismatch at index [1-9]\d*\. {_BOTH_LARGE}",
    why="The first length is compiled in as a constant. A second length compiles again, and makes the length a symbol.",
    advice="Call mark_dynamic(x, 1) before the first call, or pad to a few lengths. compile-bench run measures "
    "which of them costs less for a schedule of shapes.",
    when=of_guards.FREE_SIZE,
)
def _length() -> Repro:
    def marked() -> list[tuple[Tensor]]:
        batches = [(torch.ones(4, length),) for length in (8, 16, 24)]
        torch._dynamo.mark_dynamic(batches[0][0], 1)
        return batches

    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(4, length),) for length in (8, 16, 24)], marked())


@shapes.cause(
    "batch-of-one",
    "a batch of one",
    pattern=r"size mismatch at index \d+\. (expected [01],|expected \d+, actual [01]\b)|^2 <= ",
    why="Sizes 0 and 1 are never symbols, because broadcasting and contiguity differ for them.",
    advice="Accept one more compilation. To avoid it, pad to two, unless a mean or a batch norm goes over that "
    "dimension.",
    when=of_guards.ONE_OR_NONE & of_guards.IS_ARGUMENT,
)
def _one() -> Repro:
    def padded(x: Tensor) -> Tensor:
        return _doubled_sine(x)[:1]

    calls = [(torch.ones(n, 8),) for n in (1, 4)]
    return Repro(lambda x: _doubled_sine(x)[:1], padded, calls, [(torch.ones(4, 8),), (torch.ones(4, 8),)])


@shapes.cause(
    "shape-tested",
    "a branch on a size",
    pattern=r"\.(size|stride)\(\)\[|\b(Eq|Ne|Mod)\(",
    equal=False,
    why="The branch becomes a guard on the symbolic size. Sizes that take the other branch compile again.",
    advice="Pad so that all sizes take the same branch.",
    when=of_guards.REMAINDER_TESTED,
)
def _tested() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.sin() if x.shape[0] % 8 == 0 else x.cos()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [(torch.ones(n, 8),) for n in (16, 24, 21)], [(torch.ones(24, 8),)] * 3)


@shapes.cause(
    "dtype",
    "a different dtype",
    pattern="dtype mismatch",
    equal=False,
    why="The generated code is for one dtype.",
    advice="Cast before the call.",
    when=of_guards.IS_ARGUMENT & of_guards.FLOATING,
)
def _dtype() -> Repro:
    calls = [(torch.ones(8, dtype=dtype),) for dtype in (torch.float32, torch.float64)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.float(),) for (x,) in calls])


@shapes.cause(
    "layout",
    "a different memory layout",
    pattern="stride mismatch",
    why="Strides are compiled in as constants.",
    advice="Call .contiguous() on inputs before the call, or use channels_last everywhere.",
    when=of_guards.IS_ARGUMENT & of_guards.NOT_WRITTEN,
)
def _layout() -> Repro:
    calls = [(torch.ones(4, 8),), (torch.ones(8, 4).t(),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.contiguous(),) for (x,) in calls])


@shapes.cause(
    "rank",
    "a different number of dimensions",
    pattern="rank mismatch",
    why="The number of dimensions is compiled in.",
    advice="Give every call the same number of dimensions.",
    when=of_guards.SAME_RANK_CODE,
)
def _rank() -> Repro:
    calls = [(torch.ones(8),), (torch.ones(1, 8),)]
    return Repro(
        lambda x: _doubled_sine(x).flatten(), lambda x: _doubled_sine(x).flatten(), calls, [(torch.ones(8),)] * 2
    )


@shapes.cause(
    "requires-grad",
    "requires_grad of an input changes",
    pattern="requires_grad mismatch",
    equal=False,
    why="An input that requires a gradient needs a backward graph, too.",
    advice="Accept one more compilation: the graph with gradients differs from the one without. To avoid it, "
    "make requires_grad of the input the same in every call.",
    when=of_guards.IS_ARGUMENT,
)
def _requires_grad() -> Repro:
    calls = [(torch.ones(8),), (torch.ones(8, requires_grad=True),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.detach(),) for (x,) in calls])


@shapes.cause(
    "aliased",
    "the same tensor passed twice",
    pattern=r"Duplicate tensors|\bis (?!not\b|None\b|True\b|False\b)",
    why="Two inputs that are the same tensor need different code from two that are not.",
    advice="Clone one of them, or always pass two tensors.",
    when=of_guards.IS_ARGUMENT & of_guards.NOT_WRITTEN,
)
def _aliased() -> Repro:
    def added(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    same = torch.ones(4)
    return Repro(added, added, [(torch.ones(4), torch.ones(4)), (same, same)], [(torch.ones(4), torch.ones(4))] * 2)


@shapes.cause(
    "parameter-or-tensor",
    "a tensor in one call, a Parameter or a number in another",
    pattern=r"expected type of(?!.*NoneType)|___check_type_id",
    equal=False,
    why="The type of an argument is compiled in, and so is requires_grad of a tensor.",
    advice="Pass the same type in every call.",
    when=of_guards.IS_ARGUMENT,
)
def _parameter() -> Repro:
    calls: list[tuple[Any, ...]] = [(torch.ones(4),), (nn.Parameter(torch.ones(4)),)]
    return Repro(_doubled_sine, _doubled_sine, calls, [(x.detach(),) for (x,) in calls])


@shapes.cause(
    "device",
    "a different device",
    pattern=r"device mismatch|dispatch key set mismatch.*\((\w+),.*actual DispatchKeySet\((?!\1\b)",
    equal=False,
    why="The generated code is for one device.",
    advice="Move inputs to the same device before the call.",
    when=of_guards.IS_ARGUMENT,
)
def _device() -> Repro:
    calls = [(torch.ones(8, device=device),) for device in ("cpu", "meta")]
    return Repro(_doubled_sine, _doubled_sine, calls, [calls[0]] * 2)


@shapes.cause(
    "inference-mode",
    "inference_mode() in one call, no_grad() in another",
    pattern="dispatch key set mismatch",
    why="Tensors that are made in inference mode have different dispatch keys.",
    advice="Use one mode everywhere.",
    when=of_guards.IS_ARGUMENT & of_guards.AUTOGRAD_KEYS,
)
def _inference() -> Repro:
    modes = (torch.no_grad, torch.inference_mode)

    def made(x: Tensor) -> Tensor:
        return _doubled_sine(x + 1)

    return Repro(made, made, [_VECTOR] * 2, around=lambda index: modes[index % 2]())


@values.cause(
    "grad-mode",
    "calls with and without gradients",
    pattern="GLOBAL_STATE changed:.*grad_mode",
    why="There is one compilation for training and one for evaluation. That is expected, once.",
    advice="Warm up both.",
    when=of_places.without_calls(
        "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", text="the function does not switch it itself"
    ),
)
def _grad_mode() -> Repro:
    contexts = (contextlib.nullcontext, torch.no_grad)
    return Repro(_doubled_sine, _doubled_sine, [_VECTOR] * 2, around=lambda index: contexts[index % 2]())


@values.cause(
    "autocast",
    "autocast in one call, none in another",
    pattern="GLOBAL_STATE changed:.*autocast",
    equal=False,
    why="The autocast state is compiled in.",
    advice="Use one autocast state for every call.",
    when=of_places.without_calls("autocast", text="the function does not switch it itself"),
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
    pattern=r"\.training\b",
    equal=False,
    why="Dropout and batch norm read .training. One more compilation is expected, once.",
    advice="Warm up both.",
    when=of_places.without_calls("train", "eval", text="the function does not switch it itself"),
)
def _training() -> Repro:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    return Repro(model, model, [_VECTOR] * 2, around=lambda index: contextlib.nullcontext(model.train(index % 2 == 0)))


@values.cause(
    "deterministic-flag",
    "use_deterministic_algorithms() between calls",
    pattern="GLOBAL_STATE changed:.*deterministic",
    why="The global flag is compiled in.",
    advice="Set it once.",
    when=of_places.without_calls("use_deterministic_algorithms", text="the function does not set it itself"),
)
def _deterministic() -> Repro:
    @contextlib.contextmanager
    def switched(index: int) -> Any:
        torch.use_deterministic_algorithms(bool(index % 2))
        yield
        torch.use_deterministic_algorithms(False)

    return Repro(_doubled_sine, _doubled_sine, [_VECTOR] * 2, around=switched)


@values.cause(
    "torch-setting",
    "a changed setting of torch: threads, default dtype, default device",
    pattern=r"GLOBAL_STATE changed:.*(num_threads|default_dtype|allow_)|torch_function_mode_stack|CURRENT_DEVICE",
    equal=False,
    why="Settings of torch are compiled in, so each combination compiles again.",
    advice="Set it once, before the first call.",
    when=of_places.without_calls("set_", part=True, text="the function does not set it itself"),
)
def _setting() -> Repro:
    @contextlib.contextmanager
    def changed(index: int) -> Any:
        torch.set_default_dtype(torch.float64 if index % 2 else torch.float32)
        yield
        torch.set_default_dtype(torch.float32)

    return Repro(_doubled_sine, _doubled_sine, [_VECTOR] * 2, around=changed)


@values.cause(
    "integer-argument",
    "an int argument that counts up",
    pattern=r"^(?!___stack)\w+(\[\d+\])* == -?\d+$",
    why="The first value is compiled in as a constant, and the second makes it a symbol. The values 0 and 1 stay "
    "constants.",
    advice="Pass {value} as a tensor.",
    when=of_values.ARITHMETIC,
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
    pattern=r"^(?!___stack)\w+(\[\d+\])* == -?(\d*\.\d|\d+e|inf)",
    why="The first value is compiled in as a constant, and the second makes it a symbol.",
    advice="Pass {value} as a zero-dimensional tensor.",
    when=of_values.ARITHMETIC,
)
def _float() -> Repro:
    def scaled(x: Tensor, rate: Any) -> Tensor:
        return x * rate

    rates = (0.5, 0.25, 0.125)
    return Repro(scaled, scaled, [(*_VECTOR, r) for r in rates], [(*_VECTOR, torch.tensor(r)) for r in rates])


@values.cause(
    "text-argument",
    "a string, a flag or an enum as a mode",
    pattern=r"^\w+ == (['\"]|True|False|torch\.)|___check_obj_id\(\w+, ",
    why="Dynamo specialises on the value, so each value compiles again.",
    advice="Compile one function for each mode, so that each has its own recompile limit.",
    when=of_guards.SELECTS,
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
    "another-function",
    "a function argument that changes from call to call",
    pattern=r"___check_obj_id\(.*\.__(code|func)__|Not a function",
    equal=False,
    why="The function's code is compiled in, so each function compiles again. (A new lambda from the same place does "
    "not.)",
    advice="Use few functions and compile one caller for each, or select between their results with a mask.",
    when=of_guards.CALLED_ARGUMENT,
)
def _function() -> Repro:
    def applied(x: Tensor, function: Any) -> Tensor:
        return function(x) + 1

    def sine(x: Tensor) -> Tensor:
        return x.sin()

    def cosine(x: Tensor) -> Tensor:
        return x.cos()

    return Repro(applied, applied, [(*_VECTOR, sine), (*_VECTOR, cosine)], [(*_VECTOR, sine)] * 2)


@values.cause(
    "filled-by-first-call",
    "an attribute, a flag or a cache that the first call sets",
    pattern=rf"[\])'.]\w* is None$|hasattr\(|___dict_contains\(.*[,( ](self|fn)\b|{_OF_MODEL}.* == False$",
    why="The code of the first call assumes that it is not set. From the second call on it is set, so the function "
    "compiles again. A cache does so for every new entry.",
    advice="Set {value} before the first compiled call: in __init__, as a buffer, or by one eager call.",
    when=of_guards.SET_ONCE,
)
def _filled() -> Repro:
    class Filling(nn.Module):
        def __init__(self, positions: Tensor | None) -> None:
            super().__init__()
            self.positions = positions

        def forward(self, x: Tensor) -> Tensor:
            if self.positions is None:
                self.positions = torch.arange(4.0)
            return x * self.positions

    return Repro(Filling(None), Filling(torch.arange(4.0)), [_VECTOR] * 3)


@values.cause(
    "optional-argument",
    "an argument that is sometimes None",
    pattern=r"^\w+ is (not )?None$|NoneType",
    why="None has a different type from a tensor.",
    advice="Pass a neutral value, such as a mask of ones.",
    when=of_guards.NEUTRAL_POSSIBLE,
)
def _optional() -> Repro:
    def masked(x: Tensor, mask: Tensor | None) -> Tensor:
        return x.sin() if mask is None else x.sin() * mask

    ones = torch.ones(4)
    return Repro(masked, masked, [(ones, None), (ones, ones)], [(ones, ones)] * 2)


@values.cause(
    "configuration-object",
    "a changed field of a configuration object or a dict",
    pattern=rf"^(?!G\[)(?!{_OF_MODEL}.* == -?[\d.]+(e-?\d+)?$)\w+[.\[].* == ",
    why="Dynamo guards the fields that it reads by their values.",
    advice="Keep changing values in tensors.",
    when=of_values.ARITHMETIC,
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
    pattern=r"^G\[.* == ",
    why="Dynamo guards the globals that it reads by their values.",
    advice="Pass it as a tensor argument.",
    when=of_values.ARITHMETIC,
)
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

    return Repro(broken, fixed, [_VECTOR] * 3, [(*_VECTOR, torch.tensor(n)) for n in (2, 3, 4)], around=changed)


@values.cause(
    "value-across-break",
    "a Python number that is used after a graph break",
    pattern=r"^___stack\d+ == ",
    why="The code after a break is a separate function. A number from before the break is its argument, and is "
    "compiled in like any argument.",
    advice="Fix the break in front of it.",
    when=of_guards.ACROSS_BREAK,
)
def _across() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * round(x.sum().item())

    def fixed(x: Tensor) -> Tensor:
        return x * x.sum().round()

    return Repro(broken, fixed, [(torch.full((4,), float(n)),) for n in (2, 3, 4)])


@values.cause(
    "dictionary-keys",
    "a dict argument with different keys",
    pattern=r"_contains(__)?\(|dict\.keys\(|\.keys\(\)|^len\((?!self)[^()]*\) != ",
    why="The keys are compiled in.",
    advice="Use the same keys in every call, or one stacked tensor.",
    when=of_guards.IS_ARGUMENT,
)
def _keys() -> Repro:
    def broken(x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return x + sum(extra.values())

    def fixed(x: Tensor, extra: Tensor) -> Tensor:
        return x + extra.sum(0)

    ones = torch.ones(4)
    calls = [(ones, {str(key): ones for key in range(size)}) for size in (1, 2, 3)]
    stacked = [(ones, torch.cat([torch.ones(size, 4), torch.zeros(3 - size, 4)])) for size in (1, 2, 3)]
    return Repro(broken, fixed, calls, stacked)


@limits.cause(
    "counter",
    "self.calls += 1, and the count is used",
    pattern=r"^\S*\.\S.* == -?\d+$",
    code=r"\.\w+ \+= ",
    why="An int attribute is compiled in, so every value compiles again. Past the recompile limit (8) the function "
    "runs eagerly, and only a warning says so.",
    advice="Use a buffer, and replace it by the sum: register_buffer(…, persistent=False), which leaves checkpoints as "
    "they are, then {value} = {value} + …. add_() would change a tensor that the backward pass may need.",
    when=of_guards.COUNTED,
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
            self.calls = self.calls + 1
            return x * self.calls

    return Repro(Counting(), Buffered(), [_VECTOR] * 12)


@limits.cause(
    "annealed-attribute",
    "a number attribute that changes: annealed, or set from outside",
    pattern=rf"{_OF_MODEL}.* == -?[\d.]+(e-?\d+)?$",
    why="The first value is compiled in as a constant, and the second makes it a symbol.",
    advice="Use a buffer, and replace it by each new value: register_buffer(…, persistent=False), which leaves "
    "checkpoints as they are, then {value} = …. mul_() or fill_() would change a tensor that the backward pass may "
    "need.",
    when=of_values.STATE_OF_MODULE,
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
    pattern="size mismatch",
    options={"dynamic": False},
    why="Every size compiles again. Past the recompile limit (8) the function runs eagerly.",
    advice="Leave dynamic unset, mark the sizes that change, or pad to a few sizes.",
    when=of_guards.STATIC_SHAPES,
)
def _static() -> Repro:
    sizes = range(2, 14)
    return Repro(_doubled_sine, _doubled_sine, [(torch.ones(n, 8),) for n in sizes], _marked(*sizes))


@limits.cause(
    "growing-list",
    "a list of tensors that grows",
    pattern=r"^len\((?!self\b)[^()]*\) == |^not \w+$|_iterator_len\(",
    equal=False,
    why="The length of a list is compiled in.",
    advice="Use one preallocated tensor.",
    when=of_guards.STACKED,
)
def _list() -> Repro:
    def broken(x: Tensor, cache: list[Tensor]) -> Tensor:
        return x + torch.stack(cache).sum(0)

    def fixed(x: Tensor, cache: Tensor) -> Tensor:
        return x + cache.sum(0)

    ones = torch.ones(4)
    return Repro(broken, fixed, [(ones, [ones] * n) for n in range(1, 13)], [(ones, torch.zeros(16, 4))] * 12)


@limits.cause(
    "kept-activations",
    "a list or dict attribute that grows",
    pattern=r"^len\(self\b.*\) == |^not self\b",
    why="The list is an input of the graph, and its length is compiled in. The list also keeps every tensor alive.",
    advice="Return the tensors, or write them into one preallocated buffer.",
    when=of_guards.APPENDED_ONLY,
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
