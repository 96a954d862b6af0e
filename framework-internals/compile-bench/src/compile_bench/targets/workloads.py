"""What the targets of a sweep are, for the tables of a report. Nothing here imports torch.

The tests compare the batches with the arguments of the targets.
"""

from __future__ import annotations

from typing import NamedTuple

from benchkit.device import Device

Batch = tuple[int, ...]


class Workload(NamedTuple):
    """A target of the zoo on one kind of device.

    Attributes:
        model: The model, by the name of its preset or of its publication.
        batch: Shape of its first argument.
        unit: What the last dimension of the batch counts; empty for features and pixels.
        cut: How many of its layers it has, for a model that is not whole.
    """

    model: str
    batch: Batch
    unit: str = ""
    cut: str = ""

    def __str__(self) -> str:
        cut = f", {self.cut}" if self.cut else ""
        return f"{self.model}{cut}, {' × '.join(f'{size:,}' for size in self.batch)} {self.unit}".rstrip()


def _both(model: str, cpu: Batch, cuda: Batch, unit: str = "", cut: str = "") -> dict[Device, Workload]:
    """A published model: small on a CPU, and with its own widths, but ``cut`` of its layers, on a GPU."""
    return {"cpu": Workload(f"small {model}", cpu, unit), "cuda": Workload(model, cuda, unit, cut)}


_WORKLOADS: dict[str, dict[Device, Workload]] = {
    "gpt": {
        "cpu": Workload("preset `tiny`", (16, 128), "bytes"),
        "cuda": Workload("preset `gpt2-124m`", (16, 1024), "tokens"),
    },
    "mlp": {"cpu": Workload("4 layers of 512", (64, 512)), "cuda": Workload("4 layers of 512", (4096, 512))},
    "resnet": _both("ResNet-18", (8, 3, 32, 32), (64, 3, 224, 224)),
    "gpt2": _both("GPT-2", (2, 64), (8, 1024), "tokens", "2 of its 12 layers"),
    "llama": _both("Llama 3.2 1B", (2, 64), (4, 1024), "tokens", "2 of its 16 layers"),
    "qwen3": _both("Qwen3 0.6B", (2, 64), (4, 1024), "tokens", "2 of its 28 layers"),
    "qwen3-moe": _both("Qwen3 30B-A3B with 32 of its 128 experts", (2, 64), (4, 512), "tokens", "2 of its 48 layers"),
    "bert": _both("BERT base", (2, 64), (16, 512), "tokens", "2 of its 12 layers"),
    "vit": _both("ViT B/16", (4, 3, 32, 32), (64, 3, 224, 224), cut="2 of its 12 layers"),
    "t5": _both("T5 base", (2, 32), (8, 512), "tokens", "2 + 2 of its 12 + 12 layers"),
    "mamba": _both("Mamba 130M", (2, 16), (8, 64), "tokens", "2 of its 24 layers"),
    "wav2vec2": _both("Wav2Vec2 base", (2, 8_000), (8, 80_000), "samples", "2 of its 12 layers"),
    "longformer": _both("Longformer base", (2, 64), (4, 2048), "tokens", "2 of its 12 layers"),
}


def workload(target: str, device: Device) -> Workload | None:
    """What a target of the sweep is on a device; None for another target."""
    return _WORKLOADS.get(target, {}).get(device)
