"""Inductor's programs: generated modules as text, times from a trace, the labelled model, and a real compilation."""

import json
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchkit import UserError
from benchkit.processes import ChildCrashed
from jax_baseline.cli import app
from jax_baseline.diff import compiled_programs
from jax_baseline.diff.compiled_programs import FunctionSpec, compile_both, load_inputs
from jax_baseline.diff.inductor import program as inductor_program
from jax_baseline.diff.inductor.labels import labelled_loss
from jax_baseline.diff.inductor.program import kernel_seconds_from_trace
from jax_baseline.diff.inductor.source import hook_launches
from jax_baseline.diff.programs import Program
from jax_baseline.user_code import load_function
from torch_baseline.config import GPTConfig
from torch_baseline.model import GPT

# What Inductor generates, shortened: a Triton kernel, a C++ kernel, a product, a library call, two statements a line.
GENERATED = """# AOT ID: ['3_backward']
import torch
from torch._inductor.async_compile import AsyncCompile
async_compile = AsyncCompile()

triton_poi_fused_add_0 = async_compile.triton('triton_poi_fused_add_0', '''
import triton
@triton.jit
def triton_poi_fused_add_0(in_out_ptr0, in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')

cpp_fused_mul_1 = async_compile.cpp_pybinding(['const float*', 'float*'], r'''
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
}
''')

def call(args):
    x, = args
    with torch.cuda._DeviceGuard(0):
        # Topologically Sorted Source Nodes: [add]
        # [Provenance debug handles] triton_poi_fused_add_0:1
        stream0 = get_raw_stream(0)
        triton_poi_fused_add_0.run(buf0, x, buf1, 128, stream=stream0)
        # [Provenance debug handles] extern_kernels.mm:2
        extern_kernels.mm(reinterpret_tensor(x, (4, 2), (1, 4), 0), buf1, out=buf2)
        # [Provenance debug handles] cpp_fused_mul_1:3
        cpp_fused_mul_1(buf2, buf3); del buf2  # reuse
        # [Provenance debug handles] torch.ops.aten.flash.default:4
        buf4 = torch.ops.aten.flash.default(buf3, True)
        # [Provenance debug handles] never_called:5
        del buf3
    return (buf4, )
"""


def test_hooks_go_around_every_launch():
    module = hook_launches(GENERATED, graph=7, hooks="package.module:HOOKS")
    assert module.phase == "backward"
    assert [handle for handle, _ in module.launches] == [
        "triton_poi_fused_add_0:1",
        "extern_kernels.mm:2",
        "cpp_fused_mul_1:3",
        "torch.ops.aten.flash.default:4",
    ]
    assert module.missed == ("never_called:5",)
    assert module.kernels["triton_poi_fused_add_0"].roles == ("update", "read", "write")
    assert module.kernels["cpp_fused_mul_1"].roles == ("read", "write")
    compile(module.source, "generated", "exec")
    lines = [line.strip() for line in module.source.splitlines()]
    assert lines[0] == "from package.module import HOOKS as HOOKS"
    assert "with HOOKS.launch('7:extern_kernels.mm:2'):" in lines
    assert (
        "HOOKS.observe('7:extern_kernels.mm:2', (reinterpret_tensor(x, (4, 2), (1, 4), 0), buf1, ), buf2, None)"
        in lines
    )
    assert "HOOKS.observe('7:torch.ops.aten.flash.default:4', (buf3, True, ), None, buf4)" in lines
    after = lines.index("HOOKS.observe('7:cpp_fused_mul_1:3', (buf2, buf3, ), None, None)")
    assert lines[after + 1] == "del buf2"


