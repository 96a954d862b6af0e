"""Two functions, one of torch and one of JAX: the verdict of ``diff``, and where they part."""

import subprocess
import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from benchkit import UserError
from jax_baseline.diff.runs import measure, other_inputs, tensor_of, torch_arrays
from jax_baseline.diff.verdict import judge, require_repeatable
from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN
from jax_baseline.parity.location.functions import locate
from jax_baseline.parity.rounding import jax_in_float64, torch_in_float64, torch_noise, with_noise

X = np.random.default_rng(0).standard_normal((8, 32), np.float32)
W = np.random.default_rng(1).standard_normal((32, 32), np.float32)
GELU = torch.nn.functional.gelu
TENTHS = torch.tensor([-0.3, 0.1, 0.7])


def once(side):
    """Several tests measure the same functions of the same arrays."""
    known = {}

    def measured(function, *arrays):
        key = function, *map(id, arrays)
        if key not in known:
            known[key] = side(function, *arrays), arrays  # which keep their ids
        return known[key][0]

    return measured


@once
def of_torch(function, *arrays):
    def run(given, seed, *, wide, ties=False):
        tensors = [to_torch(one, wide) for one in given]
        with torch_noise(seed, not wide, ties), torch_in_float64() if wide else nullcontext():
            results = function(*tensors)
            return torch_arrays(results if isinstance(results, tuple) else [results])

    return run(arrays, None, wide=False), measure(run, arrays)


def to_torch(array, wide):
    tensor = torch.from_numpy(array)
    return tensor.double() if wide and tensor.is_floating_point() else tensor


@once
def of_jax(function, *arrays):
    def run(given, seed, *, wide, ties=False):
        with jax.enable_x64(wide), jax_in_float64() if wide else nullcontext():
            if seed is None:
                called = jax.jit(function, compiler_options=ROUND_AS_WRITTEN)
            else:
                called = with_noise(function, seed, exact_constants=not wide, ties=ties)
            results = called(*(jnp.asarray(one, jnp.float64 if wide else None) for one in given))
            return [*map(np.asarray, jax.tree.leaves(results))]

    return run(arrays, None, wide=False), measure(run, arrays)


def verdict(torch_function, jax_function, *arrays, precision=("highest", "highest")):
    (one, of_one), (other, of_other) = of_jax(jax_function, *arrays), of_torch(torch_function, *arrays)
    results = ([tensor_of(index, array, True) for index, array in enumerate(side)] for side in (one, other))
    return judge(*results, (of_one, of_other), ("JAX", "torch"), precision)


def exact(x):
    return jax.nn.gelu(x, approximate=False)


def narrowed(x):
    return GELU(x).half()


def of_half(x):
    return GELU(x.half())


def of_bfloat16(x):
    return GELU(x.bfloat16())


