"""The model of nanoGPT beside ours: another network of the same size, from a checkout that the user names.

``NANOGPT=…/nanoGPT ./scripts/python.sh scripts/end_to_end.py`` measures it. Its code is not part of this repository.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from torch import Tensor, nn

from benchkit import UserError
from benchkit.command.user_file import load_file
from torch_baseline.config import GPTConfig

VARIABLE = "NANOGPT"


def checkout() -> Path | None:
    """The file ``model.py`` of the checkout; None if the variable is not set."""
    if not (folder := os.environ.get(VARIABLE)):
        return None
    file = Path(folder, "model.py").absolute()
    if not file.is_file():
        raise UserError(f"{VARIABLE}: expected a checkout of nanoGPT with model.py in it, got {folder}")
    return file


def fingerprint(file: Path) -> str:
    """The first digits of the SHA-256 of a file, which name what was measured."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def network(config: GPTConfig) -> nn.Module:
    """The model with its training script's settings: no biases, no dropout, tied embedding; it returns its loss."""
    if (file := checkout()) is None:
        raise UserError(f"{VARIABLE}: expected the folder of a checkout of nanoGPT, got nothing; set it")
    module = load_file(file, "nanogpt_")
    sizes = {name: getattr(config, name) for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    return _Loss(module.GPT(module.GPTConfig(**sizes, dropout=0.0, bias=False)))


class _Loss(nn.Module):
    """The loss of a model that returns logits and loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens_BT, targets_BT)[1]
        return loss
