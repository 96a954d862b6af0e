"""Every error that a public docstring announces under "Raises" is raised, and is of that class."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import custom_ops
import lowering
import native_build
from custom_ops.builds import loading, operator_library
from custom_ops.operators.calls import calls

X, BIAS, TABLE = torch.ones(16, 4), torch.ones(4), torch.ones(3, 2)
IMAGE, FILTER, FIVE, Q = torch.ones(1, 2, 3, 4), torch.ones(5, 2, 1, 1), torch.ones(5), torch.ones(1, 2, 3, 4)
W, CLASSES = torch.ones(2, 4), torch.zeros(16, dtype=torch.int64)
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


def with_a_moment_that_is_no_tensor() -> None:
    own = optimizer()
    own.step()
    state = own.state_dict()
    own.load_state_dict({**state, "state": {0: {**state["state"][0], "exp_avg": None}}})


def with_a_state_of_another_kind() -> object:
    weight = nn.Parameter(torch.ones(3))
    other = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones(3)
    other.step()
    return optimizer().load_state_dict(other.state_dict())


def loss(**wrong: Any) -> object:
    return custom_ops.linear_cross_entropy(**{"x": X, "weight": W, "targets": CLASSES, **wrong})


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packed(of_queries: Tensor, of_keys: Tensor | None) -> object:
    q = Q[0].transpose(0, 1)
    return custom_ops.flash_attention(q, q, q, cu_seqlens_q=of_queries, cu_seqlens_k=of_keys)


# Calls that are right, of functions that need a kernel.
RIGHT: dict[str, Callable[[], object]] = {
    "AdamW.step": lambda: optimizer().step(),
    "axpb": lambda: custom_ops.axpb(X, X, 2.0),
    "bias_gelu": lambda: custom_ops.bias_gelu(X, BIAS),
    "conv_bn_relu": lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE),
    "flash_attention": lambda: custom_ops.flash_attention(Q, Q, Q),
    "geglu": lambda: custom_ops.geglu(X),
    "linear": lambda: custom_ops.linear(X, torch.ones(2, 4)),
    "linear_cross_entropy": lambda: custom_ops.linear_cross_entropy(X, torch.ones(2, 4), CLASSES),
    "rotary": lambda: custom_ops.rotary(Q.transpose(1, 2), TABLE, TABLE),
    "scale": lambda: custom_ops.scale(X),
    "swiglu": lambda: custom_ops.swiglu(X, X),
    "vector_add": lambda: custom_ops.vector_add(X, X),
}
# Numbers of NumPy and of torch, where the eager call takes a number of Python.
NUMBERS: dict[str, Callable[[Any], Any]] = {
    "axpb": lambda number: custom_ops.axpb(X, X, number),
    "conv_bn_relu": lambda number: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE, padding=number),
    "flash_attention": lambda number: custom_ops.flash_attention(Q, Q, Q, scale=number, softcap=number)[0],
    "flash_attention, window": lambda number: custom_ops.flash_attention(Q, Q, Q, window_size=(number, 0))[0],
    "linear_cross_entropy": lambda number: loss(label_smoothing=number, z_loss=number, softcap=number),
    "linear_cross_entropy, target": lambda number: loss(ignore_index=number),
    "scale": lambda number: custom_ops.scale(X, number),
}
OF_NO_DEVICE = [name for name in RIGHT if name != "AdamW.step"]
# Calls that are wrong, by what is called and the class of the error: the argument that the message names, if it names
# one, and the call.
WRONG: dict[tuple[str, str], list[tuple[str, Callable[[], object]]]] = {
    ("AdamW", "ValueError"): [
        ("lr", lambda: optimizer(lr=-1.0)),
        ("lr", lambda: optimizer(lr=float("nan"))),
        ("lr", lambda: optimizer(lr=torch.ones(2))),
        ("betas", lambda: optimizer(betas=(1.0, 0.9))),
        ("betas", lambda: optimizer(betas=(0.9, -0.1))),
        ("betas", lambda: optimizer(betas=(0.9,))),
        ("betas", lambda: optimizer(betas=0.9)),
        ("eps", lambda: optimizer(eps=-1e-8)),
        ("weight_decay", lambda: optimizer(weight_decay=-0.1)),
        ("differentiable", lambda: optimizer(differentiable=True)),
    ],
    ("AdamW", "TypeError"): [
        ("dtype", lambda: custom_ops.AdamW([X.double()], dtype=torch.bfloat16)),
        ("dtype", lambda: custom_ops.AdamW([X], dtype=torch.int32)),
        ("amsgrad", lambda: optimizer(amsgrad=UNKNOWN)),
        ("maximize", lambda: optimizer(maximize=1)),
        ("lr", lambda: optimizer(lr="1e-3")),
        ("eps", lambda: optimizer(eps=None)),
    ],
    ("AdamW.add_param_group", "ValueError"): [
        ("eps", lambda: optimizer().add_param_group({"params": [X], "eps": -1.0}))
    ],
    ("AdamW.add_param_group", "TypeError"): [
        ("dtype", lambda: optimizer().add_param_group({"params": [X.int()], "dtype": torch.float16}))
    ],
    ("AdamW.load_state_dict", "ValueError"): [
        ("", with_a_state_of_another_kind),
        ("", lambda: optimizer().load_state_dict(custom_ops.AdamW([{"params": [X]}, {"params": [BIAS]}]).state_dict())),
    ],
    ("AdamW.load_state_dict", "TypeError"): [("", with_a_moment_that_is_no_tensor)],
    ("AdamW.gradient_norm", "TypeError"): [
        ("", lambda: with_sparse_gradient().gradient_norm()),
        ("", lambda: optimizer(torch.float8_e4m3fn).gradient_norm()),
    ],
    ("AdamW.step", "ValueError"): [("norm", lambda: optimizer().step(norm=torch.ones(2)))],
    ("AdamW.step", "TypeError"): [
        ("", lambda: with_sparse_gradient().step()),
        ("parameters", lambda: optimizer(torch.float8_e4m3fn).step()),
        ("norm", lambda: optimizer().step(norm=1.0)),  # type: ignore[call-overload]
        ("max_norm", lambda: optimizer().step(norm=torch.ones(()), max_norm=UNKNOWN)),
    ],
    ("axpb", "ValueError"): [
        ("b", lambda: custom_ops.axpb(X, BIAS, 2.0)),
        ("b", lambda: custom_ops.axpb(X, X.to("meta"), 2.0)),
        ("alpha", lambda: custom_ops.axpb(X, X, LEARNED)),
    ],
    ("axpb", "TypeError"): [
        ("b", lambda: custom_ops.axpb(X, X.half(), 2.0)),
        ("x", lambda: custom_ops.axpb(X.int(), X.int(), 2.0)),
        ("alpha", lambda: custom_ops.axpb(X, X, BIAS)),  # type: ignore[arg-type]
        ("alpha", lambda: custom_ops.axpb(X, X, UNKNOWN)),
    ],
    ("bias_gelu", "ValueError"): [
        ("bias", lambda: custom_ops.bias_gelu(X, X)),
        ("bias", lambda: custom_ops.bias_gelu(X, BIAS[:3])),
        ("bias", lambda: custom_ops.bias_gelu(X, BIAS.to("meta"))),
        ("x", lambda: custom_ops.bias_gelu(X[0, 0], BIAS)),
    ],
    ("bias_gelu", "TypeError"): [
        ("bias", lambda: custom_ops.bias_gelu(X, BIAS.half())),
        ("x", lambda: custom_ops.bias_gelu(X.int(), BIAS.int())),
    ],
    ("conv_bn_relu", "ValueError"): [
        ("x", lambda: custom_ops.conv_bn_relu(IMAGE[0], FILTER, FIVE, FIVE)),
        ("scale", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, BIAS, FIVE)),
        ("shift", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, BIAS)),
        ("weight", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER.to("meta"), FIVE, FIVE)),
    ],
    ("conv_bn_relu", "TypeError"): [
        ("weight", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER.half(), FIVE, FIVE)),
        ("scale", lambda: custom_ops.conv_bn_relu(IMAGE.half(), FILTER.half(), FIVE.half(), FIVE)),
        ("stride", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE, stride=UNKNOWN)),
        ("stride", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE, (1, 1, 1))),
        ("padding", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE, 1, "same")),
    ],
    ("conv_bn_relu", "RuntimeError"): [
        ("", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE, groups=2)),
        ("", lambda: custom_ops.conv_bn_relu(IMAGE, FILTER, FIVE, FIVE, stride=0)),
    ],
    ("flash_attention", "ValueError"): [
        ("q", lambda: custom_ops.flash_attention(*[torch.ones(1, 1, 1, 257)] * 3)),
        ("q", lambda: custom_ops.flash_attention(Q, Q, Q, cu_seqlens_q=starts(3), cu_seqlens_k=starts(3))),
        ("k", lambda: custom_ops.flash_attention(Q, Q.to("meta"), Q)),
        ("k", lambda: custom_ops.flash_attention(torch.ones(1, 3, 3, 4), Q, Q)),
        ("k", lambda: custom_ops.flash_attention(Q, Q[..., :2], Q[..., :2])),
        ("v", lambda: custom_ops.flash_attention(Q, Q, Q[:, :1])),
        ("v", lambda: custom_ops.flash_attention(Q, Q, Q[..., :2])),
        ("scale", lambda: custom_ops.flash_attention(Q, Q, Q, scale=float("inf"))),
        ("q", lambda: custom_ops.flash_attention(Q[..., :0], Q[..., :0], Q[..., :0], scale=1.0)),
        ("scale", lambda: custom_ops.flash_attention(Q, Q, Q, scale=LEARNED)),
        ("softcap", lambda: custom_ops.flash_attention(Q, Q, Q, softcap=LEARNED)),
        ("softcap", lambda: custom_ops.flash_attention(Q, Q, Q, softcap=-1.0)),
        *(
            ("window_size", partial(custom_ops.flash_attention, Q, Q, Q, window_size=window))
            for window in ((-2, 0), (1.5, 0), (1,), ("a", 0), None)
        ),
        ("sinks", lambda: custom_ops.flash_attention(Q, Q, Q, sinks=FIVE)),
        ("attn_mask", lambda: custom_ops.flash_attention(Q, Q, Q, attn_mask=torch.ones(5, 3))),
        ("attn_mask", lambda: custom_ops.flash_attention(Q, Q, Q, attn_mask=torch.ones(1, 1, 1, 3, 3))),
        ("alibi_slopes", lambda: custom_ops.flash_attention(Q, Q, Q, alibi_slopes=FIVE)),
        ("alibi_slopes", lambda: custom_ops.flash_attention(Q, Q, Q, alibi_slopes=LEARNED.expand(2))),
        ("cu_seqlens_k", lambda: packed(starts(3), None)),
        ("cu_seqlens_k", lambda: packed(starts(3), starts(1, 2))),
        ("cu_seqlens_q", lambda: packed(starts(2), starts(3))),
    ],
    ("flash_attention", "TypeError"): [
        ("q", lambda: custom_ops.flash_attention(Q.int(), Q.int(), Q.int())),
        ("k", lambda: custom_ops.flash_attention(Q, Q.half(), Q)),
        ("scale", lambda: custom_ops.flash_attention(Q, Q, Q, scale=UNKNOWN)),
        ("softcap", lambda: custom_ops.flash_attention(Q, Q, Q, softcap=UNKNOWN)),
        ("softcap", lambda: custom_ops.flash_attention(Q, Q, Q, softcap=FIVE)),  # type: ignore[arg-type]
        ("sinks", lambda: custom_ops.flash_attention(Q, Q, Q, sinks=[1.0])),  # type: ignore[arg-type]
        ("attn_mask", lambda: custom_ops.flash_attention(Q, Q, Q, attn_mask=torch.ones(3, 3).double())),
        ("cu_seqlens_q", lambda: packed(starts(3).long(), starts(3))),
    ],
    ("fold_batch_norm", "ValueError"): [
        ("norm", lambda: custom_ops.fold_batch_norm(nn.BatchNorm2d(3, track_running_stats=False)))
    ],
    ("fuse", "TypeError"): [("model", lambda: custom_ops.fuse(UNKNOWN))],
    ("fuse", "ValueError"): [("model", lambda: custom_ops.fuse(nn.Sequential()))],
    ("geglu", "ValueError"): [
        ("up", lambda: custom_ops.geglu(X, X.to("meta"))),
        ("up", lambda: custom_ops.geglu(X, X[:1])),
        ("gate", lambda: custom_ops.geglu(X[:, :3])),
        ("approximate", lambda: custom_ops.geglu(X, approximate=UNKNOWN)),
    ],
    ("geglu", "TypeError"): [
        ("up", lambda: custom_ops.geglu(X, X.half())),
        ("gate", lambda: custom_ops.geglu(X.int())),
    ],
    ("swiglu", "ValueError"): [
        ("up", lambda: custom_ops.swiglu(X, X.to("meta"))),
        ("gate", lambda: custom_ops.swiglu(X[:, :3])),
        ("gate", lambda: custom_ops.swiglu(X[0, 0])),
    ],
    ("swiglu", "TypeError"): [
        ("up", lambda: custom_ops.swiglu(X, X.half())),
        ("up", lambda: custom_ops.swiglu(X, UNKNOWN)),
        ("gate", lambda: custom_ops.swiglu(X.int())),
    ],
    ("linear", "ValueError"): [
        ("weight", lambda: custom_ops.linear(X, torch.ones(2, 5))),
        ("weight", lambda: custom_ops.linear(X, W.to("meta"))),
        ("bias", lambda: custom_ops.linear(X, W, torch.ones(1))),
        ("x", lambda: custom_ops.linear(X[0, 0], W)),
        ("", lambda: custom_ops.linear(X, W, lowering=UNKNOWN)),
    ],
    ("linear", "TypeError"): [
        ("weight", lambda: custom_ops.linear(X, W.double())),
        ("bias", lambda: custom_ops.linear(X, W, torch.ones(2).double())),
        ("x", lambda: custom_ops.linear(UNKNOWN, W)),
    ],
    ("linear_cross_entropy", "ValueError"): [
        ("weight", lambda: loss(weight=torch.ones(2, 5))),
        ("weight", lambda: loss(weight=W[:0], bias=None, targets=torch.full_like(CLASSES, -100))),
        ("bias", lambda: loss(bias=FIVE)),
        ("targets", lambda: loss(targets=CLASSES.to("meta"))),
        ("targets", lambda: loss(targets=CLASSES[:3])),
        ("targets", lambda: loss(targets=CLASSES + 2)),
        ("targets", lambda: loss(targets=CLASSES - 1, mode="least_memory")),
        ("targets", lambda: loss(x=X.clone().requires_grad_(), targets=CLASSES + 2)),
        ("reduction", lambda: loss(reduction=UNKNOWN)),
        ("mode", lambda: loss(mode=UNKNOWN)),
        ("label_smoothing", lambda: loss(label_smoothing=2.0)),
        ("z_loss", lambda: loss(z_loss=-1.0)),
        ("z_loss", lambda: loss(z_loss=LEARNED)),
        ("softcap", lambda: loss(softcap=0.0)),
        ("class_weight", lambda: loss(class_weight=BIAS)),
        ("class_weight", lambda: loss(class_weight=torch.ones(2, device="meta"))),
        ("class_weight", lambda: loss(class_weight=torch.ones(2, requires_grad=True))),
    ],
    ("linear_cross_entropy", "TypeError"): [
        ("weight", lambda: loss(weight=W.half())),
        ("x", lambda: loss(x=X.int(), weight=W.int())),
        ("targets", lambda: loss(targets=UNKNOWN)),
        ("targets", lambda: loss(targets=X[:, 0])),
        ("ignore_index", lambda: loss(ignore_index=UNKNOWN)),
        ("label_smoothing", lambda: loss(label_smoothing=UNKNOWN)),
        ("class_weight", lambda: loss(class_weight=torch.ones(2, dtype=torch.int64))),
    ],
    ("rotary", "ValueError"): [
        ("x", lambda: custom_ops.rotary(X, TABLE, TABLE)),
        ("x", lambda: custom_ops.rotary(Q[..., :3], TABLE, TABLE)),
        ("cos", lambda: custom_ops.rotary(Q, TABLE.to("meta"), TABLE)),
        ("cos", lambda: custom_ops.rotary(Q, TABLE.clone().requires_grad_(), TABLE)),
    ],
    ("rotary", "TypeError"): [
        ("cos", lambda: custom_ops.rotary(Q.transpose(1, 2), TABLE.double(), TABLE)),
        ("x", lambda: custom_ops.rotary(Q.int(), TABLE, TABLE)),
        ("cos", lambda: custom_ops.rotary(Q, UNKNOWN, TABLE)),
    ],
    ("scale", "ValueError"): [("alpha", lambda: custom_ops.scale(X, LEARNED))],
    ("scale", "TypeError"): [("x", lambda: custom_ops.scale(X.int()))],
    ("vector_add", "ValueError"): [
        ("b", lambda: custom_ops.vector_add(X, BIAS)),
        ("b", lambda: custom_ops.vector_add(X, X.to("meta"))),
    ],
    ("vector_add", "TypeError"): [
        ("b", lambda: custom_ops.vector_add(X, X.half())),
        ("b", lambda: custom_ops.vector_add(X, X.to_sparse())),
        ("a", lambda: custom_ops.vector_add(X.int(), X.int())),
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
def test_errors_are_of_the_class_that_is_announced_and_name_the_argument(place: str, error: str) -> None:
    for argument, call in WRONG[place, error]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        assert caught.type.__name__ == error, caught.value
        operator = place.partition(".")[0]
        form = rf"(?i){operator}[\w.]*: argument '{argument}\b.*: (expected .+|.+ have no gradient)"
        assert not argument or re.match(form, str(caught.value)), caught.value


F64, F16, BF16 = torch.float64, torch.float16, torch.bfloat16
HEADS = torch.ones(2, 4, 5, 8, dtype=F16)
LISTS: dict[str, Any] = {name: [torch.ones(4)] for name in ("parameters", "gradients", "means", "squares")}
# Right operands of operators, by name.
OPERANDS: dict[str, dict[str, Any]] = {
    "mm": {"a": torch.ones(2, 3), "b": torch.ones(3, 4), "bias": torch.ones(4)},
    "rotary": {"x": torch.ones(2, 3, 2, 8), "cos": torch.ones(3, 4), "sin": torch.ones(3, 4)},
    "cross_entropy": {"logits": torch.ones(4, 3), "targets": CLASSES[:4], "classes": 3, "ignore_index": 0},
    "swiglu_backward": {"grad": X, "gate": X, "up": X},
    "flash_attention_backward": {
        "grad_out": HEADS, "grad_lse": torch.ones(2, 4, 5), "q": HEADS, "k": HEADS, "v": HEADS, "out": HEADS,
        "lse": torch.ones(2, 4, 5), "causal": False, "scale": None,
    },
    "adamw_": {
        **LISTS, "maxima": [], "steps": [torch.ones(())], "copies": [], "norm": None, "device_lr": None, "lr": 0.1,
        "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "max_norm": 1.0, "maximize": False,
    },
}  # fmt: skip


def each(dtype: torch.dtype, *names: str) -> dict[str, Any]:
    return {name: [torch.ones(4, dtype=dtype)] for name in names}


# An operator, the argument that is refused, and what differs from the right operands.
REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("mm", "a", {"a": torch.ones(2, 3, dtype=torch.int64)}),
    ("mm", "b", {"b": torch.ones(3, 4, dtype=F64)}),
    ("mm", "a", {"a": torch.ones(2, 3, 4)}),
    ("mm", "b", {"b": torch.ones(4, 5)}),
    ("mm", "bias", {"bias": torch.ones(4, dtype=F64)}),
    ("mm", "bias", {"bias": torch.ones(3)}),
    ("rotary", "x", {"x": torch.ones(3, 2, 8)}),
    ("rotary", "x", {"x": torch.ones(2, 3, 2, 7)}),
    ("rotary", "x", {"x": torch.ones(2, 3, 2, 8, dtype=torch.int64)}),
    ("rotary", "sin", {"sin": torch.ones(3, 4, dtype=F64)}),
    ("rotary", "cos", {"cos": torch.ones(4, 4)}),
    ("rotary", "sin", {"sin": torch.ones(3, 2)}),
    ("cross_entropy", "logits", {"logits": torch.ones(3)}),
    ("cross_entropy", "targets", {"targets": CLASSES[:2]}),
    ("cross_entropy", "targets", {"targets": CLASSES[:4].int()}),
    ("cross_entropy", "classes", {"classes": 4}),
    ("swiglu_backward", "grad", {"up": None}),
    ("swiglu_backward", "grad", {"grad": X[:1]}),
    ("swiglu_backward", "grad", {"grad": X.half()}),
    ("flash_attention_backward", "lse", {"lse": torch.ones(2, 4, 5).half()}),
    ("flash_attention_backward", "lse", {"lse": torch.ones(1, 1, 1)}),
    ("flash_attention_backward", "lse", {"lse": torch.ones(2, 4, 5, 1)}),
    ("flash_attention_backward", "grad_lse", {"grad_lse": torch.ones(2, 4, 5).double()}),
    ("flash_attention_backward", "grad_lse", {"grad_lse": torch.ones(2, 4)}),
    ("flash_attention_backward", "out", {"out": HEADS[..., :4]}),
    ("adamw_", "means", {"means": []}),
    ("adamw_", "gradients", {"gradients": [torch.ones(3)]}),
    ("adamw_", "squares", each(F64, "squares")),
    ("adamw_", "parameters", each(BF16, "parameters")),
    ("adamw_", "gradients", {**each(F64, "parameters", "means", "squares"), **each(F16, "gradients")}),
    ("adamw_", "gradients", each(F64, "gradients")),
    ("adamw_", "gradients", {**each(BF16, "copies"), **each(F16, "gradients")}),
    ("adamw_", "copies", each(torch.float32, "copies")),
    ("adamw_", "parameters", {**each(F64, *LISTS), **each(F16, "copies")}),
    ("adamw_", "maxima", {"maxima": [torch.ones(4)] * 2}),
    ("adamw_", "copies", {"copies": [torch.ones(4)] * 2}),
    ("adamw_", "means", {"means": [torch.ones(4, 2)[:, 0]]}),
    ("adamw_", "steps", {"steps": [torch.ones(2)]}),
    ("adamw_", "norm", {"norm": torch.ones((), dtype=F64)}),
    ("adamw_", "device_lr", {"device_lr": torch.ones(2)}),
]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_numpy_are_numbers(name: str) -> None:
    whole = name.endswith(("conv_bn_relu", "window", "target"))
    number = np.int64(1) if whole else np.float32(0.5)
    assert torch.equal(NUMBERS[name](number), NUMBERS[name](number.item()))


@pytest.mark.parametrize(
    "name",
    [
        "axpb",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("flash_attention", "linear_cross_entropy")),
        "scale",
    ],
)
def test_a_compiled_kernel_takes_a_tensor_as_a_number(name: str) -> None:
    torch.compiler.reset()
    number = torch.tensor(0.5)
    with lowering.choose("kernel"):
        compiled = torch.compile(NUMBERS[name], backend="eager")(number)
    torch.testing.assert_close(compiled, NUMBERS[name](number))


@pytest.mark.parametrize(("operator", "argument", "wrong"), REFUSED)
def test_a_kernel_and_its_fake_refuse_in_the_same_words(operator: str, argument: str, wrong: dict[str, Any]) -> None:
    (fake,) = (rules.fake for rules in loading.operators() if rules.name == operator)
    arguments = {**OPERANDS[operator], **wrong}.values()
    with pytest.raises(RuntimeError) as by_kernel:
        getattr(calls, operator)(*arguments)
    with pytest.raises((ValueError, TypeError)) as by_fake:
        fake(*arguments)
    assert str(by_kernel.value) == str(by_fake.value)
    assert str(by_fake.value).startswith(f"{operator}: argument '{argument}': expected ")


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
