"""Reads guards that failed: what they are about, and what changed, in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable

# Guard -> cause; the first match counts.
_CAUSES = tuple(
    (re.compile(pattern), cause)
    for pattern, cause in (
        ("size mismatch", "tensor size"),
        ("stride mismatch", "tensor layout"),
        ("rank mismatch", "tensor rank"),
        ("dtype mismatch", "dtype"),
        ("device mismatch", "device"),
        ("requires_grad mismatch", "requires_grad"),
        ("dispatch key set mismatch", "dispatch keys"),
        ("GLOBAL_STATE|grad_mode|torch_function_mode_stack|functorch", "global state (grad mode, autocast, …)"),
        ("Duplicate tensors", "the same tensor twice"),
        (r"NoneType|hasattr\(| is (not )?None\b", "None or absent"),
        (r"_contains(__)?\(|\bdict\.keys\(|\.keys\(\)", "container keys"),
        ("___check_obj_id|Not a function", "another object"),
        ("___check_type_id|expected type of", "another type"),
        (r"\blen\(|_iterator_len\(|^not ", "container length"),
        (r"\.training\b", "train / eval mode"),
        (r"\.(size|stride)\(\)\[|\b(Eq|Ne|Mod)\(", "symbolic shape"),
        (" == ", "Python value"),
        (" <=? | >=? | != ", "symbolic shape"),
    )
)

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

# How a guard names a value, and how the code does.
_NAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"object\.__getattribute__\(([\w.]+), '(\w+)'\)", r"\1.\2"),
        (r"\b[LG]\['(\w+)'\]", r"\1"),
        (r"\._(?:modules|parameters|buffers)\['(\d+)'\]", r"[\1]"),
        (r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1"),
        (r"\.__dict__\['(\w+)'\]", r".\1"),
        (r"\b___stack\d+\b(?:\.\w+|\(\)|\[[^\]]+\])*", "a value that the lines before computed"),
        (r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)"),
        (r"\b___(?:tuple|dict)_iterator_len\(", "len("),
    )
)


def named(value: str) -> str:
    """A value as the code names it."""
    for pattern, name in _NAMES:
        value = pattern.sub(name, value)
    return value[1:-1] if re.fullmatch(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", value) else value


def _dtypes(found: re.Match[str]) -> str:
    before, after = (_DTYPES.get(name, name.lower()) for name in found.group(2, 3))
    return f"{named(found[1])} is {after}, compiled for {before}"


def _dispatch_keys(found: re.Match[str]) -> str:
    before, after = (keys.split(", ") for keys in found.group(2, 3))
    gone = ", ".join(key for key in before if key not in after)
    new = ", ".join(key for key in after if key not in before)
    changed = " and ".join(part for part in (f"without {gone}" if gone else "", f"with {new}" if new else "") if part)
    return f"{named(found[1])} has other dispatch keys, {changed}: another device, or inference mode"


def _compared(found: re.Match[str]) -> str:
    left, sign, right = found.groups()
    if sign in ("<=", "<") and re.fullmatch(r"-?\d+", left):  # ``2 <= x.size()[0]``
        left, sign, right = right, {"<=": ">=", "<": ">"}[sign], left
    relation = {"==": "", ">=": "at least ", ">": "more than ", "<=": "at most ", "<": "less than "}
    return f"{named(left)} is {'now' if sign == '!=' else 'no longer'} {relation.get(sign, '')}{named(right)}"


_TENSOR = r"tensor '(.+)' "
_CLASS = r"<class '(?:.*\.)?(\w+)'>"
# Guard -> sentence, with the guard's groups or made from the match. The first match counts.
_SENTENCES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (
        _TENSOR + r"size mismatch at index (\d+)\. expected (-?\d+), actual (-?\d+)",
        "{1} has size {4} in dimension {2}, compiled for {3}",
    ),
    (
        _TENSOR + r"stride mismatch at index (\d+)\. expected (-?\d+), actual (-?\d+)",
        "{1} has stride {4} in dimension {2}, compiled for {3}",
    ),
    (_TENSOR + r"rank mismatch\. expected (\d+), actual (\d+)", "{1} has rank {3}, compiled for {2}"),
    (_TENSOR + r"dtype mismatch\. expected (\w+), actual (\w+)", _dtypes),
    (_TENSOR + r".*device mismatch\. expected (\S+), actual (\S+)", "{1} is on {3}, compiled for {2}"),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=1", "{1} no longer needs a gradient"),
    (_TENSOR + r"requires_grad mismatch\. expected requires_grad=0", "{1} now needs a gradient"),
    (
        _TENSOR + r"dispatch key set mismatch\. expected DispatchKeySet\((.*)\), actual DispatchKeySet\((.*)\)",
        _dispatch_keys,
    ),
    (r"expected type of '(.+)' to be .*found <class 'NoneType'>", "{1} is None, compiled for a tensor"),
    (rf"expected type of '(.+)' to be .*found {_CLASS}", "{1} is of type {2}, compiled for a tensor"),
    (r"GLOBAL_STATE changed: grad_mode.*", "whether gradients are recorded (torch.no_grad) has changed"),
    (r"GLOBAL_STATE changed: autocast.*", "torch.autocast has changed"),
    (r"GLOBAL_STATE changed: (.*\S).*", "the global setting {1} has changed"),
    (r'Duplicate tensors found: \["(.+?)", "(.+?)".*\]', "{1} and {2} are one tensor, compiled for different ones"),
    (rf"___check_type_id\((.+), \d+\), type={_CLASS}", "{1} is no longer of type {2}"),
    (r"___check_type_id\((.+), \d+\).*", "{1} is of another type"),
    (r"___check_obj_id\((.+)\.__code__, \d+\).*", "{1} is another function"),
    (r"___check_obj_id\((.+), \d+\).*", "{1} is another object"),
    (r"not ___\w*contains\((.+), (.+)\)", "{1} is in {2} now"),
    (r"___\w*contains\((.+), (.+)\)", "{1} is no longer in {2}"),
    (r"not hasattr\((.+), '?(\w+)'?\)", "{1} has an attribute {2} now"),
    (r"hasattr\((.+), '?(\w+)'?\)", "{1} no longer has an attribute {2}"),
    (r"(.+) is not None", "{1} is None now"),
    (r"(.+) is None", "{1} is no longer None"),
    (r"(\S+) is not (\S+)", "{1} and {2} are the same object now"),
    (r"(\S+) is (\S+)", "{1} and {2} are no longer the same object"),
    (r".*?\bdict\.keys\(([^()]+)\).* == .*", "the keys of {1} have changed"),
    (r"(.+) (==|!=|<=|>=|<|>) (.+)", _compared),
    (r"not (\S+)", "{1} is no longer empty, None or False"),
    (r"(\S+)", "{1} is no longer true"),
)


def cause_of(guard: str) -> str:
    """The cause of a recompilation, from the guard that failed; ``"other"`` if the wording is unknown."""
    return next((cause for pattern, cause in _CAUSES if pattern.search(guard)), "other")


def what_changed(guard: str) -> str:
    """What changed since the code was compiled, as a sentence; the guard itself if its form is unknown."""
    for pattern, sentence in _SENTENCES:
        if found := re.fullmatch(pattern, guard):
            groups = (named(group) for group in found.groups())
            return sentence.format("", *groups) if isinstance(sentence, str) else sentence(found)
    return f"the guard `{guard}` no longer holds"
