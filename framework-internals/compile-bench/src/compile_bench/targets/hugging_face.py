"""Architectures of Hugging Face ``transformers`` with random weights. Nothing is downloaded.

On a GPU they have the widths of a published model and two layers, because more layers repeat the same code. On a CPU
the widths are smaller, too. Dropout is 0, so that results can be compared with float64. Other random parts
(LayerDrop and SpecAugment of Wav2Vec2) stay as the architecture has them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchkit import UserError
from benchkit.device import Device
from compile_bench.targets.target import Target

Sizes = Mapping[str, Any]


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


@dataclass(frozen=True)
class Architecture:
    """How to make an architecture."""

    about: str  # a phrase that describes it in a list
    config: str  # name of the configuration's class
    model: str  # name of the model's class
    cpu: Sizes  # sizes on a CPU
    gpu: Sizes  # sizes on a GPU
    # Makes positional arguments and labels from the configuration and the device.
    inputs: Callable[[Any, Device], tuple[tuple[Any, ...], Tensor]]
    always: Sizes = field(default_factory=dict)  # settings for both devices


def transformers_target(name: str, device: Device) -> Target:
    """Make the target of an architecture."""
    library = _library(name)
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    sizes = {**architecture.always, **(architecture.cpu if device == "cpu" else architecture.gpu)}
    config = getattr(library, architecture.config)(**sizes)
    model = getattr(library, architecture.model)(config)
    inputs, labels = architecture.inputs(config, device)
    autocast = None if device == "cpu" else torch.bfloat16
    return Target(Supervised(model), inputs, {"labels": labels}, autocast=autocast)


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


def _text(cpu: tuple[int, int], gpu: tuple[int, int]) -> Callable[[Any, Device], tuple[tuple[Any, ...], Tensor]]:
    """Makes token ids of shape (batch, length), which are the labels, too."""

    def inputs(config: Any, device: Device) -> tuple[tuple[Any, ...], Tensor]:
        ids = torch.randint(3, config.vocab_size, cpu if device == "cpu" else gpu)
        return (ids,), ids.clone()

    return inputs


def _translation(config: Any, device: Device) -> tuple[tuple[Any, ...], Tensor]:
    """Ids for the encoder, no mask, ids for the decoder."""
    shape = (2, 32) if device == "cpu" else (8, 512)
    source, target = (torch.randint(3, config.vocab_size, shape) for _ in range(2))
    return (source, None, target), target.clone()


def _images(config: Any, device: Device) -> tuple[tuple[Any, ...], Tensor]:
    batch = 4 if device == "cpu" else 64
    images = torch.randn(batch, 3, config.image_size, config.image_size)
    return (images,), torch.randint(config.num_labels, (batch,))


def _audio(config: Any, device: Device) -> tuple[tuple[Any, ...], Tensor]:
    """Samples at 16 kHz: half a second, or five."""
    batch, samples = (2, 8_000) if device == "cpu" else (8, 80_000)
    return (torch.randn(batch, samples),), torch.randint(1, config.vocab_size, (batch, 12))


def _decoder(hidden: int, middle: int, heads: int, groups: int, vocabulary: int, **more: Any) -> Sizes:
    """Sizes of a decoder of the Llama family, with two layers."""
    return {
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        **more,
    }


def _encoder(hidden: int, heads: int, **more: Any) -> Sizes:
    """Sizes of an encoder of the BERT family, with two layers."""
    return {
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        **more,
    }


_NO_CACHE: Sizes = {"use_cache": False}
_NO_DROPOUT: Sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SMALL_EXPERTS: Sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}
_REAL_EXPERTS: Sizes = {
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "head_dim": 128,
}
_SMALL_EARS: Sizes = {
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_SMALL_TEXT = (2, 64)

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(
        "GPT-2 (transformers), 2 layers",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 128, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128},
        {"n_embd": 768, "n_layer": 2, "n_head": 12},
        _text(_SMALL_TEXT, (8, 1024)),
        {**_NO_CACHE, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "llama": Architecture(
        "Llama 3.2 1B (transformers), 2 layers",
        "LlamaConfig",
        "LlamaForCausalLM",
        _decoder(128, 256, 4, 2, 512),
        _decoder(2048, 8192, 32, 8, 128_256),
        _text(_SMALL_TEXT, (4, 1024)),
        _NO_CACHE,
    ),
    "qwen3": Architecture(
        "Qwen3 0.6B (transformers), 2 layers",
        "Qwen3Config",
        "Qwen3ForCausalLM",
        _decoder(128, 256, 4, 2, 512, head_dim=32),
        _decoder(1024, 3072, 16, 8, 151_936, head_dim=128),
        _text(_SMALL_TEXT, (4, 1024)),
        _NO_CACHE,
    ),
    "qwen3-moe": Architecture(
        "Qwen3 30B-A3B (transformers), 32 of its 128 experts, 2 layers",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _decoder(128, 256, 4, 2, 512, **_SMALL_EXPERTS),
        _decoder(2048, 6144, 32, 4, 151_936, **_REAL_EXPERTS),
        _text(_SMALL_TEXT, (4, 512)),
        _NO_CACHE,
    ),
    "bert": Architecture(
        "BERT base (transformers), 2 layers",
        "BertConfig",
        "BertForMaskedLM",
        _encoder(128, 4, vocab_size=512),
        _encoder(768, 12),
        _text(_SMALL_TEXT, (16, 512)),
        _NO_DROPOUT,
    ),
    "vit": Architecture(
        "ViT B/16 (transformers), 2 layers",
        "ViTConfig",
        "ViTForImageClassification",
        _encoder(128, 4, image_size=32, patch_size=8),
        _encoder(768, 12),
        _images,
        _NO_DROPOUT,
    ),
    "t5": Architecture(
        "T5 base (transformers), 2 + 2 layers",
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 128, "d_ff": 256, "d_kv": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 512},
        {"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 2, "num_heads": 12},
        _translation,
        {**_NO_CACHE, "dropout_rate": 0.0},
    ),
    "mamba": Architecture(
        "Mamba 130M (transformers, scan in Python), 2 layers",
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 64, "num_hidden_layers": 1, "state_size": 8, "vocab_size": 512},
        {"hidden_size": 768, "num_hidden_layers": 2, "state_size": 16},
        _text((2, 16), (8, 64)),
        _NO_CACHE,
    ),
    "wav2vec2": Architecture(
        "Wav2Vec2 base (transformers), 2 layers; LayerDrop and SpecAugment in training",
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        _encoder(64, 4, vocab_size=32, **_SMALL_EARS),
        _encoder(768, 12),
        _audio,
        {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0},
    ),
    "longformer": Architecture(
        "Longformer base (transformers), 2 layers",
        "LongformerConfig",
        "LongformerForMaskedLM",
        _encoder(64, 4, vocab_size=512, attention_window=16, max_position_embeddings=130),
        _encoder(768, 12, attention_window=512, max_position_embeddings=4098),
        _text(_SMALL_TEXT, (4, 2048)),
        _NO_DROPOUT,
    ),
}
