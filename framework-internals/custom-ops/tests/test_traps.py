"""Reproduces common errors; TRAPS.md explains them and refers to the tests by name."""

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension
import warm_python

import native_build
from custom_ops.builds import loading, torch_internals
from custom_ops.roads import ahead_of_time, just_in_time
from custom_ops.roads.module import NAME, SOURCES
from custom_ops.roads.wrappers import wrappers

ROOT = Path(__file__).resolve().parents[1]


def test_no_cxx_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "apt-get install g++" in (just_in_time.missing() or "")
    monkeypatch.setattr(just_in_time, "NAME", "not_loaded_before")  # a module that is loaded needs no compiler any more
    for build in (just_in_time.load.__wrapped__, lambda: ahead_of_time.build_wheel(tmp_path)):
        with pytest.raises(native_build.BuildError, match=r"no C\+\+ compiler 'no-such-compiler'.*or set CXX"):
            build()


def test_no_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(native_build.BuildError, match=r"no nvcc .*set CUDA_HOME"):
        native_build.compile_cuda(SOURCES / "cuda.cu", "sm_90")


def test_device_without_kernels() -> None:
    meta = torch.ones(3, device="meta")
    with pytest.raises(NotImplementedError, match=r"kernels for \(cpu.*got meta \(custom_ops.build_info\(\) says why"):
        just_in_time.load().vector_add(meta, meta)


def test_mixed_devices() -> None:
    with pytest.raises(ValueError, match="argument 'b': expected device cpu like 'a', got meta"):
        just_in_time.load().vector_add(torch.ones(3), torch.ones(3, device="meta"))


def test_memory_order_is_not_index_order() -> None:
    a, b = torch.arange(6.0).view(2, 3).t(), torch.zeros(3, 2)
    as_memory_has_it = torch.as_strided(a, (6,), (1,)).view(3, 2)
    assert not torch.equal(as_memory_has_it, a)
    assert torch.equal(just_in_time.load().vector_add(a, b), a)


def test_gradient_ends_at_a_bare_function() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3)
    assert not wrappers()["pybind11 function"](a, b).requires_grad


def test_gradient_is_lost_without_an_autograd_kernel() -> None:
    a, b = torch.ones(3, requires_grad=True), torch.ones(3)
    result = wrappers()["torch.library, no autograd"](a, b)
    assert result.requires_grad
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        result.sum().backward()
    assert a.grad is None


def test_tangent_is_lost_without_an_autograd_kernel() -> None:
    a = torch.ones(3)
    _, tangent = torch.func.jvp(lambda x: wrappers()["torch.library, no autograd"](x, a), (a,), (a,))
    assert torch.equal(tangent, torch.zeros(3))  # not ones


def test_module_name_and_file_name_differ(tmp_path: Path) -> None:
    renamed = tmp_path / "another_name.so"
    shutil.copy2(just_in_time.load().__file__, renamed)
    spec = importlib.util.spec_from_file_location("another_name", renamed)
    assert spec is not None
    with pytest.raises(ImportError, match=r"does not define module export function \(PyInit_another_name\)"):
        importlib.util.module_from_spec(spec)


def test_import_before_torch() -> None:
    library = just_in_time.load().__file__
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location({NAME!r}, {library!r})
importlib.util.module_from_spec(spec)
"""
    answer = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert re.search(r"ImportError: lib(c10|torch\w*)\.so: cannot open shared object file", answer.stderr)


def test_wheel_of_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(NAME)
    module.__spec__ = types.SimpleNamespace(name=NAME)  # type: ignore[assignment]
    vars(module).update(torch_version="1.0.0", with_cuda=False)
    monkeypatch.setitem(sys.modules, NAME, module)
    with pytest.raises(native_build.BuildError, match=r"compiled against torch 1\.0\.0, but torch .* is running"):
        ahead_of_time.load()


def test_library_of_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "_C.abi3.so"
    fields = {"name": "custom_ops", "torch_at_least": "2.3", "torch_at_most": "2.4", "machine": platform.machine()}
    record = json.dumps({**fields, "cuda": None, "architectures": []})
    library.write_bytes(b"native_build library record: " + record.encode() + b"\0")
    monkeypatch.setenv(loading.VARIABLE, str(library))
    with pytest.raises(native_build.LibraryError, match=r"it is for torch 2\.3 to 2\.4, and this is torch"):
        loading.build_info()


@pytest.mark.skipif(native_build.find_nvcc() is None, reason="needs nvcc")
def test_cuda_version_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = native_build.find_nvcc()
    assert nvcc is not None
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(nvcc.parent.parent))
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    with pytest.raises(RuntimeError, match=r"detected CUDA version .* mismatches the version that was used to compile"):
        torch_internals.check_cuda_version("g++", torch_internals.TorchVersion("12.0"))


def test_cpu_tensor_to_a_cuda_only_operator() -> None:
    library = torch.library.Library("custom_ops_traps", "FRAGMENT")
    library.define("on_gpu(Tensor x) -> Tensor")
    library.impl("on_gpu", lambda x: x.clone(), "CUDA")
    with pytest.raises(NotImplementedError, match=r"Could not run 'custom_ops_traps::on_gpu'.*'CPU' backend"):
        torch.ops.custom_ops_traps.on_gpu(torch.ones(3))


def test_an_import_without_pyinit(tmp_path: Path) -> None:
    library = loading.load().file
    assert library is not None
    renamed = tmp_path / "operators.abi3.so"
    shutil.copy2(library, renamed)
    # In a separate process: the operators of two copies of a library cannot be registered in one.
    code = (
        "import importlib.util, torch\n"
        f"spec = importlib.util.spec_from_file_location('operators', {str(renamed)!r})\n"
        "importlib.util.module_from_spec(spec)\n"
    )
    answer = warm_python.run(["-c", code], env=os.environ)
    assert answer.returncode == 1
    assert "does not define module export function (PyInit_operators)" in answer.stderr


def test_second_openmp_runtime() -> None:
    module = just_in_time.load()
    module.vector_add(torch.ones(200_000), torch.ones(200_000))
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) <= 1
    # Nor does the file ask for one: the names that torch's own runtime answers to stay open.
    names = Path(module.__file__).read_bytes()
    assert b"GOMP_parallel" in names
    assert b"libgomp" not in names


def test_trap_log_and_tests_name_each_other() -> None:
    explained = set(re.findall(r"`(test_\w+)`", (ROOT / "TRAPS.md").read_text()))
    here = {
        name for name in globals() if name.startswith("test_") and name != "test_trap_log_and_tests_name_each_other"
    }
    gpu = {name for name in explained if f"def {name}(" in (ROOT / "tests/test_operators_gpu.py").read_text()}
    assert explained == here | gpu
