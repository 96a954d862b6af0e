"""ResNet (He and others, 2015), with the stride on the 3 × 3 convolution of a bottleneck ("v1.5")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchkit.device import Device
from compile_bench.target import Target


class ResidualBlock(nn.Module):
    """Convolutions with batch norm, added to the input (or to its projection where the shape changes).

    Args:
        channels: of the input.
        width: of the 3 × 3 convolutions.
        stride: of the first of them.
        bottleneck: 1 × 1, 3 × 3, 1 × 1 with four times the width at the end, rather than twice 3 × 3.
    """

    def __init__(self, channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.channels = 4 * width if bottleneck else width
        shapes: tuple[tuple[int, int, int, int], ...]
        if bottleneck:
            shapes = ((channels, width, 1, 1), (width, width, 3, stride), (width, self.channels, 1, 1))
        else:
            shapes = ((channels, width, 3, stride), (width, width, 3, 1))
        self.steps = nn.ModuleList(_convolution(*shape) for shape in shapes)
        projected = stride != 1 or channels != self.channels
        self.shortcut = _convolution(channels, self.channels, 1, stride) if projected else nn.Identity()

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """(N, channels, H, W) to (N, self.channels, H / stride, W / stride)."""
        y = x_NCHW
        for index, step in enumerate(self.steps):
            y = step(y if index == 0 else F.relu(y))
        return F.relu(y + self.shortcut(x_NCHW))


class ResNet(nn.Module):
    """A stem, four stages of residual blocks and a classifier.

    Args:
        depths: blocks of each stage: (2, 2, 2, 2) is ResNet-18, (3, 4, 6, 3) with bottlenecks ResNet-50.
        width: of the first stage; each later one doubles it.
        bottleneck: the kind of block.
        classes: outputs.
        small_images: a 3 × 3 stem without pooling, for images of 32 × 32.
    """

    def __init__(
        self, depths: Sequence[int], *, width: int = 64, bottleneck: bool, classes: int, small_images: bool = False
    ) -> None:
        super().__init__()
        stem = _convolution(3, width, 3, 1) if small_images else _convolution(3, width, 7, 2)
        self.stem = nn.Sequential(stem, nn.ReLU())
        self.pool = nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[ResidualBlock] = []
        channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(ResidualBlock(channels, width * 2**stage, stride, bottleneck=bottleneck))
                channels = blocks[-1].channels
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Images (N, 3, H, W) to logits (N, classes)."""
        features = self.blocks(self.pool(self.stem(x_NCHW)))
        return self.head(features.mean((2, 3)))


def _convolution(channels: int, width: int, size: int, stride: int) -> nn.Sequential:
    """A convolution without bias, and the batch norm that has one."""
    convolution = nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


def resnet(device: Device) -> Target:
    """ResNet-50, 64 images of 224 × 224, bfloat16 on a GPU; 18 layers of width 16 and up, 8 of 32 × 32 on a CPU."""
    torch.manual_seed(0)
    if device == "cpu":
        model = ResNet((2, 2, 2, 2), width=16, bottleneck=False, classes=10, small_images=True)
        images, classes = torch.randn(8, 3, 32, 32), 10
    else:
        model = ResNet((3, 4, 6, 3), bottleneck=True, classes=1000)
        images, classes = torch.randn(64, 3, 224, 224), 1000
    labels = torch.randint(classes, (len(images),))
    return Target(
        model,
        (images,),
        loss=lambda logits: F.cross_entropy(logits, labels[: len(logits)].to(logits.device)),
        autocast=None if device == "cpu" else torch.bfloat16,
    )
