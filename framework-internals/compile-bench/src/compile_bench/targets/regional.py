"""What of a model is compiled: the regions that its own code compiles, all of it, or its repeated blocks.

A factory may return ``torch.compile(model)``, call ``model.compile()``, or compile some blocks. To compile such a model
again would put its regions into a larger one, with other breaks and guards. So the calls of ``torch.compile`` are noted
while a target is loaded (:func:`noting_regions`), and a model that holds regions becomes an :class:`OwnRegions`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn

from benchkit import UserError
from compile_bench.capture.collector import compiler_off, user_code_filter
from compile_bench.targets.case import Case
from compile_bench.targets.randomness import generators_restored
from compile_bench.targets.target import FunctionModel, in_mode

Signature = tuple[type[nn.Module], tuple[tuple[str, torch.Size], ...]]
Backend = Callable[..., Any]

# Values of torch.compile's options that say nothing about a region.
_DEFAULTS = {"backend": "inductor", "mode": "default", "fullgraph": False, "isolate_recompiles": False}


@dataclass(frozen=True)
class Region:
    """What a call of ``torch.compile`` in the target's own code compiles."""

    name: str  # name of the module's class, or of the function
    options: Mapping[str, Any]  # the options that are not the default
    module: weakref.ref[nn.Module] | None  # refers to the module; None for a function that is no module's method
    whole: bool  # whether it is all of the module, and not what another of its methods than forward calls
    result: weakref.ref[Any]  # refers to what the call returned

    @classmethod
    def of(cls, compiled: Any, result: Any, options: Mapping[str, Any]) -> Region:
        """The region of a call.

        ``compiled`` is a module, a function or a bound method; ``module.compile()`` gives the module's ``_call_impl``.
        """
        owner = getattr(compiled, "__self__", compiled)
        module = owner if isinstance(owner, nn.Module) else None
        whole = module is not None and getattr(compiled, "__name__", "forward") in ("forward", "_call_impl")
        name = getattr(compiled, "__qualname__", type(compiled).__name__)
        if module is not None:
            name = type(module).__name__ + ("" if whole else f".{compiled.__name__}")
        told = {key: value for key, value in options.items() if value is not None and value != _DEFAULTS.get(key)}
        return cls(name, told, None if module is None else weakref.ref(module), whole, weakref.ref(result))

    def __str__(self) -> str:
        shown = (f"{name}={getattr(value, '__name__', repr(value))}" for name, value in self.options.items())
        options = ", ".join(shown)
        return f"{self.name} ({options})" if options else self.name


@dataclass
class _Recorder:
    """Stands in the place of ``torch.compile``."""

    # The regions of this process. A module is imported once, and several targets may use its regions.
    regions: list[Region] = field(default_factory=list)
    # Chooses the backend of new regions, given the one that their code asks for; None keeps that.
    backend: Callable[[str | Backend], Backend] | None = None
    # While a target is loaded: holds the mode in which regions run eagerly, once there is one.
    loading: ExitStack | None = None
    installed: bool = False  # whether it stands there

    @contextmanager
    def install(self) -> Iterator[None]:
        if self.installed:
            yield
            return
        original = torch.compile

        @functools.wraps(original)
        def compile_and_note(model: Any = None, **options: Any) -> Any:
            if model is None:
                return functools.partial(compile_and_note, **options)
            result = original(model, **self._with_backend(options))
            if not options.get("disable"):
                self._note(Region.of(model, result, options))
            return result

        with patch.object(torch, "compile", compile_and_note), patch.object(self, "installed", True):
            yield

    def _with_backend(self, options: dict[str, Any]) -> dict[str, Any]:
        if self.backend is None:
            return options
        wanted = options.get("backend") or "inductor"
        given = dict(options.get("options") or {})
        if wanted == "inductor":  # its options are no other backend's; Dynamo itself reads this one
            given = {name: given[name] for name in given if name == "guard_filter_fn"}
            options = {**options, "mode": None}
        return {**options, "backend": self.backend(wanted), "fullgraph": False, "options": given or None}

    def _note(self, region: Region) -> None:
        self.regions = [*(known for known in self.regions if known.result() is not None), region]
        if self.loading is not None:
            self.loading.enter_context(torch.compiler.set_stance("force_eager"))


