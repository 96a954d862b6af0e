"""AdamW over all parameters of a group in one kernel, with the clipping of the gradients in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from custom_ops.operators import calls
from custom_ops.operators.checks import check_adamw, check_gradient_norm, wide
from custom_ops.operators.registration import Rules


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay, one kernel per parameter group.

    The update is that of ``torch.optim.AdamW``. A call moves 28 bytes per float32 parameter, which is the least: it
    reads the parameter, its gradient and both moments, and writes all but the gradient. If ``step`` is given a norm,
    the kernel also scales the gradients while it reads them; ``torch.nn.utils.clip_grad_norm_`` reads and writes them
    once more. The gradients themselves stay as they are.

    A parameter of 16 bits has a float32 master in the state (Micikevicius et al. 2018): the update reads the gradient,
    changes the master and rounds it to the parameter, in the same 28 bytes. A model under autocast whose matrices are
    bfloat16 has the same products, and neither its forward pass casts them nor its backward pass their gradients.

    State and parameter groups have the names and shapes of ``torch.optim.AdamW(fused=True)``, and masters beside them,
    so the ``state_dict`` of one can be loaded into the other. A learning rate that is a tensor on the parameters'
    device may change between the replays of a CUDA graph.

    Args:
        params: Parameters or parameter groups, contiguous, on a CPU or a GPU. All floating-point dtypes have a kernel.
        lr: Learning rate, a number or a float32 tensor of one element.
        betas: Decay of the two moments, each above 0 and below 1.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the parameters per step, times the learning rate.
        dtype: Casts the parameters, which are float32, to ``torch.bfloat16`` or ``torch.float16`` when their group is
            added, and keeps their values as masters. A group may have its own.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If parameters that are not float32 are to be cast, or the dtype has not 16 bits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        dtype: torch.dtype | None = None,
    ) -> None:
        beta1, beta2 = betas
        for name, value, valid, expected in (
            ("lr", float(lr), float(lr) >= 0, "0 or more"),
            ("betas[0]", beta1, 0 < beta1 < 1, "a number above 0 and below 1"),
            ("betas[1]", beta2, 0 < beta2 < 1, "a number above 0 and below 1"),
            ("eps", eps, eps >= 0, "0 or more"),
            ("weight_decay", weight_decay, weight_decay >= 0, "0 or more"),
        ):
            if not valid:
                raise ValueError(f"AdamW: argument '{name}': expected {expected}, got {value}")
        # torch's AdamW reads "fused" in a state that it loads.
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "dtype": dtype, "fused": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with the constructor's numbers where it has none of its own."""
        super().add_param_group(param_group)
        # Tells torch that a CUDA graph may contain the step: its counters are on the device.
        param_group["capturable"] = all(parameter.is_cuda for parameter in param_group["params"])
        # Not part of the group, so that torch's optimizer can load it: afterwards the parameters have this dtype.
        if (dtype := param_group.pop("dtype")) is not None:
            self._cast(param_group["params"], dtype)

    def _cast(self, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"AdamW: argument 'dtype': expected torch.bfloat16 or torch.float16, got {dtype}")
        for parameter in parameters:
            if parameter.dtype != torch.float32:
                raise TypeError(
                    f"AdamW: argument 'dtype': expected parameters of torch.float32 to cast, got {parameter.dtype}"
                )
            self.state[parameter]["master"] = parameter.detach().clone()
            parameter.data = parameter.detach().to(dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; parameters of 16 bits become their masters, rounded, or masters the parameters if it has none.

        Args:
            state_dict: From this optimizer or from ``torch.optim.AdamW``.
        """
        super().load_state_dict(state_dict)  # rounds the state of a parameter to its dtype
        given = state_dict["state"]
        saved = (key for group in state_dict["param_groups"] for key in group["params"])
        for key, parameter in zip(saved, (p for group in self.param_groups for p in group["params"]), strict=True):
            if parameter.element_size() != 2 or key not in given:
                continue
            for name, value in given[key].items():
                if name != "step":
                    self.state[parameter][name] = value.detach().to(parameter.device, torch.float32, copy=True)
            if "master" in given[key]:
                parameter.detach().copy_(self.state[parameter]["master"])

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients as one vector, a scalar on their device; 0 if there are none."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return gradient_norm(gradients) if gradients else torch.zeros(())

    @overload
    def step(self, closure: None = None, *, norm: Tensor | None = None, max_norm: float = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, norm: Tensor | None = None, max_norm: float = ...) -> float: ...
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, norm: Tensor | None = None, max_norm: float = 1.0
    ) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients again.
            norm: The norm of the gradients, from :meth:`gradient_norm`. The update then uses the gradients times
                min(1, max_norm / (norm + 1e-6)), as after ``torch.nn.utils.clip_grads_with_norm_``.
            max_norm: The largest norm; unused without ``norm``.

        Returns:
            The loss of the closure.

        Raises:
            ValueError: If a gradient has another shape or device than its parameter, or a tensor is not contiguous.
            TypeError: If a gradient has another dtype than its parameter.
            native_build.BuildError: At the first call, if the kernels cannot be built.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for dtype in dict.fromkeys(p.dtype for p in parameters):
                self._update(group, [p for p in parameters if p.dtype == dtype], norm, max_norm)
        return loss

    def _update(
        self, group: dict[str, Any], parameters: Sequence[Tensor], norm: Tensor | None, max_norm: float
    ) -> None:
        states = [self._state_of(p) for p in parameters]
        means, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
        masters = [s["master"] for s in states if "master" in s]
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1)
        lr, (beta1, beta2) = group["lr"], group["betas"]
        on_device = isinstance(lr, Tensor)
        _call(
            "adamw_", check_adamw,
            masters or parameters, [p.grad for p in parameters], means, squares, steps, parameters if masters else [],
            norm, lr if on_device else None, 0.0 if on_device else lr,
            beta1, beta2, group["eps"], group["weight_decay"], max_norm,
        )  # fmt: skip
        # The kernel changed them behind autograd's back; a later backward pass that needs the old values must fail.
        torch.autograd.graph.increment_version((*parameters, *masters, *means, *squares))

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        narrow = parameter.element_size() == 2
        if narrow and "master" not in state:
            state["master"] = parameter.detach().float()
        if "step" not in state:
            like = state["master"] if narrow else parameter
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(like)
            state["exp_avg_sq"] = torch.zeros_like(like)
        return state


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return √ Σ g² over all elements of all tensors: ``torch.nn.utils.get_total_norm`` in two kernels.

    A GPU adds four squares, or eight of 16 bits, in float32 or float64, and these sums in float64; a CPU adds all
    squares in float64. The order of the sum is fixed.

    Args:
        gradients: Tensors of any shapes on one device, all float64 or of any other floating-point dtypes.

    Returns:
        A scalar on their device, float64 for float64 gradients and float32 for others.

    Raises:
        ValueError: If there are none, or the devices differ.
        TypeError: If a dtype has no kernel, or float64 is mixed with others.
    """
    norm: Tensor = _call("gradient_norm", check_gradient_norm, list(gradients))
    return norm


def _call(name: str, check: Callable[..., None], *arguments: Any) -> Any:
    operator = getattr(calls, name)
    try:
        return operator(*arguments)
    except RuntimeError:
        check(*arguments)  # the kernel's own error is always a RuntimeError
        raise


def _fake_norm(gradients: Sequence[Tensor]) -> Tensor:
    check_gradient_norm(gradients)
    return gradients[0].new_empty((), dtype=wide(gradients[0].dtype))


def _fake_adamw(*arguments: Any) -> None:
    check_adamw(*arguments)


RULES = (Rules("gradient_norm", _fake_norm), Rules("adamw_", _fake_adamw))
