"""The variants of the step that are compared, and the modules of the lenses that each uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchkit.device import Device
from engines.spec import EngineSpec
from lowering import Lowering, share_rows


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        title: The variant's name in the report.
        spec: The engine that runs it.
        over: The variant that it is compared with; empty for the first.
        change: What is different from that variant.
        lens: The lens that explains the difference.
    """

    title: str
    spec: EngineSpec
    over: str = ""
    change: str = ""
    lens: str = ""


def norm(lowering: Lowering | None = None) -> dict[str, Any]:
    """Constructor arguments of :class:`torch_baseline.model.GPT` that make every norm one of rmsnorm-fused."""
    from rmsnorm_fused import RMSNorm

    return {"norm": lambda width, eps: RMSNorm(width, eps=eps, lowering=lowering), "add_norm": _add_norm}


def _add_norm(norm: Any, x: Any, branch: Any) -> tuple[Any, Any]:
    normed, x = norm(branch, residual=x)
    return x, normed


def every_operator(lowering: Lowering | None = None) -> dict[str, Any]:
    """Constructor arguments with rmsnorm-fused's norms, and the layers and functions of custom-ops."""
    import custom_ops

    _share_rows()

    def attention(q: Any, k: Any, v: Any) -> Any:
        return custom_ops.flash_attention(q, k, v, True, lowering=lowering)[0]

    activation = partial(custom_ops.bias_gelu, lowering=lowering)
    linear = partial(custom_ops.Linear, bias=False, lowering=lowering)
    rotate = partial(custom_ops.rotary, lowering=lowering)
    return {**norm(lowering), "activation": activation, "linear": linear, "rotate": rotate, "attention": attention}


def _share_rows() -> None:
    """Take the rows of rank 0's machine in all processes of a training, which must run the same graphs."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        share_rows(("custom_ops", "rmsnorm_fused"), "cuda" if torch.cuda.is_available() else "cpu")


def every_kernel() -> dict[str, Any]:
    """The same with every operator's kernel under torch.compile, which the compiler may not open."""
    return every_operator("kernel")


def every_operator_and_loss() -> dict[str, Any]:
    """:func:`every_operator`, and the loss of custom-ops, whose kernel replaces the logits by their gradient."""
    import custom_ops

    return {**every_operator(), "loss": custom_ops.linear_cross_entropy}


_NORM, _OPERATORS, _KERNELS, _LOSS = (
    f"whole_step.variants:{name}" for name in ("norm", "every_operator", "every_kernel", "every_operator_and_loss")
)


def on_several(device: Device, count: int) -> Mapping[str, tuple[str, EngineSpec]]:
    """Return the variants for so many devices by name, each with its title; the first is plain PyTorch.

    With one device nothing is sharded. JAX is last, since XLA takes much memory for its trials while it compiles.
    """
    own = partial(EngineSpec, "torch", parts=_LOSS, optimizer="custom_ops:AdamW")
    jax = partial(EngineSpec, "jax", attention="cudnn" if device == "cuda" else "xla")
    ddp, sharded = (" + DDP", " + FSDP2") if count > 1 else ("", "")
    spread = {
        "compiled": (f"torch.compile{ddp}", EngineSpec("torch", data=count)),
        "own": (f"this repository's kernels{ddp}", own(data=count, low_precision_weights=device == "cuda")),
        "compiled, sharded": (f"torch.compile{sharded}", EngineSpec("torch", fsdp=count)),
        "own, sharded": (f"this repository's kernels{sharded}", own(fsdp=count)),
        "jax": ("JAX, data-parallel" if ddp else "JAX", jax(data=count)),
        "jax, sharded": ("JAX, weights sharded", jax(fsdp=count)),
    }
    return {name: about for name, about in spread.items() if count > 1 or not name.endswith("sharded")}


# Without time for all, these come first: plain PyTorch, then the steps whose speed the report is asked for.
_FIRST = ("eager", "compiled", "graph", "compiled graph", "optimizer", "lowerings", "all", "operators", "loss")


def by_importance(names: Iterable[str]) -> list[str]:
    """The names of variants, those first that a run with little time measures."""
    return sorted(names, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))