def test_times_from_a_trace():
    """A kernel belongs to the range in which its launch was called, wherever on the timeline it ran."""

    def event(category, name, start, duration, **arguments):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": arguments}

    trace = {
        "traceEvents": [
            event("user_annotation", "launch 0:a:1", 0, 10),
            event("user_annotation", "launch 0:b:2", 20, 10),
            event("user_annotation", "launch 0:a:1", 40, 10),
            event("user_annotation", "ProfilerStep#1", 0, 60),
            event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
            event("cuda_driver", "cuLaunchKernelEx", 22, 1, correlation=2),
            event("cuda_runtime", "cudaLaunchKernel", 24, 1, correlation=3),
            event("cuda_runtime", "cudaLaunchKernel", 42, 1, correlation=4),
            event("kernel", "k1", 100, 5, correlation=1),
            event("kernel", "k2", 110, 7, correlation=2),
            event("gpu_memset", "Memset", 120, 2, correlation=3),
            event("kernel", "k1", 130, 6, correlation=4),
            event("kernel", "from elsewhere", 140, 50, correlation=99),
            {"ph": "M", "name": "process_name"},
        ]
    }
    found = kernel_seconds_from_trace(json.loads(json.dumps(trace)))
    assert found == {"0:a:1": [pytest.approx(5e-6), pytest.approx(6e-6)], "0:b:2": [pytest.approx(9e-6)]}


@pytest.mark.parametrize("tied", [True, False])
def test_the_labelled_model_computes_the_same(tied):
    config = GPTConfig(vocab_size=64, block_size=16, n_layer=2, n_head=2, n_embd=32, tie_embeddings=tied)
    plain, labels = GPT(config, seed=3), GPT(config, seed=3)
    tokens = torch.arange(32).reshape(2, 16)
    targets = (tokens * 7) % 64
    expected = plain(tokens, targets)
    expected.backward()
    loss = labelled_loss(labels, "float32", "cpu")(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    for (name, want), (other, got) in zip(plain.named_parameters(), labels.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=0)


# The example of the guide, and inputs that cannot be.
GUIDE = (Path(__file__).parents[3] / "docs" / "jax-baseline.md").read_text()
EXAMPLE = next(
    textwrap.dedent(block.split("```")[0]) for block in GUIDE.split("```python\n")[1:] if "def torch_fn" in block
)
USER_FILE = f"""{EXAMPLE}

def exact_inputs():  # products of these are exact, in any order of their sums
    generator = np.random.default_rng(0)
    return tuple(generator.integers(-1, 2, shape).astype(np.float32) for shape in ((64, 256), (256, 128)))


def wide_inputs():
    return (np.zeros(3),)


def no_arrays():
    return [1.0]


def large_numbers():
    return np.array([1, 2**31])


def whole_numbers():
    return np.arange(3)


def reversed_rows():
    return np.arange(6, dtype=np.float32).reshape(3, 2)[::-1], np.array(-(2**31))
"""


@pytest.fixture
def user_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return str(path)


ODD_FILE = """
import numpy as np


def inputs():
    return np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.ones(2, np.float32)


SHARED = np.ones((3, 4), np.float32)


def shared_inputs():
    return SHARED


def overwriting(x):
    return x.add_(1)


def number(x, y):
    return float(x.sum())


def itself(x, y):
    return x


def nested(x, y):
    return {"b": x.cos(), "a": (None, [y.exp(), x.sum(0)])}


def jax_nested(x, y):
    import jax.numpy as jnp

    return {"b": jnp.cos(x), "a": (None, [jnp.exp(y), x.sum(0)])}


def unused(x, y):
    return (x * x).sum()


jax_unused = unused
"""


@pytest.fixture
def odd_file(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(ODD_FILE)
    return str(path)


@pytest.mark.slow
def test_two_functions_of_a_user(user_file):
    torch_spec = FunctionSpec(f"{user_file}:torch_fn", f"{user_file}:exact_inputs", True, "cpu", 1)
    xla, inductor = compile_both(
        FunctionSpec(f"{user_file}:jax_fn", f"{user_file}:exact_inputs", True, "cpu", 1), torch_spec
    )
    assert (
        {launch.label[0] for launch in xla.launches}
        == {launch.label[0] for launch in inductor.launches}
        == {"hidden", "softmax"}
    )
    matmuls = [launch for launch in inductor.launches if launch.category == "matmul"]
    # x·w forward; backward its two gradients.
    assert [launch.phase for launch in matmuls] == ["forward", "backward", "backward"]
    # Two matrices read and one written, float32.
    assert matmuls[0].bytes_read == 4 * (64 * 256 + 256 * 128)
    assert matmuls[0].bytes_written == 4 * 64 * 128
    assert all(launch.seconds is not None for launch in (*xla.launches, *inductor.launches))
    assert all(
        tensor.moments for launch in (*xla.launches, *inductor.launches) for tensor in launch.writes if tensor.bytes
    )
    # The scalar and both gradients come out the same: 128 terms of a sum, and a logarithm and exponentials before it.
    for ours, theirs in zip(xla.values, inductor.values, strict=True):
        np.testing.assert_allclose(ours.moments, theirs.moments, rtol=0, atol=256 * 2**-24 * theirs.moments[2])
    generated = next(launch for launch in inductor.launches if launch.kind == "C++ kernel")
    assert 'extern "C"' in generated.source


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("mine.py", "must be given as file.py:function"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("{file}:absent", "has no function 'absent'; it has annotate, exact_inputs, inputs, jax_fn"),
    ],
)
def test_functions_that_are_not_there(user_file, reference, message):
    with pytest.raises(UserError, match=message):
        load_function(reference.replace("{file}", user_file), what="the torch function")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wide_inputs", "element 0 is float64; return float32"),
        ("no_arrays", "element 0 of the returned tuple must be a NumPy array, got list"),
        ("large_numbers", "element 0 is int64 and contains 2147483648; JAX converts it to 32 bits"),
    ],
)
def test_inputs_that_cannot_be_shared(user_file, name, message):
    with pytest.raises(UserError, match=message):
        load_inputs(f"{user_file}:{name}")


