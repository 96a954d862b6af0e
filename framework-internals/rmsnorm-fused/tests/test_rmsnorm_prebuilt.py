"""The prebuilt library: its build, its use without a compiler, and its rejection under other versions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchkit import UserError
from native_build import INCLUDE_DIR, BuildError, find_nvcc, instruction_levels, missing_cxx, read_record
from rmsnorm_fused import backends, rms_norm
from rmsnorm_fused.cli import app
from rmsnorm_fused.impl import prebuild
from rmsnorm_fused.impl.prebuild import CSRC

HERE = Path(__file__).parent
FILES = tuple(
    HERE / f"test_{name}.py"
    for name in ("rmsnorm_numerics", "layer_norm_numerics", "rmsnorm_operators", "layer_norm_operators")
)
# The prebuilt library's derivatives are registered from Python, so torch.func refuses them; Inductor needs a compiler.
WITHOUT_FUNC = "(numerics or opcheck or vmap or gradcheck)"
pytestmark = pytest.mark.skipif(missing_cxx() is not None, reason=str(missing_cxx()))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the kernels that every processor of the family can run: the others take twice as long to compile."""
    (lowest, *_) = instruction_levels()
    return prebuild.build(tmp_path_factory.mktemp("library"), cuda=False, levels=[lowest])


