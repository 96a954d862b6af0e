"""Each wheel alone, in an environment that has torch and NumPy and nothing else of ours or of others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

import native_build

ROOT = Path(__file__).resolve().parents[2]
needs_cxx = pytest.mark.skipif(native_build.missing_cxx() is not None, reason=str(native_build.missing_cxx()))

CUSTOM_OPS = """
import torch, custom_ops
x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
custom_ops.bias_gelu(x, bias).square().sum().backward()
inputs = x.detach().clone().requires_grad_(), bias.detach().clone().requires_grad_()
torch.nn.functional.gelu(sum(inputs), approximate="tanh").square().sum().backward()
torch.testing.assert_close(x.grad, inputs[0].grad)
w, target = torch.randn(5, 8, requires_grad=True), torch.arange(4)
custom_ops.linear_cross_entropy(x, w, target).backward()
optimizer = custom_ops.AdamW([w])
optimizer.step()
q = torch.randn(1, 2, 16, 8)
torch.testing.assert_close(custom_ops.flash_attention(q, q, q)[0],
                           torch.nn.functional.scaled_dot_product_attention(q, q, q))
whole = torch.compile(custom_ops.bias_gelu, fullgraph=True, backend="aot_eager")
torch.testing.assert_close(whole(x, bias), custom_ops.bias_gelu(x, bias))
assert custom_ops.build_info().road == "wheel"
"""
RMSNORM_FUSED = """
import torch, rmsnorm_fused
x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
y = rmsnorm_fused.rms_norm(x, (8,), weight, backend="cpp")
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), weight))
y.sum().backward()
whole = torch.compile(rmsnorm_fused.RMSNorm(8), fullgraph=True, backend="aot_eager")
torch.testing.assert_close(whole(x), rmsnorm_fused.RMSNorm(8)(x))
"""
LOWERING = """
import lowering, native_build
print(lowering.describe({"bias_gelu": "custom_ops"}, "cpu"))
"""
LIGHT = """
import sys
loaded = {name.partition(".")[0] for name in sys.modules}
heavy = loaded & {"rich", "matplotlib", "typer", "filelock", "ninja", "triton", "jax", "torch_baseline"}
assert not heavy, heavy
"""


def _requirements(name: str, seen: set[str]) -> set[str]:
    """A distribution and what it requires here, by canonical name."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in seen:
        return seen
    try:
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # for another platform
        return seen
    seen.add(name)
    for line in required:
        if "extra ==" not in line:
            _requirements(re.match(r"[\w.-]+", line)[0], seen)
    return seen


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The Python of an environment with links to torch, NumPy and their requirements, Triton left out."""
    folder = tmp_path / "environment"
    venv.create(folder)
    packages = next(folder.glob("lib/python*/site-packages"))
    for name in _requirements("torch", _requirements("numpy", set())) - {"triton"}:
        for file in metadata.files(name) or ():
            link = packages / file.parts[0]
            if file.parts[0] != ".." and not link.exists():
                link.symlink_to(Path(file.locate()).parents[len(file.parts) - 1] / file.parts[0])
    return folder / "bin" / "python"


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env={**inherited, **environment}
    )


def _install(package: Path, python: Path, folder: Path) -> Path:
    """Build a wheel without CUDA, and install it where no index can bring anything else."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = _run(
        *pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, package, CUDA_HOME=str(folder)
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    installed = _run(*pip, "--python", python, "install", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    return wheel


@pytest.mark.slow
@needs_cxx
def test_the_wheel_of_custom_ops_needs_torch_alone(bare: Path, tmp_path: Path) -> None:
    _install(ROOT / "framework-internals" / "custom-ops", bare, tmp_path)
    used = _run(bare, "-W", "error", "-c", f"import custom_ops\n{LIGHT}\n{CUSTOM_OPS}", CUSTOM_OPS_AUTOGRAD="python")
    assert used.returncode == 0, used.stderr
    command = _run(bare.with_name("custom-ops"), "info")
    assert command.returncode == 2
    assert command.stderr.splitlines() == [
        "custom-ops: the command line needs the package typer, which is not installed: pip install 'custom-ops[tools]'"
    ]


@pytest.mark.slow
@needs_cxx
def test_the_wheel_of_rmsnorm_fused_needs_torch_alone(bare: Path, tmp_path: Path) -> None:
    wheel = _install(ROOT / "framework-internals" / "rmsnorm-fused", bare, tmp_path)
    assert re.fullmatch(r"rmsnorm_fused-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    used = _run(bare, "-W", "error", "-c", f"import rmsnorm_fused\n{LIGHT}\n{RMSNORM_FUSED}")
    assert used.returncode == 0, used.stderr
    command = _run(bare.with_name("rmsnorm-fused"), "info")
    assert (command.returncode, len(command.stderr.splitlines())) == (2, 1)
    assert "pip install 'rmsnorm-fused[tools]'" in command.stderr


@pytest.mark.slow
def test_the_shared_packages_that_operators_use_need_torch_alone(bare: Path, tmp_path: Path) -> None:
    _install(ROOT / "shared", bare, tmp_path)
    used = _run(bare, "-c", f"{LOWERING}\n{LIGHT}")
    assert used.returncode == 0, used.stderr
