"""Parsed totals against XLA's own counts, where those are right; and where they are not."""

import json
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_baseline.diff.xla.private import complete_text, run_text
from jax_baseline.gpt.model import loss, one_pass_logsumexp
from jax_baseline.gpt.transfer import from_torch
from jax_baseline.hlo import kernels, parse, summarise
from jax_baseline.hlo.compiled_step import CompiledStep
from jax_baseline.hlo.exposed_intermediates import expose_intermediates
from jax_baseline.hlo.lock import Drift, make_lock, read_lock
from jax_baseline.hlo.profile import kernel_seconds
from torch_baseline.config import GPTConfig
from torch_baseline.model import init_numpy

GOLDEN = Path(__file__).parent / "golden"
CONFIG = GPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=32)


@pytest.fixture(scope="module")
def model_gradients():
    """The loss and gradients of a one-block model: compiled, and its arguments."""
    params = from_torch(init_numpy(CONFIG, 0), CONFIG)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)), jnp.int32)
    arguments = (params, tokens, tokens)
    function = jax.jit(lambda params, x, y: jax.value_and_grad(loss)(params, x, y, CONFIG))
    return function.lower(*arguments).compile(), arguments


def test_totals_of_the_model_agree_with_xla(model_gradients):
    compiled, _ = model_gradients
    summary, costs, memory = summarise(compiled.as_text()), compiled.cost_analysis(), compiled.memory_analysis()
    # Scalars of index arithmetic are counted a little differently: parts in a million of a model's work.
    assert summary.flops == pytest.approx(costs["flops"], rel=1e-3)
    # XLA's CPU analysis takes every operand whole; only so do the two agree.
    assert summary.whole_bytes == pytest.approx(costs["bytes accessed"], rel=1e-3)
    assert summary.bytes < summary.whole_bytes
    assert summary.argument_bytes == memory.argument_size_in_bytes


def test_totals_of_a_reduction_of_two_arrays_at_once_agree_with_xla():
    compiled = jax.jit(one_pass_logsumexp).lower(jnp.ones((4, 8, 300))).compile()
    summary, costs = summarise(compiled.as_text()), compiled.cost_analysis()
    assert summary.flops == pytest.approx(costs["flops"], rel=1e-3)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(jnp.fft.fft2, "complex64"), (jnp.fft.rfft, "float32"), (jnp.fft.irfft, "complex64")],
)
def test_fourier_transforms_agree_with_xla(function, dtype):
    compiled = jax.jit(function).lower(jnp.ones((7, 100), dtype)).compile()
    assert summarise(compiled.as_text()).flops == pytest.approx(compiled.cost_analysis()["flops"], rel=1e-3)


LABELS = ("NHWC", "HWIO", "NHWC")
IMAGE, KERNEL = (2, 8, 8, 6), (3, 3, 6, 4)


def convolve(x, k, strides=(2, 2), padding=((1, 1), (0, 1)), groups=1):
    return jax.lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=LABELS, feature_group_count=groups, rhs_dilation=(1, 2)
    )


@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        (convolve, KERNEL),
        (lambda x, k: convolve(x, k, (1, 1), "SAME", 2), (3, 3, 3, 4)),
        (lambda x, k: jax.lax.conv_transpose(x, k, (2, 2), "VALID", dimension_numbers=LABELS), KERNEL),
        (jax.grad(lambda x, k: convolve(x, k).sum()), KERNEL),
        (jax.grad(lambda x, k: jnp.square(convolve(x, k, (1, 1), "SAME", 2)).sum(), argnums=1), (3, 3, 3, 4)),
    ],
    ids=["padded", "grouped", "transposed", "gradient of the input", "gradient of grouped kernels"],
)
def test_convolutions_agree_with_xla(function, kernel):
    """Zeros of the padding and of dilation are no work: a transposed convolution of stride 2 has 3/4 of them."""
    compiled = jax.jit(function).lower(jnp.ones(IMAGE), jnp.ones(kernel)).compile()
    assert summarise(compiled.as_text()).flops == pytest.approx(compiled.cost_analysis()["flops"], rel=1e-3)


