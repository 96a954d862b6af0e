"""Operators of every style of torch.library: inside a trace and after it they behave as before, and so does torch."""

from __future__ import annotations

import pytest
import torch

from dispatcher_trace import installed, record, trace
from dispatcher_trace.capture import dispatcher

from .library_styles import NAMESPACE, STYLES, USES, outcome, state

SLOW = ("make_fx, fake", "make_fx, symbolic", "compile", "compile, eager", "opcheck")


class Seen:
    """What all uses of all styles gave before, inside and after one trace, and the state around it."""

    def __init__(self, usual_operators: list[str]) -> None:
        self.operators = {style: make() for style, make in STYLES.items()}
        names = [operator.name for operator in self.operators.values()]
        outcome("make_fx, symbolic", self.operators["impl CPU, Meta"])  # fills every cache of torch's
        self.before = self._outcomes()
        state_before = state(names)
        shimmed = installed("all", only=[*usual_operators, *names])
        with pytest.raises(ZeroDivisionError), shimmed as shims, record(shims, kernels=False) as self.trace:  # noqa: PT012
            self.inside = self._outcomes()
            raise ZeroDivisionError
        self.states = state_before, state(names)
        self.after = self._outcomes()

    def _outcomes(self) -> dict[tuple[str, str], str]:
        uses = [use for use in USES if use not in SLOW]
        return {(style, use): outcome(use, operator) for style, operator in self.operators.items() for use in uses}


@pytest.fixture(scope="module")
def seen(usual_operators: list[str]) -> Seen:
    return Seen(usual_operators)


def test_every_use_gives_the_same_before_inside_and_after_a_trace(seen: Seen) -> None:
    assert seen.inside == seen.before
    assert seen.after == seen.before
    errors = [key for key, text in seen.before.items() if "Error" in text]
    assert len(errors) < len(seen.before) / 4  # the oracle is not empty


@pytest.mark.parametrize(
    "part",
    [
        "tables",
        "second map",
        "py_kernels",
        "_dispatch_cache",
        "cached operators",
        "fake tensors",
        "questions",
        "torch.library",
    ],
)
def test_the_state_of_torch_is_as_before(seen: Seen, part: str) -> None:
    before, after = seen.states
    assert after[part] == before[part]
    assert before[part]


def test_torch_tensor_has_no_attribute_more(seen: Seen) -> None:
    before, after = (set(each["torch.Tensor"]) for each in seen.states)
    assert after == before


def test_python_kernels_are_hops(seen: Seen) -> None:
    for style, operator in seen.operators.items():
        paths = [call.path for call in seen.trace.all_calls if call.operator == operator.name]
        assert paths, style
        if style == "impl of a builtin":  # cannot be registered again, so it has no shim
            assert f"{operator.name} at CPU" in seen.trace.unshimmed
        elif style != "impl CompositeImplicitAutograd":
            assert any(path[-1] == "CPU" for path in paths), style


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_compilation_and_opcheck_give_the_same_before_inside_and_after(style: str) -> None:
    operator = STYLES[style]()
    before = [outcome(use, operator) for use in SLOW]
    with trace(kernels=False):
        inside = [outcome(use, operator) for use in SLOW]
    assert inside == before
    assert [outcome(use, operator) for use in SLOW] == before


def test_a_kernel_that_is_registered_inside_a_trace_stays() -> None:
    made = STYLES["impl CPU, Meta"]()
    with installed("all", only=[made.name]):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(made.name, "AutogradCPU")
        assert torch._C._dispatch_has_kernel_for_dispatch_key(made.name, "CPU")
        made.keep.impl(made.name.partition("::")[2], lambda x: x * 5, "CPU", allow_override=True)
        made.keep.impl(made.name.partition("::")[2], lambda keys, x: x * 7, "AutogradCPU", with_keyset=True)
        assert torch._C._dispatch_has_kernel_for_dispatch_key(made.name, "AutogradCPU")
        assert made.call(torch.ones(1)) == 7
    assert made.call(torch.ones(1)) == 7
    with torch.inference_mode():
        assert made.call(torch.ones(1)) == 5


def test_a_library_that_ends_inside_a_trace() -> None:
    made = STYLES["impl CPU, Meta"]()
    with installed("all", only=[made.name]) as shims, record(shims, kernels=False):
        assert made.call(torch.ones(1)) == 2
        made.keep._destroy()
    assert made.name not in dispatcher.operators()


def test_a_kernel_that_outlives_its_operator_prevents_no_trace() -> None:
    made = STYLES["impl CPU, Meta"]()
    kernels = torch.library.Library(NAMESPACE, "IMPL")
    kernels.impl(made.name.partition("::")[2], lambda x: x, "AutocastCPU")
    made.keep._destroy()
    with trace(scope="core", kernels=False) as t:
        torch.ones(1) + 1
    assert t.calls
    kernels._destroy()


def test_a_kernel_that_is_registered_inside_a_trace_is_used_and_traced() -> None:
    x = torch.ones(1)
    expected = torch.selu(x)
    library = torch.library.Library("aten", "IMPL")
    with installed("core", only=["aten::selu", "aten::mul.Tensor"]) as shims, record(shims, kernels=False) as t:
        assert torch.selu(x) == expected
        library.impl("selu", lambda x: x * x * 5, "CPU")
        assert torch.selu(x) == 5
        library._destroy()
        assert torch.selu(x) == expected
    composite, own, again = (call for call in t.calls if call.operator == "aten::selu")
    assert [composite.path, own.path, again.path] == [("AutogradCPU",), ("AutogradCPU", "CPU"), ("AutogradCPU",)]
    assert composite.hops[0].kind == again.hops[0].kind == "math kernel"  # that of the table at the time
    assert [call.operator for call in own.hops[1].calls] == ["aten::mul.Tensor"] * 2
    assert not t.findings


def test_a_custom_operator_that_is_defined_again_inside_a_trace() -> None:
    name = f"{NAMESPACE}::again"

    def define(factor: int) -> None:
        @torch.library.custom_op(name, mutates_args=())
        def again(x: torch.Tensor) -> torch.Tensor:
            return x * factor

    define(2)
    with installed("all", only=[name]) as shims, record(shims, kernels=False):
        assert torch.ops.dispatcher_trace_styles.again(torch.ones(1)) == 2
        define(3)
        assert torch.ops.dispatcher_trace_styles.again(torch.ones(1)) == 3
    assert torch.ops.dispatcher_trace_styles.again(torch.ones(1)) == 3