def jax_norm(x, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps)


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "says"),
    [
        (GELU, exact, ""),
        (GELU, jax.nn.gelu, "in float64 result 0, float64[8,32], differs by"),
        (narrowed, exact, "dtype mismatch: result 0 is float32 in JAX and float16 in torch"),
        (narrowed, jax.nn.gelu, "in float64 result 0, float64[8,32], differs by"),
        (of_half, lambda x: exact(x.astype(jnp.float16)), ""),
        (of_half, lambda x: jax.nn.gelu(x.astype(jnp.float16)), "in float64 result 0"),
        (of_bfloat16, lambda x: exact(x.astype(jnp.bfloat16)), ""),
        (of_bfloat16, lambda x: jax.nn.gelu(x.astype(jnp.bfloat16)), "in float64 result 0"),
        (lambda x: x.sum(), lambda x: x[::-1].sum(), ""),
        (lambda x: x.sum(1), lambda x: x.sum(0), "result 0 is float32[32] in JAX and float32[8] in torch"),
        (lambda x: x * 2, lambda x: x.astype(jnp.bfloat16).astype(x.dtype) * 2, "differs by"),
        (lambda x: x.argmax(1), lambda x: x.argmax(1), ""),
        (lambda x: x.argmax(1) + 1, lambda x: x.argmax(1), "differs by"),
        (lambda x: torch.nn.functional.layer_norm(x, (32,)), jax_norm, ""),
        (lambda x: torch.cumsum(x, 1), lambda x: jax.lax.scan(lambda c, v: (c + v,) * 2, x[:, 0] * 0, x.T)[1].T, ""),
    ],
    ids=[
        *("same", "tanh", "dtypes", "dtypes and tanh", "half", "half and tanh", "bfloat16", "bfloat16 and tanh"),
        *("order", "axis", "cast", "integers", "one more", "norm", "scan"),
    ],
)
def test_a_verdict_follows_from_measured_rounding(torch_function, jax_function, says):
    found = verdict(torch_function, jax_function, X)
    assert found.same == (not says), found.text
    assert says in found.text
    assert "(bound " in found.text or "result 0 is" in found.text


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "says"),
    [
        (torch.log, jnp.log, "THE SAME FUNCTION"),
        (lambda x: (x * 1e5).half(), lambda x: (x * 1e5).astype(jnp.float16), "THE SAME FUNCTION"),
        (torch.log, lambda x: jnp.where(x > 0, jnp.log(x), -jnp.inf), "is not finite at the same places of both"),
        (lambda x: x / 0, lambda x: x / 0, "or nowhere"),
    ],
    ids=["NaN", "infinities of float16", "NaN and infinities", "nothing finite"],
)
def test_what_is_not_finite_has_its_places(torch_function, jax_function, says):
    assert says in verdict(torch_function, jax_function, X).text


def test_noise_moves_no_whole_number_that_becomes_an_index():
    """The rank of a quantile, a floor, became one less."""
    assert verdict(lambda x: x.quantile(0.3, -1), lambda x: jnp.quantile(x, 0.3, -1), X).same
    found = verdict(lambda x: x.median(-1).values, lambda x: jnp.median(x, -1), X)
    assert found.text.startswith("NOT THE SAME FUNCTION"), found.text


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_half_precision_inputs_hide_no_difference(dtype):
    x = X.astype(dtype, copy=False)
    assert verdict(GELU, exact, x).same
    assert verdict(GELU, jax.nn.gelu, x).where == "float64"


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "where"),
    [
        (torch.nn.functional.relu6, jax.nn.relu6, ""),
        (torch.nn.functional.relu6, jax.nn.relu, "times 16"),
        (lambda x: (x > 0).to(x.dtype), lambda x: (x >= 0).astype(x.dtype), "with zeros"),
        (lambda x: torch.where(x == 0, 1.0, x.ceil()), lambda x: jnp.floor(x) + 1, "of multiples of 1/2"),
        (torch.nn.functional.softplus, jax.nn.softplus, ""),  # torch's is x above 20, which is 2e-9 off
    ],
)
def test_other_inputs_show_what_the_given_ones_do_not_reach(torch_function, jax_function, where):
    found = verdict(torch_function, jax_function, X)
    assert (found.same, found.where) == (not where, where), found.text
    assert f"on inputs {where or 'times 16, times 1000'}" in found.text


