"""What to do about a break or a recompilation, from how the code uses what broke or what was checked."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from compile_bench.capture.frames import RESUMED, Frame
from compile_bench.capture.text import plural, shorten
from compile_bench.capture.trace import Break, Recompile
from compile_bench.capture.wording import RECOMPILE_LIMIT, cause_of
from compile_bench.catalogue import Advised, Cause, advise, match_recompile
from compile_bench.catalogue.source import Source
from compile_bench.catalogue.use import Use, first_line, guarded_value

_LOGGING = ("logger.", "logging.", "log.", "warnings.")
_PYTHONS_OWN = re.compile(r"python3\.\d+/")

# What PyTorch says of a break, and the setting of torch._dynamo.config that captures what the line reads.
_SETTINGS = (
    (re.compile(r"Tensor\.item|_local_scalar_dense|\.tolist"), "capture_scalar_outputs"),
    (re.compile(r"[Dd]ynamic (output )?shape|DynamicOutputShape|nonzero"), "capture_dynamic_output_shape_ops"),
)

# PyTorch's own page of a kind of break.
_PAGE = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb{}.html"
_NO_FAKE = "no fake impl registered"
_REGISTER_FAKE = (
    "Register what the operator gives for tensors without values: torch.library.register_fake, or register_fake of the "
    "operator."
)
NOTHING_KNOWN = "no safe change known"

# Causes that are the caller's wherever the guard is.
_OF_THE_CALL = ("dtype", "device", "global state (grad mode, autocast, …)", "train / eval mode")
_SIZES = "Pass the same sizes in every call, or compile with dynamic=True, so that sizes are symbols."
# Not an entry of a dictionary, such as an optimizer's learning rate.
_INTEGER_ATTRIBUTE = re.compile(r"self(\.\w+)+ == -?\d+")
_WARM_UP = "Call the model once before it is compiled: the first call sets it."

# What a caller can do about a guard in a package, by its cause and whether it is on an attribute of a module.
_IN_PACKAGES = {
    ("tensor size", False): _SIZES,
    ("symbolic shape", False): _SIZES,
    ("None or absent", True): _WARM_UP,
    ("Python value", True): "Set torch._dynamo.config.allow_unspec_int_on_nn_module = True: an integer attribute of a "
    "module is then a symbol.",
}


def read(file: str) -> Source | None:
    """The source of a file; None if it cannot be read as Python."""
    try:
        return Source.read(Path(file))
    except (OSError, SyntaxError):
        return None


def advice_on_break(
    causes: Sequence[Cause], met: Break, guards: Sequence[Recompile], *, static_shapes: bool
) -> list[Advised]:
    """The advice on a break that fits the use of what broke, the likeliest first.

    A function at the recompile limit gets the advice on the guard of its line.
    """
    if met.category == RECOMPILE_LIMIT:
        own = [again for again in guards if (again.file, again.line) == (met.file, met.line)]
        return [advice for again in own[-1:] for advice in _advice_on_guard(again, static_shapes=static_shapes)]
    if _NO_FAKE in met.reason:
        return [Advised("", _REGISTER_FAKE)]
    source = read(met.file)
    return advise(causes, None if source is None else Use(source, met.line, met.columns))


def _advice_on_guard(again: Recompile, *, static_shapes: bool) -> list[Advised]:
    source = None if again.package else read(again.file)
    if source is None:
        return advise(match_recompile(again.guard, again.source), None)
    use = Use.of_guard(source, again.line, again.guard, static_shapes=static_shapes)
    return advise(match_recompile(again.guard, use.code or again.source), use)


def guarded_attribute(again: Recompile) -> str:
    """The attribute that a guard checked, as ``self.name``; empty for anything else."""
    value = guarded_value(again.guard)
    return f"self.{value.rpartition('.')[2]}" if value.startswith("self.") else ""


def recompile_advice(again: Recompile, *, static_shapes: bool = False) -> str:
    """What to do about a recompilation; empty where nothing is known to be safe."""
    if _is_of_package(again.guard, again.package):
        return advice_in_package(again.guard, again.package)
    advice = _advice_on_guard(again, static_shapes=static_shapes)
    return with_entry(advice[0].text, advice[0].case) if advice else ""


def advice_from_guard(guard: str, source: str, package: str) -> str:
    """What to do about a recompilation of which only the guard is known: advice with its condition in words.

    The lines of an installed ``package`` cannot be changed; it is empty for the user's own.
    """
    if _is_of_package(guard, package):
        return advice_in_package(guard, package)
    advice = advise(match_recompile(guard, source), None, value=guarded_value(guard))
    return with_entry(advice[0].text, advice[0].case) if advice else ""


def _is_of_package(guard: str, package: str) -> bool:
    """Whether a guard is about what the user cannot change; torch's functions guard the user's own arguments too."""
    return bool(package) and (package != "torch" or guarded_value(guard).startswith("self"))


def advice_in_package(guard: str, package: str) -> str:
    """What a caller can do about a guard in an installed package; empty where nothing is known to help."""
    if cause_of(guard) in _OF_THE_CALL:
        return advice_from_guard(guard, "", "")
    of_module = re.match(r"(not )?(hasattr\()?self\b", guard) is not None
    if of_module and cause_of(guard) == "Python value" and not _INTEGER_ATTRIBUTE.fullmatch(guard):
        return ""
    return _IN_PACKAGES.get((cause_of(guard), of_module), "")


def with_entry(advice: str, entry: str) -> str:
    """Advice with the catalogue's entry that it is from."""
    return f"{advice} (catalogue: {entry})" if entry else advice


