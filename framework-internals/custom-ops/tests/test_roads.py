"""Both builds of vector_add, the wrappers, and the selection of the library."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python
from torch.autograd import forward_ad

import custom_ops
import native_build
from custom_ops.bench import measure
from custom_ops.builds import loading, operator_library
from custom_ops.roads.wrappers import SHIPPED, STABLE, STABLE_AUTOGRAD, wrappers

# What csrc/scale/module.cpp calls of Python, all in the limited API since 3.2.
LIMITED_API = {"PyErr_Occurred", "PyLong_AsLongLong", "PyLong_FromLongLong", "PyModule_Create2"}


def test_every_wrapper_adds(device: str) -> None:
    a, b = torch.randn(33, device=device), torch.randn(33, device=device)
    for name, function in wrappers().items():
        assert torch.equal(function(a, b), a + b), name


@pytest.mark.parametrize(
    ("form", "differentiable", "compilable"),
    [
        ("torch.add", True, True),
        ("pybind11 function", False, False),
        ("autograd.Function", True, False),
        ("torch.library, no autograd", False, True),
        ("torch.library + register_autograd", True, True),
        (STABLE, False, True),
        (STABLE_AUTOGRAD, True, True),
        (SHIPPED, True, True),
        ("custom_op decorator", True, True),
    ],
)
def test_what_each_wrapper_can_do(form: str, differentiable: bool, compilable: bool) -> None:
    a, b = torch.ones(3), torch.ones(3)
    assert measure.gradients_flow(wrappers()[form], a, b) is differentiable
    assert measure.compiles_whole(wrappers()[form], a, b) is compilable


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form", ["torch.library + register_autograd", "custom_op decorator", STABLE, STABLE_AUTOGRAD])
def test_a_registered_operator_refuses_a_tangent(form: str, grad: bool) -> None:
    a, b = torch.ones(3, requires_grad=grad), torch.ones(3)
    operator = wrappers()[form]
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        operator(forward_ad.make_dual(a, b), b)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda a: operator(a, b), (b,), (b,))


def test_the_tangents_of_the_function_of_autograd_are_added() -> None:
    a, b = torch.ones(3), torch.arange(3.0)
    add = wrappers()["autograd.Function"]
    for one, other in ((True, True), (True, False), (False, True)):
        with forward_ad.dual_level():
            sum_ = add(forward_ad.make_dual(a, b) if one else a, forward_ad.make_dual(a, a) if other else a)
            assert torch.equal(forward_ad.unpack_dual(sum_).tangent, one * b + other * a)


def test_the_library_that_serves_is_reported_and_hashed() -> None:
    custom_ops.load()
    found = custom_ops.build_info()
    assert found.file is not None
    assert found.file.suffix == ".so"
    assert len(found.sha256 or "") == 64
    assert found.road in ("named library", "wheel", "compiled here")
    assert "a named library" in found.missing or found.road == "named library"


def test_a_library_that_is_named_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    library = custom_ops.load().file
    monkeypatch.setenv(loading.VARIABLE, str(library))
    found = loading.build_info()
    assert (found.road, found.file) == ("named library", library)
    monkeypatch.setenv(loading.VARIABLE, "nowhere.so")
    with pytest.raises(
        native_build.LibraryError, match=r"CUSTOM_OPS_LIBRARY names nowhere\.so, .*; set it to .* or unset"
    ):
        loading.build_info()


def test_no_open_road_names_every_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "missing_cxx", lambda: "no compiler (install one)")
    monkeypatch.setattr(native_build, "missing_gpu", lambda: "no GPU (get one)")
    monkeypatch.setattr(loading, "_library_of", lambda road: Path("nowhere.so"))
    monkeypatch.delenv(loading.VARIABLE, raising=False)
    assert loading.build_info().road is None
    with pytest.raises(
        native_build.BuildError, match=r"the wheel: there is no .*; compiling here: no compiler .*; run-time .*: no GPU"
    ):
        loading._load.__wrapped__()


def test_the_library_alone_has_operators_module_and_c_function() -> None:
    library = custom_ops.load().file
    script = (
        "import ctypes, importlib.util, sys, torch\n"
        "spec = importlib.util.spec_from_file_location('_C', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "assert module.add_one(41) == 42\n"
        "function = ctypes.CDLL(sys.argv[1]).add_one\n"
        "function.argtypes, function.restype = [ctypes.c_longlong], ctypes.c_longlong\n"
        "assert function(2**40) == 2**40 + 1\n"
        "assert torch.equal(torch.ops.custom_ops.vector_add(torch.ones(3), torch.ones(3)), torch.full((3,), 2.0))\n"
    )
    answer = warm_python.run(["-c", script, library], env=os.environ)
    assert answer.returncode == 0, answer.stderr


def test_the_library_keeps_to_the_abis_that_it_claims() -> None:
    """The library uses no symbols of torch's C++ classes or beyond Python's limited API, and exports only its own."""
    library = custom_ops.load().file
    assert library is not None
    symbols = subprocess.run(
        ["nm", "-D", "--with-symbol-versions", str(library)], capture_output=True, text=True, check=True
    ).stdout
    undefined = set(re.findall(r"^ +[Uw] ([^\s@]+)", symbols, re.MULTILINE))
    defined = set(re.findall(r"^[0-9a-f]+ [TDBRV] ([^\s@]+)", symbols, re.MULTILINE))
    assert not [name for name in undefined if re.match(r"_ZNK?(2at|3c10|5torch)", name)]
    assert {name for name in undefined if name.startswith(("Py", "_Py"))} <= LIMITED_API
    assert {name for name in defined if not name.startswith("custom_ops_jax_")} == {
        "PyInit__C", "add_one", "custom_ops_cpu_level", "native_build_library_record"
    }  # fmt: skip


def test_abi3audit_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("abi3audit")
    library = custom_ops.load().file
    assert library is not None
    named = tmp_path / operator_library.FILE_NAME
    named.write_bytes(library.read_bytes())
    answer = subprocess.run(
        [sys.executable, "-m", "abi3audit", "--strict", "--assume-minimum-abi3", "3.11", str(named)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_kernels_of_a_gpu_that_do_not_compile_leave_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_gpu(architectures: tuple[str, ...]) -> Path:
        if architectures:
            raise native_build.BuildError("cannot build custom_ops: no sm_10 here")
        return Path("without-cuda.so")

    monkeypatch.setattr(loading, "architectures_here", lambda: ("sm_10",))
    monkeypatch.setattr(loading.operator_library, "build_once", without_gpu)
    monkeypatch.setattr(loading.runtime_compiled, "missing", lambda: "no NVRTC")
    asked = loading.BuildInfo("compiled here", "library", None, {})
    with pytest.warns(UserWarning, match="no compiled CUDA kernels: cannot build custom_ops: no sm_10 here"):
        made = loading._compile(asked)
    assert (made.file, made.cuda) == (Path("without-cuda.so"), None)
    assert made.missing["the library's CUDA kernels"] == "cannot build custom_ops: no sm_10 here"
    assert made.missing["run-time compilation"] == "no NVRTC"


def test_a_library_that_does_not_compile_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_once(architectures: tuple[str, ...]) -> Path:
        raise native_build.BuildError(f"cannot build for {architectures}")

    monkeypatch.setattr(loading.operator_library, "build_once", build_once)
    for architectures in ((), ("sm_80",)):
        monkeypatch.setattr(loading, "architectures_here", lambda architectures=architectures: architectures)
        with pytest.raises(native_build.BuildError, match=r"cannot build for \(\)"):
            loading._compile(loading.BuildInfo("compiled here", None, None, {}))
