"""Traces compared with golden ones, the untraced run, the profiler and the prediction.

Golden facts hold from torch 2.10 to 2.15: the keys that an operator visits and the operators that a composite calls.
These facts are not golden, because they change between versions: file and line of a registration, the number in
``VariableType_2.cpp``, how often ``mm`` asks for ``resolve_conj``, sequence numbers of autograd nodes.
"""

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dispatcher_trace import Call, Shims, installed, record
from dispatcher_trace.capture import dispatcher, profile
from dispatcher_trace.capture.types import calls_from_json
from dispatcher_trace.measure.programs import gpt_step
from dispatcher_trace.render.outline import Shown
from dispatcher_trace.render.text import tree

from .conftest import Traced


# Operators must be defined before the shims are installed.
@torch.library.custom_op("dispatcher_trace_tests::increment", mutates_args=("x",))
def _increment(x: Tensor) -> None:
    x.add_(1)


@pytest.fixture(scope="module")
def untraced() -> dict[str, tuple[Tensor, Counter[str]]]:
    """Result and operators of each program without shims."""
    seen = {}
    for name, program in PROGRAMS.items():
        program()
        with profile.profiled() as profiled:
            result = program()
        seen[name] = (result, Counter(profile.operator_names(profiled.events)))
    return seen


@pytest.fixture(scope="module")
def numbers() -> dict[str, Tensor]:
    """Results of the programs with numbers under ``torch.func``, without shims."""
    return {name: program() for name, program in NUMBERS_UNDER_GRAD.items()}


@pytest.fixture(scope="module")
def symbolic() -> str:
    """The graph of a program with symbolic sizes, without shims."""
    return make_fx(_with_sizes, tracing_mode="symbolic")(torch.ones(3, 2)).code


@pytest.fixture(scope="module")
def symbolic_grad() -> str:
    """The graph of a gradient with a symbolic size, without shims."""
    return _gradient_with_a_size()


@pytest.fixture(scope="module")
def shims(
    untraced: dict[str, tuple[Tensor, Counter[str]]], numbers: dict[str, Tensor], symbolic: str, symbolic_grad: str
) -> Iterator[Shims]:
    with installed("all") as shims:
        yield shims


def _inputs(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 4, generator=generator).to(dtype) for _ in range(2))
    return a.requires_grad_(requires_grad), b


def _steps(calls: list[Call]) -> list[tuple[str, str, str]]:
    return [(hop.operator, hop.key, hop.how) for call in calls for hop in call.hops]


def _without(operator: str, calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.operator != operator]


def test_add(traced: Traced) -> None:
    a, b = _inputs()
    t = traced(lambda: a + b)
    add = ("aten::add.Tensor", "AutogradCPU", "call"), ("aten::add.Tensor", "CPU", "redispatch")
    assert _steps(t.all_calls) == [*add]
    (call,) = t.calls
    assert call.title == "$2: f32[4, 4] = aten::add.Tensor($0: f32[4, 4], $1: f32[4, 4])"
    assert call.hops[1].native == "structured_ufunc_add_CPU"
    assert call.hops[0].keys == ("AutogradCPU", "CPU")
    assert call.hops[0].removed == ("AutocastCPU",)
    assert "`self`, `other` carry it" in call.hops[0].why


def test_add_in_inference_mode_has_one_hop(traced: Traced) -> None:
    with torch.inference_mode():
        a, b = _inputs()
        t = traced(lambda: a + b)
    assert _steps(t.all_calls) == [("aten::add.Tensor", "CPU", "call")]


def test_matmul_is_composite(traced: Traced) -> None:
    a, b = _inputs(requires_grad=True)
    t = traced(lambda: a @ b)
    (matmul,) = t.calls
    assert _steps([matmul]) == [("aten::matmul", "AutogradCPU", "call")]
    (mm,) = matmul.hops[0].calls
    assert mm.path == ("AutogradCPU", "CPU")
    assert mm.hops[0].made_node.startswith("MmBackward0#")
    assert mm.hops[1].native == "structured_mm_out_cpu"