def page(registry: str) -> str:
    """Address of PyTorch's page of a break; empty if PyTorch gives the break no number."""
    return _PAGE.format(registry.removeprefix("GB")) if registry else ""


def cause_of_separate(caller: Frame, breaks: Collection[Break]) -> Break | None:
    """The break that keeps a caller out of a graph, so that what it calls is compiled by itself; None if there is none.

    It is one for which Dynamo skips the calling function, or one on the line of the call.
    """
    source = read(caller.file)
    function = None if source is None else Use(source, caller.line).function
    first = 0 if function is None else first_line(function)
    calling = (caller.file, first)
    skipped = (met for met in breaks if met.whole_frame and calling in [(f.file, f.line) for f in met.compiled])
    at_call = (met for met in breaks if (met.file, met.line) == (caller.file, caller.line))
    return next(skipped, next(at_call, None))


def break_before(again: Recompile, breaks: Collection[Break]) -> Break | None:
    """The break that a recompilation follows from; None if none is known.

    The code after a break is a function of its own. A function that is called where no graph is, too, is compiled by
    itself. What such a function gets is guarded, and would be a value inside the graph without the break.
    """
    if again.function.startswith(RESUMED):
        line = int(again.function.rpartition("_at_")[2] or 0)
        return next((met for met in breaks if again.guard.startswith("___stack") and met.line == line), None)
    if again.called_at is None or guarded_value(again.guard).startswith(("self", "G[")):
        return None
    return cause_of_separate(again.called_at, breaks)


def advice_to_the_caller(met: Break, breaks: Sequence[Break], guards: Sequence[Recompile] = ()) -> str:
    """What can be done about a break in an installed package without changing the package; empty if nothing can.

    The breaks that one line of the user leads to get one advice. At the recompile limit the guard of the line counts.
    """
    if _NO_FAKE in met.reason:
        return _REGISTER_FAKE
    if writing := next((frame for frame in met.frames if frame.source.startswith(_LOGGING)), None):
        advice = "Call the model once before it is compiled if the message is written once, or turn the message off"
        return f"{advice}: it comes from {shorten(writing.file).partition('/')[0]}."
    if met.category == RECOMPILE_LIMIT:
        own = (again.guard for again in guards if (again.file, again.line) == (met.file, met.line))
        if any(guarded_value(guard).startswith("self") for guard in own):
            return ""  # state of the package, such as an optimizer's settings
        advice = (
            "Keep what changes from call to call out of the arguments, pass it as a tensor, or mark its size dynamic"
        )
        return f"{advice}; torch._dynamo.config.recompile_limit allows more compilations."
    if met.reason.startswith("Call to `torch._dynamo.graph_break()`") or "Optimizer." in " ".join(met.hints):
        return "PyTorch keeps this call out of graphs: make it outside of what is compiled."
    if setting := _setting(met):
        return (
            f"Set torch._dynamo.config.{setting} = True before the first compiled call: it captures what is read here."
        )
    same_line = [other for other in breaks if other.place == met.place and _packages(other) and not _setting(other)]
    return _disabling(same_line) or _newer(met)


