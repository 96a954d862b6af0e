"""Where two functions of a user part, and probably why: both run operation by operation in one process."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import numpy as np

from benchkit.processes import Job, Runner
from jax_baseline.diff.compiled_programs import FunctionSpec, importable_neighbours, load_inputs
from jax_baseline.gpt.devices import process_environment
from jax_baseline.user_code import load_function

_LIMIT_SECONDS = 300.0


def located(jax_spec: FunctionSpec, torch_spec: FunctionSpec, where: str) -> str:
    """Return the first operations that differ, in words, from a process of its own in which JAX uses the CPU.

    ``where`` is that of the verdict, :class:`jax_baseline.diff.verdict.Agreement`.
    """
    job = Job(partial(_located, jax_spec, torch_spec, where), "locating", environment=process_environment("cpu"))
    return Runner(_LIMIT_SECONDS).run(job)


def _located(jax_spec: FunctionSpec, torch_spec: FunctionSpec, where: str) -> str:
    import jax
    import jax.numpy as jnp
    import torch

    from jax_baseline.diff.runs import other_inputs
    from jax_baseline.parity.location.functions import locate
    from jax_baseline.parity.rounding import Widening, in_torchs_precision, jax_in_float64, torch_in_float64

    wide = where != "own dtype"
    with ExitStack() as stack:
        for spec in (jax_spec, torch_spec):
            stack.enter_context(importable_neighbours(spec))
        of_jax = load_function(jax_spec.function, what="the JAX function")
        of_torch = load_function(torch_spec.function, what="the torch function")
        given = load_inputs(torch_spec.inputs)
        arrays = [
            array.astype(np.float64) if wide and np.issubdtype(array.dtype, np.floating) else array
            for array in dict(other_inputs(given)).get(where, given)
        ]

        def in_torch() -> Any:
            tensors = [torch.from_numpy(array.copy()).to(torch_spec.device) for array in arrays]
            with torch_in_float64(Widening(exact=True)) if wide else nullcontext():
                return of_torch(*tensors)

        with jax.enable_x64(wide), in_torchs_precision(), jax_in_float64() if wide else nullcontext():
            location = locate(in_torch, of_jax, [jnp.asarray(array) for array in arrays])
    if location.torch or location.jax or torch_spec.gradients:
        return str(location)
    return "cause not identified: each floating operation of one is computed by the other; compare what they return"
