"""The C++ and CUDA C++ kernels from the prebuilt library (``csrc/stable.cpp``)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from native_build import LibraryError, load_library, read_record
from rmsnorm_fused.impl import prebuild

_NAMESPACE = "rmsnorm_fused_prebuilt_2"  # another one for other schemas: the stable ABI passes arguments unchecked
_LIBRARY = torch.library.Library(_NAMESPACE, "DEF")


def unavailable(device_type: str) -> str | None:
    """Say why the prebuilt library cannot be used for a type of device, with the remedy; None if it can."""
    library = prebuild.library_path()
    remedy = f"python -m rmsnorm_fused build makes one if there is a compiler; {prebuild.VARIABLE} names one elsewhere"
    if not library.is_file():
        return f"there is no prebuilt library {library} ({remedy})"
    try:
        record = read_record(library)
    except LibraryError as error:
        return str(error)
    reason = record.refusal(torch.__version__)
    if reason is None and device_type == "cuda":
        reason = record.cuda_refusal(torch.cuda.get_device_capability())
    return None if reason is None else f"the prebuilt library {library} cannot be used: {reason} ({remedy})"


@functools.cache
def load(schemas: tuple[str, ...]) -> Any:
    """Load the library, whose operators get their schemas from Python.

    Returns:
        Its namespace in ``torch.ops``.
    """
    prebuild.cpu_level()  # the library chooses the same one, and keeps silent about a wrong name
    _define(schemas)
    load_library(prebuild.library_path())
    return getattr(torch.ops, _NAMESPACE)


@functools.cache  # once, even where the library cannot be loaded at first
def _define(schemas: tuple[str, ...]) -> None:
    for schema in schemas:
        _LIBRARY.define(schema)