def test_autocast_comes_before_autograd(shims: Shims) -> None:
    a, b = _inputs(requires_grad=True)
    with record(shims, kernels=False) as t, torch.autocast("cpu", torch.bfloat16):
        a @ b
    (matmul,) = t.calls
    assert matmul.path == ("AutocastCPU",)
    assert Counter(call.operator for call in matmul.hops[0].calls) == {"aten::to.dtype": 2, "aten::matmul": 1}
    inner = matmul.hops[0].calls[-1]
    assert inner.path == ("AutogradCPU",)
    assert {tensor.dtype for tensor in inner.hops[0].tensors} == {"bf16"}
    assert "aten::matmul with bf16 where f32 came in" in matmul.hops[0].why


def test_factory_goes_through_backend_select(traced: Traced) -> None:
    t = traced(lambda: torch.empty(3))
    assert _steps(t.all_calls) == [
        ("aten::empty.memory_format", "BackendSelect", "call"),
        ("aten::empty.memory_format", "CPU", "redispatch"),
    ]
    assert "the thread includes it" in t.hops[0].why


def test_view_visits_adinplaceorview(traced: Traced) -> None:
    a, _ = _inputs()
    t = traced(lambda: a.view(16))
    assert t.calls[0].path == ("AutogradCPU", "ADInplaceOrView", "CPU")


def test_backward_names_its_node(traced: Traced) -> None:
    a, b = _inputs(requires_grad=True)
    t = traced(lambda: (a @ b).sum().backward())
    made = {hop.made_node for hop in t.hops if hop.made_node.startswith("MmBackward0")}
    backward = {call.hops[0].node for call in t.all_calls if call.operator == "aten::mm" and call.hops[0].node}
    assert backward == made


def test_a_number_stays_weak_and_is_shown_as_a_number(shims: Shims) -> None:
    x = torch.tensor(3.0, dtype=torch.bfloat16)
    expected = [x * 0.1, x + 2, torch.tensor(5) * True]
    with record(shims, kernels=False) as t:
        traced = [x * 0.1, x + 2, torch.tensor(5) * True]
    assert [tensor.dtype for tensor in traced] == [tensor.dtype for tensor in expected]
    assert all(map(torch.equal, traced, expected))
    assert "0.1: f64[]" in t.calls[0].title


def test_an_exception_passes_and_its_trace_is_kept(shims: Shims) -> None:
    a, _ = _inputs()
    with pytest.raises(RuntimeError, match="mat1 and mat2"), record(shims, kernels=True) as t:
        a @ torch.ones(3, 3)
    assert "RuntimeError" in t.hops[-1].error
    assert "raised RuntimeError" in t.calls[-1].hops[0].why
    assert t.match is not None
    assert t.match.tied == t.match.calls == len(t.all_calls)
    with record(shims, kernels=False) as after:
        a + a
    assert len(after.hops) == 2


def test_json_round_trip(traced: Traced) -> None:
    a, b = _inputs(requires_grad=True)
    t = traced(lambda: (a @ b).sum().backward())
    document = json.loads(json.dumps(t.to_json()))
    assert calls_from_json(document["calls"]) == t.calls
    assert document["torch"] == torch.__version__


def test_markdown_has_every_hop(traced: Traced) -> None:
    a, b = _inputs()
    t = traced(lambda: a @ b)
    text = t.to_markdown()
    assert all(f"\n{hop.number}. `{hop.operator}` at {hop.key}: {hop.why}" in text for hop in t.hops)


def test_parameters_can_be_made(traced: Traced) -> None:
    t = traced(lambda: nn.Linear(2, 2))
    assert t.unrecorded == {"aten::detach": 2}
    assert "What a tensor subclass's constructor calls (aten::detach) is not recorded; it ran 2 times." in t.notes


def test_hops_of_another_thread_are_recorded_apart(shims: Shims) -> None:
    a, b = _inputs()
    with record(shims, kernels=False) as t:
        thread = threading.Thread(target=lambda: a + b)
        thread.start()
        thread.join()
        a - b
    assert [(hop.operator, hop.thread) for hop in t.hops] == [
        ("aten::add.Tensor", "thread 1"),
        ("aten::add.Tensor", "thread 1"),
        ("aten::sub.Tensor", "main"),
        ("aten::sub.Tensor", "main"),
    ]


