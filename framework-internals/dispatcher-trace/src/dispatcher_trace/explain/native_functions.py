"""The C++ function of a backend kernel, from the ``native_functions.yaml`` in the wheel."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_FUNC = re.compile(r"^- func: ([\w.]+)\(")
_FIELD = re.compile(r"^  (structured|structured_delegate|ufunc_inner_loop|dispatch):\s*([^#\s]*)")
_ENTRY = re.compile(r"^    ([\w, ]+):\s*(\S+)")

# Alias keys, in the order in which the dispatcher falls back to them for a backend (OperatorEntry.cpp).
_EXPLICIT = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")


@dataclass
class _Function:
    """One entry of the file."""

    structured: bool = False
    delegate: str = ""
    ufunc: bool = False
    dispatch: dict[str, str] = field(default_factory=dict)


def native_function(operator: str, key: str, kind: str) -> str:
    """The function in namespace ``at::native`` that a kernel calls.

    Args:
        operator: ``aten::add.Tensor``.
        key: A backend key, or the autograd key of a composite.
        kind: Kind of the registration.

    Returns:
        The name of the function, or of the class whose ``impl`` runs (``structured_mm_out_cpu``). Empty if the file
        does not have it: autograd, autocast and fallback kernels are generated or registered elsewhere.
    """
    namespace, _, name = operator.partition("::")
    functions = _functions()
    if namespace != "aten" or name not in functions:
        return ""
    function = functions[name]
    if kind == "math kernel":
        return function.dispatch.get("CompositeImplicitAutograd", "" if function.dispatch else name.partition(".")[0])
    if kind == "default backend kernel":
        return next((function.dispatch[alias] for alias in _EXPLICIT if alias in function.dispatch), "")
    if kind != "kernel":
        return ""
    if function.delegate and key not in function.dispatch:
        target = functions.get(function.delegate, _Function())
        if target.ufunc and key in ("CPU", "CUDA"):
            return f"structured_ufunc_{function.delegate.partition('.')[0]}_{key}"
        implementation = target.dispatch.get(key, "")
        return f"structured_{implementation}" if implementation else ""
    implementation = function.dispatch.get(key, "")
    return f"structured_{implementation}" if implementation and function.structured else implementation


@functools.cache
def _functions() -> Mapping[str, _Function]:
    """The parsed file. Torch's code generator fixes its layout, and a YAML parser would take seconds."""
    path = _file()
    return {} if path is None else _parse(path.read_text(encoding="utf-8"))


def _file() -> Path | None:
    spec = importlib.util.find_spec("torchgen")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "packaged/ATen/native/native_functions.yaml"
    return path if path.is_file() else None


def _parse(text: str) -> dict[str, _Function]:
    functions: dict[str, _Function] = {}
    current, section = _Function(), ""
    for line in text.splitlines():
        if match := _FUNC.match(line):
            current, section = _Function(), ""
            functions[match[1]] = current
        elif match := _FIELD.match(line):
            section, value = match[1], match[2]
            current.structured |= section == "structured" and value == "True"
            current.ufunc |= section == "ufunc_inner_loop"
            if section == "structured_delegate":
                current.delegate = value
        elif line.startswith("  ") and not line.startswith("   "):
            section = ""
        elif section == "dispatch" and (match := _ENTRY.match(line)):
            current.dispatch.update(dict.fromkeys((key.strip() for key in match[1].split(",")), match[2]))
    return functions