def variants(device: Device) -> Mapping[str, Variant]:
    """Return the variants by name, in the order of the report."""
    graphs = _with_graph() if device == "cuda" else {}
    return {**_in_eager_mode(device), **_compiled(device), **graphs, **_others(device)}


def _optimizer(device: Device) -> dict[str, Any]:
    # On a GPU the step computes in bfloat16.
    return {"optimizer": "custom_ops:AdamW", "low_precision_weights": device == "cuda"}


def _one_pass(device: Device) -> str:
    """What the optimizer of custom-ops changes."""
    masters = ", and matrices and their gradients are bfloat16 beside float32 masters" if device == "cuda" else ""
    return f"clipping and AdamW are one pass over all parameters{masters}"


def _operators(device: Device) -> str:
    """The operators of :func:`every_operator`; on a GPU the linear layers are PyTorch's."""
    layers = "linear layers, " if device == "cpu" else ""
    return f"norms, {layers}bias and GELU, rotary positions and attention are"


def _in_eager_mode(device: Device) -> dict[str, Variant]:
    eager = partial(EngineSpec, "torch", compiled=False)
    ours = "linear layers and attention are" if device == "cpu" else "attention is"  # on a GPU linear is PyTorch's
    return {
        "eager": Variant("PyTorch, eager", eager()),
        "compiled": Variant("torch.compile", EngineSpec("torch"), "eager", "the model is compiled", "compile-bench"),
        "norm": Variant(
            "eager, rmsnorm-fused",
            eager(parts=_NORM),
            "eager",
            "each norm is this repository's kernel, forward and backward",
            "rmsnorm-fused",
        ),
        "operators": Variant(
            "eager, rmsnorm-fused, custom-ops",
            eager(parts=_OPERATORS),
            "norm",
            f"bias and GELU are one kernel, rotary positions are one, and {ours} this repository's",
            "custom-ops",
        ),
        "all": Variant(
            "eager, all kernels + loss + AdamW",
            eager(parts=_LOSS, **_optimizer(device)),
            "operators",
            f"also the loss with the gradient of the logits; {_one_pass(device)}",
            "custom-ops",
        ),
    }


def _compiled(device: Device) -> dict[str, Variant]:
    return {
        "lowerings": Variant(
            "torch.compile, lowerings measured",
            EngineSpec("torch", parts=_OPERATORS),
            "compiled",
            f"{_operators(device)} formula or kernel, as measured in the whole step",
            "compile-bench",
        ),
        "loss": Variant(
            "lowerings + loss",
            EngineSpec("torch", parts=_LOSS),
            "lowerings",
            "the loss and the gradient of the logits are one kernel, which writes over the logits",
            "custom-ops",
        ),
        "optimizer": Variant(
            "lowerings + loss + AdamW",
            EngineSpec("torch", parts=_LOSS, **_optimizer(device)),
            "loss",
            _one_pass(device),
            "custom-ops",
        ),
    }


def _with_graph() -> dict[str, Variant]:
    """The variants of a GPU whose whole step is a CUDA graph."""
    graph = partial(EngineSpec, "torch", parts=_LOSS, graph=True, **_optimizer("cuda"))
    whole = "the whole step is one CUDA graph"
    return {
        "graph": Variant("lowerings + loss + AdamW + graph", graph(), "optimizer", whole, "compile-bench"),
        "residual": Variant(
            "the same, bfloat16 residual stream",
            graph(low_precision_residual=True),
            "graph",
            "the residual stream and its gradient have half the bytes, and a rounding at each sum",
            "jax-baseline",
        ),
        "compiled graph": Variant(
            "torch.compile + graph", EngineSpec("torch", graph=True), "compiled", whole, "compile-bench"
        ),
    }


def _others(device: Device) -> dict[str, Variant]:
    jax = EngineSpec("jax", attention="cudnn" if device == "cuda" else "xla")
    return {
        "operators compiled": Variant(
            "torch.compile, rmsnorm-fused, custom-ops",
            EngineSpec("torch", parts=_KERNELS),
            "compiled",
            f"{_operators(device)} kernels that the compiler may not open",
            "custom-ops",
        ),
        "jax": Variant("JAX", jax, "compiled", "the same step by XLA, optimizer and clipping included", "jax-baseline"),
    }