def test_other_inputs_keep_to_the_domain_that_an_array_shows():
    counts, shares, weights = np.arange(6.0), np.linspace(0.1, 0.9, 5), np.linspace(0.5, 3.0, 4)
    for name, (a, b, c) in other_inputs([counts, shares, weights]):
        np.testing.assert_array_equal(a, counts)
        assert 0 < b.min() <= b.max() <= 0.9, name
        assert c.min() > 0, name
    found = dict(other_inputs([X]))
    assert list(found) == [
        "times 16", "times 1000", "times 1/16", "of the opposite sign", "with zeros", "of multiples of 1/2",
    ]  # fmt: skip
    assert list(dict(other_inputs([X], kinks=False))) == list(found)[:4]
    halves = found["of multiples of 1/2"][0]
    np.testing.assert_array_equal(np.sort(halves, -1), np.tile(np.arange(-16, 16) / 2, (8, 1)))


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "array"),
    [
        (
            lambda n: n / 7 + n.sqrt() * torch.linspace(0, 1, 6),
            lambda n: n / 7 + jnp.sqrt(n) * jnp.linspace(0, 1, 6),
            1,
        ),
        (torch.linalg.eigvalsh, jnp.linalg.eigvalsh, 2),
        (lambda x: torch.fft.rfft(x).conj().imag, lambda x: jnp.fft.rfft(x).conj().imag, 3),
        (lambda x: x.exp(), jnp.exp, 4),
    ],
    ids=["whole numbers", "a covariance", "a conjugate", "one number"],
)
def test_equal_functions_of_unusual_inputs_are_the_same(torch_function, jax_function, array):
    covariance = (X[:6] @ X[:6].T).astype(np.float32)
    arrays = {1: np.arange(6, dtype=np.int32), 2: (covariance + covariance.T) / 2, 3: X, 4: np.array(-0.3, np.float32)}
    found = verdict(torch_function, jax_function, arrays[array])
    assert found.same, found.text
    assert array != 4 or "on inputs times 1/16" in found.text


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "where"),
    [
        (lambda x: (x * 10).round().clamp(-127, 127).int(), lambda x: jnp.round(x * 10).astype(jnp.int32), "times 16"),
        (lambda x: x > 0, lambda x: x >= 0, "with zeros"),
        (lambda x: x.round().int(), lambda x: jnp.floor(x + 0.5).astype(jnp.int32), "of multiples of 1/2"),
        (lambda x: x.clamp(max=10).argmax(-1), lambda x: x.argmax(-1), "times 16"),
        (lambda x: x > x.mean(-1, keepdim=True), lambda x: x > x.mean(-1, keepdims=True), ""),
        (lambda x: torch.bucketize(x, TENTHS), lambda x: jnp.searchsorted(jnp.asarray(TENTHS.numpy()), x), ""),
        (
            lambda x: (x / (x.abs().amax() / 127)).round().int(),
            lambda x: jnp.round(x * (127 / jnp.abs(x).max())).astype(jnp.int32),
            "",
        ),
    ],
    ids=["clamp", "comparison", "half to even", "ties", "mean", "buckets", "quantiser"],
)
def test_integers_are_compared_on_the_other_inputs(torch_function, jax_function, where):
    found = verdict(torch_function, jax_function, X)
    assert (found.same, found.where) == (not where, where), found.text
    assert f"on inputs {where or 'times 16, times 1000'}" in found.text


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "noted"),
    [
        (lambda x: x.argsort(-1), lambda x: x.argsort(-1), "with zeros"),  # torch sorts equal numbers in any order
        (lambda x: x.topk(24).indices, lambda x: jax.lax.top_k(x, 24)[1], "with zeros"),
        (lambda x: x.tanh().argmax(-1), lambda x: jnp.tanh(x).argmax(-1), "times 16"),  # where both are almost 1
        # The exponential overflows in one formula, which a comparison hides.
        (lambda x: x.sigmoid() > 0.5, lambda x: jnp.exp(x) / (1 + jnp.exp(x)) > 0.5, "times 1000"),
    ],
    ids=["argsort", "top", "saturated", "overflow"],
)
def test_integers_that_equal_elements_or_an_overflow_decide_are_noted(torch_function, jax_function, noted):
    found = verdict(torch_function, jax_function, X)
    assert found.same, found.text
    assert f"on inputs {noted} result 0 differs by" in found.text


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "says"),
    [
        (
            lambda x: x / x.abs(),
            lambda x: jnp.where(x == 0, jnp.inf, jnp.sign(x)),
            "NOT THE SAME FUNCTION: on inputs with",
        ),
        (lambda x: x / x.abs(), lambda x: x / jnp.abs(x), "THE SAME FUNCTION"),
        (torch.log, jnp.log, "THE SAME FUNCTION"),
        (
            lambda x: torch.where(x.abs() > 9, torch.nan, x),
            lambda x: jnp.where(jnp.abs(x) > 9, jnp.inf, x),
            "on inputs times 16 result 0 is not finite at the same places of both, or not in the same way",
        ),
    ],
    ids=["NaN and infinity", "NaN", "NaN and infinity of both", "scaled"],
)
def test_what_is_not_finite_on_the_other_inputs_has_its_places(torch_function, jax_function, says):
    found = verdict(torch_function, jax_function, X)
    assert says in found.text
    assert found.same == (not says.startswith("NOT"))


