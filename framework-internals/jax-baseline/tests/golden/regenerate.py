"""Write the golden HLO texts anew: one small training step, compiled for a CPU and, ahead of time, for H200s.

    JAX_PLATFORMS=cpu ./scripts/python.sh framework-internals/jax-baseline/tests/golden/regenerate.py

The latter needs the optional extra ``gpu-target``.
"""

from importlib.resources import files
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_baseline.diff.xla.private import complete_text

ROWS, WIDTH, HIDDEN, LAYERS = 64, 32, 128, 3


def step(weights, x):
    """One step of gradient descent on a scanned stack of layers; the weights are given away."""

    def loss(weights, x):
        first, stack = weights
        with jax.named_scope("first"):
            x = jax.nn.gelu(x @ first)
        with jax.named_scope("stack"):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)
        with jax.named_scope("loss"):
            return -jax.nn.log_softmax(x.astype(jnp.float32))[:, 0].mean()

    value, gradients = jax.value_and_grad(loss)(weights, x)
    with jax.named_scope("update"):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def shapes(dtype):
    weights = (jax.ShapeDtypeStruct((WIDTH, HIDDEN), dtype), jax.ShapeDtypeStruct((LAYERS, HIDDEN, HIDDEN), dtype))
    return weights, jax.ShapeDtypeStruct((ROWS, WIDTH), dtype)


def main():
    folder = Path(__file__).parent
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    compiled = jax.jit(step, donate_argnums=0).lower(*shapes(jnp.float32)).compile()
    (folder / "cpu_step.hlo").write_text(compiled.as_text())
    (folder / "step.stablehlo").write_text(jax.jit(step).lower(*shapes(jnp.float32)).as_text())
    # For GPUs: two of them, products by Triton; and one with products by cuBLAS and nothing left out of the text.
    description = (files("jax_baseline.hlo") / "targets" / "nvidia_h200.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x2")
    mesh = Mesh(np.array(topology.devices), ("data",))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    jitted = jax.jit(step, donate_argnums=0, in_shardings=(whole, rows), out_shardings=whole)
    (folder / "h200_step.hlo").write_text(jitted.lower(*shapes(jnp.bfloat16)).compile().as_text())
    one = NamedSharding(Mesh(mesh.devices[:1], ("data",)), PartitionSpec())
    lowered = jax.jit(step, in_shardings=one, out_shardings=one).lower(*shapes(jnp.float32))
    compiled = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})
    (folder / "h200_cublas_step.hlo").write_text(complete_text(compiled))


if __name__ == "__main__":
    main()
