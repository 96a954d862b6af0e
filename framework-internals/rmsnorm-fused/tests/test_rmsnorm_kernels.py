"""The kernels themselves: under Triton's interpreter, through its compiler, and through nvcc, all without a GPU."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
import warm_python
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS  # what torch's builder adds: no implicit conversions of half

from native_build import compile_cuda, find_nvcc
from rmsnorm_fused.impl.prebuild import CSRC

HERE = Path(__file__).parent


def _release(package: str) -> tuple[int, ...]:
    return tuple(map(int, version(package).split(".")[:2]))


@pytest.mark.skipif(
    _release("triton") < (3, 7) and _release("numpy") >= (2, 4),
    reason="the interpreter of Triton before 3.7 makes scalars of arrays, which NumPy refuses from 2.4 on",
)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="these are the tests that it would start again")
@pytest.mark.parametrize(
    ("files", "selection"),
    [
        # Operators are registered, differentiated and compiled in the same way whatever is behind them. Wide rows take
        # seconds each under the interpreter, and so do random ones; test_triton_row_in_blocks runs the kernels of wide
        # rows on narrow ones.
        pytest.param(
            "*_numerics.py",
            " and not ".join(
                [
                    *("triton-cpu", "511", "1000", "2000", "4096", "4097", "9000", "16384", "40000", "random"),
                    # Of each kernel one dtype or two.
                    *("torch.float64", "-torch.float16", "dtype1", "dtype2", "dtype3", "cpu-4"),
                ]
            ),
            id="numerics",
        ),
        pytest.param("test_*.py", "triton-cpu", id="all", marks=pytest.mark.slow),
    ],
)
def test_triton_under_its_interpreter(files, selection):
    # A separate process: Triton reads the variable when it is imported, and other tests must not see it.
    answer = warm_python.run(
        [
            "-m", "pytest", *sorted(HERE.glob(files)), "-k", selection, "-q", "-p", "no:cacheprovider",
            "-c", HERE.parents[2] / "pyproject.toml", "--rootdir", HERE.parents[2],
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    passed = re.search(r"(\d+) passed", answer.stdout)
    assert passed is not None
    assert int(passed[1]) > 50, answer.stdout[-1000:]


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize(
    ("architecture", "files"),
    [
        ("sm_90", "forward_wide.cu"),  # the shortest, with the headers of most others
        *(
            pytest.param(name, "*.cu", marks=pytest.mark.slow)
            for name in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
        ),
    ],
)
def test_cuda_compiles_without_spills(architecture, files):
    sources = sorted((CSRC / "cuda").glob(files))
    assert sources
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda path: compile_cuda(path, architecture, cuda_cflags=COMMON_NVCC_FLAGS), sources)
    for source, kernels in zip(sources, reports, strict=True):
        spilling = [kernel.name for kernel in kernels if kernel.spill_stores or kernel.spill_loads]
        assert not spilling, f"{source.name} for {architecture}: {spilling}"
