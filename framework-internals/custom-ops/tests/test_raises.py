"""Every error that a public docstring announces under "Raises" is raised, and is of that class."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import custom_ops
import native_build
from custom_ops.builds import loading, operator_library
from custom_ops.operators.calls import calls

X, BIAS, TABLE = torch.ones(16, 4), torch.ones(4), torch.ones(3, 2)
IMAGE, FILTER, Q = torch.ones(1, 2, 3, 4), torch.ones(5, 2, 1, 1), torch.ones(1, 2, 3, 4)
CLASSES = torch.zeros(16, dtype=torch.int64)
UNKNOWN: Any = "an argument of a wrong type"
LEARNED: Any = torch.ones((), requires_grad=True)


def optimizer(dtype: torch.dtype = torch.float32, **options: Any) -> custom_ops.AdamW:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    weight.grad = torch.ones(3, dtype=dtype)
    return custom_ops.AdamW([weight], **options)


def with_sparse_gradient() -> custom_ops.AdamW:
    own = optimizer()
    own.param_groups[0]["params"][0].grad = torch.ones(3).to_sparse()
    return own


def with_a_state_of_another_kind() -> object:
    weight = nn.Parameter(torch.ones(3))
    other = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones(3)
    other.step()
    return optimizer().load_state_dict(other.state_dict())


# Calls that are right, of functions that need a kernel.
RIGHT: dict[str, Callable[[], object]] = {
    "AdamW.step": lambda: optimizer().step(),
    "axpb": lambda: custom_ops.axpb(X, X, 2.0),
    "bias_gelu": lambda: custom_ops.bias_gelu(X, BIAS),
    "conv_bn_relu": lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, torch.ones(5), torch.ones(5)),
    "flash_attention": lambda: custom_ops.flash_attention(Q, Q, Q),
    "geglu": lambda: custom_ops.geglu(X),
    "linear": lambda: custom_ops.linear(X, torch.ones(2, 4)),
    "linear_cross_entropy": lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES),
    "rotary": lambda: custom_ops.rotary(Q.transpose(1, 2), TABLE, TABLE),
    "scale": lambda: custom_ops.scale(X),
    "swiglu": lambda: custom_ops.swiglu(X, X),
    "vector_add": lambda: custom_ops.vector_add(X, X),
}
OF_NO_DEVICE = [name for name in RIGHT if name != "AdamW.step"]
WRONG: dict[tuple[str, str], list[Callable[[], object]]] = {
    ("AdamW", "ValueError"): [lambda: optimizer(lr=-1.0), lambda: optimizer(differentiable=True)],
    ("AdamW", "TypeError"): [
        lambda: custom_ops.AdamW([X.double()], dtype=torch.bfloat16),
        lambda: custom_ops.AdamW([X], dtype=torch.int32),
        lambda: optimizer(amsgrad=UNKNOWN),
        lambda: optimizer(maximize=1),
        lambda: optimizer(lr="1e-3"),
    ],
    ("AdamW.add_param_group", "ValueError"): [lambda: optimizer().add_param_group({"params": [X], "eps": -1.0})],
    ("AdamW.add_param_group", "TypeError"): [
        lambda: optimizer().add_param_group({"params": [X.int()], "dtype": torch.float16})
    ],
    ("AdamW.load_state_dict", "ValueError"): [
        with_a_state_of_another_kind,
        lambda: optimizer().load_state_dict(custom_ops.AdamW([{"params": [X]}, {"params": [BIAS]}]).state_dict()),
    ],
    ("AdamW.gradient_norm", "TypeError"): [
        lambda: with_sparse_gradient().gradient_norm(),
        lambda: optimizer(torch.float8_e4m3fn).gradient_norm(),
    ],
    ("AdamW.step", "ValueError"): [lambda: optimizer().step(norm=torch.ones(2))],
    ("AdamW.step", "TypeError"): [
        lambda: with_sparse_gradient().step(),
        lambda: optimizer(torch.float8_e4m3fn).step(),
        lambda: optimizer().step(norm=1.0),  # type: ignore[call-overload]
        lambda: optimizer().step(norm=torch.ones(()), max_norm=UNKNOWN),
    ],
    ("axpb", "ValueError"): [
        lambda: custom_ops.axpb(X, BIAS, 2.0),
        lambda: custom_ops.axpb(X, X.to("meta"), 2.0),
        lambda: custom_ops.axpb(X, X, LEARNED),
    ],
    ("axpb", "TypeError"): [
        lambda: custom_ops.axpb(X, X.half(), 2.0),
        lambda: custom_ops.axpb(X.int(), X.int(), 2.0),
        lambda: custom_ops.axpb(X, X, BIAS),  # type: ignore[arg-type]
    ],
    ("bias_gelu", "ValueError"): [lambda: custom_ops.bias_gelu(X, X), lambda: custom_ops.bias_gelu(X, BIAS.to("meta"))],
    ("bias_gelu", "TypeError"): [
        lambda: custom_ops.bias_gelu(X, BIAS.half()),
        lambda: custom_ops.bias_gelu(X.int(), BIAS.int()),
    ],
    ("conv_bn_relu", "ValueError"): [
        lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, BIAS, BIAS),
        lambda: custom_ops.conv_bn_relu(IMAGE, FILTER.to("meta"), torch.ones(5), torch.ones(5)),
    ],
    ("conv_bn_relu", "TypeError"): [
        lambda: custom_ops.conv_bn_relu(IMAGE, FILTER.half(), torch.ones(5), torch.ones(5)),
        lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, torch.ones(5), torch.ones(5), stride=UNKNOWN),
    ],
    ("conv_bn_relu", "RuntimeError"): [
        lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, torch.ones(5), torch.ones(5), groups=2)
    ],
    ("flash_attention", "ValueError"): [
        lambda: custom_ops.flash_attention(Q, Q.to("meta"), Q),
        lambda: custom_ops.flash_attention(Q, Q, Q[:, :1]),
        lambda: custom_ops.flash_attention(*[torch.ones(1, 1, 1, 257)] * 3),
        lambda: custom_ops.flash_attention(Q, Q, Q, scale=float("inf")),
        lambda: custom_ops.flash_attention(Q, Q, Q, scale=LEARNED),
        lambda: custom_ops.flash_attention(Q, Q, Q, softcap=LEARNED),
        lambda: custom_ops.flash_attention(Q, Q, Q, alibi_slopes=LEARNED.expand(2)),
    ],
    ("flash_attention", "TypeError"): [
        lambda: custom_ops.flash_attention(Q, Q.half(), Q),
        lambda: custom_ops.flash_attention(Q.int(), Q.int(), Q.int()),
        lambda: custom_ops.flash_attention(Q, Q, Q, softcap=UNKNOWN),
    ],
    ("fold_batch_norm", "ValueError"): [
        lambda: custom_ops.fold_batch_norm(nn.BatchNorm2d(3, track_running_stats=False))
    ],
    ("fuse", "TypeError"): [lambda: custom_ops.fuse(UNKNOWN)],
    ("fuse", "ValueError"): [lambda: custom_ops.fuse(nn.Sequential())],
    ("geglu", "ValueError"): [
        lambda: custom_ops.geglu(X, X.to("meta")),
        lambda: custom_ops.geglu(X[:, :3]),
        lambda: custom_ops.geglu(X, approximate=UNKNOWN),
    ],
    ("geglu", "TypeError"): [lambda: custom_ops.geglu(X, X.half()), lambda: custom_ops.geglu(X.int())],
    ("swiglu", "ValueError"): [lambda: custom_ops.swiglu(X, X.to("meta")), lambda: custom_ops.swiglu(X[:, :3])],
    ("swiglu", "TypeError"): [lambda: custom_ops.swiglu(X, X.half()), lambda: custom_ops.swiglu(X.int())],
    ("linear", "ValueError"): [
        lambda: custom_ops.linear(X, torch.ones(2, 5)),
        lambda: custom_ops.linear(X, torch.ones(2, 4, device="meta")),
        lambda: custom_ops.linear(X, torch.ones(2, 4), torch.ones(1)),
        lambda: custom_ops.linear(X[0, 0], torch.ones(2, 4)),
    ],
    ("linear", "TypeError"): [
        lambda: custom_ops.linear(X, torch.ones(2, 4).double()),
        lambda: custom_ops.linear(X, torch.ones(2, 4), torch.ones(2).double()),
    ],
    ("linear_cross_entropy", "ValueError"): [
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 5), CLASSES),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES.to("meta")),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES + 2),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES - 1, mode="least_memory"),
        lambda: custom_ops.linear_cross_entropy(X.clone().requires_grad_(), torch.ones(2, 4), CLASSES + 2),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES, reduction=UNKNOWN),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES, mode=UNKNOWN),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES, label_smoothing=2.0),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES, class_weight=BIAS),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES, z_loss=LEARNED),
    ],
    ("linear_cross_entropy", "TypeError"): [
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4).half(), CLASSES),
        lambda: custom_ops.linear_cross_entropy(X.int(), torch.ones(2, 4).int(), CLASSES),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), UNKNOWN),
        lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES, label_smoothing=UNKNOWN),
    ],
    ("rotary", "ValueError"): [
        lambda: custom_ops.rotary(X, TABLE, TABLE),
        lambda: custom_ops.rotary(Q[..., :3], TABLE, TABLE),
        lambda: custom_ops.rotary(Q, TABLE.to("meta"), TABLE),
        lambda: custom_ops.rotary(Q, TABLE.clone().requires_grad_(), TABLE),
    ],
    ("rotary", "TypeError"): [
        lambda: custom_ops.rotary(Q.transpose(1, 2), TABLE.double(), TABLE),
        lambda: custom_ops.rotary(Q.int(), TABLE, TABLE),
        lambda: custom_ops.rotary(Q, UNKNOWN, TABLE),
    ],
    ("scale", "ValueError"): [lambda: custom_ops.scale(X, LEARNED)],
    ("scale", "TypeError"): [lambda: custom_ops.scale(X.int())],
    ("vector_add", "ValueError"): [
        lambda: custom_ops.vector_add(X, BIAS),
        lambda: custom_ops.vector_add(X, X.to("meta")),
    ],
    ("vector_add", "TypeError"): [
        lambda: custom_ops.vector_add(X, X.half()),
        lambda: custom_ops.vector_add(X.int(), X.int()),
    ],
}
OF_BUILDS = {("build_info", "native_build.LibraryError"), ("load", "native_build.LibraryError"),
             ("load", "native_build.BuildError")}  # fmt: skip


def announced() -> set[tuple[str, str]]:
    """The names of public functions, classes and methods, each with a class of errors that its docstring has."""
    pairs = set()
    for name in custom_ops.__all__:
        public = getattr(custom_ops, name)
        methods = {f"{name}.{key}": value for key, value in vars(public).items()} if inspect.isclass(public) else {}
        for place, value in {name: public, **methods}.items():
            _, _, errors = inspect.cleandoc(getattr(value, "__doc__", None) or "").partition("Raises:\n")
            pairs |= {(place, error) for error in re.findall(r"^    ([\w.]+): ", errors, re.MULTILINE)}
    return pairs


def test_every_error_that_is_announced_has_a_test() -> None:
    needing_a_build = {(name, "native_build.BuildError") for name in RIGHT}
    assert announced() == {
        *WRONG,
        *OF_BUILDS,
        *needing_a_build,
        *((name, "NotImplementedError") for name in OF_NO_DEVICE),
    }


@pytest.mark.parametrize(("place", "error"), WRONG, ids=[" ".join(pair) for pair in WRONG])
def test_errors_are_of_the_class_that_is_announced(place: str, error: str) -> None:
    for call in WRONG[place, error]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        assert caught.type.__name__ == error, caught.value


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("error", [native_build.BuildError, NotImplementedError])
def test_a_build_that_fails_or_has_no_kernel_is_the_error(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    RIGHT[name]()

    def fail(*_: Tensor) -> None:
        raise error("the reason")

    for kernel in [key for key, value in vars(calls).items() if callable(value)]:
        if hasattr(torch.ops.custom_ops, kernel):
            monkeypatch.setattr(calls, kernel, fail)
    with pytest.raises(error, match=r"^the reason$") as caught:
        RIGHT[name]()
    assert caught.type is error


def test_a_build_that_is_not_possible_or_not_for_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading, "_load", functools.cache(loading._load.__wrapped__))
    with monkeypatch.context() as patch:
        patch.setattr(operator_library, "CSRC", tmp_path / "absent")
        patch.setattr(loading.runtime_compiled, "missing", lambda: "no GPU")
        with pytest.raises(native_build.BuildError, match="no build of custom_ops: "):
            custom_ops.load()
    monkeypatch.setenv(loading.VARIABLE, str(tmp_path / "absent.so"))
    for call in (custom_ops.load, custom_ops.build_info):
        with pytest.raises(native_build.LibraryError, match=r"absent\.so, which does not exist"):
            call()
