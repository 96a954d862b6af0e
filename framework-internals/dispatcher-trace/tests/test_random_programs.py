"""Random programs, traced and untraced: the same bits, the same operators, and the same tables afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from dispatcher_trace import Shims, Trace, installed, record
from dispatcher_trace.capture import dispatcher

from . import random_programs
from .random_programs import (
    MODES,
    TRANSFORMS,
    Input,
    Program,
    as_json,
    described,
    prepared,
    programs,
    programs_of_numbers,
)

MATRIX, VECTOR = (Input("float32", shape, "contiguous") for shape in ((4, 4), (4,)))


class Untraced:
    """A process without shims that runs programs."""

    def __init__(self) -> None:
        self._process = self._start()

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        command = [sys.executable, random_programs.__file__]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, program: Program) -> tuple[list[str], Counter[str]] | None:
        """Results of a program and how often the profiler saw each operator; None if torch itself crashes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(as_json(program), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if answer:
            found = json.loads(answer)
            return found["results"], Counter(found["operators"])
        self.end()
        status = self._process.returncode
        self._process = self._start()
        assert status < 0, "the untraced program raised what is printed above"  # otherwise a signal ended it
        return None

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def untraced() -> Iterator[Untraced]:
    process = Untraced()
    yield process
    process.end()


@pytest.fixture(scope="module")
def shims() -> Iterator[Shims]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for mode in {*MODES, *TRANSFORMS}:  # the first use of a mode registers operators of torch's own
        prepared(Program((MATRIX,), (mode,), ("v0 / 3",)))()
    before = dispatcher.dumps()
    with installed("all") as shims:
        yield shims
    assert dispatcher.dumps() == before
    torch.set_num_threads(threads)


def without_a_shim(shims: Shims, program: Program) -> set[str]:
    """The operators of which a trace of the program may miss calls; docs/dispatcher-trace.md names the limits.

    These are operators at the key Undefined; those with Python kernels of torch, where functionalization and zero
    tangents reach them; and what the constructors of tensor subclasses call.
    """
    found = set()
    if "plain subclass" in program.modes:
        found = {"aten::alias", "aten::is_same_size", "aten::_has_same_storage_numel"}
    for operator, table in shims.tables.items():
        select = table.get("BackendSelect")
        tensors = any("Tensor" in str(argument.type) for argument in dispatcher.schema(operator).arguments)
        zeros = {"func.jvp", "dual numbers", "func.jacfwd", "func.hessian"}.intersection(program.modes)
        second = sum(mode in ("backward", "func.grad") for mode in program.modes) > 1
        python = zeros or second or "functionalize" in program.modes
        if (not tensors and (select is None or select.fallthrough)) or (
            python and any(cell.unwatched for cell in table.values())
        ):
            found.add(operator.partition(".")[0])
    return found


def check(program: Program, untraced: Untraced, shims: Shims) -> str:
    """Compare a program with its untraced run.

    Returns:
        Whether the operators are the same, or which of the known limits applies.
    """
    expected = untraced(program)
    if expected is None:
        return "torch itself crashes"
    results, operators = expected
    run = prepared(program)
    with record(shims, kernels=True) as t:
        traced = run()
    found = described(traced)
    assert found == results, "\n".join([str(program), "traced:", *found, "untraced:", *results])
    return compare_operators(program, t, operators, shims)


def compare_operators(program: Program, t: Trace, operators: Counter[str], shims: Shims) -> str:
    ours = Counter(call.operator.partition(".")[0] for call in t.all_calls)
    assert t.match is not None
    assert t.match.tied == t.match.calls == len(t.all_calls), program
    ours += Counter(t.unrecorded)
    if ours == operators:
        assert t.match.operators - t.match.calls == 0, program
        return "same operators"
    added, missed = ours - operators, operators - ours
    assert not added, f"{program}\nonly traced: {added}"
    assert set(missed) <= without_a_shim(shims, program), f"{program}\nonly untraced: {missed}"
    return "same operators but for a known limit"


PROGRAMS = {
    "programs": "expressions over operators × dtypes × views × modes, in place among them",
    "oracle": "the untraced run (bits, strides, aliases, errors), the profiler's operators, the dispatch tables",
}


@pytest.mark.fuzz
def test_traced_programs_compute_what_they_compute_untraced(fuzz, untraced: Untraced, shims: Shims) -> None:
    record = fuzz.run(programs(), lambda program: check(program, untraced, shims), **PROGRAMS, wanted=2000)
    assert record.outcomes.get("same operators", 0) >= 0.9 * record.run


def test_a_few_traced_programs_compute_what_they_compute_untraced(fuzz, untraced: Untraced, shims: Shims) -> None:
    fuzz.run(programs(), lambda program: check(program, untraced, shims), **PROGRAMS, wanted=5)


NUMBERS = {
    "programs": "calculations with Python numbers × dtypes × zero or one dimension × transforms × autocast",
    "oracle": PROGRAMS["oracle"],
}


@pytest.mark.fuzz
def test_numbers_under_transforms_are_computed_as_untraced(fuzz, untraced: Untraced, shims: Shims) -> None:
    fuzz.run(programs_of_numbers(), lambda program: check(program, untraced, shims), **NUMBERS, wanted=2000)


def test_a_few_numbers_under_transforms_are_computed_as_untraced(fuzz, untraced: Untraced, shims: Shims) -> None:
    fuzz.run(programs_of_numbers(), lambda program: check(program, untraced, shims), **NUMBERS, wanted=6)


# What random programs found, shrunk.


def test_the_tangent_of_a_number_keeps_its_dtype(untraced: Untraced, shims: Shims) -> None:
    for dtype in ("float32", "bfloat16"):
        program = Program((Input(dtype, (), "contiguous"),), ("dual numbers",), ("v0 * 0.1", "v0 * True", "v1 * 2"))
        # Whether the known limit shows depends on what ran before; any other outcome is a difference.
        assert check(program, untraced, shims) in ("same operators", "same operators but for a known limit")


def test_the_tracers_own_operators_under_functorch_are_not_in_the_profile(untraced: Untraced, shims: Shims) -> None:
    program = Program((VECTOR,), ("func.grad",), ("v0 * 0.3",))
    assert check(program, untraced, shims) == "same operators"


def test_a_call_that_ends_in_vmaps_own_kernel_is_seen(untraced: Untraced, shims: Shims) -> None:
    for step in ("v0.normal_()", "v0[0].uniform_()"):  # the second raises there
        program = Program((VECTOR,), ("vmap",), (step,))
        assert check(program, untraced, shims) == "same operators"


def test_a_number_whose_tangent_has_another_dtype(untraced: Untraced, shims: Shims) -> None:
    number = Input("float32", (), "contiguous")
    for step in ("v0 * 0.3", "v0 + 2j"):
        for given in (number, VECTOR):
            check(Program((given,), ("func.jvp",), (step,)), untraced, shims)


def test_a_number_that_vmap_casts_alone_under_grad(untraced: Untraced, shims: Shims) -> None:
    number = Input("float32", (), "contiguous")  # a sample has no dimensions
    for step in ("v0 + 1", "v0 * 0.3", "v0 / 3"):
        program = Program((number,), ("func.grad", "vmap"), (step,))
        assert check(program, untraced, shims) == "same operators"


def test_a_subclass_with_a_tangent_can_be_made(untraced: Untraced, shims: Shims) -> None:
    check(Program((MATRIX,), ("plain subclass", "func.jvp"), ("v0.neg()",)), untraced, shims)


def test_the_note_on_constructors_counts_constructors(shims: Shims) -> None:
    run = prepared(Program((VECTOR,), ("functionalize", "plain subclass"), ("v0.conj()",)))
    with record(shims, kernels=False) as t:
        run()
    assert t.unrecorded == {"aten::alias": 1}
    assert "What a tensor subclass's constructor calls (aten::alias) is not recorded; it ran once." in t.notes
