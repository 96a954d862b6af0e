"""Checks of the operators' arguments: the same conditions and messages as the C++ checks in ``csrc/stable``.

The fake kernels call these checks. The public functions call them after the C++ code has raised: every error crosses
the stable ABI as a RuntimeError, and the check turns it into a TypeError where a dtype or the kind of an argument is
wrong, and into a ValueError where a device, a shape or a number is.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from native_build.derivatives import is_fake

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ``dtype`` is computed: float32 for the 16-bit dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def explain(error: Exception, check: Callable[..., None], *arguments: Any) -> NoReturn:
    """Raise the error that ``check`` finds in the arguments, or else ``error`` itself."""
    try:
        for name, value in zip(check.__code__.co_varnames, arguments, strict=False):
            check_kinds(check.__name__.removeprefix("check_"), check.__annotations__.get(name, ""), **{name: value})
        check(*arguments)
    except (TypeError, ValueError) as known:
        raise known from None
    raise error


def check_kinds(op: str, annotation: str, **arguments: Any) -> None:
    """Check that arguments are what their annotation says."""
    for name, value in arguments.items():
        if (expected := _expected_kind(annotation, value)) is not None:
            raise TypeError(f"{op}: argument '{name}': expected {expected}, got {_kind(value)}")


def check_number(op: str, name: str, value: Any) -> None:
    """Check that a number is no tensor whose gradient would be lost, because a kernel takes numbers."""
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: argument '{name}': expected a number, got a tensor that needs a gradient, for which there is no "
            "kernel (use .detach())"
        )


def plain_number(op: str, name: str, value: Any) -> Any:
    """Return a number for the kernel of a compiled call, which takes no tensor in its place."""
    check_number(op, name, value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "Tensor": ("a torch.Tensor", (Tensor,)),
    "Tensor | None": ("a torch.Tensor or None", (Tensor, type(None))),
    "bool": ("True or False", (bool, torch.SymBool)),
    "float": ("a real number", (numbers.Real, torch.SymInt, torch.SymFloat, Tensor)),
    "int": ("an int", (numbers.Integral, torch.SymInt)),
    "float | None": ("a real number or None", (numbers.Real, torch.SymInt, torch.SymFloat, Tensor, type(None))),
}


def _expected_kind(annotation: str, value: Any) -> str | None:
    """What the annotation requires, in words; None if ``value`` satisfies it."""
    expected, kinds = _KINDS.get(annotation, ("", (object,)))
    if not isinstance(value, kinds):
        return expected
    if not isinstance(value, Tensor):
        return None
    if is_sharded(value):
        return "a plain tensor (gather it with .full_tensor(), or take a process's part with .to_local())"
    if annotation.startswith("float"):
        return expected if value.numel() != 1 else None
    if annotation.startswith("Tensor") and (value.layout != torch.strided or value.is_nested):
        return "a dense tensor (convert it with .to_dense() or .to_padded_tensor())"
    return None


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process may have a part."""
    return hasattr(tensor, "to_local")  # the class takes half a second to import


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor) or is_sharded(value):
        return type(value).__name__
    if value.is_nested:
        return "a nested one"
    return str(value.layout) if value.layout != torch.strided else f"a tensor of shape {_sizes(value.shape)}"


def check_vector_add(a: Tensor, b: Tensor) -> None:
    """Check the arguments of vector_add."""
    check_operands("vector_add", "a", a, b)


def check_axpb(x: Tensor, b: Tensor, alpha: float) -> None:
    """Check the arguments of axpb, like :func:`check_vector_add`."""
    check_operands("axpb", "x", x, b)


def check_scale(x: Tensor, alpha: float = 1.23) -> None:
    """Check the arguments of scale."""
    _check_kernel_dtype("scale", "x", x)


def check_bias_gelu(x: Tensor, bias: Tensor) -> None:
    """Check the arguments of bias_gelu."""
    _check_bias("bias_gelu", x, bias)
    _check_kernel_dtype("bias_gelu", "x", x)