@pytest.fixture(scope="module")
def whole_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the kernels of every instruction set, as it is shipped."""
    return prebuild.build(tmp_path_factory.mktemp("library"), cuda=False)


@pytest.fixture
def chosen(monkeypatch):
    """Selects a library for this process, and clears the caches afterwards."""

    def choose(path: Path) -> None:
        monkeypatch.setenv(prebuild.VARIABLE, str(path))
        monkeypatch.setattr(backends, "_quick_calls", {})  # an extension that another test has loaded
        backends._resolve.cache_clear()

    yield choose
    backends._resolve.cache_clear()


def without_compiler(library: Path, tmp_path: Path, *command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run Python without a C++ compiler and without nvcc."""
    return subprocess.run(
        [sys.executable, *command],
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")},
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PATH": str(tmp_path), "CXX": "no-such-compiler", "CUDA_HOME": str(tmp_path),
            prebuild.VARIABLE: str(library), **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


def run_tests(library: Path, tmp_path: Path, selected: str, **environment: str) -> int:
    """Run tests of every back end on the library; returns their number."""
    answer = without_compiler(
        library, tmp_path,
        "-m", "pytest", *map(str, FILES),
        "-k", selected, "-m", "not slow", "-q", "-p", "no:cacheprovider",
        "-c", str(HERE.parents[2] / "pyproject.toml"), "--rootdir", str(HERE.parents[2]), **environment,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout[-4000:] + answer.stderr[-2000:]
    passed = re.search(r"(\d+) passed", answer.stdout)
    return int(passed[1]) if passed else 0


@pytest.fixture(params=["library", "whole_library"])
def either_library(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_it_is_right_without_a_compiler(library, tmp_path):
    selected = "cpp-cpu and (random or every_float8 or threads or gradcheck)"
    assert run_tests(library, tmp_path, selected) > 5


@pytest.mark.slow
@pytest.mark.parametrize("level", ["default", "avx2", "avx512"])
def test_torchs_limit_of_the_instruction_set_is_kept(whole_library, tmp_path, level):
    levels = ("DEFAULT", "AVX2", "AVX512")
    if (here := torch.backends.cpu.get_cpu_capability()) in levels and levels.index(level.upper()) > levels.index(here):
        pytest.skip(f"this processor has {here} at most, and torch itself would end on an instruction that it lacks")
    selected = "cpp-cpu and (random or every_float8 or threads or gradcheck)"
    assert run_tests(whole_library, tmp_path, selected, ATEN_CPU_CAPABILITY=level) > 5


@pytest.mark.slow
def test_the_extensions_tests_pass_on_it(whole_library, tmp_path):
    assert run_tests(whole_library, tmp_path, f"cpp-cpu and {WITHOUT_FUNC}") > 30


@pytest.mark.slow
@pytest.mark.parametrize("level", instruction_levels())
def test_the_numerics_pass_on_every_instruction_set(whole_library, tmp_path, level, monkeypatch):
    levels = list(instruction_levels())
    if levels.index(level) > levels.index(prebuild.cpu_level()):
        pytest.skip("this processor lacks the instruction set")
    monkeypatch.setenv(prebuild.LEVEL_VARIABLE, level)
    assert run_tests(whole_library, tmp_path, "cpp-cpu and numerics") > 30


@pytest.mark.slow
def test_it_says_what_it_is_for(library):
    record = read_record(library)
    assert (record.torch_at_least, record.torch_at_most) == prebuild.TORCH_VERSIONS
    assert record.cuda is None
    assert record.cuda_refusal((9, 0)) == "it was built without CUDA"


@pytest.mark.slow
def test_another_torch_is_refused_before_loading(library, tmp_path, chosen):
    other = tmp_path / library.name
    content = library.read_bytes()
    for old, new in (
        (b'"torch_at_least": "2.10"', b'"torch_at_least": "9.10"'),
        (b'"torch_at_most": "2.15"', b'"torch_at_most": "9.15"'),
    ):
        assert content.count(old) == 1
        content = content.replace(old, new)
    other.write_bytes(content)
    chosen(other)
    version = re.escape(torch.__version__)
    with pytest.raises(ValueError, match=rf"is for torch 9\.10 to 9\.15, and this is torch {version} \(python -m"):
        rms_norm(torch.ones(2, 8), eps=1e-6, backend="cpp")
    assert backends.unavailable("cpp", "cpu").startswith(
        f"{prebuild.VARIABLE} is set; the prebuilt library {other} cannot be used"
    )


def test_a_missing_library_and_something_else_are_named(tmp_path, chosen):
    chosen(tmp_path / "none.so")
    with pytest.raises(ValueError, match=r"there is no prebuilt library .*none\.so \(python -m rmsnorm_fused build"):
        rms_norm(torch.ones(2, 8), eps=1e-6, backend="cpp")
    (tmp_path / "other.so").write_bytes(b"\x7fELF")
    chosen(tmp_path / "other.so")
    with pytest.raises(ValueError, match=r"other\.so is not a library that native_build has made"):
        rms_norm(torch.ones(2, 8), eps=1e-6, backend="cpp")


def undefined_symbols(library: Path) -> set[tuple[str, str]]:
    listing = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    return {(kind, name) for kind, name in re.findall(r"^ +([Uw]) (\S+)$", listing, re.MULTILINE)}


# The stable ABI; versioned symbols of the C and C++ libraries; what the tools of the linker look for in any library.
ALLOWED = re.compile(r"aoti_torch_\w+|torch_\w+|\w+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+|_ITM_\w+|__gmon_start__")


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (binutils)")
@pytest.mark.slow
def test_it_calls_nothing_but_the_stable_abi(either_library):
    symbols = undefined_symbols(either_library)
    assert ("U", "torch_parallel_for") in symbols
    assert not [name for _, name in symbols if not ALLOWED.fullmatch(name)]
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", str(either_library)], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[-1] for line in exported.splitlines()] == ["native_build_library_record"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (binutils)")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="not an x86-64 with AVX2")
def test_instruction_sets_share_no_function(tmp_path):
    # A function that two objects define weakly is taken from one of them: from the one for a newer processor, perhaps.
    made = tmp_path / "avx512.o"
    flags = ["-O3", "-std=c++17", "-fPIC", "-fopenmp-simd", "-march=x86-64-v4", "-DRMS_NORM_CPU_LEVEL=avx512"]
    compiler, source = os.environ.get("CXX", "c++"), CSRC / "cpu" / "rms_norm.cpp"
    subprocess.run([compiler, *flags, f"-I{INCLUDE_DIR}", "-c", source, "-o", made], check=True)
    listing = subprocess.run(
        ["nm", "-C", "--defined-only", str(made)], capture_output=True, text=True, check=True
    ).stdout
    assert not [line for line in listing.splitlines() if re.search(r" [WVu] (?!DW\.ref)", line)]
    shared = re.findall(r" T (.*)", listing)
    assert sorted(name.split("(")[0] for name in shared) == [
        f"rms_norm::avx512::{name}" for name in ("backward", "backward_workspace", "forward")
    ]


@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_with_cuda_it_loads_where_there_is_none(tmp_path):
    library = prebuild.build(tmp_path / "library", architectures=("sm_90a",))
    record = read_record(library)
    assert record.architectures == ("sm_90a",)
    assert record.cuda_refusal((9, 0)) is None
    assert record.cuda_refusal((8, 0)) == "its kernels are for sm_90a, and this GPU is sm_80"
    symbols = undefined_symbols(library)
    assert ("w", "aoti_torch_get_current_cuda_stream") in symbols
    assert not [name for _, name in symbols if not ALLOWED.fullmatch(name)]
    script = (
        "import torch, rmsnorm_fused; print(rmsnorm_fused.rms_norm(torch.ones(2, 8), eps=0.0, backend='cpp').sum())"
    )
    answer = without_compiler(library, tmp_path, "-c", script)
    assert answer.stdout == "tensor(16.)\n", answer.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_with_cuda_the_extensions_numerics_pass_on_it(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA GPU")
    assert run_tests(prebuild.build(tmp_path / "library"), tmp_path, f"cuda-cuda and {WITHOUT_FUNC}") > 30


@pytest.mark.slow
def test_the_command_says_what_it_made_and_what_is_missing(tmp_path, monkeypatch, library):
    monkeypatch.setattr(prebuild, "build", lambda out, **_: library)
    answer = CliRunner().invoke(app, ["build", "--no-cuda", "--out", str(tmp_path)])
    assert answer.exit_code == 0, answer.output
    assert f"{library}:" in answer.output
    assert "without CUDA, torch 2.10 to 2.15" in answer.output
    assert f"export {prebuild.VARIABLE}={library}" in answer.output
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    answer = CliRunner().invoke(app, ["build", "--out", str(tmp_path)])
    assert answer.exit_code == 2
    assert "no nvcc" in answer.stderr
    assert "--no-cuda" in answer.stderr
    assert not [*tmp_path.iterdir()]


def test_sources_that_are_not_there_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(prebuild, "CSRC", tmp_path / "csrc")
    with pytest.raises(BuildError, match="install the package editable from its checkout"):
        prebuild.build(tmp_path)


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setattr(prebuild, "build_library_once", lambda *_, **__: pytest.fail("compiles"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/library/rms_norm_prebuilt\.so cannot be written: "):
        prebuild.build(tmp_path / "file" / "library", cuda=False)
