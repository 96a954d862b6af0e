"""The parts of jaxlib that are not public and that this package stands on; nothing else here touches them.

Optimised HLO text is compiled once more with other results. ``jaxlib._hlo`` reads the text, ``jaxlib._jax.mlir`` turns
it into what a client compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Shaped


def complete_text(compiled: Any) -> str:
    """The optimised module of a compiled function with every constant written out; ``as_text()`` leaves out large ones.

    Raises:
        RuntimeError: if this jaxlib keeps its parts elsewhere.
    """
    try:
        from jaxlib import _hlo

        options = _hlo.HloPrintOptions()
        options.print_large_constants = True
        return compiled.runtime_executable().hlo_modules()[0].to_string(options)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(_moved(error)) from error


def kept_arguments(compiled: Any) -> list[int]:
    """Numbers of the flat arguments that are parameters of the module: those the function never reads are not.

    Raises:
        RuntimeError: if this jax keeps its parts elsewhere.
    """
    try:
        return sorted(compiled._executable._kept_var_idx)
    except AttributeError as error:
        raise RuntimeError(_moved(error)) from error


def run_text(text: str, arguments: Sequence[Shaped[Array, ...]]) -> list[Shaped[Array, ...]]:
    """Compile the text of an HLO module, run it, and return its results in order.

    Args:
        text: of the module; its entry computation returns a tuple.
        arguments: one for each parameter, all on one device.

    Raises:
        RuntimeError: if this jaxlib keeps its parts elsewhere.
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
        f"jax {jax.__version__} keeps a part elsewhere that jax_baseline.diff.xla_private needs ({error}); "
        "this version has been tested with jax 0.10.2 and 0.11.2"
    )