def _setting(met: Break) -> str:
    text = f"{met.reason} {met.explanation}"
    return next((setting for pattern, setting in _SETTINGS if pattern.search(text)), "")


def _disabling(breaks: Sequence[Break]) -> str:
    """Which functions to keep out of the graph, if that leaves fewer breaks or no skipped frame; else empty."""
    around = {met.identity: names for met in breaks if (names := _functions(met))}
    innermost = {names[-1] for names in around.values()}
    # A function that is called by another one of these need not be named.
    named = dict.fromkeys(next(name for name in names if name in innermost) for names in around.values())
    skipped = any(met.whole_frame for met in breaks if met.identity in around)
    if not named or (len(named) == len(around) and not skipped):
        return ""
    gain = f"{plural(len(named), 'break')} instead of {len(around)}" if len(named) < len(around) else ""
    split = "the frames around are split there instead of skipped" if skipped else ""
    what = ", and ".join(part for part in (gain, split) if part)
    return (
        f"Keep {' and '.join(named)} out of the graph with torch.compiler.disable: {what}. All of it runs eagerly then."
    )


def _newer(met: Break) -> str:
    if "torch.compiler.disable" in met.reason:  # somebody wants it so
        return ""
    packages = _packages(met)
    return f"See whether a newer version of {packages[-1]} can be traced." if packages else ""


def _in_library(met: Break) -> list[tuple[str, Frame]]:
    """The frames of installed packages behind the user's line, outermost first, each with its short file name."""
    stack = met.frames
    if met.library:
        last = max((index for index, frame in enumerate(stack) if frame.place == met.place), default=-1)
        stack = stack[last + 1 :]
    named = [(shorten(frame.file), frame) for frame in stack]
    return [(name, frame) for name, frame in named if "/" in name and not _PYTHONS_OWN.match(name)]


def _packages(met: Break) -> list[str]:
    return [name.partition("/")[0] for name, _ in _in_library(met)]


def _functions(met: Break) -> list[str]:
    """The functions of installed packages that a break lies in, outermost first, as they can be imported.

    Empty if the innermost is the ``forward`` of a module that only calls the function with the break: this may be the
    whole model, which the caller wants compiled.
    """
    frames = _in_library(met)
    names = [(name, _importable(frame.file, frame.line)) for name, frame in frames]
    innermost = next((function for _, function in reversed(names) if function), "")
    if not names or (not names[-1][1] and innermost.endswith(".forward")):
        return []
    modules = (name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name, _ in names)
    return [f"{module}.{function}" for module, (_, function) in zip(modules, names, strict=True) if function]


@cache
def _importable(file: str, line: int) -> str:
    """The qualified name of the function that a line is in; empty for a property, and for a function in a function."""
    source = read(file)
    statement = None if source is None else source.statement(line)
    if source is None or statement is None:
        return ""
    function = statement if isinstance(statement, ast.FunctionDef) else source.function(statement)
    if function is None or any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return ""
    outside = [node for node in source.above(function) if not isinstance(node, (ast.Module, ast.If, ast.Try))]
    classes = [node.name for node in outside if isinstance(node, ast.ClassDef)]
    return ".".join([*reversed(classes), function.name]) if len(classes) == len(outside) else ""
