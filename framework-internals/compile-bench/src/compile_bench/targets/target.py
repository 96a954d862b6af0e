"""A target: a model with its arguments, and how to train it.

A target is a function without arguments, written ``path/to/file.py:function`` or ``package.module:attribute``. It
returns one of::

    (model, args)            # a torch.nn.Module or another callable, and a tuple of positional arguments
    (model, args, kwargs)    # with keyword arguments
    Target(model, args, …)   # with a loss, a schedule of shapes, an autocast dtype, or a custom training step
    a tensor                 # the function itself is the step, and is compiled as it is

For example::

    def small():
        torch.manual_seed(0)
        return torch.nn.Linear(64, 64), (torch.randn(8, 64),)

The function makes the model on the CPU, in the dtype that it runs in. The model and its arguments are then moved to the
device. A training step is forward, loss and backward. Without a ``loss``, the loss is the output if it is a scalar, and
otherwise the mean square of the output. If nothing requires a gradient, the step ends with the loss: a frozen model is
an example, or a function that runs its backward pass itself and returns the detached loss. The names in
:data:`compile_bench.targets.zoo.ZOO` are targets, too. :func:`compile_bench.targets.loading.load_target` finds both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchkit import UserError
from benchkit.device import Device
from benchkit.errors import first_line
from lowering import Choice

Step = Callable[[], Any]


class FunctionModel(nn.Module):
    """A module that calls a function. Modules in the function's closure do not become submodules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


class OperatorAdapter(Protocol):
    """An operator with two lowerings under torch.compile that does not use :func:`lowering.lower`.

    Attributes:
        name: Its name in tables and output.
    """

    name: str

    def select(self, choice: Choice) -> AbstractContextManager[object]:
        """Inside, models are compiled and run with ``choice``: ``"formula"`` is the operator as the compiler opens it.

        It is entered once in a process of its own, before the model is compiled, and may change whatever it needs to:
        a configuration, a registry, a method of a class.
        """
        ...


