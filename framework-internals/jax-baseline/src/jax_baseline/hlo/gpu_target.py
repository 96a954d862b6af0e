"""Compiles the train step for an H200 ahead of time, on a machine without a GPU.

XLA's compiler for GPUs (the ``jax-cuda13-pjrt`` plugin) compiles for a description of the device. Fusions, buffers and
collectives are the same as on a GPU machine. XLA cannot autotune here, so tile sizes and the choice between cuBLAS and
Triton are defaults. Nothing runs, and nothing is timed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import partial
from importlib.resources import files
from typing import Literal

from benchkit import UserError
from benchkit.processes import Job, Runner
from jax_baseline.gpt.devices import process_environment
from jax_baseline.hlo.compiled_step import LIMIT_SECONDS, CompiledStep
from torch_baseline.config import GPTConfig, TrainConfig

Layout = Literal["one device", "data parallel", "FSDP"]


def require_gpu_target() -> None:
    """Check that the compiler for GPUs is installed in the version of jaxlib.

    Raises:
        UserError: If it is not, with the remedy.
    """
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise UserError(
            "compiling for a GPU needs XLA's compiler for GPUs; install the optional extra jax-baseline[gpu-target] "
            "(the wheels jax-cuda13-pjrt and jax-cuda13-plugin, no GPU)"
        )
    plugin, jaxlib = (importlib.metadata.version(name) for name in ("jax-cuda13-pjrt", "jaxlib"))
    if plugin != jaxlib:
        raise UserError(
            f"jax-cuda13-pjrt is {plugin} and jaxlib {jaxlib}; they must be equal: "
            f"pip install jax-cuda13-pjrt=={jaxlib} jax-cuda13-plugin=={jaxlib}"
        )


def compile_step_for_h200(
    model: GPTConfig, training: TrainConfig, *, attention: str = "xla", devices: int = 1, layout: Layout = "one device"
) -> CompiledStep:
    """Compile the train step for H200s in a separate process.

    Raises:
        UserError: If the compiler for GPUs is not installed, or cannot compile the attention.
    """
    if attention != "xla":
        raise UserError(f"without a GPU the attention must be xla (JAX asks cuDNN for its version), got {attention!r}")
    require_gpu_target()
    call = partial(_compiled, model, training, devices, layout)
    # The plug-in must not search for a GPU. Arrays stay on the CPU, and only the compiler is used.
    return Runner(LIMIT_SECONDS).run(Job(call, "compiling for an H200", environment=process_environment("cpu")))


def _compiled(model: GPTConfig, training: TrainConfig, devices: int, layout: Layout) -> CompiledStep:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_baseline.gpt.compilation import compile_step
    from jax_baseline.gpt.sharding import batch_sharding, make_mesh, state_sharding
    from jax_baseline.gpt.train import initial_state, make_train_step

    description = (files("jax_baseline.hlo") / "targets" / "nvidia_h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{devices}")
    shares = devices if layout == "FSDP" else 1
    mesh = make_mesh(devices // shares, shares, topology.devices)
    state = jax.eval_shape(lambda: initial_state(model, training))
    shardings, rows = state_sharding(state, mesh), batch_sharding(mesh)
    step = make_train_step(model, training)
    jitted = jax.jit(
        lambda state, tokens, targets: step(state, tokens, targets),
        in_shardings=(shardings, rows, rows),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    tokens = jax.ShapeDtypeStruct((training.batch_size, model.block_size), jnp.int32)
    compiled = compile_step(jitted, state, tokens, tokens)
    memory = compiled.step.memory_analysis()
    return CompiledStep(
        compiled.text,
        {"jax": jax.__version__, "backend": "cuda, ahead of time for an H200"},
        compiled.seconds,
        memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
    )
