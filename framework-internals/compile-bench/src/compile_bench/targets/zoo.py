"""Targets of this package: architectures with random weights, small on a CPU and of published width on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchkit.device import Device
from compile_bench.targets.hugging_face import ARCHITECTURES, transformers_target
from compile_bench.targets.target import Step, Target
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.data import batch, load_corpus
from torch_baseline.model import GPT
from torch_baseline.optim import make_optimizer
from torch_baseline.train import make_train_step


class ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions with batch norm, added to the input (or to its projection where the shape changes)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(channels, width, 3, stride)
        self.second = _convolution(width, width, 3, 1)
        same = stride == 1 and channels == width
        self.shortcut = nn.Identity() if same else _convolution(channels, width, 1, stride)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, width, H / stride, W / stride)."""
        return F.relu(self.second(F.relu(self.first(x_NCHW))) + self.shortcut(x_NCHW))


class ResNet(nn.Module):
    """A stem, four stages of two residual blocks and a classifier.

    Each stage after the first doubles ``width``. For images of 32 × 32 (``small_images``) the stem is a 3 × 3
    convolution without pooling.
    """

    def __init__(self, *, width: int = 64, classes: int, small_images: bool = False) -> None:
        super().__init__()
        self.stem = _convolution(3, width, 3, 1) if small_images else _convolution(3, width, 7, 2)
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        widths = [width * 2**stage for stage in range(4)]
        blocks: list[nn.Module] = []
        for before, after in zip([width, *widths], widths, strict=False):
            blocks += [ResidualBlock(before, after, 1 if after == width else 2), ResidualBlock(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        features = self.blocks(self.pool(F.relu(self.stem(x_NCHW))))
        return self.head(features.mean((2, 3)))


def _convolution(channels: int, width: int, size: int, stride: int) -> nn.Sequential:
    """A convolution without bias, and a batch norm, which has one."""
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


def resnet(device: Device) -> Target:
    """ResNet-18.

    On a GPU it gets 64 images of 224 × 224 in bfloat16. On a CPU it has a quarter of its width and gets 8 images of
    32 × 32 in float32.
    """
    torch.manual_seed(0)
    if device == "cpu":
        model = ResNet(width=16, classes=10, small_images=True)
        images, classes = torch.randn(8, 3, 32, 32), 10
    else:
        model = ResNet(classes=1000)
        images, classes = torch.randn(64, 3, 224, 224), 1000
    labels = torch.randint(classes, (len(images),))
    return Target(
        model,
        (images,),
        loss=lambda logits: F.cross_entropy(logits, labels[: len(logits)].to(logits.device)),
        autocast=None if device == "cpu" else torch.bfloat16,
    )


def mlp(device: Device) -> Target:
    """Four layers of 512 with LayerNorm and GELU. Nearly all the time is matmul, which compiling does not change."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()]
    batch_size = 64 if device == "cpu" else 4096
    return Target(nn.Sequential(*layers, nn.Linear(512, 10)), (torch.randn(batch_size, 512),))


class Planted(nn.Module):
    """Three lines that break the graph and one that makes it recompile. It shows the break table for known causes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)
        self.started = False

    def forward(self, x: Tensor) -> Tensor:
        """Return any value. Only the breaks matter."""
        x = self.inner(x)
        if x.mean() > 0:  # a branch on a tensor's value
            x = x * 0.5
        x = x / x.abs().max().item()  # a tensor's value read by Python
        print(end="")  # a side effect in the middle
        if not self.started:  # a constant to the compiler, which is another in the second call
            self.started = True
        return self.outer(x)


def planted(device: Device) -> Target:
    """:class:`Planted`, called with a full batch and then with a smaller last one."""
    torch.manual_seed(0)
    return Target(Planted(), (torch.randn(32, 64),), schedule=((torch.randn(7, 64),),))


def gpt(device: Device, layers: int | None = None) -> Target:
    """The GPT of ``torch_baseline`` on its text: a whole step of its training loop, with clipping and AdamW.

    On a CPU this is ``tiny`` (4 layers, 16 × 128 bytes, float32). On a GPU it is ``gpt2-124m`` (12 layers, 16 × 1024
    tokens, bfloat16 autocast). With one layer it has the same code and compiles in a fraction of the time.
    """
    preset = "tiny" if device == "cpu" else "gpt2-124m"
    shape = GPTConfig.preset(preset)
    if layers is not None:
        shape = replace(shape, n_layer=layers)
    config = replace(TrainConfig.preset(preset), batch_size=16, accumulation=1)
    inputs, targets = batch(load_corpus().train, config.seed, 0, config.batch_size, shape.block_size)

    def make_step(model: nn.Module, args: tuple[Any, ...]) -> Step:
        step = make_train_step(model, make_optimizer(model, config), config)
        return lambda: step(*args)

    return Target(
        GPT(shape, seed=config.seed),
        (torch.from_numpy(inputs).contiguous(), torch.from_numpy(targets).contiguous()),
        autocast={"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config.dtype),
        make_step=make_step,
    )


@dataclass(frozen=True)
class Entry:
    """A target of the zoo."""

    make: Callable[[Device], Target]  # makes the target for a device: small on a CPU, of published width on a GPU
    about: str  # a phrase that describes it in a list


ZOO: dict[str, Entry] = {
    "gpt": Entry(gpt, "this repository's GPT: a whole step of its training loop, with clipping and AdamW"),
    "gpt-one-layer": Entry(partial(gpt, layers=1), "the same GPT with one layer"),
    "mlp": Entry(mlp, "four layers of 512 with LayerNorm and GELU"),
    "resnet": Entry(resnet, "ResNet-18; a quarter of its width on a CPU"),
    "planted": Entry(planted, "three lines that break the graph and one that makes it recompile"),
    **{
        name: Entry(partial(transformers_target, name), architecture["about"])
        for name, architecture in ARCHITECTURES.items()
    },
}
