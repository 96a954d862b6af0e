"""Whether a side of a pair draws random numbers: it is run twice on the same batches before anything is judged.

Rounding noise measures nothing on a random function: its runs differ by what it draws. A function is random if two runs
differ by more than √ε of float64, 1.5e-8 of the loss or of the gradients. Runs of a function that only adds in another
order, as parallel reductions do, differ by a few ε: a step would have to amplify that by 10⁷ to come near. What a draw
decides, such as one element of a million, moves a gradient by far more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import jaxpr_as_fun

from benchkit import UserError
from benchkit.timing.statistics import worst
from jax_baseline.parity.comparer import REPEATABLE
from jax_baseline.parity.comparison import deviation, distance
from jax_baseline.parity.location.operations import Operation, jax_operations, torch_operations
from jax_baseline.parity.pairs.pair import Batch
from jax_baseline.parity.pairs.sides import JaxSide, TorchSide

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_LISTED = 4  # places that a message names


def require_repeatable_torch(make: Callable[[], TorchSide], batches: Sequence[Batch]) -> None:
    """Run torch twice over the batches.

    ``make`` returns torch's side without noise, at its start, in float64.

    Raises:
        UserError: If the runs differ by more than rounding, with the modules and lines that draw; if a step is not
            finite; or if no step has a gradient.
    """
    runs = make(), make()
    moved = False
    for step, batch in enumerate(batches):
        one, other = (side.step(*batch) for side in runs)
        moved |= one.gradient_norm > 0
        apart = deviation(one, other)
        of_arrays = (apart[quantity].total for quantity in ("gradients", "state", "weights"))
        if not (by := worst((apart["loss"].total / (abs(one.loss) or 1.0), *of_arrays))) <= REPEATABLE:
            raise UserError(
                f"torch is random: on the same batch two runs of step {step} differ by {by:.1e} (more than "
                f"{REPEATABLE:.1e} is not rounding); {_torch_sources(runs, batches[: step + 1])}"
            )
    if not moved:
        raise UserError(
            "torch's gradients are zero in every step, as those of any other model may be; use weights and inputs on "
            "which the loss depends"
        )


def require_repeatable_jax(side: JaxSide, batch: Batch) -> None:
    """Trace JAX's loss twice and run it twice on a batch.

    Raises:
        UserError: If the runs differ by more than rounding, with the lines that draw.
    """
    arguments = side.arguments(batch)
    with side.computing():
        one, other = (jax.make_jaxpr(lambda *given: side.loss(*given))(*arguments) for _ in range(2))
        runs: list[Any] = [jaxpr_as_fun(traced)(*jax.tree.leaves(arguments)) for traced in _different(one, other)]
    runs = runs or [side.evaluated(batch) for _ in range(2)]
    if not _apart(*runs):
        return
    with side.computing():
        places = _places([jax_operations(lambda *given: side.loss(*given), arguments) for _ in range(2)])
    where = f": {places}" if places else "; where is not known"
    raise UserError(
        "JAX is random: two runs on the same batch differ by more than rounding, so its random numbers come from "
        f"outside its arguments{where}. Switch this off on both sides, or make the numbers a part of the batch"
    )


def _different(one: Any, other: Any) -> tuple[Any, ...]:
    """Both traces if they are not the same program with the same constants."""
    texts = {_ADDRESS.sub("", str(traced)) for traced in (one, other)}
    same = len(texts) == 1 and all(np.array_equal(*pair) for pair in zip(one.consts, other.consts, strict=True))
    return () if same else (one, other)


def _apart(one: Any, other: Any) -> bool:
    leaves = (enumerate(jax.tree.leaves(tree)) for tree in (one, other))
    arrays = ({str(number): np.asarray(leaf) for number, leaf in of_run} for of_run in leaves)
    return not all(apart <= REPEATABLE for apart in distance(*arrays).of_array.values())


def _torch_sources(runs: Sequence[TorchSide], batches: Sequence[Batch]) -> str:
    """Say which modules and lines draw, at the last of the batches."""
    recorded = []
    for side in runs:
        side.restart()
        for batch in batches[:-1]:
            side.step(*batch)
        with side.computing():
            recorded.append(torch_operations(lambda side=side: side.loss(batches[-1])))  # type: ignore[misc]
    places = _places(recorded, describe=lambda module: _described(runs[0], module))
    if not places:
        return "its forward pass does not: the difference is in the backward pass or the optimizer"
    return (
        f"it draws in {places}. Call eval() on what draws, or set its rate to 0, on both sides: two frameworks do not "
        "draw the same numbers"
    )


def _described(side: TorchSide, module: str) -> str:
    """A module with its class and its arguments: ``model.drop, Dropout(p=0.5) in training mode``."""
    try:
        submodule = side.model.get_submodule(module.removeprefix("model").removeprefix("."))
    except AttributeError:
        return module
    text = repr(submodule) if not any(True for _ in submodule.children()) else type(submodule).__name__
    return f"{module}, {' '.join(text.split())}{' in training mode' if submodule.training else ''},"


def _places(runs: Sequence[Sequence[Operation]], describe: Callable[[str], str] = lambda module: module) -> str:
    """The places where two runs draw, in words."""
    words_by_place = {}
    for operation in _sources(*runs):
        module, _, line = operation.place.rpartition(" ")
        words_by_place[operation.place] = " ".join(
            filter(None, (describe(module) if module else "", f"at {line} ({operation.name})"))
        )
    listed = list(words_by_place.values())[:_LISTED]
    return "; ".join(listed) + (f"; and {len(words_by_place) - _LISTED} more" if len(words_by_place) > _LISTED else "")


def _sources(one: Sequence[Operation], other: Sequence[Operation]) -> Iterator[Operation]:
    """Operations whose results differ though their operands do not."""
    differ: set[int] = set()
    for number, pair in enumerate(zip(one, other, strict=False)):
        mine, theirs = pair
        if (mine.name, mine.place, len(mine.values)) != (theirs.name, theirs.place, len(theirs.values)):
            yield mine  # from here on other operations run
            return
        if all(map(_same, mine.values, theirs.values)):
            continue
        differ.add(number)
        if mine.name == "input":  # a constant; what reads it has a place
            differ.discard(number)
        elif not differ & set(mine.operands):
            yield mine


def _same(mine: Any, theirs: Any) -> bool:
    return bool(mine.shape == theirs.shape and np.array_equal(mine, theirs, equal_nan=True))