def test_inputs_of_any_layout_are_taken(user_file):
    """Torch refuses negative strides; the copy is row by row, and a scalar stays one."""
    rows, scalar = load_inputs(f"{user_file}:reversed_rows")
    np.testing.assert_array_equal(rows, [[4, 5], [2, 3], [0, 1]])
    assert rows.flags.c_contiguous
    assert scalar.shape == ()


@pytest.mark.parametrize(("program", "name"), [("JaxProgram", "jax_fn"), ("TorchProgram", "torch_fn")])
def test_gradients_need_an_argument_that_can_have_one(user_file, program, name):
    spec = FunctionSpec(f"{user_file}:{name}", f"{user_file}:whole_numbers", True, "cpu", 0)
    with pytest.raises(UserError, match="--gradients needs a float32 or float16 argument, got int64"):
        getattr(compiled_programs, program)(spec).program()


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        ("ValueError: the kernel k calls __cudnn$fmha", "the kernel k calls __cudnn$fmha"),
        (
            "jax.errors.JaxRuntimeError: INTERNAL: error: unsupported plugin",
            "XLA does not compile its optimised text again",
        ),
    ],
)
def test_why_values_could_not_be_read_is_a_sentence(raised, why):
    class NoValues:
        def call(self, method):
            raise ChildCrashed("JaxProgram.values raised an error", f"Traceback\n  somewhere\n{raised}\n")

    (note,) = compiled_programs._with_values(Program("XLA", (), None, 0.0), NoValues()).notes
    assert note == f"values in memory could not be read ({why}), so kernels are matched by label only"


def test_every_run_has_arguments_of_its_own(odd_file, monkeypatch):
    """The function writes into its argument: else each run would begin where the one before ended."""
    found = []

    def run_thrice(run, *, prepare, **settings):
        for _ in range(3):
            prepare()
            found.append(run()[0].clone())
        return Program("Inductor", (), None, 0.0)

    monkeypatch.setattr("jax_baseline.diff.inductor.program.compile_program", run_thrice)
    monkeypatch.setattr("torch.compile", lambda function: function)
    spec = FunctionSpec(f"{odd_file}:overwriting", f"{odd_file}:shared_inputs", False, "cpu", 0)
    compiled_programs.TorchProgram(spec).program()
    for result in found:
        np.testing.assert_array_equal(result, np.full((3, 4), 2.0))
    shared = sys.modules["_jax_baseline_user_odd"].SHARED
    np.testing.assert_array_equal(shared, np.ones((3, 4)))