def test_a_convolution_in_a_library_costs_what_its_forward_pass_does():
    shapes = {"x": "f32[2,6,8,8]", "k": "f32[4,6,3,3]", "y": "f32[2,4,8,8]"}
    calls = {"Forward": "xky", "BackwardInput": "ykx", "BackwardFilter": "xyk"}
    lines = [
        f"  %{call} = ({shapes[made]}{{3,2,1,0}}, u8[64]{{0}}) custom-call(%{one}, %{other}), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=bf01_oi01->bf01, "
        f'custom_call_target="__cudnn$conv{call}"'
        for call, (one, other, made) in calls.items()
    ]
    parameters = [f"  %{name} = {shape} parameter({at})" for at, (name, shape) in enumerate(shapes.items())]
    root = f"  ROOT %t = ({shapes['y']}) tuple(%y)"
    text = "\n".join(["HloModule m", "", "ENTRY %main () -> f32[] {", *parameters, *lines, root, "}", ""])
    listed = kernels(parse(text))
    assert [kernel.cost.flops for kernel in listed] == [2 * 2 * 4 * 6 * 22 * 22] * 3  # 22 of 24 rows are no padding
    assert {kernel.category for kernel in listed} == {"matmul"}


@pytest.mark.parametrize(("axis", "comparisons"), [(0, 3), (1, 7), (2, 0)])
def test_a_sort_costs_by_the_length_of_its_axis(axis, comparisons):
    """Of 7, 100 and 1 elements: ⌈log₂ length⌉ comparisons for each element, with a second operand and without."""
    for function in (lambda x: jnp.sort(x, axis), lambda x: jnp.argsort(x, axis)):
        text = jax.jit(function).lower(jnp.ones((7, 100, 1))).compile().as_text()
        sorts = [kernel for kernel in kernels(parse(text)) if "sort" in kernel.ops]
        assert sum(kernel.cost.flops for kernel in sorts) == 700 * comparisons


def test_functions_of_single_elements_are_counted_as_often_as_they_are_applied():
    """Compilers for a CPU and a GPU leave neither: text of XLA's other passes has them."""
    text = """HloModule m

%curve (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %power = f32[] exponential(%a)
  ROOT %more = f32[] add(%power, %a)
}

%larger (b: f32[], c: f32[]) -> pred[] {
  %b = f32[] parameter(0)
  %c = f32[] parameter(1)
  ROOT %ge = pred[] compare(%b, %c), direction=GE
}

%sum (d: f32[], e: f32[]) -> f32[] {
  %d = f32[] parameter(0)
  %e = f32[] parameter(1)
  ROOT %plus = f32[] add(%d, %e)
}

ENTRY %main (x: f32[6,8], y: f32[3,4]) -> f32[6,8] {
  %x = f32[6,8]{1,0} parameter(0)
  %y = f32[3,4]{1,0} parameter(1)
  %zero = f32[] constant(0)
  %mapped = f32[6,8]{1,0} map(%x), dimensions={0,1}, to_apply=%curve
  ROOT %z = f32[6,8]{1,0} select-and-scatter(%mapped, %y, %zero), window={size=2x2}, select=%larger, scatter=%sum
}
"""
    assert [kernel.cost.flops for kernel in kernels(parse(text))] == [48, 12 * (3 + 1)]


def test_xla_counts_the_body_of_a_loop_once_and_the_parser_as_often_as_it_runs():
    trips, size = 5, 32

    def f(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=trips)[0]

    x = jnp.ones((size, size))
    compiled = jax.jit(f).lower(x, x).compile()
    product = 2 * size**3
    # Less one index addition a trip, and one comparison more than trips.
    assert compiled.cost_analysis()["flops"] == pytest.approx(product, abs=10)
    assert summarise(compiled.as_text()).flops == pytest.approx(trips * product, abs=10 * trips)
    dots = [kernel for kernel in kernels(parse(compiled.as_text())) if kernel.category == "matmul"]
    assert [kernel.calls for kernel in dots] == [trips]


def test_only_what_a_gather_or_an_update_touches_is_counted():
    table, rows, width = 4096, 8, 64

    def f(table, index, row):
        return table[index], jax.lax.dynamic_update_slice(table, row, (3, 0))

    arguments = (jnp.ones((table, width)), jnp.arange(rows), jnp.ones((1, width)))
    compiled = jax.jit(f, donate_argnums=0).lower(*arguments).compile()
    summary = summarise(compiled.as_text())
    whole = 4 * table * width
    copies = sum(kernel.kind == "copy" for kernel in kernels(parse(compiled.as_text())))
    assert compiled.cost_analysis()["bytes accessed"] > 2 * whole
    assert summary.bytes < (2 * copies + 0.1) * whole + 100 * rows * width


def test_what_is_converted_on_the_way_to_a_gather_is_counted_where_it_is_gathered():
    rows, width = 256, 512
    table, index = jnp.ones((rows, width), jnp.bfloat16), jnp.zeros(rows, jnp.int32)
    compiled = jax.jit(lambda x, i: jnp.take_along_axis(x.astype(jnp.float32), i[:, None], -1) + 1)
    found = kernels(parse(compiled.lower(table, index).compile().as_text()))
    # A row's one value of two bytes, and its index.
    assert sum(kernel.total.bytes_read for kernel in found if "gather" in kernel.ops) == rows * (2 + 4)


