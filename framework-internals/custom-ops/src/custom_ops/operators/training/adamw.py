"""AdamW over all parameters of a group in one kernel, with the clipping of the gradients in the same pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from custom_ops.operators.calls import calls
from custom_ops.operators.checks import check_adamw, check_adamw_group, check_gradient_norm, is_sharded, wide
from custom_ops.operators.registration import Rules
from custom_ops.operators.training.memory import (
    dense,
    fits,
    fitted,
    gradient_of,
    in_memory_order,
    is_sharded_alike,
    like_parameter,
    local,
    real,
    sum_over_processes,
)

_NARROW = (torch.float16, torch.bfloat16)
_KEYS = {"step", "exp_avg", "exp_avg_sq"}
_OPTIONAL_KEYS = {"max_exp_avg_sq", "master"}


class _Operands(NamedTuple):
    """The lists of the kernel: masters or parameters, what belongs to them, and the parameters that have masters."""

    written: Sequence[Tensor]
    gradients: Sequence[Tensor]
    means: Sequence[Tensor]
    squares: Sequence[Tensor]
    maxima: Sequence[Tensor]
    steps: list[Tensor]
    copies: Sequence[Tensor]


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with decoupled weight decay, one kernel per parameter group.

    The update is that of ``torch.optim.AdamW``, with the same arguments. A call moves 28 bytes per float32 parameter,
    which is the least: it reads the parameter, its gradient and both moments, and writes all but the gradient. If
    ``step`` is given a norm, the kernel also scales the gradients while it reads them;
    ``torch.nn.utils.clip_grad_norm_`` reads and writes them once more. The gradients themselves stay as they are.

    A parameter of 16 bits has a float32 master in the state (Micikevicius et al. 2018): the update reads the gradient,
    changes the master and rounds it to the parameter, in 30 bytes. A model under autocast whose matrices are bfloat16
    has the same products, and neither its forward pass casts them nor its backward pass their gradients. The parameter
    decides: an element that is not its rounded master when the step begins was written by somebody else (a loaded
    checkpoint, pruning, an average that is swapped in), and the step takes it for the master. The kernel compares
    them, so the way of writing does not matter, and a CUDA graph does the same.

    State and parameter groups have the names and shapes of ``torch.optim.AdamW(fused=True)``, and masters beside them,
    so the ``state_dict`` of one can be loaded into the other. A learning rate that is a tensor on the parameters'
    device may change between the replays of a CUDA graph.

    Under ``torch.compile``, a schedule of the learning rate causes no further graphs; the rate is rounded to float32
    there, or has to be a tensor if parameters are float64. The other numbers are part of the graph. One that changes
    at each step makes a graph for each value (the betas under ``OneCycleLR``; ``cycle_momentum=False`` keeps them).

    ``torch.amp.GradScaler`` refuses gradients of float16 parameters. Remedies are bfloat16, float32 parameters under
    autocast, or a constant factor of the loss, on which the update does not depend but for ``eps``.

    Args:
        params: Parameters or parameter groups, on a CPU or a GPU; DTensors too, each process updating its part. All
            floating-point dtypes have a kernel, and complex ones are pairs of real ones. Parameters that do not fill
            their memory (slices of a tensor) are copied to and fro. Gradients have the dtype of their parameter, or
            float32 beside 16 bits, or 16 bits beside float32.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the two moments, each from 0 to below 1.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the parameters per step, times the learning rate.
        amsgrad: Divide by the largest second moment so far (Reddi et al. 2018); 8 bytes more per parameter.
        maximize: Ascend instead of descending.
        foreach: Accepted for torch's sake; there is one implementation. So is ``fused``.
        capturable: Accepted likewise; a CUDA graph can always contain the step.
        differentiable: Only False; the kernel has no derivative.
        fused: See ``foreach``.
        dtype: Casts the parameters, which are float32, to ``torch.bfloat16`` or ``torch.float16`` when their group is
            added, and keeps their values as masters. A group may have its own.

    Raises:
        ValueError: If a number is out of its range, or ``differentiable`` is true.
        TypeError: If parameters that are not float32, or are DTensors, are to be cast, the dtype has not 16 bits, or
            ``amsgrad`` or ``maximize`` is not a bool.
    """

    _casts_at_once = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"amsgrad": amsgrad, "maximize": maximize, "differentiable": differentiable}
        without_effect = {"foreach": foreach, "capturable": capturable, "fused": fused}
        defaults = {**numbers, **flags, **without_effect, "dtype": dtype}
        check_adamw_group(defaults)
        self._casts_at_once = False
        super().__init__(params, defaults)
        del self._casts_at_once
        for group in self.param_groups:  # none of which is refused
            self._cast(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with the constructor's numbers and flags where it has none of its own.

        Raises:
            ValueError: As for the constructor.
            TypeError: As for the constructor.
        """
        if isinstance(param_group, dict):
            check_adamw_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        _set_flags(param_group)
        try:
            _check_cast(param_group)
        except TypeError:
            self.param_groups.pop()
            raise
        if self._casts_at_once:
            self._cast(param_group)

    def _cast(self, group: dict[str, Any]) -> None:
        # Not part of the group, so that torch's optimizer can load it: afterwards the parameters have this dtype.
        if (dtype := group.pop("dtype")) is None:
            return
        for parameter in group["params"]:
            master = parameter.detach().clone()
            parameter.data = parameter.detach().to(dtype)
            self.state[parameter]["master"] = master
            # Whole, so that torch's optimizer can load it.
            self._state_of(parameter, dense(parameter), group["amsgrad"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state with its options; the parameters stay as they are.

        Where a parameter of 16 bits is not its rounded master, the next step takes the parameter for it.

        Args:
            state_dict: From this optimizer or from ``torch.optim.AdamW``, with any of its options but
                ``differentiable``. A step may be a number, as before torch 1.12.

        Raises:
            ValueError: If the groups do not match, an option is out of its range, or the state is another optimizer's
                or does not fit the parameters. Nothing has changed then.
            TypeError: If a moment or a master is no tensor. Nothing has changed then either.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        given: dict[str, Any] = {}

        def keep(_: Any, final: dict[str, Any]) -> None:  # after the user's hooks
            for state in final["state"].values():
                if isinstance(state, dict) and state:
                    _check_loaded(state)
            given.update(final)

        hook = self.register_load_state_dict_pre_hook(keep)
        try:
            super().load_state_dict(state_dict)
            self._fit_state(given)
        except BaseException:
            self.__dict__.update(before)  # torch has put others in their place, and has not changed them
            raise
        finally:
            hook.remove()

    def _fit_state(self, given: dict[str, Any]) -> None:
        """Fit a state that torch has loaded to the parameters."""
        saved = iter([key for group in given["param_groups"] for key in group["params"]])
        for group in self.param_groups:
            for parameter, key in zip(group["params"], saved, strict=False):
                if not (state := given["state"].get(key)):
                    continue
                if parameter.dtype in _NARROW:  # torch has rounded the state to the dtype of the parameter
                    for name in _KEYS - {"step"} | _OPTIONAL_KEYS & state.keys():
                        self.state[parameter][name] = state[name].to(parameter.device, torch.float32, copy=True)
                self._state_of(parameter, dense(parameter), group["amsgrad"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state that was loaded, copied or unpickled."""
        for group in state["param_groups"]:
            for name in ("amsgrad", "maximize", "differentiable"):
                group.setdefault(name, False)
            check_adamw_group(group)
            _set_flags(group)
        super().__setstate__(state)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the L2 norm of all gradients as one vector, a scalar on their device; 0 if there are none.

        Parts of DTensors are added up over the processes. The result is float64 if a gradient is, else float32.

        Raises:
            TypeError: If a gradient is sparse, or its dtype has no kernel.
        """
        alike: dict[Any, list[Tensor]] = {}
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            gradient = gradient_of(parameter)
            sharding = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None  # type: ignore[attr-defined]
            double = gradient.dtype in (torch.float64, torch.complex128)
            alike.setdefault((gradient.device, double, sharding), []).append(gradient)
        norms = []
        for gradients in alike.values():
            norm = gradient_norm([real(local(gradient)) for gradient in gradients])
            if is_sharded(gradients[0]):
                norm = sum_over_processes(norm.square(), gradients[0]).sqrt()
            norms.append(norm)
        if len(norms) < 2:
            return norms[0] if norms else torch.zeros(())
        dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
        return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]))

    @overload
    def step(self, closure: None = None, *, norm: Tensor | None = None, max_norm: float = ...) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, norm: Tensor | None = None, max_norm: float = ...) -> float: ...
    @torch.no_grad()
    def step(
        self, closure: Callable[[], float] | None = None, *, norm: Tensor | None = None, max_norm: float = 1.0
    ) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients again.
            norm: The norm of the gradients, from :meth:`gradient_norm`. The update then uses the gradients times
                min(1, max_norm / (norm + 1e-6)), as after ``torch.nn.utils.clip_grads_with_norm_``.
            max_norm: The largest norm; unused without ``norm``.

        Returns:
            The loss of the closure.

        Raises:
            ValueError: If a gradient or the state has another shape than its parameter, ``norm`` several elements, or
                elements of a parameter share memory.
            TypeError: If a dtype has no kernel, a gradient's does not go with that of its parameter, it is sparse, or
                ``norm`` is no tensor.
            native_build.BuildError: At the first call, if the kernels cannot be built.
        """
        if norm is not None and not isinstance(norm, Tensor):
            raise TypeError(
                "AdamW.step: argument 'norm': expected the tensor that gradient_norm() returns, or None, got "
                f"{type(norm).__name__}"
            )
        if not isinstance(max_norm, (int, float, Tensor)):
            raise TypeError(f"AdamW.step: argument 'max_norm': expected a number, got {max_norm!r}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if norm is not None and is_sharded(norm):
            norm = norm.full_tensor()  # type: ignore[attr-defined]
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for parameter in group["params"]:
                if (gradient := parameter.grad) is not None:
                    alike.setdefault((parameter.device, parameter.dtype, gradient.dtype), []).append(parameter)
            for parameters in alike.values():
                self._update(group, parameters, norm, max_norm)
        return loss

    def _update(
        self, group: dict[str, Any], parameters: Sequence[Tensor], norm: Tensor | None, max_norm: float
    ) -> None:
        settings = _settings(group, parameters[0], max_norm)
        operands = None if is_dynamo_compiling() else self._as_they_are(group, parameters)
        if operands is not None:
            try:
                _run(calls.adamw_, operands, norm, settings)
            except RuntimeError:  # a tensor of another layout, dtype or device: nothing was changed
                operands = None
        if operands is None:
            places = [dense(parameter) for parameter in parameters]
            operands = self._fitted(group, parameters, places)
            if norm is not None:
                norm = norm.to(operands.written[0].device, operands.written[0].dtype)
            views_of_complex = is_dynamo_compiling() and parameters[0].is_complex()
            _run(_update_copies if views_of_complex else _update_checked, operands, norm, settings)
            for parameter, place in zip(parameters, places, strict=True):
                if place is not parameter:
                    parameter.copy_(place)
        if not is_dynamo_compiling():
            # The kernel changed them behind autograd's back; a later backward pass that needs the old values must fail.
            changed = (*operands.written, *operands.means, *operands.squares, *operands.maxima)
            torch.autograd.graph.increment_version((*parameters, *changed))

    def _as_they_are(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> _Operands | None:
        """The operands without a look at their layout, which the kernel checks; None if they surely need one.

        Of DTensors they are this process's parts. An operator of torch on a DTensor takes the host as long as the
        kernel takes a GPU, so there is none here for each parameter.
        """
        narrow, sharded = parameters[0].dtype in _NARROW, is_sharded(parameters[0])
        states = [self.state.get(p, {}) for p in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            known = type(parameter) in (Parameter, Tensor) or (sharded and is_sharded_alike(parameter.grad, parameter))
            if not known or not parameter.is_contiguous() or ("master" in state) != narrow:
                return None
        try:
            operands = _Operands(
                [state["master"] for state in states] if narrow else parameters,
                [p.grad for p in parameters if p.grad is not None],  # none is, by the choice of parameters
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                [state["step"] for state in states],
                parameters if narrow else [],
            )
        except KeyError:
            return None
        return _Operands(*([local(tensor) for tensor in tensors] for tensors in operands)) if sharded else operands

    def _fitted(self, group: dict[str, Any], parameters: Sequence[Tensor], places: Sequence[Tensor]) -> _Operands:
        """The operands as the kernel takes them, of parameters of every kind; raises where there is none."""
        states = [self._state_of(*pair, group["amsgrad"]) for pair in zip(parameters, places, strict=True)]

        def of_states(name: str) -> list[Tensor]:
            return [in_memory_order(state[name]) for state in states]

        narrow, values = parameters[0].dtype in _NARROW, [in_memory_order(place) for place in places]
        return _Operands(
            of_states("master") if narrow else values,
            [like_parameter(gradient_of(p), place) for p, place in zip(parameters, places, strict=True)],
            of_states("exp_avg"),
            of_states("exp_avg_sq"),
            of_states("max_exp_avg_sq") if group["amsgrad"] else [],
            [state["step"] for state in states],
            values if narrow else [],
        )

    def _state_of(self, parameter: Tensor, place: Tensor, amsgrad: bool) -> dict[str, Tensor]:
        """The state of a parameter, whole, and fitted to it if it was moved, cast or loaded."""
        state: dict[str, Any] = self.state[parameter]
        dtype = torch.float32 if parameter.dtype in _NARROW else parameter.dtype
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg", "exp_avg_sq"):
            if not fits(value := state.get(name), place, dtype):
                state[name] = fitted(name, value, place, dtype)
        if dtype == parameter.dtype:
            state.pop("master", None)
        elif not fits(master := state.get("master"), place, dtype):
            state["master"] = fitted("master", place if master is None else master, place, dtype)
        step = state.get("step")
        if not (isinstance(step, Tensor) and step.dtype == torch.float32 and step.device == parameter.device):
            count = 0.0 if step is None else float(step)
            state["step"] = torch.full((), count, dtype=torch.float32, device=parameter.device)
        return state


def _run(
    kernel: Callable[..., None], operands: _Operands, norm: Tensor | None, settings: tuple[Tensor | float | None, ...]
) -> None:
    """Count a step and update; a step that is refused does not count.

    One that is interrupted counts: Python raises what a signal's handler raises when the kernel has ended.
    """
    if not (calls.loaded or is_dynamo_compiling()):
        calls.load()  # before the step counts, because it may fail or be interrupted
    torch._foreach_add_(operands.steps, 1)
    try:
        kernel(*operands, norm, *settings)
    except (RuntimeError, TypeError, ValueError):
        torch._foreach_sub_(operands.steps, 1)
        raise


def _settings(group: dict[str, Any], parameter: Tensor, max_norm: float) -> tuple[Tensor | float | None, ...]:
    """The arguments of the kernel after the norm."""
    beta1, beta2 = group["betas"]
    numbers = (beta1, beta2, group["eps"], group["weight_decay"], max_norm)
    return (*_rate(group["lr"], parameter), *map(float, numbers), group["maximize"])


def _set_flags(group: dict[str, Any]) -> None:
    """Set what only torch reads in a group, when its optimizer loads it or a CUDA graph is captured."""
    parameters = group["params"]
    group["capturable"] = bool(parameters) and all(p.is_cuda for p in parameters)  # the counters are on the device
    group["fused"] = all(p.is_floating_point() for p in parameters)
    group["foreach"], group["differentiable"], group["decoupled_weight_decay"] = None, False, True


def _check_loaded(state: dict[str, Any]) -> None:
    """Check that the state of a parameter has what this optimizer keeps."""
    if _KEYS - state.keys():
        raise ValueError(
            f"AdamW.load_state_dict: expected a state with {', '.join(sorted(_KEYS))}, got one with "
            f"{', '.join(map(str, state))} (is it that of another optimizer?)"
        )
    for name in sorted((_KEYS | _OPTIONAL_KEYS) & state.keys() - {"step"}):
        if not isinstance(state[name], Tensor):
            raise TypeError(
                f"AdamW.load_state_dict: state '{name}': expected a tensor, got {type(state[name]).__name__} "
                "(load what state_dict() of an optimizer returned)"
            )


def _check_cast(group: dict[str, Any]) -> None:
    """Check that the parameters of a group can be cast to its dtype."""
    if (dtype := group["dtype"]) is None:
        return
    if dtype not in _NARROW:
        raise TypeError(f"AdamW: argument 'dtype': expected torch.bfloat16 or torch.float16, got {dtype}")
    for parameter in group["params"]:
        if is_sharded(parameter):  # whose part would stay as it is
            raise TypeError(
                f"AdamW: argument 'dtype': expected parameters that are no DTensors, got one (cast the model with "
                f".to({dtype}) before it is sharded; the optimizer then keeps masters too)"
            )
        if parameter.dtype != torch.float32:
            raise TypeError(
                f"AdamW: argument 'dtype': expected parameters of torch.float32 to cast, got {parameter.dtype}"
            )


def _rate(lr: float | Tensor, parameter: Tensor) -> tuple[Tensor | None, float]:
    """The learning rate as the kernel takes it: a float32 tensor on the device, or a number."""
    device = parameter.device
    if is_dynamo_compiling() and (isinstance(lr, Tensor) or parameter.dtype not in (torch.float64, torch.complex128)):
        # A number would be part of the graph: one for each rate of a schedule. A sum makes it an input, torch.full not.
        return (torch.zeros((), dtype=torch.float32, device=device) + lr).to(torch.float32), 0.0
    if not isinstance(lr, Tensor):
        return None, float(lr)
    if lr.is_cpu and (device.type != "cpu" or lr.dtype != torch.float32):
        return None, float(lr)
    return lr.to(device, torch.float32), 0.0


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return √ Σ g² over all elements of all tensors: ``torch.nn.utils.get_total_norm`` in two kernels.

    A GPU adds four squares, or eight of 16 bits, in float32 or float64, and these sums in float64; a CPU adds all
    squares in float64. The order of the sum is fixed.

    Args:
        gradients: Tensors of any shapes on one device, all float64 or of any other floating-point dtypes.

    Returns:
        A scalar on their device, float64 for float64 gradients and float32 for others.

    Raises:
        ValueError: If there are none, or the devices differ.
        TypeError: If a dtype has no kernel, or float64 is mixed with others.
    """
    norm: Tensor = _call("gradient_norm", check_gradient_norm, list(gradients))
    return norm


def _call(name: str, check: Callable[..., None], *arguments: Any) -> Any:
    if is_dynamo_compiling():
        return getattr(torch.ops.custom_ops, name).default(*arguments)
    operator = getattr(calls, name)
    try:
        return operator(*arguments)
    except RuntimeError:
        check(*arguments)  # the kernel's own error is always a RuntimeError
        raise


def _update_checked(*arguments: Any) -> None:
    _call("adamw_", check_adamw, *arguments)


def _update_copies(*arguments: Any) -> None:
    """Update what views complex numbers as real ones, in a graph: torch would pass the kernel the complex ones."""
    copied = [[x.clone() for x in tensors] for tensors in arguments[:5]]
    _update_checked(*copied, *arguments[5:])
    for place in (0, 2, 3, 4):  # all but the gradients
        for view, updated in zip(arguments[place], copied[place], strict=True):
            view.copy_(updated)


def _fake_norm(gradients: Sequence[Tensor]) -> Tensor:
    check_gradient_norm(gradients)
    return gradients[0].new_empty((), dtype=wide(gradients[0].dtype))


def _fake_adamw(*arguments: Any) -> None:
    check_adamw(*arguments)


RULES = (Rules("gradient_norm", _fake_norm), Rules("adamw_", _fake_adamw))