@dataclass(frozen=True)
class Target:
    """A model with its arguments, and how to train it.

    Attributes:
        model: The model, on the CPU.
        args: Positional arguments of ``model``.
        kwargs: Keyword arguments of ``model``.
        loss: Computes a scalar from the model's output.
        schedule: Further calls, in order, with other shapes: a smaller last batch, or a longer sequence. They are used
            to count recompilations and to compare shapes. Each call is a tuple of positional arguments, a mapping of
            keyword arguments, or one tensor. The schedule may be a ``DataLoader``; its first 1,000 calls are used.
        autocast: Dtype that the forward pass autocasts to; None for no autocast.
        make_step: Makes a whole training step, optimizer included, from a model (eager or compiled) and the arguments.
            The default step is forward, loss and backward.
        is_step: Whether ``model`` takes no arguments and runs a whole step, including the backward pass.
        operators: Operators of the model with two lowerings, for ``compile-bench tune``. Those that use
            :func:`lowering.lower` are found without it.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None
    schedule: Iterable[Any] = ()
    autocast: torch.dtype | None = None
    make_step: Callable[[nn.Module, tuple[Any, ...]], Step] | None = None
    is_step: bool = False
    operators: tuple[OperatorAdapter, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [tensor for _, tensor in named_tensors((self.args, dict(self.kwargs)))]

    def mapped(self, change: Callable[[Tensor], Tensor], *, elementwise: bool = False) -> Target:
        """The same target with every tensor among its arguments changed, see :func:`map_tensors`."""
        args, kwargs = map_tensors(change, (self.args, dict(self.kwargs)), elementwise=elementwise)
        return replace(self, args=args, kwargs=kwargs)

    def with_own_arguments(self) -> Target:
        """The same target with copies of its arguments, into which a call may write; no tensor becomes two."""
        arguments = (self.args, dict(self.kwargs))
        try:
            args, kwargs = copy.deepcopy(arguments, _changed_views(torch.clone, arguments))
        except Exception:  # whatever deepcopy raises, such as for a tensor that was computed with a gradient
            return self.mapped(
                lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), elementwise=True
            )
        return replace(self, args=args, kwargs=kwargs)

    def moved(self, device: Device) -> Target:
        """The same target with model, arguments and schedule on a device. The schedule becomes a tuple."""
        return replace(
            self.mapped(partial(_moved, device=device), elementwise=True),
            model=self.model.to(device),
            schedule=tuple(_move(entry, device) for entry in self.schedule),
        )

    def copied(self) -> nn.Module:
        """A copy of the model, so that steps of two variants do not disturb each other.

        Both models share what cannot be copied, such as a lock or an open file.
        """
        try:
            return copy.deepcopy(self.model)
        except Exception:  # whatever deepcopy raises for an attribute of the model
            torchs = ("_parameters", "_buffers", "_modules")
            attributes = (item for module in self.model.modules() for item in vars(module).items())
            values = [value for name, value in attributes if name not in torchs and not _can_be_copied(value)]
            return copy.deepcopy(self.model, {id(value): value for value in values})

    def forward(self, model: Callable[..., Any]) -> Any:
        """Call ``model`` with the arguments and the autocast of this target."""
        with self.precision():
            return model(*self.args, **self.kwargs)

    def precision(self) -> AbstractContextManager[object]:
        """The autocast context of the forward pass."""
        if self.autocast is None:
            return nullcontext()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        return torch.autocast(device, dtype=self.autocast)

    def scalar(self, output: Any) -> Tensor:
        """The loss of an output, a scalar."""
        if self.loss is not None:
            return self.loss(output)
        tensors = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        if not tensors:
            raise UserError(
                f"the model's output, of type {type(output).__name__}, holds no floating-point tensor to train on; "
                "give the target a loss"
            )
        if len(tensors) == 1 and tensors[0].ndim == 0:
            return tensors[0]
        return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()

    def backward(self, output: Any) -> Tensor:
        """Run the backward pass of an output's loss, if the loss requires a gradient. Returns the detached loss."""
        with torch.enable_grad():  # the user's file may have turned gradients off
            loss = self.scalar(output)
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def calls(self) -> Iterator[Target]:
        """The target with its own arguments, then with every entry of its schedule."""
        yield self
        for entry in self.schedule:
            if isinstance(entry, Mapping):
                yield replace(self, args=(), kwargs=entry)
            else:
                yield replace(self, args=tuple(entry) if isinstance(entry, (tuple, list)) else (entry,))

    def step(self, model: nn.Module, *, train: bool) -> Step:
        """A step of ``model``: a training step, or a forward pass without gradients.

        Args:
            model: The result of :meth:`copied`, compiled or not.
            train: Whether it is a training step. It has no effect if :attr:`is_step` is true.
        """
        if self.is_step:
            return lambda: model()
        if train and self.make_step is not None:
            return self.make_step(model, self.args)

        def training_step() -> Tensor:
            model.zero_grad(set_to_none=True)
            with torch.enable_grad():  # as in :meth:`backward`
                output = self.forward(model)
            return self.backward(output)

        def inference_step() -> Any:
            with torch.no_grad():
                return self.forward(model)

        return training_step if train else inference_step


def _can_be_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except Exception:  # whatever deepcopy raises for it
        return False
    return True


def tensors_in(output: Any) -> list[Tensor]:
    """The tensors in a model's output, in order, including those in fields of dataclasses."""
    tensors: list[Tensor] = []
    for leaf in pytree.tree_leaves(output):  # a step that is timed does it too
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_in([getattr(leaf, name) for name in _fields(leaf)])
    return tensors