_recorder = _Recorder()


@contextmanager
def noting_regions() -> Iterator[None]:
    """For the time in which a target is loaded: notes its regions. They run eagerly, since loading measures nothing."""
    with _recorder.install(), ExitStack() as stack, patch.object(_recorder, "loading", stack):
        yield


@contextmanager
def regions_compiled_with(backend: Callable[[str | Backend], Backend]) -> Iterator[None]:
    """Inside, new regions use another backend, and break where ``fullgraph`` would have them raise.

    ``backend`` chooses it, given the one that the code asks for.
    """
    with _recorder.install(), patch.object(_recorder, "backend", backend):
        yield


class OwnRegions(nn.Module):
    """A model whose own code compiles regions of it. They run eagerly until :attr:`compiled` is set.

    A compiled region refers to its module by a closure, which no copy follows. So a copy is loaded again.
    """

    def __init__(self, model: nn.Module, regions: tuple[Region, ...], load: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.regions = regions
        self.compiled = False  # whether the regions run compiled
        self._load = load

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with nullcontext() if self.compiled else torch.compiler.set_stance("force_eager"):
            return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        with generators_restored():
            copied = self._load()
        copied.load_state_dict(self.state_dict())
        first = next(self.parameters(), None)
        return in_mode(copied.to(first.dtype if first is not None else None), train=self.training)

    @property
    def text(self) -> str:
        """``12 × Block (fullgraph=True), Head``."""
        counts = Counter(map(str, self.regions))
        return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())

    def inside(self) -> list[nn.Module]:
        """The modules all of which are compiled."""
        modules = [region.module() for region in self.regions if region.module is not None and region.whole]
        return [inner for module in modules if module is not None for inner in module.modules()]


def own_regions(model: nn.Module, *, is_step: bool) -> tuple[Region, ...]:
    """The regions that a loaded model holds.

    A function that a module only calls is no region of the module: it is compiled as a part of the module. In a whole
    step it is one, since steps are written with their calls of the compiler.
    """
    function = model.function if isinstance(model, FunctionModel) else None
    reached = list(model.modules()) if function is None else reachable(function)
    modules = [module for value in reached if isinstance(value, nn.Module) for module in value.modules()]
    held = {id(value) for module in modules for value in (module, *vars(module).values(), *_forwards(type(module)))}
    held.add(id(getattr(function, "__func__", function)))
    named = {id(value) for value in reached}
    alive = ((region, id(result)) for region in _recorder.regions if (result := region.result()) is not None)
    return tuple(
        region
        for region, result in alive
        if result in held or (result in named and (is_step or region.module is not None))
    )


def _forwards(kind: type[nn.Module]) -> list[Any]:
    return [vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)]


def reachable(function: Any) -> list[Any]:
    """A function, what it names, and what the user's functions and objects among these name or hold."""
    user_code = user_code_filter()
    reached: dict[int, Any] = {}
    pending = [function]
    while pending:
        value = pending.pop()
        if id(value) in reached:
            continue
        reached[id(value)] = value
        if isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            pending += [value.__func__, value.__self__]
        elif isinstance(value, FunctionType):
            pending += _named(value) if user_code.is_user(value.__code__.co_filename) else []
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
        elif user_code.is_user(_file_of(type(value))) and not isinstance(value, nn.Module):
            pending += vars(value).values() if hasattr(value, "__dict__") else []
    return list(reached.values())


def _file_of(kind: type) -> str:
    return getattr(sys.modules.get(kind.__module__), "__file__", None) or "<built-in>"


