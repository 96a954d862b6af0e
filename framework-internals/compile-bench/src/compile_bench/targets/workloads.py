"""What the targets of a sweep are, for the tables of a report. Nothing here imports torch.

The tests compare the batches with the arguments of the targets.
"""

from __future__ import annotations

from typing import NamedTuple

from benchkit.device import Device

Batch = tuple[int, ...]


class Workload(NamedTuple):
    """A target of the zoo on one kind of device."""

    model: str  # the model, by the name of its preset or of its publication
    batch: Batch  # shape of its first argument
    unit: str = ""  # what the last dimension of the batch counts; empty for features and pixels

    def __str__(self) -> str:
        return f"{self.model}, {' × '.join(f'{size:,}' for size in self.batch)} {self.unit}".rstrip()


def _both(model: str, cpu: Batch, cuda: Batch, unit: str = "") -> dict[Device, Workload]:
    return {"cpu": Workload(f"small {model}", cpu, unit), "cuda": Workload(model, cuda, unit)}


_WORKLOADS: dict[str, dict[Device, Workload]] = {
    "gpt": {
        "cpu": Workload("preset `tiny`", (16, 128), "bytes"),
        "cuda": Workload("preset `gpt2-124m`", (16, 1024), "tokens"),
    },
    "mlp": {"cpu": Workload("4 layers of 512", (64, 512)), "cuda": Workload("4 layers of 512", (4096, 512))},
    "resnet": _both("ResNet-18", (8, 3, 32, 32), (64, 3, 224, 224)),
    "gpt2": _both("GPT-2", (2, 64), (8, 1024), "tokens"),
    "llama": _both("Llama 3.2 1B", (2, 64), (4, 1024), "tokens"),
    "qwen3": _both("Qwen3 0.6B", (2, 64), (4, 1024), "tokens"),
    "qwen3-moe": _both("Qwen3 30B-A3B, 32 experts", (2, 64), (4, 512), "tokens"),
    "bert": _both("BERT base", (2, 64), (16, 512), "tokens"),
    "vit": _both("ViT B/16", (4, 3, 32, 32), (64, 3, 224, 224)),
    "t5": _both("T5 base", (2, 32), (8, 512), "tokens"),
    "mamba": _both("Mamba 130M", (2, 16), (8, 64), "tokens"),
    "wav2vec2": _both("Wav2Vec2 base", (2, 8_000), (8, 80_000), "samples"),
    "longformer": _both("Longformer base", (2, 64), (4, 2048), "tokens"),
}


def workload(target: str, device: Device) -> Workload | None:
    """What a target of the sweep is on a device; None for another target."""
    return _WORKLOADS.get(target, {}).get(device)
