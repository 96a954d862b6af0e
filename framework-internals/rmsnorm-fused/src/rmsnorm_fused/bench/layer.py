"""Layer normalisation beside PyTorch's own and a copy of the same bytes: one shape, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from benchkit import Quantity, compare
from benchkit.results import Label
from benchkit.run import Run
from benchkit.timing import Inputs, capturable_stream, rotating_inputs
from benchkit.timing.statistics import worst
from rmsnorm_fused import layer_norm
from rmsnorm_fused.backends import IMPLEMENTATIONS
from rmsnorm_fused.bench.accuracy import Part, expected_layer
from rmsnorm_fused.bench.candidates import COMPILED, COPY, LAYER_EPS, OWN, TORCH_LAYER
from rmsnorm_fused.bench.measure import PARTS, PASSES, Case, Pass, Tensors, copy_of, gradients, rates
from rmsnorm_fused.impl import reference
from rmsnorm_fused.options import Options
from rmsnorm_fused.torch_private import kept_graphs

LayerNorm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def measure_layer(run: Run, case: Case, usable: Iterable[str]) -> None:
    """Check and time ``layer_norm`` with a weight and a bias: this package's, PyTorch's and torch.compile's.

    The records ``layer`` have the label ``pass`` and the case's labels; the values are those of a pass.

    Raises:
        RuntimeError: If one of this package's results is beyond its bound.
    """
    functions: dict[str, LayerNorm] = {TORCH_LAYER: _torch}
    if "headline" in run.configuration["compile_modes"]:
        torch.compiler.reset()
        functions[COMPILED] = torch.compile(_formula, dynamic=False, fullgraph=True)
    functions |= {name: partial(layer_norm, eps=LAYER_EPS, backend=name) for name in IMPLEMENTATIONS if name in usable}
    parameters = case.weight(run.device), (0.1 * torch.randn(case.columns, device=run.device)).to(case.dtype)
    parameters = (parameters[0], parameters[1].requires_grad_())
    with kept_graphs():
        shares = {name: _shares_of_bound(run, case, name, functions[name], parameters) for name in functions}
        sets = rotating_inputs(lambda: case.tensors(run.device), device=run.device)
        for which in PASSES:
            timings = _timings(run, case, functions, parameters, which, sets)
            for name in timings.timings:
                values = rates(case, which, name, timings)
                if name != COPY:
                    values["share_of_bound"] = Quantity(shares[name][which], "")
                    values["speedup"] = timings.speedup(name, over=TORCH_LAYER)
                labels: dict[str, Label] = {"pass": which, **case.labels, "implementation": name}
                run.record("layer", labels, values, {"note": timings[name].note})


def _torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, LAYER_EPS)


def _formula(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    return reference.normalise(x, None, weight, bias, Options(LAYER_EPS, centred=True))


def _shares_of_bound(run: Run, case: Case, name: str, function: LayerNorm, parameters: Tensors) -> dict[Pass, float]:
    torch.manual_seed(0)
    x, dy = case.tensors(run.device)
    x.requires_grad_()
    y = function(x, *parameters)
    names: tuple[Part, ...] = ("y", "dx", "dweight", "dbias")
    results = dict(zip(names, (y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)), strict=True))
    weight, bias = parameters
    references = expected_layer(x, weight, bias, dy, LAYER_EPS)
    shares = {part: references[part].share_of_bound(result) for part, result in results.items()}
    if name in OWN and not worst(shares.values()) <= 1:
        raise RuntimeError(f"{name}, layer_norm {case.rows} x {case.columns}: error over its bound: {shares}")
    return {which: worst(share for part, share in shares.items() if part in PARTS[which]) for which in PASSES}


def _timings(
    run: Run, case: Case, functions: dict[str, LayerNorm], parameters: Tensors, which: Pass, sets: list[Tensors]
) -> Any:
    copy = copy_of(case, which, run.device, sets)
    assert copy is not None
    seconds = run.configuration["seconds"]
    if which == "forward":
        forwards = {name: lambda x, _, f=function: f(x, *parameters) for name, function in functions.items()}
        with torch.no_grad():
            return compare({COPY: copy, **forwards}, device=run.device, inputs=sets, seconds=seconds)
    with capturable_stream(run.device):
        inputs: dict[str, Inputs] = {COPY: sets}
        for name, function in functions.items():
            leaves = [(x.detach().requires_grad_(), dy) for x, dy in sets]
            inputs[name] = [((function(x, *parameters),), (x, *parameters), (dy,)) for x, dy in leaves]
        timed = {COPY: copy, **dict.fromkeys(functions, gradients)}
        return compare(timed, device=run.device, inputs=inputs, seconds=seconds)
