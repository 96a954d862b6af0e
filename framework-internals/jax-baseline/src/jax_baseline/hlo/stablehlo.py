"""StableHLO, what JAX hands to XLA, counted: the operations before any of them is fused."""

from __future__ import annotations

import re
from collections import Counter

_OPERATION = re.compile(r"(?:^|[\s\"=])(stablehlo|chlo|sdy|mhlo)\.(\w+)")
# They hold values or structure, and become no work of their own.
_NO_WORK = frozenset({"constant", "return", "tuple", "get_tuple_element"})


def count_operations(text: str) -> Counter[str]:
    """Return how often each operation stands in the text of a StableHLO module, a function's body once.

    Args:
        text: ``lowered.as_text()``.

    Raises:
        ValueError: if there is no StableHLO in it.
    """
    if "stablehlo." not in text:
        raise ValueError(f"expected the text of a StableHLO module (lowered.as_text()), got {text[:60]!r}…")
    return Counter(name for _, name in _OPERATION.findall(text) if name not in _NO_WORK)
