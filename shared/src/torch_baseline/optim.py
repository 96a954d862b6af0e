"""The optimizer, its learning rate, and the moving average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torch_baseline.config import TrainConfig
from torch_baseline.parallel import spread_like, whole


@runtime_checkable
class ClippingOptimizer(Protocol):
    """An optimizer that computes the norm of its gradients and clips them while it updates the parameters."""

    def gradient_norm(self) -> Tensor:
        """Return the norm of all gradients, a scalar on the model's device."""
        ...

    def step(self, closure: None = None, *, norm: Tensor, max_norm: float) -> Any:
        """Update the parameters with the gradients times min(1, max_norm / (norm + 1e-6))."""
        ...


def make_optimizer(
    model: nn.Module,
    config: TrainConfig,
    *,
    kind: type[torch.optim.Optimizer] | None = None,
    graph: bool = False,
    linear_dtype: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Return AdamW (Loshchilov and Hutter 2019) with weight decay for matrices and none for gains and biases.

    Args:
        model: The model, on its final device and in its final dtype.
        config: Learning rate, betas, epsilon and weight decay.
        kind: Another class with the arguments of ``torch.optim.AdamW`` for these numbers.
        graph: Keep the learning rate on the device, so that a CUDA graph can contain the step.
        linear_dtype: Dtype of the weights of linear layers, which get a group with this ``dtype``. ``kind`` casts them
            and keeps float32 masters. Under autocast with this dtype the products stay the same.

    Raises:
        ValueError: If a dtype is given without a ``kind``, because torch's AdamW keeps no masters.
    """
    if linear_dtype is not None and kind is None:
        raise ValueError("linear_dtype: torch.optim.AdamW keeps no float32 masters; pass a kind that does")
    parameters = list(model.parameters())
    linear = {id(module.weight) for module in model.modules() if linear_dtype and isinstance(module, nn.Linear)}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2 and id(p) not in linear], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if linear:
        cast = [p for p in parameters if id(p) in linear]
        groups.append({"params": cast, "weight_decay": config.weight_decay, "dtype": linear_dtype})
    lr = torch.tensor(config.lr, device=parameters[0].device) if graph else config.lr
    numbers: dict[str, Any] = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": config.adam_eps}
    if kind is not None:
        return kind(groups, **numbers)
    # One kernel for many tensors instead of a dozen.
    return torch.optim.AdamW(groups, **numbers, fused=True, capturable=graph)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine (Loshchilov and Hutter 2017).

    lr · (step + 1) / (warmup + 1) before ``warmup``, then min_lr + (lr − min_lr) · (1 + cos(π p)) / 2 with p from 0 at
    step ``warmup`` to 1 at the last step.

    Args:
        step: The step, counted from 0.
        config: ``lr``, ``min_lr``, ``warmup`` and ``steps`` are used.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    progress = (step - config.warmup) / max(config.steps - 1 - config.warmup, 1)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups; one that is on the device changes in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class EMA:
    """Exponential moving average of a model's weights, e ← decay · e + (1 − decay) · p, starting at the first weights.

    Args:
        model: The model; the averages have the names of its parameters.
        decay: Decay in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Update the average with the model's current weights."""
        for name, parameter in model.named_parameters():
            self.average[name].mul_(self.decay).add_(parameter, alpha=1 - self.decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Use the averaged weights inside the block; afterwards the model has its own weights, bit for bit."""
        own = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        _copy_into(model, self.average)
        try:
            yield
        finally:
            _copy_into(model, own)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the unsharded averages on the CPU; all processes must call it if the weights are sharded."""
        return {name: whole(average).to("cpu", copy=True) for name, average in self.average.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load averages from :meth:`state_dict`."""
        for name, own in self.average.items():
            own.copy_(spread_like(state[name], own))


@torch.no_grad()
def _copy_into(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
