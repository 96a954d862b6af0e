"""What a caller can do about breaks in installed packages, whose code stays as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from compile_bench.capture.frames import Frame
from compile_bench.capture.text import plural, shorten
from compile_bench.capture.trace import Break, Recompile
from compile_bench.capture.wording import RECOMPILE_LIMIT
from compile_bench.catalogue.use import guarded_value
from compile_bench.fixes.source import Source

_LOGGING = ("logger.", "logging.", "log.", "warnings.")
_PYTHONS_OWN = re.compile(r"python3\.\d+/")

# What PyTorch says of a break, and the setting of torch._dynamo.config that captures what the line reads.
_SETTINGS = (
    (re.compile(r"Tensor\.item|_local_scalar_dense|\.tolist"), "capture_scalar_outputs"),
    (re.compile(r"[Dd]ynamic (output )?shape|DynamicOutputShape|nonzero"), "capture_dynamic_output_shape_ops"),
)


def advice_to_the_caller(met: Break, breaks: Sequence[Break], guards: Sequence[Recompile] = ()) -> str:
    """What can be done about a break in an installed package without changing the package; empty if nothing can.

    The breaks that one line of the user leads to get one advice. At the recompile limit the guard of the line counts.
    """
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
    try:
        source = Source.read(Path(file))
    except (OSError, SyntaxError):
        return ""
    statement = source.statement(line)
    if statement is None:
        return ""
    function = statement if isinstance(statement, ast.FunctionDef) else source.function(statement)
    if function is None or any("property" in ast.unparse(decorator) for decorator in function.decorator_list):
        return ""
    outside = [node for node in source.above(function) if not isinstance(node, (ast.Module, ast.If, ast.Try))]
    classes = [node.name for node in outside if isinstance(node, ast.ClassDef)]
    return ".".join([*reversed(classes), function.name]) if len(classes) == len(outside) else ""
