"""Attention on every instruction set that this processor has, one by one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

from custom_ops.builds import operator_library
from custom_ops.builds.loading import load
from custom_ops.builds.operator_library import CSRC, LEVEL_VARIABLE, attention_levels
from native_build import INCLUDE_DIR, missing_cxx
from native_build.toolchain import cxx_compiler

PROCESS = Path(__file__).with_name("cpu_level_process.py")


def run(level: str | None, *command: str) -> subprocess.CompletedProcess[str]:
    chosen = {} if level is None else {LEVEL_VARIABLE: level}
    environment = {**os.environ, **chosen, "PYTHONPATH": os.pathsep.join(sys.path)}
    return warm_python.run(command, env=environment)


# The other tests use the processor's best one, and AVX2 is what most machines have.
LEVELS = [level if level == "avx2" else pytest.param(level, marks=pytest.mark.slow) for level in attention_levels()]


@pytest.mark.parametrize("level", LEVELS)
def test_attention_is_right_on_every_instruction_set(level: str) -> None:
    known, best = list(attention_levels()), load().instructions
    if best is not None and known.index(level) > known.index(best):
        pytest.skip("this processor lacks the instruction set")
    answer = run(level, str(PROCESS))
    assert answer.returncode == 0, answer.stdout + answer.stderr


NUMERICS = (
    "test_operators.py",
    "test_glu.py",
    "test_linear.py",
    "test_rotary.py",
    "test_cross_entropy.py",
    "test_loss_parts.py",
    "test_adamw.py",
    "test_vector_add.py",
)


@pytest.mark.slow
@pytest.mark.parametrize("level", attention_levels())
def test_the_operators_whole_tests_pass_on_every_instruction_set(level: str) -> None:
    known, best = list(attention_levels()), load().instructions
    if best is not None and known.index(level) > known.index(best):
        pytest.skip("this processor lacks the instruction set")
    if level == best:
        pytest.skip("the tests themselves use it")
    files = [str(PROCESS.with_name(name)) for name in NUMERICS]
    root = PROCESS.parents[3]
    options = ("-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"))
    answer = run(level, "-m", "pytest", *options, "--rootdir", str(root), *files)
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]


@pytest.mark.skipif("avx2" not in attention_levels(), reason="no x86-64")
@pytest.mark.parametrize(
    ("features", "anywhere", "number"),
    [
        ("fpu sse2", False, 1),
        ("fpu avx2 fma bmi2 avx512f", False, 2),
        ("avx2 fma bmi2 avx512f avx512bw avx512cd avx512dq avx512vl amx_bf16 amx_tile", False, 3),  # no avx512_bf16
        ("", False, 5),
        ("fpu sse2", True, 5),
    ],
)
def test_a_library_for_this_machine_leaves_out_what_its_processor_lacks(
    monkeypatch: pytest.MonkeyPatch, features: str, anywhere: bool, number: int
) -> None:
    monkeypatch.setattr(operator_library, "processor_field", lambda name: {"flags": features}[name])
    units = operator_library.units(cuda=False, anywhere=anywhere)
    for example, most in (("flash_attention", 5), ("scale", 3)):
        levels = [unit.flags[0] for unit in units if unit.source == CSRC / example / "cpu.cpp"]
        expected = [*attention_levels()][: min(number, most)]
        assert levels == [f"-DCUSTOM_OPS_LEVEL={level}" for level in expected]
    chosen = next(unit for unit in units if unit.source.name == "cpu_levels.cpp")
    assert f"-DCUSTOM_OPS_LEVELS={number}" in chosen.flags


@pytest.mark.skipif("avx2" not in attention_levels(), reason="no x86-64")
@pytest.mark.skipif(missing_cxx() is not None, reason=str(missing_cxx()))
@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_choice_names_no_level_that_is_left_out(number: int) -> None:
    flags = ("-std=c++17", "-fsyntax-only", "-Wall", "-Werror", f"-DCUSTOM_OPS_LEVELS={number}", f"-I{INCLUDE_DIR}")
    source = CSRC / "stable" / "cpu_levels.cpp"
    answer = subprocess.run([cxx_compiler(), *flags, source], capture_output=True, text=True, check=False)
    assert (answer.stderr, answer.returncode) == ("", 0)


THREADS = """
import torch, custom_ops
from pathlib import Path
from torch.utils.data import DataLoader

def threads() -> set[str]:
    # Where torch sees a GPU, its driver starts some when it is first asked for it.
    tasks = Path("/proc/self/task").iterdir()
    return {task.name for task in tasks if not (task / "comm").read_text().startswith("cuda")}

def threads_of_a_call() -> int:
    before = threads()
    x, q = torch.randn(64, 4096), torch.randn(1, 4, 256, 64)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(custom_ops.bias_gelu(x, torch.zeros(4096)), expected)
    custom_ops.flash_attention(q, q, q)
    return len(threads() - before)

class Items(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return threads_of_a_call()
"""


def test_a_call_uses_torchs_threads_and_no_others() -> None:
    # The second call finds every thread that the first has started. Five are more than many machines have cores.
    script = THREADS + (
        "torch.set_num_threads(5)\nfirst = threads_of_a_call()\nassert first <= 4, first\n"
        "assert threads_of_a_call() == 0\n"
        "torch.set_num_threads(1)\nassert threads_of_a_call() == 0\n"
    )
    answer = run(best_level(), "-c", script)
    assert answer.returncode == 0, answer.stderr


def test_a_worker_of_a_data_loader_uses_its_one_thread() -> None:
    # Before the workers are forked, this process has threads, which they do not inherit.
    script = THREADS + (
        "threads_of_a_call()\n"
        "assert [int(n) for n in DataLoader(Items(), num_workers=2, multiprocessing_context='fork')] == [0, 0]\n"
    )
    answer = run(best_level(), "-W", "ignore", "-c", script)
    assert answer.returncode == 0, answer.stderr


def best_level() -> str:
    return load().instructions or "baseline"


def test_torchs_limit_is_the_operators_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    known = list(attention_levels())
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    found = []
    for limit in "avx512", "avx2", "default":
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", limit)
        answer = run(None, "-c", "import custom_ops; print(custom_ops.load().instructions)")
        assert answer.returncode == 0, answer.stderr
        found.append(known.index(answer.stdout.strip()))
    assert found == [found[0], min(found[0], 1), 0]


def test_an_unknown_instruction_set_is_refused_with_those_that_are_here() -> None:
    answer = run("mmx", "-c", "import custom_ops; custom_ops.load()")
    assert "CUSTOM_OPS_CPU: expected one of baseline" in answer.stderr
    assert "got 'mmx'; name one of them, or unset it" in answer.stderr


def test_a_library_that_is_loaded_without_python_refuses_it_at_the_first_call() -> None:
    library = load().file
    answer = run(
        "mmx",
        "-c",
        f"import torch\ntorch.ops.load_library({str(library)!r})\ntorch.ops.custom_ops_kernels.scale(torch.ones(2))",
    )
    assert "RuntimeError: CUSTOM_OPS_CPU: expected one of baseline" in answer.stderr