def test_threads_and_tasks_have_numbers_that_are_not_used_again(shims: Shims) -> None:
    a, b = _inputs()

    async def work() -> None:
        a * b
        await asyncio.sleep(0)
        a - b

    async def two() -> None:
        await asyncio.gather(work(), work())

    with record(shims, kernels=False) as t:
        for _ in range(2):  # the second thread may get the first one's identifier
            thread = threading.Thread(target=lambda: a + b)
            thread.start()
            thread.join()
        loop = asyncio.new_event_loop()
        loop.run_until_complete(two())
    loop.close()
    firsts = [call.hops[0] for call in t.calls]
    assert [(hop.operator, hop.thread, hop.task) for hop in firsts] == [
        ("aten::add.Tensor", "thread 1", ""),
        ("aten::add.Tensor", "thread 2", ""),
        ("aten::mul.Tensor", "main", "task 1"),
        ("aten::mul.Tensor", "main", "task 2"),
        ("aten::sub.Tensor", "main", "task 1"),
        ("aten::sub.Tensor", "main", "task 2"),
    ]
    printed = tree(t.calls)
    assert "aten::add.Tensor($0: f32[4, 4], $1: f32[4, 4])   [thread 2]" in printed
    assert printed.count("   [task 2]") == 2


def test_the_tree_folds_what_repeats(shims: Shims) -> None:
    a, b = _inputs()
    with record(shims, kernels=False) as t:
        for _ in range(5):
            a * b
            (a - b).sin()
        a + b
    folded = tree(t.calls, Shown(fold=True)).splitlines()
    assert len(tree(t.calls).splitlines()) == 16 * 3
    assert len(folded) == 3 * 3 + 1 + 3
    assert folded[9] == "… the 3 calls above 4 times more, hops 7 to 30"
    assert "aten::add.Tensor" in folded[10]


def test_a_wrapper_subclass_is_named(traced: Traced) -> None:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> torch.Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return cls(function(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))

    wrapped = Wrapped(torch.ones(6, 6))
    t = traced(lambda: wrapped.sin())
    assert t.calls[0].title == "$3: Wrapped(f32[6, 6]) = aten::sin($0: Wrapped(f32[6, 6]))"


def test_what_arguments_share_is_said_once(shims: Shims) -> None:
    a, b = _inputs()
    with record(shims, kernels=False) as t:
        a + b
        with torch.no_grad(), torch.inference_mode():
            a * b
    text = t.to_markdown()
    assert "Unless a line says otherwise, its thread adds {" in text
    lines = [line for line in text.splitlines() if line.startswith("   keys {Autograd")]
    assert lines[0].startswith("   keys {AutogradCPU, CPU} = self, other {")
    assert "thread" not in lines[0]
    assert " ∪ thread {" in text  # inference mode has other sets


def test_a_second_recording_is_refused(shims: Shims) -> None:
    with (
        record(shims, kernels=False),
        pytest.raises(RuntimeError, match="a recording is running already"),
        record(shims, kernels=False),
    ):
        pass


def test_a_running_profiler_is_refused(shims: Shims) -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(RuntimeError, match=r"torch\.profiler is running already"),
        record(shims, kernels=True),
    ):
        pass
    assert shims.recorder is None


@pytest.mark.filterwarnings("ignore:.*profiler")
def test_code_that_profiles_itself_ends_the_tracers_profile(shims: Shims) -> None:
    with record(shims, kernels=True) as t:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as inner:
            torch.ones(2) + 1
        assert not dispatcher.profiler_enabled()
    assert [call.operator for call in t.calls] == ["aten::ones", "aten::add.Tensor"]
    assert "aten::ones" in [event.name for event in inner.events()]
    assert t.match is None
    assert any("ran a profiler of its own" in note for note in t.notes)


# -- larger programs: bit-equal results, every call that the profiler saw, the prediction ------------------------------


