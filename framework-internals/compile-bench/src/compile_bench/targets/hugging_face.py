"""Architectures of Hugging Face ``transformers`` with random weights. Nothing is downloaded.

On a GPU they have the widths of a published model and two layers, because more layers repeat the same code. On a CPU
the widths are smaller, too. Dropout is 0, so that results can be compared with float64. Other random parts
(LayerDrop and SpecAugment of Wav2Vec2) stay as the architecture has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchkit import UserError
from benchkit.device import Device
from compile_bench.targets.target import Target
from compile_bench.targets.workloads import MODELS


class Supervised(nn.Module):
    """A model that returns its loss in training, which it computes itself, and its logits in evaluation."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss or the logits."""
        if self.training:
            return self.model(*inputs, labels=labels).loss
        return self.model(*inputs).logits


Inputs = tuple[tuple[Any, ...], Tensor]  # positional arguments and labels


def transformers_target(name: str, device: Device) -> Target:
    """Make the target of an architecture in :data:`ARCHITECTURES`, with sizes for the device."""
    library = _library(name)
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = config_of(architecture, library, device)
    model = getattr(library, architecture["classes"][1])(config)
    inputs, labels = INPUTS[architecture["inputs"]](config, architecture["batch"][device])
    autocast = None if device == "cpu" else torch.bfloat16
    return Target(Supervised(model), inputs, {"labels": labels}, autocast=autocast)


def config_of(architecture: Mapping[str, Any], library: ModuleType, device: Device) -> Any:
    """The configuration of an entry of :data:`ARCHITECTURES` on a device."""
    sizes = architecture["sizes"]  # by device, and what is the same on both
    return getattr(library, architecture["classes"][0])(**sizes.get("always", {}), **sizes[device])


def _library(name: str) -> ModuleType:
    try:
        library = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UserError(f"target {name} needs the package transformers: pip install 'compile-bench[zoo]'") from error
    # It warns about untrained weights, which are intended here.
    library.logging.set_verbosity_error()
    return library


def _text(config: Any, shape: Sequence[int]) -> Inputs:
    """Token ids, which are the labels, too."""
    ids = torch.randint(3, config.vocab_size, tuple(shape))
    return (ids,), ids.clone()


def _translation(config: Any, shape: Sequence[int]) -> Inputs:
    """Ids for the encoder, no mask, ids for the decoder."""
    source, target = (torch.randint(3, config.vocab_size, tuple(shape)) for _ in range(2))
    return (source, None, target), target.clone()


def _images(config: Any, shape: Sequence[int]) -> Inputs:
    return (torch.randn(*shape),), torch.randint(config.num_labels, (shape[0],))


def _audio(config: Any, shape: Sequence[int]) -> Inputs:
    """Samples at 16 kHz: half a second, or five."""
    return (torch.randn(*shape),), torch.randint(1, config.vocab_size, (shape[0], 12))


# What makes positional arguments and labels, from the configuration and the shape of the first argument.
INPUTS: dict[str, Callable[[Any, Sequence[int]], Inputs]] = {
    "text": _text,
    "translation": _translation,
    "images": _images,
    "audio": _audio,
}

# The entries of ``zoo.toml`` with classes of ``transformers``: that of the configuration, and that of the model.
ARCHITECTURES = {name: entry for name, entry in MODELS.items() if "classes" in entry}
