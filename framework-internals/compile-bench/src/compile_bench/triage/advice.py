"""What to do about a break or a recompilation, from how the code uses what broke or what was checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from compile_bench.capture.frames import RESUMED, Frame
from compile_bench.capture.guards import cause_of
from compile_bench.capture.reasons import RECOMPILE_LIMIT
from compile_bench.capture.trace import Break, Recompile
from compile_bench.catalogue import Advised, Cause, advise, match_recompile
from compile_bench.catalogue.use import Use, first_line, guarded_value
from compile_bench.fixes.source import Source

# PyTorch's own page of a kind of break.
_PAGE = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb{}.html"
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
    causes: Sequence[Cause], found: Break, guards: Sequence[Recompile], *, static_shapes: bool
) -> list[Advised]:
    """The advice that fits the use of what broke, the likeliest first.

    Args:
        causes: What the break may be caused by, the likeliest first.
        found: The break.
        guards: The guards that failed. A function at the recompile limit gets the advice on the guard of its line.
        static_shapes: Whether the model is compiled with ``dynamic=False``.
    """
    if found.category == RECOMPILE_LIMIT:
        own = [each for each in guards if (each.file, each.line) == (found.file, found.line)]
        return [advice for each in own[-1:] for advice in advice_on_guard(each, static_shapes=static_shapes)]
    source = read(found.file)
    return advise(causes, None if source is None else Use(source, found.line, found.columns))


def advice_on_guard(found: Recompile, *, static_shapes: bool = False) -> list[Advised]:
    """The advice that fits the use of what a guard checked, the likeliest first."""
    source = None if found.package else read(found.file)
    if source is None:
        return advise(match_recompile(found.guard, found.source), None)
    use = Use.of_guard(source, found.line, found.guard, static_shapes=static_shapes)
    return advise(match_recompile(found.guard, use.code or found.source), use)


def guarded_attribute(found: Recompile) -> str:
    """The attribute that a guard checked, as ``self.name``; empty for anything else."""
    value = guarded_value(found.guard)
    return f"self.{value.rpartition('.')[2]}" if value.startswith("self.") else ""


def recompile_advice(found: Recompile, *, static_shapes: bool = False) -> str:
    """What to do about a recompilation; empty where nothing is known to be safe."""
    if _is_of_package(found.guard, found.package):
        return advice_in_package(found.guard, found.package)
    advice = advice_on_guard(found, static_shapes=static_shapes)
    return with_entry(advice[0].text, advice[0].case) if advice else ""


def advice_from_guard(guard: str, source: str, package: str) -> str:
    """What to do about a recompilation of which only the guard is known: advice with its condition in words.

    Args:
        guard: The guard that failed.
        source: The line that made it.
        package: The installed package that has the line; empty for the user's own. The user cannot change its lines.
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
    """The break that keeps a caller out of a graph, so that what it calls is compiled by itself.

    Args:
        caller: The line of the call.
        breaks: All breaks of the target.

    Returns:
        A break for which Dynamo skips the calling function, or one on the line of the call; None if there is none.
    """
    source = read(caller.file)
    function = None if source is None else Use(source, caller.line).function
    first = 0 if function is None else first_line(function)
    skipped = (each for each in breaks if each.whole_frame and _is_in(caller.file, first, each.compiled))
    at_call = (each for each in breaks if (each.file, each.line) == (caller.file, caller.line))
    return next(skipped, next(at_call, None))


def _is_in(file: str, first: int, functions: Sequence[Frame]) -> bool:
    return any((each.file, each.line) == (file, first) for each in functions)


def break_before(found: Recompile, breaks: Collection[Break]) -> Break | None:
    """The break that a recompilation follows from; None if none is known.

    The code after a break is a function of its own. A function that is called where no graph is, too, is compiled by
    itself. What such a function gets is guarded, and would be a value inside the graph without the break.
    """
    if found.function.startswith(RESUMED):
        line = int(found.function.rpartition("_at_")[2] or 0)
        return next((each for each in breaks if found.guard.startswith("___stack") and each.line == line), None)
    if found.called_at is None or guarded_value(found.guard).startswith(("self", "G[")):
        return None
    return cause_of_separate(found.called_at, breaks)
