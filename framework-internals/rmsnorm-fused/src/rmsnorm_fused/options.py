"""The scalar options of a normalisation."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Casting = Literal["exact", "llama"]

CASTINGS: tuple[Casting, ...] = get_args(Casting)

LARGEST_FLOAT8 = 448.0  # the largest finite float8_e4m3fn


class Options(NamedTuple):
    """The scalars that every operator and implementation of this package takes, in their order.

    Attributes:
        eps: Number added to the mean square.
        weight_offset: Number added to the weight in the accumulating dtype; 1 for Gemma's zero-centred weight.
        llama: Whether to round x·rstd to the dtype of x before the product with the weight, and dy·weight before its
            use in the backward pass, like Hugging Face's ``LlamaRMSNorm``.
        centred: Whether the mean is subtracted first: layer normalisation, without an offset and without ``llama``.
    """

    eps: float
    weight_offset: float = 0.0
    llama: bool = False
    centred: bool = False
