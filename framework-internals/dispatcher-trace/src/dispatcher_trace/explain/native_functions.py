"""Which C++ function stands behind a backend key, as far as the wheel's own ``native_functions.yaml`` says."""

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

# Alias keys, in the order in which the dispatcher falls back on them for a backend (OperatorEntry.cpp).
_EXPLICIT = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")


@dataclass
class _Function:
    """One entry of the file."""

    structured: bool = False
    delegate: str = ""
    ufunc: bool = False
    dispatch: dict[str, str] = field(default_factory=dict)


def native_function(operator: str, key: str, kind: str) -> str:
    """The function of namespace ``at::native`` that the registration at a key leads to.

    Args:
        operator: ``aten::add.Tensor``.
        key: a backend key, or the autograd key of a composite.
        kind: of the registration.

    Returns:
        Its name (``structured_mm_out_cpu``: the class whose ``impl`` runs), or an empty text where the file does not
        say: autograd, autocast and fallback kernels are generated or registered elsewhere.
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
    """The file read line by line: its layout is fixed by torch's code generator, and a YAML reader takes seconds."""
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
