"""All uses of private parts of jaxlib in this package.

They compile optimised HLO text again. ``jaxlib._hlo`` parses the text, and ``jaxlib._jax.mlir`` converts it to the form
that a client compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Shaped


def complete_text(compiled: Any) -> str:
    """Return the optimised module of a compiled function with all constants; ``as_text()`` elides large ones.

    Raises:
        RuntimeError: If this version of jaxlib has moved a private part.
    """
    try:
        from jaxlib import _hlo

        options = _hlo.HloPrintOptions()
        options.print_large_constants = True
        return compiled.runtime_executable().hlo_modules()[0].to_string(options)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(_moved(error)) from error


def kept_arguments(compiled: Any) -> list[int]:
    """Return the indices of the flat arguments that are parameters of the module; unused arguments are not.

    Raises:
        RuntimeError: If this version of jax has moved a private part.
    """
    try:
        return sorted(compiled._executable._kept_var_idx)
    except AttributeError as error:
        raise RuntimeError(_moved(error)) from error


def run_text(text: str, arguments: Sequence[Shaped[Array, ...]]) -> list[Shaped[Array, ...]]:
    """Compile and run the text of an HLO module.

    Its entry computation returns a tuple; there is one array for each parameter, all on one device.

    Raises:
        RuntimeError: If this version of jaxlib has moved a private part.
    """
    try:
        from jax._src import compiler
        from jax._src.lib import xla_client
        from jaxlib import _hlo, _jax

        module = _hlo.hlo_module_from_text(text)
        computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
        program = _jax.mlir.xla_computation_to_mlir_module(computation)
        (device,) = arguments[0].devices()
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        executable = device.client.compile_and_load(program, xla_client.DeviceList((device,)), options)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(_moved(error)) from error
    return list(executable.execute(list(arguments)))


def _moved(error: Exception) -> str:
    return (
        f"jax_baseline.diff.xla.private did not find a private part in jax {jax.__version__} ({error}); "
        "install jax 0.10.2 or 0.11.2, which are tested"
    )
