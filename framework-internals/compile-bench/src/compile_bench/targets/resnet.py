"""ResNet-18 (He et al., 2015, arXiv:1512.03385)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchkit.device import Device
from compile_bench.targets.target import Target


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