def check_bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> None:
    """Check the arguments of bias_gelu_backward, like :func:`check_bias_gelu`."""
    op = "bias_gelu_backward"
    _check_bias(op, x, bias)
    _check_alike(op, "x", x, "grad", grad)
    _check_kernel_dtype(op, "x", x)


def check_glu(op: str, gate: Tensor, up: Tensor | None) -> None:
    """Check the operands of swiglu and geglu."""
    _check_kernel_dtype(op, "gate", gate)
    if gate.dim() < 1:
        raise ValueError(f"{op}: argument 'gate': expected one dimension or more, got []")
    if up is not None:
        _check_alike(op, "gate", gate, "up", up)
    elif gate.shape[-1] % 2:
        raise ValueError(
            f"{op}: argument 'gate': expected an even last size, two halves where 'up' is None, "
            f"got {_sizes(gate.shape)}"
        )


def check_swiglu(gate: Tensor, up: Tensor | None) -> None:
    """Check the operands of swiglu, like :func:`check_glu`."""
    check_glu("swiglu", gate, up)


def check_geglu(gate: Tensor, up: Tensor | None, tanh: bool) -> None:
    """Check the operands of geglu, like :func:`check_glu`."""
    check_glu("geglu", gate, up)


def check_glu_backward(op: str, grad: Tensor, gate: Tensor, up: Tensor | None) -> None:
    """Check the arguments of swiglu_backward and geglu_backward, like :func:`check_glu`."""
    check_glu(op, gate, up)
    _check_kind(op, "gate", gate, "grad", grad)
    expected = (*gate.shape[:-1], gate.shape[-1] // (1 if up is not None else 2))
    if grad.shape != expected:
        raise ValueError(
            f"{op}: argument 'grad': expected shape {_sizes(expected)}, that of the result, got {_sizes(grad.shape)}"
        )


def check_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Check the arguments of rotary."""
    op = "rotary"
    _check_kernel_dtype(op, "x", x)
    if x.dim() != 4 or x.shape[3] % 2:
        raise ValueError(
            f"{op}: argument 'x': expected shape (batch, tokens, heads, size) with an even size, got {_sizes(x.shape)}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        _check_wide_kind(op, "x", x, name, table)
    most = [x.shape[0], x.shape[1], x.shape[3] // 2]
    if cos.dim() not in (2, 3) or _sizes(cos.shape[:-1]) != most[3 - cos.dim() : 2] or cos.shape[-1] > most[2]:
        raise ValueError(
            f"{op}: argument 'cos': expected shape {most[1:]} or {most}, or fewer columns, an angle for each token and "
            f"pair of 'x', got {_sizes(cos.shape)}"
        )
    _check_shape(op, "cos", cos, "sin", sin)


def check_mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """Check the arguments of mm."""
    op = "mm"
    _check_kernel_dtype(op, "a", a)
    _check_kind(op, "a", a, "b", b)
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dim() != 2:
            raise ValueError(f"{op}: argument '{name}': expected a matrix, got shape {_sizes(matrix.shape)}")
    if b.shape[0] != a.shape[1]:
        raise ValueError(
            f"{op}: argument 'b': expected {a.shape[1]} rows, the columns of 'a', got shape {_sizes(b.shape)}"
        )
    if bias is None:
        return
    _check_kind(op, "a", a, "bias", bias)
    if bias.shape != b.shape[1:]:
        raise ValueError(
            f"{op}: argument 'bias': expected shape {_sizes(b.shape[1:])}, an element for each column of 'b', got "
            f"{_sizes(bias.shape)}"
        )


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check the arguments of linear."""
    op = "linear"
    if x.dim() < 1:
        raise ValueError(f"{op}: argument 'x': expected one dimension or more, got []")
    _check_kind(op, "x", x, "weight", weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: argument 'weight': expected shape (N, {x.shape[-1]}), the last size of 'x', got "
            f"{_sizes(weight.shape)}"
        )
    if bias is None:
        return
    _check_kind(op, "x", x, "bias", bias)
    if bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: argument 'bias': expected shape {_sizes(weight.shape[:1])}, an element for each row of 'weight', "
            f"got {_sizes(bias.shape)}"
        )


