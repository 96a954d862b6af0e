"""Where two functions of a user part, and probably why: both run operation by operation in one process."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from benchkit.processes import RemoteObject
from jax_baseline.diff.compiled_programs import FunctionSpec, importable_neighbours, load_function, load_inputs


class Locator:
    """Runs both functions. It lives in a separate process, and JAX in it on the CPU.

    ``where`` is that of the verdict, :class:`jax_baseline.diff.agreement.verdict.Agreement`.
    """

    def __init__(self, jax_spec: FunctionSpec, torch_spec: FunctionSpec, where: str) -> None:
        self._importable = [importable_neighbours(spec) for spec in (jax_spec, torch_spec)]
        self._jax = load_function(jax_spec.function, what="the JAX function")
        self._torch = load_function(torch_spec.function, what="the torch function")
        self._spec, self._where = torch_spec, where

    def locate(self) -> str:
        """Return the first operations that differ, in words."""
        import jax
        import jax.numpy as jnp
        import torch

        from jax_baseline.diff.agreement.runs import other_inputs
        from jax_baseline.gpt.compilation import in_torchs_precision
        from jax_baseline.parity.location import locate
        from jax_baseline.parity.rounding.float64 import Widening, jax_in_float64, torch_in_float64

        given = load_inputs(self._spec.inputs)
        wide = self._where != "own dtype"
        arrays = [
            array.astype(np.float64) if wide and np.issubdtype(array.dtype, np.floating) else array
            for array in dict(other_inputs(given)).get(self._where, given)
        ]

        def in_torch() -> Any:
            tensors = [torch.from_numpy(array.copy()).to(self._spec.device) for array in arrays]
            with torch.no_grad(), torch_in_float64(Widening(exact=True)) if wide else nullcontext():
                return self._torch(*tensors)

        with jax.enable_x64(wide), in_torchs_precision(), jax_in_float64() if wide else nullcontext():
            location = locate(in_torch, self._jax, [jnp.asarray(array) for array in arrays])
        if location.torch or location.jax or self._spec.gradients:
            return str(location)
        return "cause not identified: each floating operation of one is computed by the other; compare what they return"


def located(jax_spec: FunctionSpec, torch_spec: FunctionSpec, where: str) -> str:
    """Return where two functions part, in words, from a process of its own; see :class:`Locator`."""
    asked = {"jax_spec": jax_spec, "torch_spec": torch_spec, "where": where}
    with RemoteObject(Locator, asked, environment={"JAX_PLATFORMS": "cpu"}) as locator:
        location: str = locator.call("locate")
        return location