class _PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def _transformer_step() -> Tensor:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    (model(torch.randn(2, 5, 16)).pow(2).mean() / 3).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _cnn_step() -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
    )
    F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.tensor([1, 2])).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def _autocast_training() -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(4, 8)).float().softmax(-1).pow(2).sum()
    loss.backward()
    assert model.weight.grad is not None
    return model.weight.grad


def _mode() -> Tensor:
    with _PassThrough():
        return torch.add(*_inputs())


def _gpt_step() -> Tensor:
    return torch.cat([tensor.flatten() for tensor in gpt_step("cpu")()])


PROGRAMS: dict[str, Callable[[], Tensor]] = {
    "transformer step": _transformer_step,
    "GPT step": _gpt_step,
    "cnn step": _cnn_step,
    "autocast training": _autocast_training,
    "dispatch mode": _mode,
    "vmap": lambda: torch.vmap(lambda x: torch.softmax(x, 0) + 1)(_inputs()[0]),
    "func.grad": lambda: torch.func.grad(lambda x: (x * x).sum())(_inputs()[0]),
    "functionalize": lambda: torch.func.functionalize(lambda x: x.add_(1))(_inputs()[0].clone()),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj() * 2,
    "sparse": lambda: torch.eye(4).to_sparse() @ _inputs()[1],
    "parallel kernels": lambda: F.conv3d(torch.ones(2, 3, 12, 12, 12), torch.ones(4, 3, 3, 3, 3)),
    "dropout": lambda: (torch.manual_seed(0), F.dropout(_inputs()[0], 0.5))[1],
    "foreach": lambda: torch._foreach_add([*_inputs()], 1.5)[0],
}
# Kernels that the rules of the prediction do not know: they end the call at a key that usually redispatches.
UNPREDICTED = {"aten::detach_"}


# Calls that reach only one of torch's Python meta kernels, which cannot have a shim.
WITHOUT_A_SHIM = {"functionalize": Counter({"aten::add_": 1})}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, untraced: dict[str, tuple[Tensor, Counter[str]]], shims: Shims) -> None:
    expected, operators = untraced[name]
    with record(shims, kernels=True) as t:
        result = PROGRAMS[name]()
    assert torch.equal(result, expected)
    assert result.dtype == expected.dtype
    ours = Counter(call.operator.partition(".")[0] for call in t.all_calls)
    unseen = WITHOUT_A_SHIM.get(name, Counter())
    assert ours + Counter(t.unrecorded) + unseen == operators
    assert t.match is not None
    assert t.match.tied == t.match.calls == t.match.operators - unseen.total()
    wrong = [call for call in t.all_calls if call.missed or any(hop.predicted != hop.key for hop in call.hops)]
    assert {call.operator for call in wrong} <= UNPREDICTED


_X = torch.linspace(-1, 1, 5)
NUMBERS_UNDER_GRAD: dict[str, Callable[[], Tensor]] = {
    "with dimensions": lambda: torch.func.grad(lambda x: (x / 2).sum())(_X),
    "without": lambda: torch.func.grad(lambda x: (x * 0.3).pow(2).sum() / 3 * 0.1)(_X),
    "half precision": lambda: torch.func.grad(lambda x: ((x * 0.3).sum() * 2).float())(_X.bfloat16()),
    "promoting integers": lambda: torch.func.grad(lambda x: (x * (torch.arange(5) * 0.7)).sum())(_X),
    "vmap of grad": lambda: torch.vmap(torch.func.grad(lambda x: (x * 0.3).sum() * 0.2))(torch.stack([_X, _X])),
    "grad of vmap": lambda: torch.func.grad(lambda x: torch.vmap(lambda y: y * 0.3 / 7)(x).sum())(_X[:, None]),
    "jvp": lambda: torch.func.jvp(lambda x: (x * 0.3 + 1) / 3, (_X,), (_X,))[1],
    "jvp of a scalar": lambda: torch.func.jvp(lambda t: t.sin() * 0.1 + 0.9 * t, (_X[0],), (_X[1],))[1],
    "half precision scalar": lambda: torch.func.grad(lambda x: (x * x).sum() * 0.1)(_X.bfloat16()),
    "hessian": lambda: torch.func.hessian(lambda x: (x**3).sum() * 0.3)(_X[:2]),
    "jacfwd": lambda: torch.func.jacfwd(lambda x: x.sum() * 0.7 - 2)(_X),
    "jacrev of a scalar": lambda: torch.func.jacrev(lambda x: 2 / x.exp())(_X[0]),
    "vjp": lambda: torch.func.vjp(lambda x: x.sum() / 3, _X)[1](torch.tensor(2.0))[0],
    "vmap of jvp": lambda: torch.vmap(lambda t: torch.func.jvp(lambda y: y * 0.1, (t,), (t,))[1])(_X),
    "functionalize": lambda: torch.func.grad(torch.func.functionalize(lambda x: x.sum().mul_(0.1)))(_X),
    "grad of grad": lambda: torch.func.grad(torch.func.grad(lambda x: x**3 * 0.1))(_X[0]),
}