def check_conv_bn_relu(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Check the arguments of conv_bn_relu, except what torch's convolution checks."""
    op = "conv_bn_relu"
    for name, tensor, meaning in (
        ("x", x, "batch, channels, height, width"),
        ("weight", weight, "channels, channels of a group, height, width"),
    ):
        if tensor.dim() != 4:
            raise ValueError(f"{op}: argument '{name}': expected four dimensions ({meaning}), got {list(tensor.shape)}")
    _check_kind(op, "x", x, "weight", weight)
    _check_kernel_dtype(op, "x", x)
    for name, tensor in (("scale", scale), ("shift", shift)):
        _check_wide_kind(op, "x", x, name, tensor)
        if tensor.dim() != 1 or tensor.shape[0] != weight.shape[0]:
            raise ValueError(
                f"{op}: argument '{name}': expected shape {[weight.shape[0]]}, an element for each channel of "
                f"'weight', got {list(tensor.shape)}"
            )


def check_cross_entropy(logits: Tensor, targets: Tensor, classes: int, ignore_index: int) -> None:
    """Check the arguments of cross_entropy and of cross_entropy_gradient_."""
    op = "cross_entropy"
    if logits.dim() != 2:
        raise ValueError(
            f"{op}: argument 'logits': expected two dimensions (rows, classes), got {_sizes(logits.shape)}"
        )
    if targets.dim() != 1 or targets.shape[0] != logits.shape[0]:
        raise ValueError(
            f"{op}: argument 'targets': expected shape {[logits.shape[0]]}, an element for each row of 'logits', "
            f"got {_sizes(targets.shape)}"
        )
    _check_device(op, "logits", logits, "targets", targets)
    if targets.dtype != torch.int64:
        raise TypeError(f"{op}: argument 'targets': expected dtype torch.int64, got {targets.dtype}")
    _check_kernel_dtype(op, "logits", logits)
    if not 1 <= classes <= logits.shape[1]:
        raise ValueError(
            f"{op}: argument 'classes': expected 1 to {logits.shape[1]}, the columns of 'logits', got {classes}"
        )


def check_classes(targets: Tensor, classes: int, ignore_index: int) -> None:
    """Check that each target on a CPU is a class or ``ignore_index``."""
    if is_fake(targets):
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= classes))]
    if targets.is_cpu and len(wrong):
        raise ValueError(
            f"linear_cross_entropy: argument 'targets': expected classes from 0 to {classes - 1} or ignore_index "
            f"({ignore_index}), got {int(wrong[0])}"
        )


def check_linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, mode: str
) -> None:
    """Check the arguments of linear_cross_entropy."""
    op = "linear_cross_entropy"
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{op}: argument 'reduction': expected 'mean', 'sum' or 'none', got {reduction!r}")
    if mode not in ("fast", "least_memory"):
        raise ValueError(f"{op}: argument 'mode': expected 'fast' or 'least_memory', got {mode!r}")
    if x.dim() < 1:
        raise ValueError(f"{op}: argument 'x': expected one dimension or more, got []")
    for name, tensor, shape in (("weight", weight, ["V", x.shape[-1]]), ("bias", bias, [weight.shape[:1].numel()])):
        if tensor is None:
            continue
        _check_kind(op, "x", x, name, tensor)
        if tensor.dim() != len(shape) or tensor.shape[-1] != shape[-1]:
            raise ValueError(f"{op}: argument '{name}': expected shape {shape}, got {_sizes(tensor.shape)}")
    if weight.shape[0] == 0:
        raise ValueError(f"{op}: argument 'weight': expected a class or more, got {_sizes(weight.shape)}")
    _check_device(op, "x", x, "targets", targets)
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: argument 'targets': expected dtype torch.int64 or torch.int32, got {targets.dtype}")
    if targets.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: argument 'targets': expected shape {_sizes(x.shape[:-1])}, a class for each row of 'x', "
            f"got {_sizes(targets.shape)}"
        )
    _check_kernel_dtype(op, "x", x)


