"""What is compiled: the protocol of a target, on one screen.

A target is a function without arguments, written ``path/to/file.py:function`` or ``package.module:attribute``. It
returns one of::

    (model, args)            # a torch.nn.Module, or any callable, and the tuple of its positional arguments
    (model, args, kwargs)    # keyword arguments too
    Target(model, args, …)   # a loss, a schedule of shapes, an autocast dtype, a training step of one's own
    a tensor                 # then the function is itself the step: what it does is compiled as it stands

For example::

    def small():
        torch.manual_seed(0)
        return torch.nn.Linear(64, 64), (torch.randn(8, 64),)

The model is made on the CPU in the dtype it is to run in; it and its arguments are moved to the device. A training step
is forward, loss, backward; without a ``loss`` a scalar output is taken as it is, and the mean square of any other
output. Where nothing asks for a gradient (a frozen model, a function that does its own backward pass and returns the
loss detached) it ends with the loss. The names in :data:`compile_bench.targets.zoo.ZOO` are targets too;
:func:`compile_bench.targets.loading.load_target` finds either.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchkit import UserError
from benchkit.device import Device
from benchkit.errors import first_line

Step = Callable[[], Any]

# Of a data loader: the shapes of an epoch repeat themselves, and a loader may never end.
MOST_CALLS = 1_000


class FunctionModel(nn.Module):
    """A callable that is not a module, in the place of one. Modules that it closes over stay its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class Target:
    """A model, what it is called with, and how it is trained.

    Attributes:
        model: on the CPU.
        args: positional arguments of ``model``.
        kwargs: keyword arguments.
        loss: from the model's output to a scalar.
        schedule: further calls, in turn, where recompilations are counted and shapes compared: the last, smaller batch,
            a longer sequence. Each is a tuple of positional arguments, a mapping of keyword arguments or one tensor; a
            ``DataLoader`` will do (of which the first 1,000 calls are taken).
        autocast: dtype that the forward pass autocasts to; None for none.
        make_step: from a model (eager or compiled) and the arguments to a whole training step, optimizer included; by
            default forward, loss and backward.
        is_step: whether ``model`` takes no arguments and does a whole step, backward pass and all, when it is called.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None
    schedule: Iterable[Any] = ()
    autocast: torch.dtype | None = None
    make_step: Callable[[nn.Module, tuple[Any, ...]], Step] | None = None
    is_step: bool = False

    def moved(self, device: Device) -> Target:
        """The same target on a device, arguments too; the schedule becomes a tuple of tuples of arguments."""
        return replace(
            self,
            model=self.model.to(device),
            args=_move(self.args, device),
            kwargs=_move(dict(self.kwargs), device),
            schedule=tuple(_move(entry, device) for entry in itertools.islice(self.schedule, MOST_CALLS)),
        )

    def copied(self) -> nn.Module:
        """A model of its own with the same weights, so that steps of two variants do not disturb each other.

        What cannot be copied, such as a lock or an open file that a module holds, both have.
        """
        try:
            return copy.deepcopy(self.model)
        except Exception:  # whatever deepcopy raises for what the model holds
            held = (value for module in self.model.modules() for value in _plain_attributes(module))
            return copy.deepcopy(self.model, {id(value): value for value in held if not _can_be_copied(value)})

    def forward(self, model: nn.Module, args: tuple[Any, ...]) -> Any:
        """Call ``model`` as this target says."""
        with self.precision():
            return model(*args, **self.kwargs)

    def precision(self) -> AbstractContextManager[object]:
        """The autocast that the forward pass runs under."""
        if self.autocast is None:
            return nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, dtype=self.autocast)

    def scalar(self, output: Any) -> Tensor:
        """The loss of an output."""
        if self.loss is not None:
            return self.loss(output)
        tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        if not tensors:
            raise UserError("the model's output holds no floating-point tensor to train on; give the target a loss")
        if len(tensors) == 1 and tensors[0].ndim == 0:
            return tensors[0]
        return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()

    def backward(self, output: Any) -> Tensor:
        """The loss of an output, detached, after its backward pass; there is none where nothing asks for a gradient."""
        loss = self.scalar(output)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def at(self, entry: Any) -> Target:
        """The same target called with an entry of its schedule."""
        if isinstance(entry, Mapping):
            return replace(self, args=(), kwargs=entry)
        return replace(self, args=tuple(entry) if isinstance(entry, (tuple, list)) else (entry,))

    def calls(self) -> Iterator[Target]:
        """The target with its own arguments, then with every entry of its schedule."""
        yield self
        for entry in self.schedule:
            yield self.at(entry)

    def step(self, model: nn.Module, args: tuple[Any, ...] | None = None, *, train: bool) -> Step:
        """One step of ``model``: a training step, or a forward pass without gradients.

        Args:
            model: :meth:`copied`, or the compiled form of one.
            args: :attr:`args` by default.
            train: which of the two; a target that :attr:`is_step` has one kind.
        """
        args = self.args if args is None else args
        if self.is_step:
            return lambda: model()
        if train and self.make_step is not None:
            return self.make_step(model, args)

        def training_step() -> Tensor:
            model.zero_grad(set_to_none=True)
            return self.backward(self.forward(model, args))

        def inference_step() -> Any:
            with torch.no_grad():
                return self.forward(model, args)

        return training_step if train else inference_step


def _plain_attributes(module: nn.Module) -> list[Any]:
    """What a module holds besides parameters, buffers and other modules."""
    return [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]


def _can_be_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:  # whatever deepcopy raises for it
        return False
    return True


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors that a model returns, in turn, also those in the fields of dataclasses."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, each.name) for each in fields(leaf)])
    return found


def describe_error(error: BaseException) -> str:
    """Type and first line of an error, with a hint where the machine is what it lacks."""
    hint = ""
    if any(name in str(error) for name in ("CUDA", "NVIDIA")) and not torch.cuda.is_available():
        hint = " (it needs a GPU, and torch sees none)"
    return first_line(error) + hint


def _move(value: Any, device: Device) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), value)