@pytest.mark.parametrize("name", NUMBERS_UNDER_GRAD)
def test_numbers_under_functorch_grad(name: str, numbers: dict[str, Tensor], shims: Shims) -> None:
    expected = numbers[name]
    with record(shims, kernels=False):
        result = NUMBERS_UNDER_GRAD[name]()
    assert torch.equal(result, expected)
    assert result.dtype == expected.dtype


def test_the_compiler_does_not_see_the_tracer_between_graph_breaks(shims: Shims) -> None:
    def breaking(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return eval("y * y", {"y": y})

    compiled = torch.compile(breaking, backend="eager")
    with record(shims, kernels=False) as t:
        result = compiled(_X)
    assert torch.equal(result, breaking(_X))
    assert {"aten::add.Tensor", "aten::mul.Tensor"} <= {call.operator for call in t.calls}


def _with_sizes(x: Tensor) -> Tensor:
    return (x.view(-1) * x.shape[0] + x.shape[1] * 2.5).sum() * (x.shape[0] > 1)


def _gradient_with_a_size() -> str:
    gradient = torch.func.grad(lambda x: (x * x.shape[0]).sum())
    return make_fx(gradient, tracing_mode="symbolic")(torch.ones(3, 2)).code


def test_a_symbolic_size_is_a_number(symbolic: str, symbolic_grad: str, shims: Shims) -> None:
    with record(shims, kernels=False) as t:
        found = make_fx(_with_sizes, tracing_mode="symbolic")(torch.ones(3, 2)).code
    assert found == symbolic
    titles = [call.title for call in t.all_calls if call.operator == "aten::mul.Tensor"]
    assert any(re.search(r", s\d+: i64\[\]\)$", title) for title in titles)
    # Torch's Python dispatcher chose the kernel: a note says so, and there is no wrong prediction.
    assert not [finding for finding in t.findings if finding.kind == "prediction"]
    assert any(note.startswith("Torch's Python dispatcher, which torch.compile") for note in t.notes)
    with record(shims, kernels=False):
        found = _gradient_with_a_size()
    assert found == symbolic_grad


def test_a_backend_without_a_name_in_python_is_no_wrong_prediction(traced: Traced) -> None:
    x = torch.ones(3, 3).to_mkldnn()
    t = traced(lambda: x.to_dense())
    assert t.calls
    assert all(call.agrees for call in t.all_calls)


def test_torchs_own_python_kernels_are_skipped_and_noted(shims: Shims) -> None:
    """``aten::mm`` has one at Meta. That of a custom operator at ADInplaceOrView was given to ``torch.library``."""
    x, meta = torch.zeros(3), torch.ones(2, 2, device="meta")
    with record(shims, kernels=False) as t:
        _increment(x)
        torch.mm(meta, meta)
    written, product = t.calls
    assert (written.path, written.missed) == (("AutogradCPU", "ADInplaceOrView", "CPU"), ())
    assert written.hops[2].how == "redispatch"
    assert (product.path, product.missed) == (("AutogradMeta",), ())
    assert not [finding for finding in t.findings if finding.kind == "prediction"]
    assert t.notes[1:] == [
        "aten::mm at Meta, a Python kernel, is not watched; it ran once.",
    ]
