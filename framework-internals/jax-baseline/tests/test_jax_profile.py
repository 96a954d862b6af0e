"""Profiles read from their bytes, and on a GPU the kernels that both profilers see."""

import struct
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchkit.processes import RemoteObject
from jax_baseline.diff import compiled_programs
from jax_baseline.diff.compiled_programs import FunctionSpec
from jax_baseline.hlo.profile import kernel_events, kernel_seconds
from jax_baseline.hlo.xplane import ProfileEvent, read_instructions


def varint(number):
    number &= (1 << 64) - 1  # a negative one takes ten bytes
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def encoded(number, value):
    """A field of a message: an integer, a double, or what has a length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 1) + struct.pack("<d", value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def event(picoseconds, *stats):
    return encoded(4, encoded(1, 1) + encoded(2, 7) + encoded(3, picoseconds) + b"".join(encoded(4, s) for s in stats))


def plane(name, *lines, stats=("hlo_op", "flops", "fusion.2")):
    names = [
        encoded(5, encoded(1, index) + encoded(2, encoded(1, index) + encoded(2, stat)))
        for index, stat in enumerate(stats, 1)
    ]
    return encoded(1, encoded(1, 0) + encoded(2, name) + b"".join(encoded(3, line) for line in lines) + b"".join(names))


STRING, REFERENCE = encoded(1, 1) + encoded(5, "dot.1"), encoded(1, 1) + encoded(7, 3)
OTHERS = (encoded(1, 2) + encoded(2, 1.5), encoded(1, 2) + encoded(4, -1), encoded(1, 9) + encoded(6, b"\xff"))
PROFILE = plane("/host:CPU", encoded(2, "python") + event(10, *OTHERS), stats=("flops",)) + plane(
    "/device:GPU:0",
    encoded(1, 3)
    + encoded(2, "Stream #3")
    + event(2_500_000, *OTHERS, STRING)
    + event(10, *OTHERS)
    + event(7, REFERENCE),
    encoded(2, "XLA Ops") + event(2_600_000, STRING),
)


def test_instructions_are_read_from_the_bytes_of_a_profile():
    """Names as strings and as references, among statistics of every kind; what names no instruction is left out."""
    assert list(read_instructions(PROFILE)) == [
        ProfileEvent("/device:GPU:0", "Stream #3", "dot.1", pytest.approx(2.5e-6)),
        ProfileEvent("/device:GPU:0", "Stream #3", "fusion.2", pytest.approx(7e-12)),
        ProfileEvent("/device:GPU:0", "XLA Ops", "dot.1", pytest.approx(2.6e-6)),
    ]


@pytest.mark.parametrize("profile", [PROFILE[:-1], b"\x0b", b"\x08\x01\x0a\xff", b'{"traceEvents": []}'])
def test_other_bytes_are_no_profile(profile):
    with pytest.raises(ValueError, match="expected a serialised XSpace"):
        list(read_instructions(profile))


def test_a_profile_reads_as_jax_reads_it(tmp_path):
    """A real one, against JAX's own reader (which may be used here: no GPU was profiled in the process)."""
    step = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    x = jax.device_put(jnp.ones((128, 128)), jax.devices("cpu")[0])
    step(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        step(x).block_until_ready()
    (path,) = tmp_path.rglob("*.xplane.pb")
    theirs = [
        (plane.name, line.name, stats["hlo_op"], event.duration_ns)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if "hlo_op" in (stats := dict(event.stats))
    ]
    ours = [(*ran[:3], int(ran.seconds * 1e9 + 1e-4)) for ran in read_instructions(path.read_bytes())]
    assert ours == theirs
    assert ours


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
