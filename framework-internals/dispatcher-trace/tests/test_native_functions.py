"""Native functions of backend kernels, from the wheel's native_functions.yaml."""

import pytest

from dispatcher_trace.capture import dispatcher
from dispatcher_trace.explain import native_functions


@pytest.mark.parametrize(
    ("operator", "key", "name"),
    [
        ("aten::add.Tensor", "CPU", "structured_ufunc_add_CPU"),  # the class that at::native's add_native.h declares
        ("aten::add.Tensor", "SparseCPU", "add_sparse"),
        ("aten::mm", "CPU", "structured_mm_out_cpu"),
        ("aten::matmul", "AutogradCPU", "matmul"),
        ("aten::empty.memory_format", "CPU", "empty_cpu"),
        ("aten::zeros", "CPU", "zeros_symint"),
        ("aten::add.Tensor", "AutogradCPU", ""),
        ("aten::add.Tensor", "Conjugate", ""),
    ],
)
def test_names(operator: str, key: str, name: str) -> None:
    assert native_functions.native_function(operator, key, dispatcher.table(operator)[key].kind) == name


def test_an_operator_that_the_file_does_not_have() -> None:
    assert native_functions.native_function("prims::add", "CPU", "kernel") == ""
    assert native_functions.native_function("aten::no_such", "CPU", "kernel") == ""


def test_the_cuda_name_needs_no_gpu() -> None:
    assert native_functions.native_function("aten::mm", "CUDA", "kernel") == "structured_mm_out_cuda"


def test_a_wheel_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_functions, "_file", lambda: None)
    native_functions._functions.cache_clear()
    try:
        assert native_functions.native_function("aten::mm", "CPU", "kernel") == ""
    finally:
        native_functions._functions.cache_clear()
