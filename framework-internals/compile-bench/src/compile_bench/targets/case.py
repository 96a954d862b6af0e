"""A case: a target on a device, in training or inference, compiled in a mode."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from benchkit.device import Device

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
MODES: tuple[Mode, ...] = get_args(Mode)

# Each mode that autotunes, and the same mode without autotuning.
_UNTUNED: dict[Mode, Mode] = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}

# "whole" compiles the model as a whole. "blocks" compiles each repeated block by itself (``block.compile()``). "nested"
# compiles the whole model, and compiles the code of its blocks once (``torch.compiler.nested_compile_region``).
Scope = Literal["whole", "blocks", "nested"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# The first call compiles. With CUDA graphs, the second warms up and the third captures. The cost includes all three.
FIRST_STEPS = 3


def missing_file(target: str) -> str:
    """Why a target ``file.py:function`` cannot be loaded, if there is no such file; else empty."""
    place = target.rpartition(":")[0]
    return f"there is no file {place} (target {target})" if place.endswith(".py") and not Path(place).is_file() else ""


@dataclass(frozen=True)
class Case:
    """A target and the way it is compiled and run."""

    target: str  # name of the target
    device: Device = "cpu"  # device that it runs on
    train: bool = True  # whether a step is a training step. If not, it is a forward pass without gradients
    mode: Mode = "default"  # mode of ``torch.compile``
    dynamic: bool | None = None  # option of ``torch.compile``. With None, PyTorch makes a size symbolic when it changes
    scope: Scope = "whole"  # what is compiled: the whole model, or its repeated blocks

    @property
    def kind(self) -> str:
        """``"training"`` or ``"inference"``."""
        return "training" if self.train else "inference"

    @property
    def wants_cuda_graphs(self) -> bool:
        """Whether the mode asks for CUDA graphs."""
        return self.mode in ("reduce-overhead", "max-autotune")

    @property
    def untuned(self) -> Case | None:
        """The same case without autotuning; None if the mode does not autotune."""
        mode = _UNTUNED.get(self.mode)
        # A CPU has no CUDA graphs, so reduce-overhead is the same as the default there.
        return None if mode is None else replace(self, mode="default" if self.device == "cpu" else mode)
