"""Two functions, one of torch and one of JAX: the verdict of ``diff``, and where they part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_baseline.diff.agreement import judge, measure, tensor_of, torch_noise
from jax_baseline.parity.location import locate
from jax_baseline.parity.rounding import with_noise

X = np.random.default_rng(0).standard_normal((8, 32), np.float32)
W = np.random.default_rng(1).standard_normal((32, 32), np.float32)
GELU = torch.nn.functional.gelu


def of_torch(function, *arrays):
    def run(seed, dtype=torch.float32):
        with torch_noise(seed):
            return [function(*(torch.from_numpy(array).to(dtype) for array in arrays)).numpy()]

    return run(None), measure(run, lambda seed: run(seed, torch.float64))


def of_jax(function, *arrays):
    def run(seed, dtype=jnp.float32):
        called = jax.jit(function) if seed is None else with_noise(function, seed)
        return [np.asarray(called(*(jnp.asarray(array, dtype) for array in arrays)))]

    def wide(seed):
        with jax.enable_x64(True):
            return run(seed, jnp.float64)

    return run(None), measure(run, wide)


def verdict(torch_function, jax_function, *arrays, precision=("highest", "highest")):
    (one, of_one), (other, of_other) = of_jax(jax_function, *arrays), of_torch(torch_function, *arrays)
    results = ([tensor_of(index, array, True) for index, array in enumerate(side)] for side in (one, other))
    return judge(*results, (of_one, of_other), ("JAX", "torch"), precision)


def jax_norm(x, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps)


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "says"),
    [
        (GELU, lambda x: jax.nn.gelu(x, approximate=False), ""),
        (GELU, jax.nn.gelu, "in float64 result 0, float64[8,32], differs by"),
        (
            lambda x: GELU(x).half(),
            lambda x: jax.nn.gelu(x, approximate=False),
            "is float32 in JAX and float16 in torch",
        ),
        (lambda x: x.sum(), lambda x: x[::-1].sum(), ""),
        (lambda x: x.sum(1), lambda x: x.sum(0), "result 0 is float32[32] in JAX and float32[8] in torch"),
        (lambda x: x * 2, lambda x: x.astype(jnp.bfloat16).astype(x.dtype) * 2, "differs by"),
        (lambda x: x.argmax(1), lambda x: x.argmax(1), ""),
        (lambda x: x.argmax(1) + 1, lambda x: x.argmax(1), "differs by"),
        (lambda x: torch.nn.functional.layer_norm(x, (32,)), jax_norm, ""),
        (lambda x: torch.cumsum(x, 1), lambda x: jax.lax.scan(lambda c, v: (c + v,) * 2, x[:, 0] * 0, x.T)[1].T, ""),
    ],
    ids=["the same", "tanh", "float16", "order", "axis", "bfloat16 inside", "integers", "one more", "norm", "scan"],
)
def test_a_verdict_follows_from_measured_rounding(torch_function, jax_function, says):
    found = verdict(torch_function, jax_function, X)
    assert found.same == (not says), found.text
    assert says in found.text
    if " is " not in found.text:
        assert "(bound " in found.text


def test_a_precision_that_differs_only_in_the_dtype_of_the_inputs_is_named():
    def coarse(x):
        return (x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x).astype(x.dtype) * 2

    found = verdict(lambda x: x * 2, coarse, X)
    assert not found.same
    assert found.text.endswith("in float64 the functions agree, so one side rounds more")


def test_another_precision_of_matrix_products_is_the_cause_that_is_named():
    def coarse(x, w):  # what TF32 does to float32 matrices on a GPU
        return jax.lax.reduce_precision(x, 8, 10) @ w if x.dtype == jnp.float32 else x @ w

    found = verdict(torch.matmul, coarse, X, W, precision=("tensorfloat32", "highest"))
    assert not found.same
    cause = "likely cause: float32 matrices are multiplied in 'tensorfloat32' in JAX and 'highest' in torch"
    assert found.text.endswith(f"so one side rounds more; {cause}")
    same = verdict(torch.matmul, jnp.matmul, X, W, precision=("tensorfloat32", "highest"))
    assert same.same, same.text


@pytest.mark.parametrize(
    ("changed", "operation", "cause"),
    [
        ({}, "", ""),
        ({"approximate": "tanh"}, "gelu", "approximate='none' instead of 'tanh'"),
        ({"eps": 1e-6}, "native_layer_norm", "eps=1e-05 instead of 1e-06"),
        ({"axis": 1}, "_softmax", "dim=-1 instead of 1"),
        ({"written_out": 1e-6}, "add", "eps=1e-05 instead of 1e-06"),
    ],
)
def test_the_first_operation_that_differs_is_located_with_its_cause(changed, operation, cause):
    x, w = X.reshape(2, 4, 32).astype(np.float64), W.astype(np.float64)

    def in_torch(approximate="none", eps=1e-5, axis=2, written_out=None):
        h = GELU(torch.from_numpy(x) @ torch.from_numpy(w), approximate=approximate)
        if written_out is None:
            h = torch.nn.functional.layer_norm(h, (32,), eps=eps)
        else:
            h = (h - h.mean(-1, True)) * torch.rsqrt(h.var(-1, correction=0, keepdim=True) + written_out)
        return (torch.softmax(h @ h.abs().transpose(1, 2) / 4, axis) @ h).square().mean()

    def in_jax(x, w):
        h = jax_norm(jax.nn.gelu(jnp.einsum("btc,cd->tbd", x, w), approximate=False))  # positions first
        scores = jnp.einsum("tbc,sbc->bts", h, jnp.abs(h)) / 4
        return (jnp.einsum("bts,sbc->btc", jax.nn.softmax(scores), h) ** 2).mean()

    with jax.enable_x64(True):
        found = locate(lambda: in_torch(**changed), in_jax, (jnp.asarray(x), jnp.asarray(w)))
    assert found.torch.startswith(operation)
    assert ("test_jax_agreement.py" in found.torch) == ("test_jax_agreement.py" in found.jax) == bool(operation)
    assert cause in found.cause
