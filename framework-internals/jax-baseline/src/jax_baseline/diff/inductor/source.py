"""Reads the modules that Inductor generates, and adds a hook to every launch.

A generated module defines kernels (``name = async_compile.cpp_pybinding([...], '''source''')`` or ``.triton(...)``)
and a function ``call`` that launches kernels and library functions in order. With provenance tracking, a comment above
each launch gives its name. The module works on text and imports neither jax nor torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["read", "write", "update"]

_MARK = "# [Provenance debug handles] "
_AOT_ID = re.compile(r"^# AOT ID: \['(\d+)_(\w+)'\]", re.MULTILINE)
_CPP_PARAMETERS = re.compile(r"\bkernel\(([^)]*)\)")


@dataclass(frozen=True)
class GeneratedKernel:
    """A kernel that Inductor generated."""

    name: str
    source: str
    roles: tuple[Role, ...]  # what the kernel does with each pointer, in the order of the arguments


@dataclass(frozen=True)
class HookedModule:
    """A generated module with hooks."""

    source: str
    phase: str  # forward or backward. A graph without gradients is forward
    kernels: Mapping[str, GeneratedKernel]
    launches: tuple[tuple[str, str], ...]  # handle (``extern_kernels.mm:2``) and statement of each launch, in order
    missed: tuple[str, ...]  # handles whose launch was not found


def hook_launches(source: str, *, graph: int, hooks: str) -> HookedModule:
    """Add hooks to every launch of a generated module.

    The statement moves into ``with HOOKS.launch(key):``, and ``HOOKS.observe(key, arguments, out, result)`` follows it.
    ``key`` is ``"graph:handle"``. ``graph`` is the number of the module in the program, ``hooks`` the
    ``module:attribute`` that is imported as ``HOOKS``.
    """
    module, _, attribute = hooks.partition(":")
    lines, launches, missed = list[str](), list[tuple[str, str]](), list[str]()
    handle = ""
    for line in source.splitlines():
        text = line.strip()
        if text.startswith(_MARK):
            if handle:
                missed.append(handle)
            handle = text.removeprefix(_MARK)
        elif handle and (hooked := _hooked(line, handle, f"{graph}:{handle}")):
            launches.append((handle, text))
            handle = ""
            lines.extend(hooked)
            continue
        lines.append(line)
    if handle:
        missed.append(handle)
    identity = _AOT_ID.search(source)
    return HookedModule(
        f"from {module} import {attribute} as HOOKS\n" + "\n".join(lines) + "\n",
        "backward" if identity and identity[2] == "backward" else "forward",
        {kernel.name: kernel for kernel in _generated_kernels(source)},
        tuple(launches),
        tuple(missed),
    )


def _hooked(line: str, handle: str, key: str) -> list[str] | None:
    """Return the line with hooks, or None if the line does not launch the handle."""
    text = line.strip()
    if handle.rsplit(":", 1)[0] not in text or text.startswith("#"):
        return None
    try:
        statement, *rest = ast.parse(text).body
    except SyntaxError:
        return None
    if not isinstance(statement, ast.Expr | ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    result = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else "None"
    arguments = "".join(f"{ast.unparse(argument)}, " for argument in call.args)
    out = next((ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "out"), "None")
    indent = line[: len(line) - len(line.lstrip())]
    return [
        f"{indent}with HOOKS.launch({key!r}):",
        f"{indent}    {ast.unparse(statement)}",
        f"{indent}HOOKS.observe({key!r}, ({arguments}), {out}, {result})",
        *(f"{indent}{ast.unparse(other)}" for other in rest),
    ]


def _generated_kernels(source: str) -> list[GeneratedKernel]:
    generated = []
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="async_compile")), args=arguments),
            ):
                texts = [
                    argument.value
                    for argument in arguments
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                ]
                text = max(texts, key=len, default="")
                generated.append(GeneratedKernel(name, text.strip(), _roles(name, text)))
    return generated


def _roles(name: str, source: str) -> tuple[Role, ...]:
    """Return the roles from Inductor's names of pointers: in_ptr0, out_ptr0, in_out_ptr0."""
    match = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source) or re.search(r"def triton_\w*\(([^)]*)\)", source)
    match = match or _CPP_PARAMETERS.search(source)
    parameters = re.findall(r"\b((?:in_out|in|out)_ptr\d+|ws_ptr\d*)", match[1]) if match else []
    roles: dict[str, Role] = {"in_out": "update", "in": "read", "out": "write", "ws": "write"}
    return tuple(roles[parameter.split("_ptr")[0]] for parameter in parameters)
