"""The public function and module: their errors, and their use in place of PyTorch's own."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from native_build import BuildError
from rmsnorm_fused import LayerNorm, RMSNorm, backends, rms_norm
from rmsnorm_fused.impl import prebuild
from rmsnorm_fused.ops.rows import as_rows

X = torch.ones(2, 8)
SCALE = torch.ones(1)
FLOAT8 = {"out_dtype": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1.0, 2.0],), {}, TypeError, "x: expected a tensor, got list"),
        ((X.int(),), {}, TypeError, r"x: expected float32, .*got torch.int32"),
        ((X.to(torch.complex64),), {}, TypeError, r"got torch.complex64"),
        ((torch.tensor(1.0),), {}, ValueError, "x: expected at least one dimension"),
        ((X, [1.0]), {}, TypeError, "weight: expected a tensor or None, got list"),
        ((X, torch.ones(7)), {}, ValueError, r"weight: expected shape \(8,\).*got \(7,\)"),
        ((X, torch.ones(1, 8)), {}, ValueError, r"weight: expected shape \(8,\).*got \(1, 8\)"),
        ((X, torch.ones(8, dtype=torch.int64)), {}, TypeError, "weight: expected float32, .*got torch.int64"),
        ((X, torch.ones(8, dtype=torch.float64)), {}, TypeError, "a float64 weight needs a float64 x"),
        ((X, torch.ones(8, device="meta")), {}, ValueError, "weight: expected it on cpu, where x is, got meta"),
        ((X,), {"eps": -1e-6}, ValueError, "eps: expected a finite number of at least 0, got -1e-06"),
        ((X,), {"eps": float("nan")}, ValueError, "eps: expected a finite number"),
        ((X,), {"eps": float("inf")}, ValueError, "eps: expected a finite number of at least 0, got inf"),
        ((X,), {"eps": "small"}, TypeError, "eps: expected a number or None, got str"),
        ((X,), {"eps": True}, TypeError, "eps: expected a number or None, got bool"),
        ((X,), {"weight_offset": "1"}, TypeError, "weight_offset: expected a number, got str"),
        ((X,), {"weight_offset": False}, TypeError, "weight_offset: expected a number, got bool"),
        ((X,), {"weight_offset": float("inf")}, ValueError, "weight_offset: expected a finite number, got inf"),
        ((X,), {"casting": "gemma"}, ValueError, "casting: expected one of exact, llama, got 'gemma'"),
        ((X,), {"residual": [1.0]}, TypeError, "residual: expected a tensor or None, got list"),
        ((X,), {"residual": X.half()}, TypeError, "residual: expected torch.float32, .*got torch.float16"),
        ((X.half(),), {"residual": X.double()}, TypeError, "residual: expected torch.float16, .*or torch.float32, got"),
        (
            (X.half(),),
            {"residual": X, "casting": "llama"},
            ValueError,
            "residual: expected the dtype of x with casting=",
        ),
        (
            (X.half(),),
            {"residual": X, **FLOAT8, "scale": "dynamic"},
            ValueError,
            "residual: expected the dtype of x with out_dtype=torch.float8_e4m3fn, got torch.float32",
        ),
        (
            (X.half(),),
            {"residual": X, "backend": "cpp"},
            ValueError,
            "it takes a residual in the dtype of x, got a wider",
        ),
        ((X,), {"residual": X[:1]}, ValueError, r"residual: expected shape \(2, 8\), that of x, got \(1, 8\)"),
        ((X,), {"residual": X.to("meta")}, ValueError, "residual: expected it on cpu, where x is, got meta"),
        ((X,), {"scale": SCALE}, ValueError, "scale: expected None without out_dtype=torch.float8_e4m3fn"),
        ((X,), {"scale": "dynamic"}, ValueError, "scale: expected None without out_dtype=torch.float8_e4m3fn"),
        (
            (X,),
            {"out_dtype": torch.float16, "scale": SCALE},
            TypeError,
            "out_dtype: expected torch.float8_e4m3fn or None .*got torch.float16",
        ),
        ((X,), {"out_dtype": torch.float8_e5m2, "scale": SCALE}, TypeError, "out_dtype: .*got torch.float8_e5m2"),
        ((X.double(),), {**FLOAT8, "scale": SCALE}, TypeError, "x: expected float32, bfloat16 or float16 for a float8"),
        ((X,), FLOAT8, ValueError, "scale: expected a float32 tensor of one element .*got None"),
        ((X,), {**FLOAT8, "scale": "static"}, ValueError, "scale: expected .*got 'static'"),
        ((X,), {**FLOAT8, "scale": 1.0}, TypeError, "scale: expected .*got float"),
        ((X,), {**FLOAT8, "scale": SCALE.double()}, TypeError, "scale: expected .*got torch.float64"),
        ((X,), {**FLOAT8, "scale": torch.ones(2)}, ValueError, r"scale: expected .*got shape \(2,\)"),
        ((X,), {**FLOAT8, "scale": SCALE.to("meta")}, ValueError, "scale: expected it on cpu, where x is, got meta"),
        (
            (X.clone().requires_grad_(),),
            {**FLOAT8, "scale": SCALE},
            ValueError,
            "out_dtype: a float8 result has no gradient; call under torch.no_grad",
        ),
        (
            (X, torch.ones(8, requires_grad=True)),
            {**FLOAT8, "scale": "dynamic"},
            ValueError,
            "out_dtype: a float8 result has no gradient",
        ),
        (
            (X,),
            {"backend": "cudnn"},
            ValueError,
            "backend: expected one of auto, pytorch, triton, cuda, cpp, got 'cudnn'",
        ),
        ((X,), {"backend": "cuda"}, ValueError, "backend 'cuda' cannot be used: it takes tensors on cuda, got cpu"),
    ],
)
def test_bad_input_is_named(arguments, options, error, message):
    with pytest.raises(error, match=message):
        rms_norm(*arguments, **{"eps": 1e-6, **options})


def _jagged(requires_grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 8, generator=generator) for rows in (4, 1, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=requires_grad)


def test_jagged_tensors_are_normalised_as_torchs_own_module_does():
    x, ours, theirs = _jagged(), RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6)
    weight = torch.linspace(-1, 1, 8)
    for module in (ours, theirs):
        module.weight.data.copy_(weight)
    dense = x.values().clone().requires_grad_()
    gradients = []
    for y in (ours(x).values(), theirs(x).values(), rms_norm(dense, ours.weight, eps=1e-6)):
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(dense, (8,), weight, 1e-6))
        gradients.append(
            torch.autograd.grad(y.square().sum(), theirs.weight if len(gradients) == 1 else ours.weight)[0]
        )
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize("backend", ["auto", "pytorch"])
def test_layouts_that_no_back_end_takes_are_named(backend):
    rms_norm(X, eps=1e-6)  # from the first call on there may be a way past the checks
    with pytest.raises(
        TypeError, match=r"x: expected a dense or a jagged tensor, got torch.sparse_coo; convert it fir"
    ):
        rms_norm(torch.eye(8).to_sparse(), eps=1e-6, backend=backend)
    with pytest.raises(
        ValueError, match="backend 'cpp' cannot be used: it takes dense tensors, got a jagged one; norm"
    ):
        rms_norm(_jagged(), eps=1e-6, backend="cpp")
    with pytest.raises(TypeError, match="x: expected a tensor, got list"):
        RMSNorm(8)([1.0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_float8_result_needs_no_detached_weight_without_grad(mode):
    module = RMSNorm(8)
    with mode():
        y = rms_norm(X, module.weight, eps=1e-6, **FLOAT8, scale=SCALE, backend="pytorch")
    assert y.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize(
    ("options", "scales"), [({}, 0), ({**FLOAT8, "scale": SCALE}, 0), ({**FLOAT8, "scale": "dynamic"}, 1)]
)
def test_what_is_returned(residual, options, scales):
    found = rms_norm(X, eps=1e-6, residual=X if residual else None, **options, backend="pytorch")
    wanted = [options.get("out_dtype", X.dtype), *([X.dtype] if residual else []), *([torch.float32] * scales)]
    assert isinstance(found, tuple) == (len(wanted) > 1)
    assert [tensor.dtype for tensor in (found if isinstance(found, tuple) else (found,))] == wanted


@pytest.mark.gpu
def test_mixed_devices_are_named():
    with pytest.raises(ValueError, match="residual: expected it on cuda:0"):
        rms_norm(X.cuda(), eps=1e-6, residual=X)
    with pytest.raises(ValueError, match="scale: expected it on cuda:0"):
        rms_norm(X.cuda(), eps=1e-6, **FLOAT8, scale=SCALE)
    with pytest.raises(ValueError, match="weight: expected it on cuda:0"):
        rms_norm(X.cuda(), torch.ones(8), eps=1e-6)
    with pytest.raises(ValueError, match="backend 'cpp' cannot be used: it takes tensors on cpu, got cuda"):
        rms_norm(X.cuda(), eps=1e-6, backend="cpp")


def test_a_missing_compiler_is_named_and_auto_does_without(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(prebuild, "HERE", tmp_path)  # no library there
    monkeypatch.setattr(backends, "_quick_calls", {})  # an extension that another test has loaded
    backends._resolve.cache_clear()
    with pytest.raises(
        ValueError, match=r"backend 'cpp' cannot be used: no C\+\+ compiler 'no-such-compiler'.*rmsnorm_fused build"
    ):
        rms_norm(X, eps=1e-6, backend="cpp")
    assert torch.equal(rms_norm(X, eps=1e-6), rms_norm(X, eps=1e-6, backend="pytorch"))
    backends._resolve.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_eps_none_is_torchs(dtype):
    x = torch.full((2, 8), 1e-4, dtype=dtype)  # small enough for eps to decide
    ours = rms_norm(x, eps=None, backend="pytorch")
    assert torch.allclose(ours, torch.nn.functional.rms_norm(x, (8,)), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("shape", [8, (8,), [4, 8]])
@pytest.mark.parametrize("affine", [True, False])
def test_module_stands_in_for_torchs(where, shape, affine):
    theirs = torch.nn.RMSNorm(shape, 1e-5, affine, device=where.device)
    ours = RMSNorm(shape, 1e-5, affine, device=where.device, backend=where.backend)
    if affine:
        torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    x = torch.randn(3, 4, 8, device=where.device)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    assert isinstance(ours, torch.nn.RMSNorm)
    assert f"backend={where.backend}" in repr(ours)


def test_a_module_of_torch_becomes_one_of_ours_by_its_class():
    for kind, ours in ((torch.nn.RMSNorm, RMSNorm), (torch.nn.LayerNorm, LayerNorm)):
        module = kind(8, 1e-5)
        y = module(X)
        module.__class__ = ours
        assert torch.allclose(module(X), y, rtol=1e-5, atol=1e-6)
        assert "backend=auto" in repr(module)


def test_module_names_a_wrong_shape():
    with pytest.raises(ValueError, match=r"x: expected last dimensions \(8,\), got shape \(2, 7\)"):
        RMSNorm(8)(torch.ones(2, 7))


def test_weight_of_another_dtype_keeps_the_dtype_of_x(where):
    x = torch.randn(3, 8, device=where.device, dtype=torch.bfloat16)
    assert rms_norm(x, torch.ones(8, device=where.device), eps=1e-6, backend=where.backend).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (torch.zeros(2, 3, 8), False),
        (torch.zeros(8), False),
        (torch.zeros(4, 24)[:, 8:16], False),  # one stride between rows
        (torch.zeros(2, 5, 3, 4, 8)[:, :, 1], False),  # q of a fused projection: two strides
        (torch.zeros(2, 4, 5, 8).transpose(1, 2), True),  # three strides
        (torch.zeros(8, 4).t(), True),  # columns apart
        (torch.zeros(1, 8).expand(4, 8), False),
    ],
)
def test_rows_are_read_in_place_where_two_strides_describe_them(x, copied):
    x = x.copy_(torch.randn(x.shape)) if x.stride(0) else x
    rows = as_rows(x)
    assert rows.shape[0] * rows.shape[1] * rows.shape[2] == x.numel()
    assert torch.equal(rows.reshape(x.shape), x)
    assert (rows.data_ptr() != x.data_ptr()) == copied


def test_import_loads_no_optional_back_end():
    heavy = {"triton", "torch.utils.cpp_extension", "matplotlib"}
    program = f"import sys, rmsnorm_fused; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8,), [4, 8], torch.Size((3, 4, 8))], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_the_arguments_of_torchs_function_in_its_order(dtype, shape, eps):
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64).to(dtype)
    weight = torch.randn(shape, dtype=torch.float64).to(dtype)
    # Both round once; the mean of 96 squares in torch's order or ours differs by a few roundings before that.
    bounds = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for arguments in ((shape, weight, eps), (shape, weight), (shape,)):
        torch.testing.assert_close(rms_norm(x, *arguments), F.rms_norm(x, *arguments), **bounds)
    by_name = {"normalized_shape": shape, "weight": weight, "eps": eps}
    assert torch.equal(rms_norm(x, **by_name), rms_norm(x, shape, weight, eps))


def test_one_dimension_may_be_a_number_and_several_take_every_option():
    x, residual = torch.randn(2, 2, 3, 8)
    assert torch.equal(rms_norm(x, 8), rms_norm(x, [8]))
    y, s, scales = rms_norm(
        x, normalized_shape=(3, 8), residual=residual, out_dtype=torch.float8_e4m3fn, scale="dynamic"
    )
    assert torch.equal(s, x + residual)
    assert (y.shape, scales.shape) == ((2, 3, 8), (2, 1))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (((4,),), {}, ValueError, r"x: expected last dimensions \(4,\), got shape \(2, 8\)"),
        (((),), {}, ValueError, "normalized_shape: expected one dimension or more, got none"),
        (((8,), torch.ones(4)), {}, ValueError, r"weight: expected shape \(8,\), that of normalized_shape, got \(4,\)"),
        (
            ((8,), torch.ones(8)),
            {"weight": torch.ones(8)},
            TypeError,
            "weight: expected one value, got one by position",
        ),
        ((torch.ones(8), 1e-6), {}, TypeError, r"at most 2 positional arguments \(x, weight\), got 3"),
        (((8,), None, 1e-6, 0), {}, TypeError, r"at most 4 positional arguments \(x, normalized_shape, weight, eps\)"),
    ],
)
def test_torchs_order_with_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        rms_norm(torch.ones(2, 8), *arguments, **options)


def test_numbers_of_numpy_are_numbers():
    x = torch.randn(2, 8)
    expected = rms_norm(x, eps=2.0**-20, weight_offset=1.0)
    for kind in (np.float32, np.float64, np.float16):
        assert torch.equal(rms_norm(x, eps=kind(2.0**-20), weight_offset=kind(1)), expected)
    assert rms_norm(x, eps=np.int64(0)).isfinite().all()
    for shape in (np.int64(x.shape[-1]), (np.int32(x.shape[-1]),)):
        torch.testing.assert_close(rms_norm(x, shape, None, 1e-3), rms_norm(x, eps=1e-3), rtol=0, atol=0)


@pytest.mark.parametrize("casting", ["exact", "llama"])
def test_forward_mode_takes_the_formula_where_the_back_end_is_free(casting):
    x, t = torch.randn(2, 5, 8, dtype=torch.float64)
    weight = torch.randn(8, dtype=torch.float64)

    def call(x):
        return rms_norm(x, weight, eps=1e-3, casting=casting)

    y, tangent = torch.func.jvp(call, (x,), (t,))
    torch.testing.assert_close(y, call(x))
    step = 1e-6  # central differences err by its square, and by the rounding of y over it
    torch.testing.assert_close(tangent, (call(x + step * t) - call(x - step * t)) / (2 * step), rtol=1e-7, atol=1e-8)
    with forward_ad.dual_level():
        dual = call(forward_ad.make_dual(x, t))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("backend", ["auto", "pytorch"])
@pytest.mark.parametrize(
    ("shape", "normalized_shape", "of_scales"),
    [
        ((4, 1, 1), (1, 1), (4, 1)),
        ((4, 2, 2), (2, 2), (4, 1)),
        ((4, 3, 1), (1,), (4, 3, 1)),
        ((1, 1), (1, 1), (1,)),
        ((0, 2, 3), (2, 3), (0, 1)),
        ((4, 2), None, (4, 1)),
    ],
)
def test_there_is_one_dynamic_scale_for_each_row(shape, normalized_shape, of_scales, backend, with_residual):
    x = torch.linspace(1, 2, max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()].view(shape)
    residual = torch.ones_like(x) if with_residual else None
    y, *sums, scales = rms_norm(
        x, normalized_shape=normalized_shape, residual=residual, **FLOAT8, scale="dynamic", backend=backend
    )
    assert [tensor.shape for tensor in (y, *sums)] == [x.shape] * (1 + with_residual)
    assert tuple(scales.shape) == of_scales
    # The scales of a row belong to its elements: y · scale is the norm, but for the rounding to three bits.
    exact = F.rms_norm(x if residual is None else x + residual, normalized_shape or shape[-1:])
    over = scales.view(*of_scales[:-1], *(1 for _ in normalized_shape or (1,)))
    torch.testing.assert_close(y.float() * over, exact, rtol=2**-4, atol=0)


def test_every_error_that_is_announced_is_raised_and_of_its_class(monkeypatch):
    def fail(device_type):
        raise BuildError("the reason")

    def build():
        monkeypatch.setattr(backends, "_resolve", backends._resolve.__wrapped__)
        monkeypatch.setattr(backends, "_load_native", fail)
        monkeypatch.setattr(backends, "_quick_calls", {})
        rms_norm(X, backend="cpp")

    wrong = {
        (rms_norm, "TypeError"): lambda: rms_norm(X.int()),
        (rms_norm, "ValueError"): lambda: rms_norm(X, torch.ones(7)),
        (rms_norm, "NotImplementedError"): lambda: torch.func.jvp(lambda x: rms_norm(x, backend="cpp"), (X,), (X,)),
        (rms_norm, "BuildError"): build,
        (RMSNorm.forward, "TypeError"): lambda: RMSNorm(8)([1.0]),
        (RMSNorm.forward, "ValueError"): lambda: RMSNorm(7)(X),
    }
    announced = set()
    for public in (rms_norm, RMSNorm, RMSNorm.forward):
        _, _, errors = inspect.cleandoc(public.__doc__).partition("Raises:\n")
        announced |= {(public, error) for error in re.findall(r"^    (\w+): ", errors, re.MULTILINE)}
    assert announced == set(wrong)
    for (_, error), call in wrong.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        assert caught.type.__name__ == error
