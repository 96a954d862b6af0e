"""Random functions in torch and in JAX: no false alarm, and planted differences are found and located."""

from __future__ import annotations

from types import CodeType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_baseline.parity.gpt import adapters, planted_mistakes
from jax_baseline.parity.location.functions import locate
from jax_baseline.parity.pairs import run as run_pair
from jax_baseline.parity.rounding import jax_in_float64, torch_in_float64

from .random_gpts import comparisons
from .random_pairs import Description, descriptions
from .random_programs import OPERATIONS, Function, functions
from .test_jax_agreement import verdict

_WANTED, _PAIRS, _GPTS = 500, 100, 80


def lines(code):
    nested = [part for part in code.co_consts if isinstance(part, CodeType)]
    return {line for *_, line in code.co_lines() if line}.union(*map(lines, nested))


def located(program):
    """Whether the first difference is named at a line of the operation that has it."""
    array = program.input().astype(np.float64)

    def in_torch():
        with torch_in_float64():
            return program.torch(torch.from_numpy(array))

    with jax.enable_x64(True), jax_in_float64():
        found = locate(in_torch, program.jax, (jnp.asarray(array),))
    in_torch, in_jax, *_ = OPERATIONS[program.steps[program.wrong[0]][0]]
    places = [(found.torch, in_torch), (found.jax, in_jax)]
    return any(":" in place and int(place.rpartition(":")[2]) in lines(made.__code__) for place, made in places)


def check(program):
    found = verdict(program.torch, program.jax, program.input())
    if program.wrong is None:
        assert found.same, found.text
        return "equal"
    x = torch.from_numpy(program.input()).double()
    with jax.enable_x64(True), jax_in_float64():
        wrong = np.asarray(program.jax(jnp.asarray(x.numpy())))
    with torch_in_float64():
        right = program.torch(x).numpy()
    if np.linalg.norm(wrong - right) < 1e-9 * np.linalg.norm(right):
        return "planted without effect"
    if found.same:
        return "planted, missed"
    return "planted, located" if located(program) else "planted, found"


@pytest.mark.fuzz
def test_random_functions(fuzz):
    record = fuzz.run(
        functions(),
        check,
        programs="functions written in torch and in JAX, one in two with a planted difference",
        oracle="equality by construction",
        wanted=_WANTED,
    )
    planted = sum(record.outcomes.get(f"planted, {how}", 0) for how in ("located", "found", "missed"))
    assert record.outcomes.get("planted, located", 0) >= 0.95 * planted, record.outcomes


@pytest.mark.parametrize(
    ("steps", "wrong", "dtype", "outcome"),
    [
        ((("attention", True), ("layer_norm", False), ("gelu", False)), None, "bfloat16", "equal"),
        pytest.param(
            (("matmul", False), ("gelu", True), ("softmax", False)),
            (1, 1),
            "float16",
            "planted, located",
            marks=pytest.mark.slow,
        ),
        ((("rms_norm", False), ("matmul", False), ("cumsum", True)), (0, 1e-6), "float32", "planted, located"),
        ((("softmax", False), ("clip", False)), (1, 1.5), "float32", "planted without effect"),
    ],
)
def test_known_functions_have_their_outcome(steps, wrong, dtype, outcome):
    assert check(Function((3, 4, 6), steps, wrong, seed=0, dtype=dtype)) == outcome


def check_pair(description):
    pair = description.pair()
    narrowest = "float32"
    for dtype in ("float64", "float32"):
        outcome = run_pair(pair, dtype, narrowest=narrowest)
        narrowest = outcome.narrowest
        assert "casts to narrower types stay" not in outcome.widened, outcome.widened
        if outcome.verdict == "NO PARITY" and description.wrong:
            return f"planted, found: {description.wrong}"
        assert outcome.verdict == "PARITY", str(outcome)
    assert not description.wrong, f"missed: {outcome}"
    return "equal"


@pytest.mark.fuzz
def test_random_pairs(fuzz):
    fuzz.run(
        descriptions(),
        check_pair,
        programs="pairs of models with casts on both sides or one, state and parameter groups, one in two with a "
        "planted difference",
        oracle="equality by construction",
        wanted=_PAIRS,
    )


@pytest.mark.slow
def test_known_pairs_have_their_outcome():
    assert check_pair(Description("bfloat16 gelu", "mean", "rates", "", 3)) == "equal"
    assert check_pair(Description("float32 loss", "teacher", "mask", "no mask", 3)) == "planted, found: no mask"


def check_gpt(comparison):
    if not comparison.mistake:
        divergence = adapters.run(comparison.setup).divergence()
        assert divergence is None, str(divergence)
        return f"equal in {comparison.setup.training.dtype}"
    planted = [mistake for mistake in planted_mistakes.MISTAKES if mistake.name == comparison.mistake]
    equal, wrong = planted_mistakes.plant_mistakes(comparison.setup, planted)
    assert equal.step is None, equal
    return "planted, missed" if wrong.step is None else "planted, found"


@pytest.mark.fuzz
def test_random_gpts(fuzz):
    record = fuzz.run(
        comparisons(),
        check_gpt,
        programs="GPTs of random shapes and training settings in three precisions, one in two with a planted mistake",
        oracle="equality by construction",
        wanted=_GPTS,
    )
    missed, found = (record.outcomes.get(f"planted, {how}", 0) for how in ("missed", "found"))
    assert missed <= 1 + 0.08 * (missed + found), record.outcomes