def check_loss_parts(
    weight: Tensor, class_weight: Tensor | None, label_smoothing: float, z_loss: float, softcap: float | None
) -> None:
    """Check what linear_cross_entropy adds to the loss."""
    op = "linear_cross_entropy"
    check_kinds(op, "float", label_smoothing=label_smoothing, z_loss=z_loss)
    check_kinds(op, "float | None", softcap=softcap)
    for name, number, within, expected in (
        ("label_smoothing", label_smoothing, 0 <= label_smoothing <= 1, "a number from 0 to 1"),
        ("z_loss", z_loss, 0 <= z_loss < math.inf, "a finite number of 0 or more"),
        ("softcap", softcap, softcap is None or 0 < softcap < math.inf, "a finite number above 0, or None"),
    ):
        if not within:
            raise ValueError(f"{op}: argument '{name}': expected {expected}, got {number}")
    if class_weight is None:
        return
    _check_device(op, "weight", weight, "class_weight", class_weight)
    if not class_weight.is_floating_point():
        raise TypeError(f"{op}: argument 'class_weight': expected a floating-point dtype, got {class_weight.dtype}")
    if class_weight.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: argument 'class_weight': expected shape {_sizes(weight.shape[:1])}, a number for each class, got "
            f"{_sizes(class_weight.shape)}"
        )
    if class_weight.requires_grad:
        raise ValueError(f"{op}: argument 'class_weight': the weights of classes have no gradient; use .detach()")


def check_gradient_norm(gradients: Sequence[Tensor]) -> None:
    """Check the argument of gradient_norm."""
    op, name = "gradient_norm", "gradients"
    if not gradients:
        raise ValueError(f"{op}: argument '{name}': expected one tensor or more, got none")
    expected = wide(gradients[0].dtype)
    for tensor in gradients:
        _check_device(op, name, gradients[0], name, tensor)
        _check_kernel_dtype(op, name, tensor)
        if wide(tensor.dtype) != expected:
            raise TypeError(
                f"{op}: argument '{name}': expected dtypes that are computed in {expected}, like the first, "
                f"got {tensor.dtype}"
            )