@pytest.mark.parametrize(
    ("program", "name", "remedy"),
    [("JaxProgram", "torch_fn", "name torch's function first and JAX's second"), ("TorchProgram", "jax_fn", "")],
)
def test_a_function_that_fails_is_blamed(user_file, program, name, remedy):
    """Each framework's function given to the other: what it raises is one line that names it."""
    spec = FunctionSpec(f"{user_file}:{name}", f"{user_file}:inputs", False, "cpu", 0)
    with pytest.raises(UserError, match=rf"{name} raised \w+: .*{remedy}"):
        getattr(compiled_programs, program)(spec).program()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", r":number must return tensors, alone or in tuples, lists and dictionaries; got float"),
        pytest.param("itself", "must call operations of torch on its arguments", marks=pytest.mark.slow),
    ],
)
def test_a_function_without_results_to_compare_is_told(odd_file, name, message):
    spec = FunctionSpec(f"{odd_file}:{name}", f"{odd_file}:inputs", False, "cpu", 0)
    with pytest.raises(UserError, match=message):
        compiled_programs.TorchProgram(spec).program()


@pytest.mark.slow
def test_results_are_flat_as_those_of_jax(odd_file):
    """None is nothing, dictionaries go by their keys, what the result does not depend on has a gradient of zeros."""
    nested, unused = (
        [
            getattr(compiled_programs, program)(
                FunctionSpec(f"{odd_file}:{name}", f"{odd_file}:inputs", gradients, "cpu", 0)
            )
            .program()
            .values
            for program, name in (("JaxProgram", f"jax_{name}"), ("TorchProgram", name))
        ]
        for name, gradients in (("nested", False), ("unused", True))
    )
    for xla, inductor in (nested, unused):
        assert [value.shape for value in xla] == [value.shape for value in inductor]
        np.testing.assert_allclose(*([value.sketch for value in values] for values in (xla, inductor)), atol=1e-4)
    assert len(nested[0]) == 3
    assert set(unused[1][2].sketch) == {0.0}


CASTS_FILE = """
import jax.numpy as jnp
import numpy as np
import torch


def inputs():
    return (np.linspace(1, 2, 100, dtype=np.float32) ** 2,)


def torch_casts(x):
    return x.to(torch.bfloat16).to(torch.float32) * 2


def jax_casts(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32) * 2


class Casts(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, gradient: gradient.to(torch.bfloat16).to(torch.float32))


def gradient_casts(x):
    return (Casts.apply(x) * x.detach()).sum()
"""


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(180, method="thread")])]
)
def test_a_cast_that_a_compiler_leaves_out_is_in_the_results(tmp_path, device):
    """Inductor's kernels and, on a GPU, XLA's compute in float32: a cast to bfloat16 and back is no cast there."""
    path = tmp_path / "casts.py"
    path.write_text(CASTS_FILE)
    x = torch.from_numpy(np.linspace(1, 2, 100, dtype=np.float32) ** 2)
    expected = x.to(torch.bfloat16).double().sum() * 2  # exact in float32, as each product is
    assert abs(expected - x.double().sum() * 2) > 1e-3
    for side in ("jax", "torch"):
        spec = FunctionSpec(f"{path}:{side}_casts", f"{path}:inputs", False, device, 0)
        made = compiled_programs.JaxProgram if side == "jax" else compiled_programs.TorchProgram
        (value,) = made(spec).program().values
        assert value.moments[1] == expected, side


def test_a_cast_of_a_gradient_is_in_the_results(tmp_path):
    path = tmp_path / "casts.py"
    path.write_text(CASTS_FILE)
    spec = FunctionSpec(f"{path}:gradient_casts", f"{path}:inputs", True, "cpu", 0)
    _, gradient = compiled_programs.TorchProgram(spec).program().values
    x = torch.from_numpy(np.linspace(1, 2, 100, dtype=np.float32) ** 2)
    assert gradient.moments[1] == x.to(torch.bfloat16).double().sum()