def named_tensors(tree: Any, name: str = "", seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers and in attributes of objects, such as a cache, each with its place.

    A place is written as ``args[0].keys``. ``seen`` has the objects that were visited, by identity.
    """
    seen = {} if seen is None else seen
    try:
        paths = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a container whose class is registered without names
        paths = [(f"[{number}]", leaf) for number, leaf in enumerate(pytree.tree_leaves(tree))]
    for path, leaf in paths:
        if isinstance(leaf, Tensor):
            yield name + path, leaf
        elif id(leaf) not in seen and not isinstance(leaf, (type, nn.Module, FunctionType, ModuleType)):
            seen[id(leaf)] = leaf
            held = getattr(leaf, "__dict__", {})
            slots = {inner: getattr(leaf, inner) for inner in _fields(leaf)} if is_dataclass(leaf) else {}
            for inner, value in {**held, **slots}.items():
                yield from named_tensors(value, f"{name}{path}.{inner}", seen)


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Nested containers with every leaf changed, those in fields of dataclasses too."""

    def changed(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return change(leaf)
        other = copy.copy(leaf)
        for inner in _fields(leaf):
            object.__setattr__(other, inner, map_leaves(change, getattr(leaf, inner)))  # it may be frozen
        return other

    return pytree.tree_map(changed, tree)


def map_tensors(change: Callable[[Tensor], Tensor], tree: Any, *, elementwise: bool = False) -> Any:
    """A copy of nested containers and objects with every tensor changed, once where it occurs several times.

    Of an ``elementwise`` change, which keeps shapes, the results share memory where the tensors do.
    """
    views = _changed_views(change, tree) if elementwise else {}
    once = cache(lambda tensor: views[id(tensor)] if id(tensor) in views else change(tensor))
    memo: dict[int, Any] = {id(tensor): once(tensor) for _, tensor in named_tensors(tree)}
    # Modules are shared: one may be a part of the model.
    memo |= {id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, nn.Module)}
    try:
        return copy.deepcopy(tree, memo)
    except Exception:  # whatever deepcopy raises, such as for a lock
        return map_leaves(lambda leaf: once(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _changed_views(change: Callable[[Tensor], Tensor], tree: Any) -> dict[int, Tensor]:
    """By identity, what an elementwise change makes of tensors that share their memory: views of one changed tensor.

    Compiled code takes a view by its base, so a copy has a base of the same shape.
    """
    sharing: dict[tuple[int, torch.dtype], dict[int, Tensor]] = {}
    for _, tensor in named_tensors(tree):
        if type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.requires_grad:
            sharing.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), {})[id(tensor)] = tensor
    views: dict[int, Tensor] = {}
    for tensors in sharing.values():
        base, *others = {id(base): base for base in map(_base, tensors.values())}.values()
        if len(tensors) == 1 or others:
            continue
        changed = change(base)
        if changed is base or changed.stride() != base.stride():
            continue
        changed = changed.detach()
        for identity, tensor in tensors.items():
            offset = tensor.storage_offset() - base.storage_offset()
            views[identity] = changed if tensor is base else changed.as_strided(tensor.shape, tensor.stride(), offset)
    return views


def _base(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def _fields(instance: Any) -> list[str]:
    return [inner.name for inner in fields(instance) if hasattr(instance, inner.name)]


def in_mode(model: nn.Module, *, train: bool) -> nn.Module:
    """The model in training or evaluation mode; as it is if its mode is fixed, as that of an exported program."""
    with suppress(NotImplementedError):
        model.train(train)
    return model


def has_fixed_mode(model: nn.Module) -> bool:
    """Whether a model refuses to be put into its own mode."""
    try:
        model.train(model.training)
    except NotImplementedError:
        return True
    return False


def describe_error(error: BaseException) -> str:
    """Type and first line of an error and of its first cause, with a hint if it needs a GPU that is missing."""
    text, first = first_line(error), error
    while first.__cause__ is not None:
        first = first.__cause__
    if (cause := first_line(first)) not in text:
        text += f"; its cause: {cause}"
    if any(name in text for name in ("CUDA", "NVIDIA")) and not torch.cuda.is_available():
        text += " (it needs a GPU, and torch sees none)"
    return text


def _move(value: Any, device: Device) -> Any:
    return map_tensors(partial(_moved, device=device), value)


def _moved(tensor: Tensor, device: Device) -> Tensor:
    """A tensor on a device; a leaf stays one, so that its gradient stays on the device too."""
    if tensor.device.type == device or not (tensor.requires_grad and tensor.is_leaf):
        return tensor.to(device)
    return tensor.detach().to(device).requires_grad_()
