"""The instructions of a profile and their times, and on a GPU the kernels that both profilers see."""

import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchkit.processes import RemoteObject
from jax_baseline.diff import compiled_programs
from jax_baseline.diff.compiled_programs import FunctionSpec
from jax_baseline.hlo.profile import kernel_events, kernel_seconds


def test_times_are_those_of_one_run_and_of_the_instructions_asked_for():
    compiled = jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jnp.ones((64, 64))).compile()
    x = jnp.ones((64, 64))
    seen = {name for name, _ in kernel_events(lambda: compiled(x).block_until_ready())}
    assert seen
    found = kernel_seconds(lambda: compiled(x), [*seen, "never"], repeats=2)
    assert found.keys() == seen
    assert all(0 < seconds < 1 for seconds in found.values())


@pytest.fixture
def product_file(tmp_path):
    """A product, and a sum over what an element-wise function makes of it, for both frameworks."""
    path = tmp_path / "product.py"
    path.write_text(
        textwrap.dedent(
            """
            import jax
            import jax.numpy as jnp
            import numpy as np
            import torch
            from torch.fx.traceback import annotate

            def inputs():
                return (np.ones((1024, 1024), np.float16),)

            def torch_fn(x):
                with annotate({"region": "matmul"}):
                    y = x @ x
                with annotate({"region": "sum"}):
                    return torch.relu(y).float().sum()

            def jax_fn(x):
                with jax.named_scope("matmul"):
                    y = x @ x
                with jax.named_scope("sum"):
                    return jax.nn.relu(y).astype(jnp.float32).sum()
            """
        )
    )
    return Path(path)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize(("program", "name"), [("JaxProgram", "jax_fn"), ("TorchProgram", "torch_fn")])
def test_the_kernels_of_a_gpu_are_timed_and_seen(product_file, program, name):
    """In a process of its own, as everywhere: NVIDIA's profiling library serves one framework in a process."""
    spec = FunctionSpec(f"{product_file}:{name}", f"{product_file}:inputs", False, "cuda", repeats=3)
    with RemoteObject(getattr(compiled_programs, program), {"spec": spec}, limit=90) as made:
        launches = made.call("program").launches
    product = next(launch for launch in launches if launch.category == "matmul")
    assert product.label == ("matmul",)
    assert product.seconds is not None
    assert 1e-6 < product.seconds < 1e-3  # 2 · 1024³ FLOP: 2.2 µs at 989 TFLOP/s
    reductions = [launch for launch in launches if launch.category == "reduction"]
    assert reductions
    assert all(launch.seconds for launch in reductions)
    if program == "JaxProgram":
        assert product.flops == pytest.approx(2 * 1024**3, rel=0.01)
    else:
        assert any(launch.kind == "Triton kernel" and "@triton.jit" in launch.source for launch in launches)
