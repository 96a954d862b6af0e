"""What is measured: a target on a device, in training or inference, compiled in a mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from benchkit.device import Device

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES: tuple[Mode, ...] = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

# A mode that autotunes, and the same without.
_UNTUNED: dict[Mode, Mode] = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}

# The model as a whole; its repeated blocks one by one (``block.compile()``); or the whole with the blocks marked as one
# region that is compiled once (``torch.compiler.nested_compile_region``).
Scope = Literal["whole", "blocks", "nested"]
SCOPES: tuple[Scope, ...] = ("whole", "blocks", "nested")

# The first call compiles; with CUDA graphs the second warms up and the third captures: all three belong to the price.
FIRST_STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        target: its name.
        device: where it runs.
        train: training step, or forward pass without gradients.
        mode: of ``torch.compile``.
        dynamic: of ``torch.compile``: None leaves it to PyTorch, which turns a size symbolic when it changes.
        scope: what is compiled: the whole model, or its repeated blocks.
    """

    target: str
    device: Device = "cpu"
    train: bool = True
    mode: Mode = "default"
    dynamic: bool | None = None
    scope: Scope = "whole"

    @property
    def kind(self) -> str:
        """``"training"`` or ``"inference"``."""
        return "training" if self.train else "inference"

    @property
    def untuned(self) -> Case | None:
        """The same without autotuning; None where the mode does none."""
        mode = _UNTUNED.get(self.mode)
        # A CPU has no CUDA graphs: reduce-overhead is the default there.
        return None if mode is None else replace(self, mode="default" if self.device == "cpu" else mode)
