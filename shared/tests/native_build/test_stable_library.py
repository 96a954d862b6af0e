"""Libraries on the stable ABI: what is written into them, what is refused, and a CUDA kernel in one."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm_python

import native_build
from native_build import BuildError, LibraryError, LibraryRecord, Unit

needs_cxx = pytest.mark.skipif(native_build.missing_cxx() is not None, reason=str(native_build.missing_cxx()))
needs_nvcc = pytest.mark.skipif(native_build.find_nvcc() is None, reason="no nvcc")

OPERATOR = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
int64_t answer();
int64_t more(const torch::stable::Tensor& x) { return x.numel() + answer() + PLUS; }
STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("more(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("more", TORCH_BOX(&more)); }
"""
KERNEL = """
#include <cstdint>
#include <cuda_runtime.h>
__global__ void set(int* x) { *x = 40; }
int64_t answer() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices < 0) set<<<1, 1>>>(nullptr);
  return 40;
}
"""
RECORD = LibraryRecord("lib", "2.10", "2.15", platform.machine(), "13.0", ("sm_80", "sm_90a", "sm_100", "compute_90"))


@pytest.fixture
def sources(tmp_path) -> tuple[Path, Path]:
    operator, answer = tmp_path / "operator.cpp", tmp_path / "answer.cpp"
    operator.write_text(OPERATOR)
    answer.write_text("#include <cstdint>\nint64_t answer() { return 40; }\n")
    return operator, answer


def units(operator: Path, answer: Path, namespace: str) -> list[Unit]:
    return [Unit(answer), Unit(operator, (f"-DNAMESPACE={namespace}", "-DPLUS=2"))]


@needs_cxx
def test_a_library_is_built_read_loaded_and_left_alone_by_a_failure(sources, tmp_path):
    output = tmp_path / "made" / "library.so"
    arguments = {"torch_versions": ("2.10", "2.15")}
    made = native_build.build_library("answers", units(*sources, "native_build_answers"), output, **arguments)
    assert made == LibraryRecord("answers", "2.10", "2.15", platform.machine())
    assert native_build.read_record(output) == made
    assert native_build.load_library(output) == made
    assert torch.ops.native_build_answers.more(torch.ones(3)) == 45

    content = output.read_bytes()
    sources[1].write_text("int nothing() { return nonsense; }\n")
    with pytest.raises(BuildError, match=r"cannot build answers: .*nonsense") as caught:
        native_build.build_library("answers", [Unit(sources[1])], output, **arguments)
    assert "\n" not in str(caught.value)
    sources[1].write_text("int answer();\nint other() { return answer(); }\n")
    with pytest.raises(BuildError, match=r"cannot build answers: .*answer\(\)"):
        native_build.build_library("answers", [Unit(sources[1])], output, **arguments)
    assert output.read_bytes() == content
    assert [*output.parent.iterdir()] == [output]


@needs_cxx
def test_the_same_sources_make_the_same_library_in_any_folder(tmp_path):
    made = []
    for folder in (tmp_path / "here", tmp_path / "there" / "deeper"):
        folder.mkdir(parents=True)
        source = folder / "place.cpp"
        source.write_text(
            'extern "C" __attribute__((visibility("default"))) const char* place() { return __FILE__; }\n'
        )
        made.append(folder / "library.so")
        native_build.build_library(
            "places", [Unit(source)], made[-1], torch_versions=("2.10", "2.15"), exports=("place",)
        )
    assert made[0].read_bytes() == made[1].read_bytes()
    place = ctypes.CDLL(str(made[0])).place
    place.restype = ctypes.c_char_p
    assert place() == b"places/place.cpp"


@needs_cxx
def test_what_an_older_torch_lacks_does_not_compile(sources, tmp_path):
    sources[0].write_text(OPERATOR + "void later() { torch_stream_native_handle(nullptr, nullptr); }\n")
    with pytest.raises(BuildError, match="torch_stream_native_handle"):  # since torch 2.13
        native_build.build_library(
            "answers", units(*sources, "native_build_late"), tmp_path / "late.so", torch_versions=("2.10", "2.15")
        )


@needs_cxx
def test_what_is_exported_can_be_looked_up_and_pythons_functions_may_be_missing(sources, tmp_path):
    module = tmp_path / "module.cpp"
    module.write_text(
        'extern "C" void* PyLong_FromLong(long);\n'
        'extern "C" __attribute__((visibility("default"))) void* found() { return PyLong_FromLong(1); }\n'
        'extern "C" __attribute__((visibility("default"))) int hidden() { return 2; }\n'
    )
    output = tmp_path / "exports.so"
    arguments = {"torch_versions": ("2.10", "2.15"), "exports": ("found",)}
    native_build.build_library("exports", [Unit(sources[1]), Unit(module)], output, **arguments)
    library = ctypes.PyDLL(str(output))
    library.found.restype = ctypes.py_object
    assert library.found() == 1
    assert not hasattr(library, "hidden")
    module.write_text('extern "C" int nowhere(); extern "C" int found() { return nowhere(); }\n')
    with pytest.raises(BuildError, match=r"cannot build exports: .*undefined reference to `nowhere'"):
        native_build.build_library("exports", [Unit(module)], output, **arguments)


