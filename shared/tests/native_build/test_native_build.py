"""Builds, what is said when one cannot be made, and the compiler's resource report."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.utils import cpp_extension

import native_build
from native_build import toolchain
from native_build.extension import source_digest
from native_build.kernel_resources import parse_resources

needs_cxx = pytest.mark.skipif(native_build.missing_cxx() is not None, reason=str(native_build.missing_cxx()))
needs_nvcc = pytest.mark.skipif(native_build.find_nvcc() is None, reason="no nvcc")

# pybind11 alone: torch/extension.h would take forty seconds to compile.
MODULE = """
#include <Python.h>
#include "answer.h"
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "answer", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
#define INITIALISER_OF(name) PyInit_##name
#define INITIALISER(name) INITIALISER_OF(name)
PyMODINIT_FUNC INITIALISER(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "build"))
    path = tmp_path / "answer.cpp"
    path.write_text(MODULE)
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    return path


@needs_cxx
def test_an_extension_is_built_once_and_again_when_a_header_changes(source, monkeypatch):
    first = native_build.load_extension("answer_module", [source])
    assert first.answer() == 42
    assert native_build.load_extension("answer_module", [source]) is first
    library = Path(first.__file__)

    # A build that was killed leaves torch's lock file behind, for which torch would wait for ever.
    (library.parent / "finished").unlink()
    (library.parent / "lock").touch()
    native_build.extension._load.cache_clear()
    assert native_build.load_extension("answer_module", [source]).answer() == 42

    # Another checkout with equal sources has nothing to build.
    shutil.copytree(source.parent, source.parent / "other", ignore=shutil.ignore_patterns("build"))
    with monkeypatch.context() as patched:
        patched.setattr(cpp_extension, "load", None)
        elsewhere = native_build.load_extension("answer_module", [source.parent / "other" / source.name])
    assert elsewhere.__file__ == first.__file__
    shutil.rmtree(source.parent / "other")

    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    native_build.extension._load.cache_clear()
    second = native_build.load_extension("answer_module", [source])
    assert second.answer() == 43
    assert Path(second.__file__).parent != library.parent


@needs_cxx
def test_the_error_begins_with_the_compilers_first_complaint_and_names_the_log(source):
    source.write_text(MODULE + "int broken = undefined_name;\n")
    with pytest.raises(native_build.BuildError, match=r"cannot build broken_module: .*undefined_name") as caught:
        native_build.load_extension("broken_module", [source])
    assert "\n" not in str(caught.value)
    assert "build.log" in str(caught.value)
    with pytest.raises(native_build.BuildError, match=r"cannot build broken_module: .*undefined_name"):
        native_build.load_extension("broken_module", [source])  # a second try says the same


@needs_cxx
def test_a_module_is_built_once_and_a_failure_is_remembered(source):
    units = [native_build.Unit(source)]
    module = native_build.load_module("answer_module", units)
    assert module.answer() == 42
    assert native_build.load_module("answer_module", units) is module
    source.write_text(MODULE + "int broken = undefined_name;\n")
    for _ in range(2):
        with pytest.raises(native_build.BuildError, match=r"cannot build broken: .*undefined_name"):
            native_build.load_module("broken", units)


@needs_cxx
@needs_nvcc
def test_a_module_with_cuda_kernels_needs_no_gpu(source):
    kernel = source.with_name("kernel.cu")
    kernel.write_text("__global__ void f(float* x) { x[0] = 1; }\nvoid launch(float* x) { f<<<1, 1>>>(x); }\n")
    units = [native_build.Unit(source), native_build.Unit(kernel)]
    assert native_build.load_module("cuda_module", units, architectures=("sm_90a",)).answer() == 42


@needs_cxx
@pytest.mark.parametrize(("name", "error"), [("INT", KeyboardInterrupt), ("TERM", SystemExit)])
@pytest.mark.parametrize("load", ["load_module", "load_extension"])
def test_a_signal_ends_the_compilers(source, tmp_path, monkeypatch, request, load, name, error):
    # A shell's job in the background ignores Ctrl-C, and what it starts inherits that.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    compiler = tmp_path / "interrupted-c++"
    seconds = "2718.28"  # tells this test's processes from others
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -c "*) mkdir {tmp_path}/once && kill -{name} {os.getpid()}; sleep {seconds};; '
        '*) exec c++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    sources = [native_build.Unit(source)] if load == "load_module" else [source]
    with pytest.raises(error):
        getattr(native_build, load)("interrupted_module", sources)
    while sleeping(seconds):  # a killed process may take a moment to go; one that stays meets the test's time limit
        time.sleep(0.05)


def sleeping(seconds: str) -> list[str]:
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            commands.append((process / "cmdline").read_text())
    return [command for command in commands if seconds in command]