def test_results_that_are_finite_on_one_side_only_are_noted():
    found = verdict(lambda x: x.softmax(-1), lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), X)
    assert found.same
    assert found.text.endswith("on inputs times 1000 result 0 is finite in torch only")


def test_a_function_that_fails_in_float64_is_compared_in_its_own_dtype():
    def needs_float32(x):
        if x.dtype != torch.float32:
            raise TypeError("expected float32")
        return GELU(x)

    found = verdict(needs_float32, exact, X)
    assert found.same
    assert "not compared in float64, because torch raised TypeError: expected float32" in found.text
    assert "in float64 result" not in found.text


def test_weights_from_outside_widen_the_bound_in_float64_by_their_own_rounding():
    weights, bias = torch.from_numpy(W), jnp.zeros(32)
    table = jnp.asarray(W) * (1 + 2**-23)  # another rounding of the same weights
    found = verdict(lambda x: x @ weights, lambda x: x @ table + bias, X)
    assert found.same, found.text
    bound = float(found.text.partition("(bound ")[2].partition(")")[0])
    assert 1e-7 < bound < 2e-6
    assert not verdict(lambda x: x @ weights, lambda x: x @ (table * 1.00001), X).same


def test_a_narrow_constant_of_torch_is_no_difference():
    tenth = torch.tensor(0.1)
    assert verdict(lambda x: x * tenth, lambda x: x * 0.1, X).same
    assert not verdict(lambda x: x * tenth, lambda x: x * 0.10001, X).same


def test_what_writes_into_a_tensor_from_outside_writes_into_its_copy():
    count, one = torch.zeros(3), torch.ones(3)
    with torch_in_float64():
        count.add_(one / 3)
        got = (count * one).sum()
    assert got.dtype == torch.float64
    assert got.item() == 1.0
    assert count.sum() == 0