def test_donation_agrees_with_xla():
    def f(a, b):
        return a + b, b.sum()

    a = jnp.ones((64, 64))
    compiled = jax.jit(f, donate_argnums=0).lower(a, a).compile()
    summary = summarise(compiled.as_text())
    assert (summary.donated, summary.arguments) == (1, 2)
    assert summary.donated_bytes == compiled.memory_analysis().alias_size_in_bytes == 4 * 64 * 64


def test_everything_in_memory_can_be_taken_out(model_gradients):
    """The rewritten module returns, for what the program returns too, the very same values."""
    compiled, arguments = model_gradients
    module = parse(compiled.as_text())
    names = {kernel.name for kernel in kernels(module)}
    text, taken = expose_intermediates(complete_text(compiled), names)
    assert len(taken) == sum(len(kernel.writes) for kernel in kernels(module))
    values = dict(zip(taken, run_text(text, jax.tree.leaves(arguments)), strict=True))
    expected = jax.tree.leaves(compiled(*arguments))
    compared = 0
    for name, want in zip(module.result.operands, expected, strict=True):
        if name in values:
            compared += 1
            np.testing.assert_allclose(np.asarray(values[name]).reshape(want.shape), want, rtol=1e-4, atol=1e-6)
    assert compared >= 4


def test_a_bitcast_that_transposes_keeps_its_values():
    text = """HloModule m

ENTRY %main (x: f32[2,3]) -> f32[3,2] {
  %x = f32[2,3]{1,0} parameter(0)
  %turned = f32[3,2]{0,1} bitcast(%x)
  ROOT %twice = f32[3,2]{0,1} add(%turned, %turned)
}
"""
    x = jnp.arange(6.0).reshape(2, 3)
    rewritten, names = expose_intermediates(text, {"twice"})
    assert names == ["twice"]
    np.testing.assert_array_equal(run_text(rewritten, [x])[0], 2 * np.asarray(x).T)


def test_a_gpu_program_with_library_products_gives_its_values_on_a_cpu():
    """What an H200 would leave in memory, calls of cuBLAS and cuts of tuples included, computed here."""
    text = (GOLDEN / "h200_cublas_step.hlo").read_text()
    module = parse(text)
    found = kernels(module)
    assert sum(kernel.target == "__cublas$lt$matmul" for kernel in found) == 5
    generator = np.random.default_rng(0)
    weights = [jnp.asarray(generator.standard_normal(shape, np.float32) / 8) for shape in ((32, 128), (3, 128, 128))]
    x = jnp.asarray(generator.standard_normal((64, 32), np.float32))
    rewritten, names = expose_intermediates(text, {kernel.name for kernel in found})
    values = dict(zip(names, run_text(rewritten, [*weights, x]), strict=True))
    expected = runpy.run_path(str(GOLDEN / "regenerate.py"))["step"](tuple(weights), x)
    compared = 0
    for name, want in zip(module.result.operands, jax.tree.leaves(expected), strict=True):
        if name in values:
            compared += 1
            np.testing.assert_allclose(np.asarray(values[name]).reshape(want.shape), want, rtol=1e-4, atol=1e-5)
    assert compared == 3


def test_a_library_call_that_is_no_plain_product_is_named():
    text = (GOLDEN / "h200_cublas_step.hlo").read_text().replace('"epilogue":"DEFAULT"', '"epilogue":"GELU"')
    with pytest.raises(
        ValueError, match=r"calls the library function __cublas\$lt\$matmul, which the text does not define"
    ):
        expose_intermediates(text, set())


def test_the_profiler_sees_every_kernel(model_gradients):
    compiled, arguments = model_gradients
    names = [kernel.name for kernel in kernels(parse(compiled.as_text()))]
    seconds = kernel_seconds(lambda: compiled(*arguments), names, repeats=2)
    assert set(seconds) == set(names)
    assert all(value > 0 for value in seconds.values())


@pytest.mark.parametrize("name", ["cpu_step.hlo", "h200_step.hlo"])
def test_golden_modules_agree_with_the_arithmetic_of_their_source(name):
    """golden/regenerate.py: x (64, 32) through a matrix (32, 128) and three scanned ones (128, 128), and back."""
    summary = summarise((GOLDEN / name).read_text())
    rows = 64 if name.startswith("cpu") else 32  # of two devices each has half the batch
    products = 2 * rows * 32 * 128 + 3 * 2 * rows * 128 * 128
    # Forward, and backward for weights and inputs; the first layer's input has no gradient.
    expected = 3 * products - 2 * rows * 32 * 128
    assert expected < summary.flops < 1.1 * expected
    assert (summary.donated, summary.dots) == (2, 5)
    scopes = {(group.region, group.phase) for group in summary.regions}
    assert {("first", "forward"), ("first", "backward"), ("stack", "forward"), ("stack", "backward")} <= scopes
    assert {("loss", "forward"), ("update", "other")} <= scopes


