"""Reads PyTorch's messages about breaks, and sorts them into categories."""

from __future__ import annotations

import re

RECOMPILE_LIMIT = "recompile limit"
BACKEND_FAILED = "backend failed"
ASKED_FOR = "asked for by the code"
NOT_ENTERED = "call Dynamo will not enter"

# How the reasons of breaks at an iterator in use begin, which Dynamo can neither take as an argument nor hand over.
ITERATOR_IN_USE = ("Missing tp_iternext", "Generator reconstruction", "Reconstruction failure")

# Reason -> category; the first match counts. The numbers of PyTorch's published list change between releases, but the
# wording of these reasons is the same from 2.10 on.
_CATEGORIES = tuple(
    (re.compile(pattern, re.IGNORECASE), category)
    for pattern, category in (
        (r"recompile.?limit|cache.?size.?limit", RECOMPILE_LIMIT),
        (r"data.dependent branch|data.dependent jump|dynamic control flow", "data-dependent control flow"),
        (
            r"Tensor\.item|\.item\(\)|data.dependent operator|_local_scalar_dense|\.tolist|repr\(\) on tensor"
            r"|sort with non-constant keys|list with non-scalar tensor",
            "tensor value read by Python",
        ),
        (
            r"dynamic (output )?shape|DynamicOutputShape|data.dependent output shape|nonzero|unbacked",
            "data-dependent shape",
        ),
        (r"graph_break\(\)|call to .?torch\._dynamo\.graph_break|user.requested", ASKED_FOR),
        (r"builtin operator|reorderable_logging|logging|print|^setattr\(\) on unsupported", "side effect"),
        (
            r"marked as skipped|dynamo\.disable|skipped function|forbidden|torch\.compiler\.disable"
            r"|numpy function|ndarray method|time function|copy\.deepcopy|op returned non-Tensor|RNN, GRU, or LSTM",
            NOT_ENTERED,
        ),
        (r"backend compiler|BackendCompilerFailed|^backend=", BACKEND_FAILED),
        (r"context manager|contextlib", "context manager"),
        (r"requires_grad|autograd\.(Function|grad)|backward|hook", "autograd"),
        (
            r"sparse tensor|resize_\(\)|tensor data attribute|nn\.Parameter\(\)|opaque object",
            "tensor Dynamo cannot represent",
        ),
        (r"bytecode|tp_|__\w+__|generator|exception|super\(\)|iterator|class|builtin", "Python construct"),
    )
)

# Lines that introduce a message.
_INTRODUCTION = re.compile(r"^Encountered graph break when attempting to trace .*:$|Graph break encountered:$")
# It differs from process to process, so one reason would be two.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+\b")
_REGISTRY_NUMBER = re.compile(r"/gb/gb(\d{4})\.html")


def parse_message(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Split a formatted graph-break message into reason, explanation and hints."""
    lines = [line.strip() for line in text.split("\n  Explanation:")[0].splitlines() if line.strip()]
    head = [line for line in lines if not _INTRODUCTION.search(line)] or lines
    explanation = re.search(r"^  Explanation: (.*?)(?=^  Hint: |^  Developer debug context:|\Z)", text, re.S | re.M)
    hints = re.findall(r"^  Hint: (.*?)(?=^  Hint: |^\s*\n|^  Developer debug context:|\Z)", text, re.S | re.M)
    # The reason is the last line above an explanation. An error without one begins with the reason.
    reason = (head[-1] if explanation else head[0]) if head else "no reason given"
    return (
        _ADDRESS.sub("", reason.removeprefix("torch._dynamo.exc.Unsupported: ")),
        one_line(explanation[1].split("\n\n")[0]) if explanation else "",
        tuple(one_line(hint) for hint in hints),
    )


def one_line(text: str) -> str:
    """The text on one line, with single spaces."""
    return re.sub(r"\s+", " ", text).strip()


def categorise(reason: str, explanation: str = "") -> str:
    """The category of a break's reason; ``"other"`` if the wording is unknown."""
    for text in (reason, explanation):
        for pattern, category in _CATEGORIES:
            if pattern.search(text):
                return category
    return "other"


def registry_number(text: str) -> str:
    """The number in PyTorch's published list that a message links to, such as ``"GB0170"``; empty without a link."""
    number = _REGISTRY_NUMBER.search(text)
    return f"GB{number[1]}" if number else ""
