"""Reads PyTorch's wording: messages about breaks, and guards that failed. Nothing here imports torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path

_WORDING: dict[str, list[tuple[str, str]]] = tomllib.loads(
    Path(__file__).with_name("wording.toml").read_text(encoding="utf-8")
)
_CATEGORIES = [(re.compile(pattern, re.IGNORECASE), category) for pattern, category in _WORDING["categories"]]
_CAUSES, _CHANGES, _NAMES = (
    [(re.compile(pattern), meaning) for pattern, meaning in _WORDING[kind]] for kind in ("causes", "changes", "names")
)

RECOMPILE_LIMIT = "recompile limit"
BACKEND_FAILED = "backend failed"
ASKED_FOR = "asked for by the code"
NOT_ENTERED = "call Dynamo will not enter"

# How the reasons of breaks at an iterator in use begin, which Dynamo can neither take as an argument nor hand over.
ITERATOR_IN_USE = ("Missing tp_iternext", "Generator reconstruction", "Reconstruction failure")

# Lines that introduce a message.
_INTRODUCTION = re.compile(r"^Encountered graph break when attempting to trace .*:$|Graph break encountered:$")
# It differs from process to process, so one reason would be two.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+\b")
# The error of an operator that ran on fake tensors, which the reason does not name.
_OF_AN_OPERATOR = re.compile(r"""with fake tensors: .*: got \w+\((["'])(?P<error>.*)\1\)""", re.S)
_REGISTRY_NUMBER = re.compile(r"/gb/gb(\d{4})\.html")


def parse_message(text: str) -> tuple[str, str, tuple[str, ...]]:
    """Split a formatted graph-break message into reason, explanation and hints."""
    lines = [line.strip() for line in text.split("\n  Explanation:")[0].splitlines() if line.strip()]
    head = [line for line in lines if not _INTRODUCTION.search(line)] or lines
    explanation = re.search(r"^  Explanation: (.*?)(?=^  Hint: |^  Developer debug context:|\Z)", text, re.S | re.M)
    hints = re.findall(r"^  Hint: (.*?)(?=^  Hint: |^\s*\n|^  Developer debug context:|\Z)", text, re.S | re.M)
    # The reason is the last line above an explanation. An error without one begins with the reason.
    reason = (head[-1] if explanation else head[0]) if head else "no reason given"
    if explanation and (failed := _OF_AN_OPERATOR.search(explanation[1])):
        error = failed["error"].partition(r"\n")[0].partition(". ")[0]  # the message is a repr
        reason = f"{reason}: {one_line(error)}"
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


_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def named(value: str) -> str:
    """A value as the code names it."""
    for pattern, name in _NAMES:
        value = pattern.sub(name, value)
    return value[1:-1] if re.fullmatch(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", value) else value


def _dtypes(match: re.Match[str]) -> str:
    before, after = (_DTYPES.get(name, name.lower()) for name in match.group(2, 3))
    return f"{named(match[1])} is {after}, compiled for {before}"


def _dispatch_keys(match: re.Match[str]) -> str:
    before, after = (keys.split(", ") for keys in match.group(2, 3))
    gone = ", ".join(key for key in before if key not in after)
    new = ", ".join(key for key in after if key not in before)
    changed = " and ".join(part for part in (f"without {gone}" if gone else "", f"with {new}" if new else "") if part)
    return f"{named(match[1])} has other dispatch keys, {changed}: another device, or inference mode"


def _compared(match: re.Match[str]) -> str:
    left, sign, right = match.groups()
    if sign in ("<=", "<") and re.fullmatch(r"-?\d+", left):  # ``2 <= x.size()[0]``
        left, sign, right = right, {"<=": ">=", "<": ">"}[sign], left
    relation = {"==": "", ">=": "at least ", ">": "more than ", "<=": "at most ", "<": "less than "}
    return f"{named(left)} is {'now' if sign == '!=' else 'no longer'} {relation.get(sign, '')}{named(right)}"


_MADE: dict[str, Callable[[re.Match[str]], str]] = {
    "dtypes": _dtypes,
    "dispatch_keys": _dispatch_keys,
    "compared": _compared,
}


def cause_of(guard: str) -> str:
    """The cause of a recompilation, from the guard that failed; ``"other"`` if the wording is unknown."""
    return next((cause for pattern, cause in _CAUSES if pattern.search(guard)), "other")


def what_changed(guard: str) -> str:
    """What changed since the code was compiled, as a sentence; the guard itself if its form is unknown."""
    for pattern, sentence in _CHANGES:
        if match := pattern.fullmatch(guard):
            if sentence.startswith("="):
                return _MADE[sentence[1:]](match)
            return sentence.format("", *map(named, match.groups()))
    return f"the guard `{guard}` no longer holds"