def test_golden_module_of_two_h200s():
    text = (GOLDEN / "h200_step.hlo").read_text()
    summary = summarise(text)
    # One for the scanned stack (it runs three times), one for the first matrix, one for the loss.
    assert summary.collectives == {"all-reduce-start": 3}
    assert summary.kinds["fusion custom: __triton_nested_gemm_fusion"] == 5
    found = {kernel.name: kernel for kernel in kernels(parse(text))}
    reduce_in_loop = found["all-reduce-start"]
    assert (reduce_in_loop.calls, reduce_in_loop.category, reduce_in_loop.region) == (3, "collective", "stack")
    assert reduce_in_loop.cost.bytes_read == 128 * 128 * 2
    location = found["gemm_fusion_dot.5"].location
    assert location is not None
    assert (location.file, location.function) == ("regenerate.py", "step.<locals>.loss")
    source = (GOLDEN / "regenerate.py").read_text().splitlines()[location.line - 1]
    assert "gelu(x @ first)" in source


def test_golden_module_of_a_cpu():
    found = kernels(parse((GOLDEN / "cpu_step.hlo").read_text()))
    loops = [kernel for kernel in found if kernel.category == "matmul" and kernel.region == "stack"]
    assert [(kernel.phase, kernel.calls) for kernel in loops] == [("forward", 3), ("backward", 3), ("backward", 3)]
    slices = [kernel for kernel in found if kernel.name.startswith("dynamic-slice_bitcast_fusion")]
    # The stack is (3, 128, 128) and an activation's (3, 64, 128): what is read is one layer's, and a number.
    assert {kernel.cost.bytes_read for kernel in slices} == {128 * 128 * 4 + 4, 64 * 128 * 4 + 4}
    assert {kernel.category for kernel in slices} == {"data movement"}


def test_the_operations_that_xla_was_given_are_counted():
    text = '%0 = stablehlo.constant 1\n%1 = "stablehlo.while"(%0)\n%2 = chlo.erf %stablehlo.add\nstablehlo.return'
    assert CompiledStep("", {}, stablehlo=text).stablehlo_operations == 2
    whole = CompiledStep("", {}, stablehlo=(GOLDEN / "step.stablehlo").read_text())
    assert whole.stablehlo_operations > len(kernels(parse((GOLDEN / "cpu_step.hlo").read_text())))


def test_a_lock_holds_until_a_fusion_changes():
    text = (GOLDEN / "cpu_step.hlo").read_text()
    versions = {"jax": "0.10.2", "backend": "cpu"}
    lock = make_lock(text, subject="a step", versions=versions)
    assert read_lock(lock.dump()) == lock
    assert not Drift(lock, make_lock(text, subject="a step", versions=versions))

    broken = text.replace("kind=kCustom, calls=%fused_computation.4,", "kind=kLoop, calls=%fused_computation.4,")
    assert broken != text
    drift = Drift(lock, make_lock(broken, subject="a step", versions={**versions, "jax": "0.11.2"}))
    assert drift
    assert sum(drift.removed.values()) == sum(drift.added.values()) == 1
    lines = drift.lines()
    assert any("− 1 × fusion custom: __ynn_fusion" in line for line in lines)
    assert "jax: 0.10.2 in the lock, 0.11.2 now" in lines
    assert all("→ f32[" in line for line in lines if " × " in line)
    assert not drift.reshaped()
    undonated = make_lock(
        text.replace("may-alias", "x", 0).replace("input_output_alias", "no"), subject="", versions={}
    )
    assert any("donated arguments: 2 in the lock, 0 now" in line for line in Drift(lock, undonated).lines())


def test_other_shapes_alone_are_said_and_are_no_drift():
    text = (GOLDEN / "cpu_step.hlo").read_text()
    lock = make_lock(text, subject="a step", versions={})
    larger = Drift(lock, make_lock(text.replace("f32[32,128]", "f32[32,256]"), subject="a step", versions={}))
    assert not larger
    assert any("f32[32,256]" in line and "in the lock f32[32,128]" in line for line in larger.reshaped())
    rows = json.loads(lock.dump())
    old = read_lock(json.dumps({**rows, "kernels": [row[:5] for row in rows["kernels"]]}))  # of an older version
    assert old.kernels == lock.kernels
    assert not Drift(old, lock).reshaped()


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"format": 99}'])
def test_other_files_are_no_locks(text):
    with pytest.raises(ValueError, match="expected a fusion lock"):
        read_lock(text)