def test_processors_that_share_a_home_share_no_builds():
    assert platform.machine() in native_build.build_root(cuda=False).name


def test_headers_in_folders_of_folders_change_a_builds_name(tmp_path):
    source, deep = tmp_path / "a.cpp", tmp_path / "include" / "sub" / "a.inc"
    deep.parent.mkdir(parents=True)
    source.touch()
    names = set()
    for text in ("1", "2"):
        deep.write_text(text)
        names.add(source_digest([source], [tmp_path / "include"], []))
    assert len(names) == 2


def test_a_missing_compiler_is_one_line_with_the_remedy(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native_build.BuildError, match=r"no C\+\+ compiler 'no-such-compiler'.*apt-get install g"):
        native_build.load_extension("answer_module_without_compiler", [source])


def test_another_system_is_one_line_with_the_remedy(source, monkeypatch):
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(native_build.BuildError, match=r"compiled on Linux alone, and this is darwin \(use"):
        native_build.load_extension("answer_module_elsewhere", [source])
    assert "darwin" not in (native_build.missing_inductor("cpu") or "")  # torch's own compiler works there


def test_inductor_needs_the_compiler_for_a_cpu_alone(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native_build.missing_inductor("cpu") == (
        "Inductor compiles for a CPU with a C++ compiler: no C++ compiler 'no-such-compiler' on PATH "
        "(install one: apt-get install g++, or set CXX)"
    )
    assert native_build.missing_inductor("cuda") is None


def test_a_missing_nvcc_is_one_line_with_the_remedy(source, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(native_build.BuildError, match=r"no nvcc .*set CUDA_HOME"):
        native_build.compile_cuda(source, "sm_90")


@needs_nvcc
def test_the_resources_of_a_kernel_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "build"))
    path = tmp_path / "kernel.cu"
    path.write_text(
        "__global__ void rotate(float* x) {\n"
        "  __shared__ float s[64]; s[threadIdx.x % 64] = x[threadIdx.x]; __syncthreads();\n"
        "  x[threadIdx.x] = s[(threadIdx.x + 1) % 64]; }\n"
        "__global__ void spill(float* x, int k) { float a[64]; for (int i = 0; i < 64; ++i) a[(i * k) % 64] = x[i];\n"
        "  for (int i = 0; i < 64; ++i) x[i] = a[i]; }\n"
    )
    found = {kernel.name: kernel for kernel in native_build.compile_cuda(path, "sm_90a")}
    rotate = next(kernel for name, kernel in found.items() if "rotate" in name)
    assert (rotate.architecture, rotate.shared_memory, rotate.stack_frame) == ("sm_90a", 256, 0)
    assert 0 < rotate.registers <= 255
    indexed = next(kernel for name, kernel in found.items() if "spill" in name)
    assert indexed.stack_frame >= 256  # an array indexed at run time lies in local memory
    path.write_text("__global__ void broken() { nonsense; }")
    with pytest.raises(native_build.BuildError, match=r"kernel.cu does not compile for sm_90: .*nonsense"):
        native_build.compile_cuda(path, "sm_90")


@needs_nvcc
def test_resources_are_read_again_when_an_included_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "build"))
    source, header = tmp_path / "kernels" / "kernel.cu", tmp_path / "common" / "size.cuh"
    source.parent.mkdir()
    header.parent.mkdir()
    source.write_text(
        '#include "../common/size.cuh"\n__global__ void f(float* x) { __shared__ float s[SIZE];\n'
        "  s[threadIdx.x] = x[0]; __syncthreads(); x[0] = s[threadIdx.x ^ 1]; }\n"
    )
    for size in (64, 128, 64):
        header.write_text(f"#define SIZE {size}\n")
        (kernel,) = native_build.compile_cuda(source, "sm_90")
        assert kernel.shared_memory == 4 * size
    assert len([*(tmp_path / "build").rglob("*.ptxas")]) == 2


def test_a_report_whose_format_has_changed_is_not_read_as_no_spills():
    with pytest.raises(ValueError, match="no stack or register figures for k"):
        parse_resources("ptxas info    : Compiling entry function 'k' for 'sm_90'\nptxas info : something new\n")


def test_as_many_compilers_as_processors_and_memory_allow(monkeypatch):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(toolchain, "processors", lambda: 64)
    monkeypatch.setattr(toolchain, "available_memory", lambda: 5 << 30)
    assert toolchain.compilers_at_once() == 5
    monkeypatch.setattr(toolchain, "available_memory", lambda: 0)
    assert toolchain.compilers_at_once() == 1
    monkeypatch.setenv("MAX_JOBS", "3")
    assert toolchain.compilers_at_once() == 3


def test_the_nvcc_of_nvidias_package_is_found(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert toolchain.find_nvcc() in (nvcc, Path("/usr/local/cuda/bin/nvcc"))