def _named(function: FunctionType) -> Iterable[Any]:
    """The values of a function's free names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    names = _names(function.__code__)
    yield from (value for name, value in list(function.__globals__.items()) if name in names)


def _names(code: CodeType) -> set[str]:
    return {
        *code.co_names,
        *(name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)),
    }


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The largest group of equal blocks in one container, with the same class and the same shapes of parameters.

    At least two modules, none inside another; empty if the model repeats no module with parameters.
    """
    groups: dict[tuple[str, Signature], list[nn.Module]] = defaultdict(list)
    for name, container in model.named_modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential)):
            for block in container:
                shapes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
                if shapes:
                    groups[name, (type(block), shapes)].append(block)
    repeated = [blocks for blocks in groups.values() if len(blocks) > 1]

    def parameters(blocks: list[nn.Module]) -> int:
        return sum(parameter.numel() for block in blocks for parameter in block.parameters())

    return max(repeated, key=parameters, default=[])


def compile_case(
    model: nn.Module, case: Case, *, backend: Backend | None = None, options: Mapping[str, Any] | None = None
) -> nn.Module:
    """Compile a model by the mode, the dynamic option and the scope of a case.

    Returns the module to call. With scope ``"blocks"`` the model's blocks change in place; with ``"nested"`` the class
    of its blocks changes for the rest of the process. :class:`OwnRegions` keep their regions, and run them compiled.
    With a ``backend`` in place of Inductor, the mode has no effect.

    Raises:
        UserError: If the options do not fit the model, or if torch.compile is off, so that every count would be 0.
    """
    if off := compiler_off():
        raise UserError(f"{case.target} cannot be compiled: {off}")
    if isinstance(model, OwnRegions):
        _refuse_options(model, case)
        model.compiled = True
        return model
    asked: dict[str, Any] = {"dynamic": case.dynamic}
    if backend is not None:
        asked["backend"] = backend
    elif options is not None:
        asked["options"] = dict(options)
    elif case.mode != "default":
        asked["mode"] = case.mode
    if case.scope == "whole":
        # Compiled as it is: called from another function, it would be skipped from its first graph break on.
        if isinstance(model, FunctionModel) and _is_python(model.function):
            return FunctionModel(torch.compile(model.function, **asked))
        return cast(nn.Module, torch.compile(model, **asked))
    blocks = blocks_of(model, case)
    if case.scope == "blocks":
        for block in blocks:
            block.compile(**asked)
        return model
    # This marks forward on the class. If each instance has a marked forward, torch 2.13 takes all of them for the same
    # region with the same weights: each block silently computes with the weights of the first one.
    kind = type(blocks[0])
    if kind not in _marked:
        kind.forward = torch.compiler.nested_compile_region(kind.forward)
        _marked.add(kind)
    return cast(nn.Module, torch.compile(model, **asked))


# Classes whose forward is marked as a nested region.
_marked: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()


def blocks_of(model: nn.Module, case: Case) -> list[nn.Module]:
    """The repeated blocks of the model of a case."""
    if blocks := repeated_blocks(model):
        return blocks
    raise UserError(f"{case.target} has no repeated blocks in a ModuleList or Sequential: compile it as a whole")


def inside_regions(model: nn.Module, case: Case) -> list[nn.Module]:
    """The modules of a model, before it is compiled, that are inside of what is compiled."""
    if isinstance(model, OwnRegions):
        return model.inside()
    if case.scope == "blocks":
        return [inner for block in blocks_of(model, case) for inner in block.modules()]
    return list(model.modules())


def _is_python(function: Any) -> bool:
    """Whether a callable is Python code: a function, a method, or an object with a ``__call__`` in Python."""
    kinds = (FunctionType, MethodType)
    return isinstance(function, kinds) or isinstance(function.__call__, kinds)


def _refuse_options(model: OwnRegions, case: Case) -> None:
    asked = {"mode": case.mode != "default", "dynamic": case.dynamic is not None, "scope": case.scope != "whole"}
    if options := [f"--{name}" for name, given in asked.items() if given]:
        raise UserError(
            f"{case.target} compiles {model.text} itself, got {', '.join(options)}: set the option in that call of "
            "torch.compile, or return the model uncompiled"
        )
