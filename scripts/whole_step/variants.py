"""The ways to run the step that are set side by side, and the parts of the lenses that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchkit.device import Device
from jax_baseline.timing.engines import EngineSpec


@dataclass(frozen=True)
class Variant:
    """One way to run the step.

    Attributes:
        title: as the report names it.
        spec: the engine.
        over: the variant that it differs from in one respect; empty for the first.
        change: that respect, to follow "with respect to …:".
        lens: the subproject that explains the difference.
    """

    title: str
    spec: EngineSpec
    over: str = ""
    change: str = ""
    lens: str = ""


def norm() -> dict[str, Any]:
    """Parts for :class:`torch_baseline.model.GPT`: every norm by rmsnorm-fused."""
    from rmsnorm_fused import RMSNorm

    return {"norm": lambda width, eps: RMSNorm(width, eps=eps)}


def every_operator() -> dict[str, Any]:
    """Norms by rmsnorm-fused, bias + GELU and attention by custom-ops."""
    import custom_ops

    def attention(q: Any, k: Any, v: Any) -> Any:
        return custom_ops.flash_attention(q, k, v, True)[0]

    return {**norm(), "activation": custom_ops.bias_gelu, "attention": attention}


def variants(device: Device) -> Mapping[str, Variant]:
    """The variants by name, in the order of the report."""
    jax = EngineSpec("jax", attention="cudnn" if device == "cuda" else "xla")
    return {
        "eager": Variant("PyTorch, eager", EngineSpec("torch", compiled=False)),
        "compiled": Variant("torch.compile", EngineSpec("torch"), "eager", "the model is compiled", "compile-bench"),
        "norm": Variant(
            "eager, rmsnorm-fused",
            EngineSpec("torch", compiled=False, parts="whole_step.variants:norm"),
            "eager",
            "each norm is this repository's kernel, forward and backward",
            "rmsnorm-fused",
        ),
        "operators": Variant(
            "eager, rmsnorm-fused, custom-ops",
            EngineSpec("torch", compiled=False, parts="whole_step.variants:every_operator"),
            "norm",
            "bias and GELU are one kernel, attention is this repository's",
            "custom-ops",
        ),
        "operators compiled": Variant(
            "torch.compile, rmsnorm-fused, custom-ops",
            EngineSpec("torch", parts="whole_step.variants:every_operator"),
            "compiled",
            "norms, bias and GELU, and attention are kernels that the compiler may not open",
            "custom-ops",
        ),
        "jax": Variant("JAX", jax, "compiled", "the same step by XLA, optimizer and clipping included", "jax-baseline"),
    }
