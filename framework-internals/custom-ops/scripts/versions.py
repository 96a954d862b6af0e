"""Tests one library under other versions of torch and Python, each in a separate environment.

    python scripts/versions.py LIBRARY --torch 2.10 --torch 2.15 --python 3.11 --environments FOLDER

Nothing is compiled. The named Python (python3.12, …, on PATH) makes each environment with `python -m venv` and
`pip install torch==<version>.*`; an existing environment is used again.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[3]

CHECK = """
import platform, torch, custom_ops
torch.manual_seed(0)
info = custom_ops.load()
assert info.road == "named library", info
x, bias = torch.randn(33, 65, requires_grad=True), torch.randn(65, requires_grad=True)
y = custom_ops.bias_gelu(x, bias)
expected = torch.nn.functional.gelu(x + bias, approximate="tanh")
torch.testing.assert_close(y, expected)
for ours, theirs in zip(torch.autograd.grad(y.sum(), (x, bias)), torch.autograd.grad(expected.sum(), (x, bias))):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
assert torch.equal(custom_ops.vector_add(x, x), x + x)
assert torch.equal(custom_ops.scale(x), 1.23 * x)
q = torch.randn(2, 4, 17, 32, requires_grad=True)
out, lse = custom_ops.flash_attention(q, q, q, True)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
out.sum().backward()
image, weight = torch.randn(1, 3, 9, 9), torch.randn(4, 3, 3, 3)
y = custom_ops.conv_bn_relu(image, weight, torch.ones(4), torch.zeros(4), padding=1)
torch.testing.assert_close(y, torch.relu(torch.conv2d(image, weight, padding=1)))
for name, operands in (("vector_add", (x, x)), ("bias_gelu", (x, bias)), ("flash_attention", (q, q, q))):
    torch.library.opcheck(getattr(torch.ops.custom_ops, name).default, operands)
try:
    custom_ops.vector_add(x, bias)
except ValueError as error:
    assert "expected shape [33, 65] like 'a', got [65]" in str(error)
else:
    raise AssertionError("different shapes were taken")
print(f"torch {torch.__version__}, Python {platform.python_version()}: works, sha256 {info.sha256[:16]}")
"""


def _interpreter(environments: Path, python: str, torch: str) -> Path:
    folder = environments / f"python{python}-torch{torch}"
    interpreter = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([f"python{python}", "-m", "venv", str(folder)], check=True)
        install = [
            str(interpreter),
            "-m",
            "pip",
            "install",
            "--quiet",
            f"torch=={torch}.*",
            "numpy",
            "filelock",
            "rich",
        ]
        index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        subprocess.run([*install, *index], check=True)
        (folder / "ready").touch()
    return interpreter


def check(interpreter: Path, library: Path) -> str | None:
    """Run the check with an interpreter and print its line; returns the error, or None."""
    sources = os.pathsep.join(str(path) for path in (ROOT / "shared/src", ROOT / "framework-internals/custom-ops/src"))
    environment = {**os.environ, "PYTHONPATH": sources, "CUSTOM_OPS_LIBRARY": str(library.resolve())}
    command = [str(interpreter), "-c", CHECK]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return (answer.stderr.strip() or "no output").splitlines()[-1]
    print(answer.stdout.strip())
    return None


def main(
    library: Annotated[Path, typer.Argument(exists=True, help="dist/_C.abi3.so, or the library from a wheel.")],
    torch: Annotated[
        list[str] | None, typer.Option(help="2.10, 2.13, …; repeat for several. Default: 2.10 to 2.15.")
    ] = None,
    python: Annotated[list[str] | None, typer.Option(help="3.11, 3.12, …; repeat for several. Default: 3.11.")] = None,
    environments: Annotated[Path, typer.Option(help="Folder of the environments.")] = Path("build/versions"),
    interpreter: Annotated[
        list[Path] | None, typer.Option(help="Python of an existing environment with torch; makes no new one.")
    ] = None,
) -> None:
    """Test one library under other versions of torch and Python."""
    if interpreter:
        found = {str(path): path for path in interpreter}
    else:
        versions = torch or [f"2.{minor}" for minor in range(10, 16)]
        found = {
            f"torch {one}, Python {other}": _interpreter(environments, other, one)
            for one in versions
            for other in python or ["3.11"]
        }
    failures = {name: reason for name, path in found.items() if (reason := check(path, library)) is not None}
    for name, reason in failures.items():
        print(f"{name}: {reason}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
