"""Kernels for the key ``Autograd`` that Python makes."""

from __future__ import annotations

from typing import Any

import torch

from native_build.derivatives import derivative_kernel


def test_a_call_does_not_read_the_schema_once_for_each_argument() -> None:
    """Each reading makes an object of every argument: 190 µs of a call with 13."""
    readings = []

    class Schema:
        def __getattr__(self, name: str) -> Any:
            readings.append(name)
            return getattr(operator._schema, name)

    class Operator:
        _schema = Schema()

        def __getattr__(self, name: str) -> Any:
            return getattr(operator, name)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        assert inputs[2] == 3.0

    with torch.library._scoped_library("derivatives_test", "FRAGMENT") as library:
        library.define("scaled(Tensor x, float a=1.0, float b=3.0) -> Tensor")
        operator = torch.ops.derivatives_test.scaled.default
        library.impl("scaled", lambda x, a=1.0, b=3.0: x * a, "CPU")
        kernel = derivative_kernel(Operator(), lambda ctx, gradient: (gradient, None, None), setup)  # type: ignore[arg-type]
        library.impl("scaled", kernel, "Autograd", with_keyset=True)
        x = torch.ones(2, requires_grad=True)
        operator(x).sum().backward()
        assert torch.equal(x.grad, torch.ones(2))  # type: ignore[arg-type]
        readings.clear()
        operator(x)
        assert "arguments" not in readings