def check_adamw_group(group: Mapping[str, Any]) -> None:
    """Check the numbers and flags of a parameter group of AdamW."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"AdamW: argument 'lr': expected a number or one element, got shape {_sizes(lr.shape)}")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"AdamW: argument 'betas': expected two numbers, got {betas!r}")
    for name, value, below in (
        ("lr", lr, math.inf),
        ("betas[0]", betas[0], 1),
        ("betas[1]", betas[1], 1),
        ("eps", group["eps"], math.inf),
        ("weight_decay", group["weight_decay"], math.inf),
    ):
        if not isinstance(value, (numbers.Real, Tensor)):
            raise TypeError(f"AdamW: argument '{name}': expected a number, got {value!r}")
        if not 0 <= float(value) < below:
            expected = "a number from 0 to below 1" if below == 1 else "a finite number of 0 or more"
            raise ValueError(f"AdamW: argument '{name}': expected {expected}, got {value}")
    for name in ("amsgrad", "maximize"):
        if not isinstance(group[name], bool):
            raise TypeError(f"AdamW: argument '{name}': expected True or False, got {group[name]!r}")
    if group["differentiable"]:
        raise ValueError(
            "AdamW: argument 'differentiable': expected False, because the kernel has no derivative, got "
            f"{group['differentiable']!r} (use torch.optim.AdamW)"
        )


def check_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    maxima: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    norm: Tensor | None,
    device_lr: Tensor | None,
    *settings: float,
) -> None:
    """Check the arguments of adamw_."""
    op, first = "adamw_", "parameters"
    lists = {first: parameters, "gradients": gradients, "means": means, "squares": squares}
    lists |= {"maxima": maxima} if maxima else {}
    lists |= {"steps": steps, **({"copies": copies} if copies else {})}
    for name, tensors in lists.items():
        if len(tensors) != len(parameters):
            raise ValueError(
                f"{op}: argument '{name}': expected {len(parameters)} tensors, one per parameter, got {len(tensors)}"
            )
    for index, parameter in enumerate(parameters):
        for name in [name for name in lists if name != "steps"]:
            tensor = lists[name][index]
            if name == "gradients":
                _check_gradient_in_list(op, parameters[0], gradients[0], copies[0] if copies else None, tensor)
            elif name == "copies":
                _check_copy_in_list(op, parameters[0], copies[0], tensor)
            else:
                _check_wide_in_list(op, first, parameters[0], name, tensor)
            _check_shape(op, first, parameter, name, tensor)
            if not tensor.is_contiguous():
                raise ValueError(f"{op}: argument '{name}': expected contiguous tensors")
        _check_scalar(op, first, parameters[0], "steps", steps[index], torch.float32)
    if parameters and norm is not None:
        _check_scalar(op, first, parameters[0], "norm", norm, parameters[0].dtype)
    if parameters and device_lr is not None:
        _check_scalar(op, first, parameters[0], "device_lr", device_lr, torch.float32)


def _check_wide_in_list(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    _check_kind(op, first, x, name, other)
    if other.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{op}: argument '{name}': expected dtype torch.float32 or torch.float64, got {other.dtype}")


def _check_gradient_in_list(op: str, parameter: Tensor, first: Tensor, copy: Tensor | None, gradient: Tensor) -> None:
    _check_device(op, "parameters", parameter, "gradients", gradient)
    if gradient.dtype != parameter.dtype:
        if parameter.dtype != torch.float32 or gradient.dtype not in (torch.float16, torch.bfloat16):
            _check_dtype(op, "parameters", parameter, "gradients", gradient)
        if copy is not None:
            _check_dtype(op, "copies", copy, "gradients", gradient)
    _check_dtype(op, "gradients", first, "gradients", gradient)


def _check_copy_in_list(op: str, parameter: Tensor, first: Tensor, copy: Tensor) -> None:
    if parameter.dtype != torch.float32:
        raise TypeError(
            f"{op}: argument 'parameters': expected dtype torch.float32 beside 'copies', got {parameter.dtype}"
        )
    _check_device(op, "parameters", parameter, "copies", copy)
    if copy.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"{op}: argument 'copies': expected dtype torch.float16 or torch.bfloat16, got {copy.dtype}")
    _check_dtype(op, "copies", first, "copies", copy)


def _check_scalar(op: str, first: str, x: Tensor, name: str, scalar: Tensor, dtype: torch.dtype) -> None:
    _check_device(op, first, x, name, scalar)
    if scalar.dtype != dtype or scalar.numel() != 1:
        raise ValueError(
            f"{op}: argument '{name}': expected one element of dtype {dtype}, got shape {_sizes(scalar.shape)} of "
            f"dtype {scalar.dtype}"
        )


def check_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    attn_mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> None:
    """Check the arguments of flash_attention."""
    op = "flash_attention"
    _check_attention(op, q, k, v, scale)
    if sinks is not None:
        _check_wide_kind(op, "q", q, "sinks", sinks)
        if sinks.shape != q.shape[1:2]:
            raise ValueError(
                f"{op}: argument 'sinks': expected shape {_sizes(q.shape[1:2])}, an element for each head of 'q', "
                f"got {_sizes(sinks.shape)}"
            )
    _check_features(op, q, k, window_left, window_right, softcap, attn_mask, alibi_slopes, cu_seqlens_q, cu_seqlens_k)


def check_flash_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    *features: Any,
) -> None:
    """Check the arguments of flash_attention_backward, like :func:`check_flash_attention`."""
    op = "flash_attention_backward"
    _check_attention(op, q, k, v, scale)
    if features:
        _check_features(op, q, k, *features)
    for name, tensor in (("grad_out", grad_out), ("out", out)):
        _check_alike(op, "q", q, name, tensor)
    for name, of_rows in (("lse", lse), ("grad_lse", grad_lse)):
        if of_rows is None:
            continue
        _check_wide_kind(op, "q", q, name, of_rows)
        if of_rows.shape != q.shape[:3]:
            raise ValueError(
                f"{op}: argument '{name}': expected shape {_sizes(q.shape[:3])}, an element for each query of 'q', "
                f"got {_sizes(of_rows.shape)}"
            )


def _check_features(
    op: str,
    q: Tensor,
    k: Tensor,
    window_left: int,
    window_right: int,
    softcap: float,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> None:
    for name, side in (("window_left", window_left), ("window_right", window_right)):
        if side < -1:
            raise ValueError(f"{op}: argument '{name}': expected a number of keys, or -1 for no limit, got {side}")
    if not 0 <= softcap < math.inf:  # a compiler's symbol has no math.isfinite
        raise ValueError(f"{op}: argument 'softcap': expected a finite number of 0 or more, got {softcap}")
    if attn_mask is not None:
        _check_kind(op, "q", q, "attn_mask", attn_mask)
        sizes = (*q.shape[:3], k.shape[2])
        if attn_mask.dim() != 4 or any(n not in (1, full) for n, full in zip(attn_mask.shape, sizes, strict=True)):
            raise ValueError(
                f"{op}: argument 'attn_mask': expected shape {list(sizes)}, or 1 for any of these, "
                f"got {_sizes(attn_mask.shape)}"
            )
    if alibi_slopes is not None:
        _check_wide_kind(op, "q", q, "alibi_slopes", alibi_slopes)
        if alibi_slopes.shape not in (q.shape[1:2], q.shape[:2]):
            raise ValueError(
                f"{op}: argument 'alibi_slopes': expected shape {_sizes(q.shape[1:2])} or {_sizes(q.shape[:2])}, an "
                f"element for each head of 'q', got {_sizes(alibi_slopes.shape)}"
            )
    _check_sequences(op, q, k, cu_seqlens_q, cu_seqlens_k)


def _check_sequences(op: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        if cu_seqlens_q is not cu_seqlens_k:
            raise ValueError(
                f"{op}: argument 'cu_seqlens_k': expected one where there is 'cu_seqlens_q', and none elsewhere"
            )
        return
    for name, starts, total in (("cu_seqlens_q", cu_seqlens_q, q.shape[2]), ("cu_seqlens_k", cu_seqlens_k, k.shape[2])):
        _check_device(op, "q", q, name, starts)
        if starts.dtype != torch.int32:
            raise TypeError(f"{op}: argument '{name}': expected dtype torch.int32, got {starts.dtype}")
        if starts.dim() != 1 or starts.shape[0] < 2 or not starts.is_contiguous():
            raise ValueError(
                f"{op}: argument '{name}': expected a contiguous vector of two elements or more, "
                f"got shape {_sizes(starts.shape)}"
            )
        if q.shape[0] != 1:
            raise ValueError(f"{op}: argument '{name}': expected a batch of one beside it, got {q.shape[0]}")
        if starts.device.type == "cpu" and type(starts) is Tensor:  # a GPU's would have to be waited for
            rows = starts.tolist()
            if rows[0] != 0 or rows[-1] != total or rows != sorted(rows):
                raise ValueError(
                    f"{op}: argument '{name}': expected numbers that ascend from 0 to {total}, the rows of all "
                    "sequences"
                )
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"{op}: argument 'cu_seqlens_k': expected {cu_seqlens_q.shape[0]} elements like 'cu_seqlens_q', "
            f"got {cu_seqlens_k.shape[0]}"
        )


def _check_attention(op: str, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"{op}: argument '{name}': expected four dimensions (batch, heads, sequence, head size), "
                f"got {list(tensor.shape)}"
            )
    for name, tensor in (("k", k), ("v", v)):
        _check_kind(op, "q", q, name, tensor)
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{op}: argument 'k': expected batch {q.shape[0]} and head size {q.shape[3]} like 'q', "
            f"got shape {list(k.shape)}"
        )
    if v.shape[:3] == k.shape[:3] and v.shape[3] != k.shape[3]:
        raise ValueError(
            f"{op}: argument 'v': expected head size {k.shape[3]} like 'k', got {v.shape[3]} (another size has no "
            "kernel; fill the smaller up with zeros)"
        )
    _check_shape(op, "k", k, "v", v)
    if not 1 <= q.shape[3] <= 256:
        raise ValueError(f"{op}: argument 'q': expected a head size of 1 to 256, got {q.shape[3]}")
    if (q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]) != 0:
        raise ValueError(
            f"{op}: argument 'k': expected a number of heads that divides the {q.shape[1]} of 'q', got {k.shape[1]}"
        )
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"{op}: argument 'scale': expected a finite number, got {scale}")
    _check_kernel_dtype(op, "q", q)


def check_operands(op: str, first: str, x: Tensor, b: Tensor) -> None:
    """Check that two operands have the same device, dtype and shape, and that the dtype has a kernel."""
    _check_alike(op, first, x, "b", b)
    _check_kernel_dtype(op, first, x)


def _check_bias(op: str, x: Tensor, bias: Tensor) -> None:
    _check_kind(op, "x", x, "bias", bias)
    if x.dim() < 1:
        raise ValueError(f"{op}: argument 'x': expected one dimension or more, got []")
    if bias.dim() != 1 or bias.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{op}: argument 'bias': expected shape {[x.shape[-1]]}, an element for each of x's last dimension, "
            f"got {list(bias.shape)}"
        )


def _check_device(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    if other.device != x.device:
        raise ValueError(
            f"{op}: argument '{name}': expected device {x.device} like '{first}', got {other.device} "
            "(move it there with .to())"
        )


def _check_dtype(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    if other.dtype != x.dtype:
        raise TypeError(
            f"{op}: argument '{name}': expected dtype {x.dtype} like '{first}', got {other.dtype} "
            "(dtypes are not promoted; use .to())"
        )


def _check_kind(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    _check_device(op, first, x, name, other)
    _check_dtype(op, first, x, name, other)


def _check_alike(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    _check_kind(op, first, x, name, other)
    _check_shape(op, first, x, name, other)


def _check_wide_kind(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    _check_device(op, first, x, name, other)
    if other.dtype != wide(x.dtype):
        raise TypeError(
            f"{op}: argument '{name}': expected dtype {wide(x.dtype)}, in which {x.dtype} is computed, "
            f"got {other.dtype}"
        )


def _check_shape(op: str, first: str, x: Tensor, name: str, other: Tensor) -> None:
    if other.shape != x.shape:
        raise ValueError(
            f"{op}: argument '{name}': expected shape {_sizes(x.shape)} like '{first}', got {_sizes(other.shape)} "
            "(shapes are not broadcast; use .expand())"
        )


def _check_kernel_dtype(op: str, name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(
            f"{op}: argument '{name}': expected dtype torch.float32, torch.float64, torch.float16 or torch.bfloat16, "
            f"got {x.dtype}"
        )


def _sizes(shape: Sequence[Any]) -> list[Any]:
    return list(shape)
