"""Counts the operations of a StableHLO module, the input of XLA."""

from __future__ import annotations

import re
from collections import Counter

_OPERATION = re.compile(r"(?:^|[\s\"=])(stablehlo|chlo|sdy|mhlo)\.(\w+)")
# Operations for values and structure, which need no work at run time.
_NO_WORK = frozenset({"constant", "return", "tuple", "get_tuple_element"})


def count_operations(text: str) -> Counter[str]:
    """Count each operation in the text of a StableHLO module. The body of a function counts once.

    Raises:
        ValueError: If the text contains no StableHLO.
    """
    if "stablehlo." not in text:
        raise ValueError(f"expected the text of a StableHLO module (lowered.as_text()), got {text[:60]!r}…")
    return Counter(name for _, name in _OPERATION.findall(text) if name not in _NO_WORK)