FILE = """\
import jax
import numpy as np
import torch


def inputs():
    return (np.random.default_rng(0).standard_normal((8, 32), np.float32),)


def torch_fn(x):
    return torch.nn.functional.gelu(x.half()).clamp(-2, 6)


def equal_fn(x):
    return jax.numpy.clip(jax.nn.gelu(x.astype("float16"), approximate=False), -2, 6)


def tanh_fn(x):
    return jax.numpy.clip(jax.nn.gelu(x.astype("float16")), -2, 6)


def limit_fn(x):
    return jax.numpy.clip(jax.nn.gelu(x.astype("float16"), approximate=False), -2, 8)


def torch_sine(x):
    return torch.sin(1e17 * x)


def torch_dropout(x):
    return torch.dropout(x, 0.5, True)


def jax_sine(x):
    return jax.numpy.sin(1e17 * x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch_function", "jax_function", "status", "says"),
    [
        ("torch_fn", "equal_fn", 0, ["THE SAME FUNCTION: in float64 result 0, float64[8,32], differs by "]),
        ("torch_fn", "tanh_fn", 1, ["torch computes gelu at mine.py:11", "approximate='tanh' instead of 'none'"]),
        ("torch_fn", "limit_fn", 1, ["on inputs times 16 result 0", "clamp at mine.py:11", "max=8.0 instead of 6"]),
        ("torch_sine", "jax_sine", 3, ["CAN'T BE JUDGED"]),
        ("torch_dropout", "jax_sine", 2, ["torch's function is random"]),
    ],
)
def test_the_command_has_a_verdict_and_names_the_first_difference(tmp_path, torch_function, jax_function, status, says):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    command = [sys.executable, "-m", "jax_baseline", "diff", f"{file}:{torch_function}", f"{file}:{jax_function}"]
    ended = subprocess.run(
        [*command, "--device", "cpu", "--repeats", "0", "--show", "0"], capture_output=True, text=True
    )
    assert ended.returncode == status, ended.stderr
    for words in says:
        assert words in ended.stdout + ended.stderr


def test_a_precision_that_differs_only_in_the_dtype_of_the_inputs_is_named():
    def coarse(x):
        return (x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x).astype(x.dtype) * 2

    found = verdict(lambda x: x * 2, coarse, X)
    assert not found.same
    assert found.text.endswith("in float64 the functions agree, so one side rounds more")
    assert found.where == "own dtype"


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


def scaled_in_torch(x):
    return (x.bfloat16() * torch.tensor(55.4256, dtype=torch.bfloat16)).to(x.dtype)


def scaled_in_jax(x, by=55.4256):
    return (x.astype(jnp.bfloat16).astype(x.dtype) * by).astype(jnp.bfloat16).astype(x.dtype)


@pytest.mark.parametrize(
    ("torch_function", "jax_function", "says"),
    [
        (scaled_in_torch, scaled_in_jax, "so torch rounds a constant"),  # 55.5 against 55.4256
        (
            lambda x: (x + 0.7).bfloat16(),
            lambda x: x.astype(jnp.bfloat16) + (0.7 if x.dtype == jnp.float64 else 0.701),
            "so JAX rounds a constant",
        ),
        # 0.1 is 0.1001 in bfloat16; of 0.01 in a LeakyReLU so little remains that it is no bias.
        (
            lambda x: x.bfloat16() * 0.1 * 0.1,
            lambda x: x.astype(jnp.bfloat16) * 0.1 * 0.1,
            "JAX rounds a Python number",
        ),
        (
            lambda x: (x if x.dtype == torch.float64 else 1.001 * x).bfloat16(),
            lambda x: (x if x.dtype == jnp.float64 else 0.999 * x).astype(jnp.bfloat16),
            "so one side rounds a constant",
        ),
        (
            lambda x: torch.nn.functional.leaky_relu(x.bfloat16(), 0.01),
            lambda x: jax.nn.leaky_relu(x.astype(jnp.bfloat16), 0.01),
            "",
        ),
        (lambda x: x.bfloat16().cumsum(0), lambda x: jnp.cumsum(x.astype(jnp.bfloat16), 0), ""),
    ],
    ids=["constant", "shift", "Python numbers", "both", "LeakyReLU", "other roundings"],
)
def test_a_bias_inside_the_bound_is_a_difference(torch_function, jax_function, says):
    x = np.random.default_rng(3).standard_normal((64, 512), np.float32) * 0.02
    found = verdict(torch_function, jax_function, x)
    assert found.same == (not says), found.text
    assert says in found.text


def test_no_side_is_said_to_round_more_where_float64_can_not_be_judged():
    """Gradients that cancel on one side alone are zero there, and nothing but rounding with noise."""
    found = verdict(lambda x: (x, x.round()), lambda x: (x, x - x), X)
    assert found.where == "own dtype"
    assert "in float64 result 1, float64[8,32], differs by" in found.text
    assert "which hides whether the functions agree" in found.text
    assert "functions agree, so" not in found.text


def test_a_random_function_is_refused_and_a_repeatable_one_is_not():
    generator = torch.Generator().manual_seed(0)
    _, drawing = of_torch(lambda x: x + 1e-3 * torch.randn(x.shape, generator=generator, dtype=x.dtype), X)
    with pytest.raises(
        UserError, match=r"torch's function is random: .* differ by \d\.\de-\d+ in result 0; switch off"
    ):
        require_repeatable(drawing, "torch's function")
    require_repeatable(of_torch(torch.tanh, X)[1], "torch's function")


def test_what_rounding_alone_decides_cannot_be_judged():
    found = verdict(lambda x: torch.sin(1e17 * x), lambda x: jnp.sin(1e17 * x), X)
    assert not found.same
    assert not found.judged
    assert "CAN'T BE JUDGED" in found.text