@needs_cxx
def test_a_library_is_built_once_until_something_changes(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("FRAMEWORK_INTERNALS_BUILD_DIR", str(tmp_path / "cache"))
    arguments = {"torch_versions": ("2.10", "2.15"), "include_dirs": [tmp_path]}
    parts = [Unit(sources[1])]
    first = native_build.build_library_once("once", parts, **arguments)
    assert first == native_build.cached_library("once", parts, **arguments)
    stamp = first.stat().st_mtime_ns
    assert native_build.build_library_once("once", parts, **arguments) == first
    assert first.stat().st_mtime_ns == stamp
    (tmp_path / "header.h").write_text("// new\n")
    assert native_build.cached_library("once", parts, **arguments) != first
    assert native_build.cached_library("once", [Unit(sources[1], ("-DX",))], **arguments) != first


@needs_cxx
def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_compiled(sources, tmp_path):
    sources[1].write_text("int nothing() { return nonsense; }\n")  # compiling it would be another error
    output = sources[0] / "made" / "library.so"  # a file stands where the folder should be
    with pytest.raises(BuildError, match=r"cannot write into .*operator\.cpp.made: .*; name another folder"):
        native_build.build_library("answers", units(*sources, "none"), output, torch_versions=("2.10", "2.15"))


def test_missing_tools_are_named(sources, tmp_path, monkeypatch):
    arguments = {"torch_versions": ("2.10", "2.15"), "architectures": ("sm_90a",)}
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"cannot build answers: no (nvcc|C\+\+ compiler)"):
        native_build.build_library("answers", units(*sources, "none"), tmp_path / "none.so", **arguments)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match=r"cannot build answers: no C\+\+ compiler 'no-such-compiler'"):
        native_build.build_library("answers", units(*sources, "none"), tmp_path / "none.so", **arguments)


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "2.15.1", "2.14.0a0+git1234", "2.15.0.dev20261101"])
def test_torch_versions_that_are_taken(version):
    assert RECORD.refusal(version) is None


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0", "2.16.0", "3.0"])
def test_torch_versions_that_are_refused(version):
    assert RECORD.refusal(version) == f"it is for torch 2.10 to 2.15, and this is torch {version}"


def test_another_processor_is_refused():
    other = dataclasses.replace(RECORD, machine="riscv64")
    assert other.refusal("2.13.0").startswith("it is for riscv64 processors, and this is a")


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("sm_80",), (8, 0), True),
        (("sm_80",), (8, 9), True),  # the same generation
        (("sm_86",), (8, 0), False),
        (("sm_80",), (9, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (10, 0), False),
        (("sm_100",), (10, 3), True),
        (("sm_100a",), (10, 3), False),
        (("sm_100f",), (10, 3), True),  # the same family
        (("sm_120",), (12, 1), True),
        (("sm_90a", "compute_90"), (11, 0), True),  # translated by the driver
        (("compute_90a",), (10, 0), False),
        (("compute_90",), (8, 9), False),
        ((), (8, 0), False),
    ],
)
def test_which_gpus_it_runs_on(architectures, capability, runs):
    refusal = dataclasses.replace(RECORD, architectures=architectures).cuda_refusal(capability)
    assert (refusal is None) is runs
    if architectures and not runs:
        major, minor = capability
        assert refusal == f"its kernels are for {', '.join(architectures)}, and this GPU is sm_{major}{minor}"


def test_without_cuda_no_gpu_is_taken():
    assert dataclasses.replace(RECORD, cuda=None).cuda_refusal((9, 0)) == "it was built without CUDA"


def test_files_that_are_none_of_ours_are_named(tmp_path):
    with pytest.raises(LibraryError, match=r"there is no library .*missing\.so"):
        native_build.read_record(tmp_path / "missing.so")
    (tmp_path / "other.so").write_bytes(b"\x7fELF and so on")
    with pytest.raises(LibraryError, match=r"other\.so is not a library that native_build has made"):
        native_build.load_library(tmp_path / "other.so")


@pytest.mark.slow
@needs_cxx
@needs_nvcc
def test_cuda_kernels_come_with_their_runtime_and_load_without_a_gpu(sources, tmp_path):
    kernel = tmp_path / "kernel.cu"
    kernel.write_text(KERNEL)
    library = tmp_path / "cuda.so"
    made = native_build.build_library(
        "answers", units(sources[0], kernel, "native_build_cuda"), library,
        torch_versions=("2.10", "2.15"), architectures=("sm_90a", "compute_90"),
    )  # fmt: skip
    assert made.cuda is not None
    assert native_build.read_record(library).architectures == ("sm_90a", "compute_90")
    script = (
        "import sys, torch, native_build, pathlib\n"
        "native_build.load_library(pathlib.Path(sys.argv[1]))\n"
        "print(torch.ops.native_build_cuda.more(torch.ones(3)))\n"
    )
    answer = warm_python.run(["-c", script, library], env=os.environ)
    assert answer.stdout == "45\n", answer.stderr


def test_an_interrupt_ends_the_compilers(tmp_path):
    compiler, pids = tmp_path / "compiler", tmp_path / "pids"
    compiler.write_text(f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 600\n")
    compiler.chmod(0o755)
    source = tmp_path / "unit.cpp"
    source.write_text("")
    program = (
        "import pathlib, signal, native_build\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"unit = native_build.Unit(pathlib.Path({str(source)!r}))\n"
        f"output = pathlib.Path({str(tmp_path / 'out.so')!r})\n"
        "native_build.build_library('slow', [unit] * 50, output, torch_versions=('2.10', '2.15'))\n"
    )
    environment = {**os.environ, "CXX": str(compiler), "MAX_JOBS": "2"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait() != 0
    begun = pids.read_text().split()
    assert len(begun) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in begun)