def test_a_file_that_fails_is_named(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(UserError, match=r"broken\.py cannot be imported: ZeroDivisionError"):
        load_function(f"{path}:f", what="the JAX function")


def test_a_moved_private_part_is_named(monkeypatch):
    from torch._inductor.codecache import PyCodeCache

    from jax_baseline.diff.inductor.private import observe_inductor

    monkeypatch.delattr(PyCodeCache, "write")
    with (
        pytest.raises(RuntimeError, match=r"jax_baseline\.diff\.inductor\.private found no write in torch"),
        observe_inductor(lambda graph: None, lambda source, provenance: source),
    ):
        pass


PRODUCT_FILE = """\
import jax
import numpy as np
import torch

{setting}


def inputs():
    generator = np.random.default_rng(0)
    return tuple(generator.standard_normal((64, 64), np.float32) for _ in range(2))


def torch_fn(x, w):
    return x @ w


def jax_fn(x, w):
    return x @ w


def torch_sum(x, w):
    return (x @ w).square().sum()


def jax_sum(x, w):
    return ((x @ w) ** 2).sum()
"""
COARSE = 'jax.config.update("jax_default_matmul_precision", "BF16_BF16_F32")'


@pytest.fixture
def precision_restored():
    before = jax.config.jax_default_matmul_precision, torch.backends.cudnn.allow_tf32
    yield
    jax.config.update("jax_default_matmul_precision", before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("setting", "in_jax", "in_torch"),
    [
        ("", "highest", "highest"),
        (COARSE, "BF16_BF16_F32", "highest"),
        ('torch.set_float32_matmul_precision("high")', "highest", "high"),
    ],
)
def test_both_sides_multiply_as_torch_does_unless_the_users_code_chooses(
    tmp_path, precision_restored, setting, in_jax, in_torch
):
    """On a GPU, JAX's default is TF32, and so is cuDNN's for torch's convolutions."""
    path = tmp_path / "product.py"
    path.write_text(PRODUCT_FILE.format(setting=setting))
    before = torch.get_float32_matmul_precision()
    specs = [FunctionSpec(f"{path}:{side}_sum", f"{path}:inputs", True, "cpu", 0) for side in ("jax", "torch")]
    made = compiled_programs.JaxProgram(specs[0])
    text = str(jax.make_jaxpr(made._function)(*made._arguments))
    products = [line for line in text.split("dot_general")[1:] if line]
    assert len(products) == 3  # one forward, two backward
    assert all((in_jax if setting == COARSE else "HIGHEST") in product for product in products)
    assert made.program().precision == in_jax
    try:
        assert compiled_programs.TorchProgram(specs[1]).program().precision == in_torch
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.timeout(180, method="thread")
@pytest.mark.parametrize(("setting", "status"), [("", 0), (COARSE.replace("BF16_BF16_F32", "tensorfloat32"), 1)])
def test_products_on_a_gpu_are_compared_in_one_precision(tmp_path, setting, status):
    path = tmp_path / "product.py"
    path.write_text(PRODUCT_FILE.format(setting=setting))
    result = CliRunner().invoke(app, ["diff", f"{path}:torch_fn", f"{path}:jax_fn", "--device", "cuda", "--show", "0"])
    assert result.exit_code == status, result.output
    assert ("'tensorfloat32' in XLA's program" in result.output) == bool(status)


@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (12,)])
def test_a_tensor_is_summed_a_part_at_a_time(shape, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(inductor_program, "_PART", 6)
    largest = 0

    def widened(tensor, convert=torch.Tensor.double):
        nonlocal largest
        largest = max(largest, tensor.numel())
        return convert(tensor)

    monkeypatch.setattr(torch.Tensor, "double", widened)
    value = torch.randn(shape)
    count, *sums, high, low = inductor_program._moments(value)
    assert largest <= 6
    wide = value.to(torch.float64)
    exact = [wide.sum(), wide.abs().sum(), wide.square().sum(), wide.pow(3).sum()]
    # Sums of n terms in float64 differ by at most n·ε of the sum of their magnitudes, in whatever order.
    bounds = [value.numel() * torch.finfo(torch.float64).eps * wide.abs().pow(power).sum() for power in (1, 1, 2, 3)]
    for found, expected, bound in zip(sums, exact, bounds, strict=True):
        assert abs(found - expected) <= bound
    assert (count, high, low) == (value.numel(), value.max(), value.min())
