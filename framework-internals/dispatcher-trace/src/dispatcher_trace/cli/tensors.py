"""Tensors as ``--tensor`` specifies them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchkit import UserError
from benchkit.errors import first_line
from dispatcher_trace.capture.types import DTYPE_NAMES, dtype_name

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SPEC = re.compile(r"^(?P<name>[^\W\d]\w*)=(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:@(?P<device>[\w:]+))?$")
_DEVICE = re.compile(r"^(cpu|cuda)(:\d+)?$")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to make: ``a=bf16[256,256]@cuda``.

    Attributes:
        name: Name of the variable.
        dtype: Dtype of the tensor.
        shape: Sizes; empty for a zero-dimensional tensor.
        device: Device of the tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str

    @classmethod
    def parse(cls, text: str, device: str = "cpu") -> TensorSpec:
        """Read a specification.

        Args:
            text: ``a=bf16[256,256]`` or ``a=bf16[256,256]@cuda``.
            device: Device if the specification names none.

        Raises:
            UserError: If the specification is malformed; the message says how.
        """
        match = _SPEC.match(text.strip())
        if match is None:
            raise UserError(
                f"--tensor takes NAME=DTYPE[SIZES] or NAME=DTYPE[SIZES]@DEVICE (a=bf16[256,256]@cuda), got {text!r}"
            )
        dtype = parse_dtype(match["dtype"], "--tensor")
        try:
            shape = tuple(int(size) for size in match["shape"].split(",")) if match["shape"].strip() else ()
        except ValueError:
            raise UserError(
                f"--tensor: sizes are whole numbers between commas, got [{match['shape']}] in {text!r}"
            ) from None
        if keyword.iskeyword(match["name"]):
            raise UserError(f"--tensor: expected a variable's name, got Python's keyword {match['name']!r} in {text!r}")
        if match["device"]:
            _check_device(match["device"], text)
        return cls(match["name"], dtype, shape, match["device"] or device)

    def make(self, *, requires_grad: bool = False) -> torch.Tensor:
        """A tensor of seeded random numbers: normal for floating point, 0 to 9 for integers.

        Raises:
            UserError: If torch cannot make a tensor of this dtype or size.
        """
        generator = torch.Generator().manual_seed(0)
        continuous = self.dtype.is_floating_point or self.dtype.is_complex
        try:
            if continuous:
                numbers = torch.randn(self.shape, generator=generator, dtype=torch.float32)
            else:
                numbers = torch.randint(0, 10, self.shape, generator=generator)
            tensor = numbers.to(self.device, self.dtype)
        except (RuntimeError, TypeError) as error:  # TypeError: a size that does not fit 64 bits
            raise UserError(
                f"--tensor: torch cannot make {self} ({first_line(error)}); take smaller sizes, or a dtype of "
                f"{', '.join(DTYPES)}"
            ) from error
        return tensor.requires_grad_(requires_grad) if continuous else tensor

    def __str__(self) -> str:
        return f"{self.name}={dtype_name(self.dtype)}[{','.join(map(str, self.shape))}]@{self.device}"


def parse_tensors(texts: Sequence[str], device: str) -> list[TensorSpec]:
    """Read the specifications of one command line.

    Args:
        texts: Specifications for :meth:`TensorSpec.parse`.
        device: Device of a specification that names none.

    Raises:
        UserError: If a specification is malformed, or two have the same name.
    """
    specs: dict[str, TensorSpec] = {}
    for text in texts:
        spec = TensorSpec.parse(text, device)
        if spec.name in specs:
            raise UserError(
                f"--tensor: {spec.name!r} is given twice, as {specs[spec.name]} and as {spec}; give each tensor "
                "another name, or leave one out"
            )
        specs[spec.name] = spec
    return list(specs.values())


def _check_device(device: str, text: str) -> None:
    """Refuse an unknown device, or a GPU that this machine does not have."""
    kind, _, index = device.partition(":")
    if _DEVICE.match(device) is None:
        raise UserError(
            f"--tensor: the device after @ is cpu, cuda or cuda:N, got {device!r} in {text!r}; without @ it is "
            "--device's"
        )
    gpus = torch.cuda.device_count()
    if kind == "cuda" and int(index or 0) >= gpus:
        raise UserError(
            f"--tensor: {text!r} asks for GPU {index or 0}, and torch {torch.__version__} sees {gpus} GPUs; use @cpu"
            + (f" or @cuda:0 to @cuda:{gpus - 1}" if gpus else "")
        )


def parse_dtype(text: str, option: str) -> torch.dtype:
    """``bf16`` or ``bfloat16`` → ``torch.bfloat16``.

    Raises:
        UserError: If there is no such dtype; the message names the option and the dtypes.
    """
    dtype = DTYPES.get(text, getattr(torch, text, None))
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{option}: unknown dtype {text!r}; one of {', '.join(DTYPES)}")
    return dtype
