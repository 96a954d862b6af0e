"""Parses PyTorch's structured trace: recorded events of known programs, and the arithmetic of phases."""

import json
from pathlib import Path

import pytest

from compile_bench.capture.frames import UserCodeFilter
from compile_bench.capture.parsing import Event, phase_seconds, read_events, without_pauses
from compile_bench.capture.trace import Break, Recompile, categorise, parse_message
from compile_bench.triage.findings import advice_on_break, advice_to_the_caller

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted({path.stem.split("-torch-")[1] for path in GOLDEN.glob("*.jsonl")})


def golden(name, version):
    lines = (GOLDEN / f"{name}-torch-{version}.jsonl").read_text().splitlines()
    return read_events([Event(*json.loads(line)) for line in lines], user_code=UserCodeFilter(torch="/library/torch"))


def line_of(comment):
    """The line of the golden program that ends in this comment."""
    lines = (GOLDEN / "program.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))


@pytest.mark.parametrize("version", VERSIONS)
def test_breaks_name_the_users_line_and_category(version):
    found = {entry.place: entry for entry in golden("breaks", version).breaks}
    assert {place: entry.category for place, entry in found.items()} == {
        f"/user/program.py:{line_of('a branch on a value')}": "data-dependent control flow",
        f"/user/program.py:{line_of('a value read')}": "tensor value read by Python",
        f"/user/program.py:{line_of('a side effect')}": "side effect",
    }
    branch = found[f"/user/program.py:{line_of('a branch on a value')}"]
    assert branch.reason == "Data-dependent branching"
    assert branch.source == "if x.sum() > 0:  # a branch on a value"
    assert branch.function == "forward"
    assert branch.explanation.startswith("Detected data-dependent branching")
    assert any("torch.cond" in hint for hint in branch.hints)
    assert not branch.whole_frame
    assert branch.times == 3  # once for each compilation of forward: first, new constant, new size


@pytest.mark.parametrize("version", VERSIONS)
def test_recompiles_name_the_guard_that_failed(version):
    recompiles = golden("breaks", version).recompiles
    constant = recompiles[0]
    assert (constant.function, constant.guard, constant.cause) == ("forward", "self.calls == 0", "Python value")
    assert constant.place == f"/user/program.py:{line_of('a new constant')}"
    sizes = [entry for entry in recompiles if entry.cause == "tensor size"]
    assert sizes[0].guard == "tensor 'x' size mismatch at index 0. expected 4, actual 5"
    assert {entry.cause for entry in recompiles} == {"Python value", "tensor size"}


@pytest.mark.parametrize("version", VERSIONS)
def test_graphs_are_counted_with_operations_and_guards(version):
    trace = golden("breaks", version)
    first = trace.graphs[0]
    assert (first.compile_id, first.function, first.operations) == ("0/0", "forward", 3)
    assert first.guards > 0
    assert first.guard_seconds is not None
    assert 1e-7 < first.guard_seconds < 1e-2
    assert len(trace.graphs) == 10


@pytest.mark.parametrize("version", VERSIONS)
def test_a_break_in_a_loop_skips_the_whole_frame(version):
    trace = golden("loop", version)
    assert trace.graphs == ()
    (found,) = trace.breaks
    assert found.whole_frame
    assert found.place == f"/user/program.py:{line_of('a branch on a value, in a loop')}"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_recompile_limit_is_found_in_the_metrics(version):
    trace = golden("limit", version)
    (found,) = trace.breaks
    assert (found.category, found.function, found.whole_frame) == ("recompile limit", "grow", True)
    assert found.file == "/user/program.py"
    assert [entry.compile_id for entry in trace.recompiles] == ["0/1", "0/2"]


def test_two_places_of_a_library_that_one_line_calls_are_two_breaks():
    stack = '  File "/user/model.py", line 5, in forward\n    return chosen(x)\n'
    texts = [
        f"Graph Break Reason: Dynamic shape operator\n\nUser code traceback:\n{stack}"
        f'  File "/library/heads/{name}.py", line 9, in chosen\n    return x.nonzero()\n'
        for name in ("boxes", "masks", "boxes")
    ]
    events = [Event("dynamo_graph_break_reason", f"{n}/0", {}, text) for n, text in enumerate(texts)]
    breaks = read_events(events, user_code=UserCodeFilter(library=["/library"])).breaks
    assert [(each.place, each.library, each.times) for each in breaks] == [
        ("/user/model.py:5", "/library/heads/boxes.py:9", 2),
        ("/user/model.py:5", "/library/heads/masks.py:9", 1),
    ]


def test_a_library_that_is_compiled_by_itself_breaks_at_the_users_line():
    stack = [
        {"filename": "/user/model.py", "line": 5, "name": "forward", "loc": "return chosen(x)"},
        {"filename": "/library/heads/loss.py", "line": 7, "name": "chosen", "loc": "def chosen(x):"},
    ]
    text = "Graph Break Reason: No package was found for xla\n\nUser code traceback:\n"
    text += '  File "/library/heads/loss.py", line 9, in chosen\n    return version("xla")\n'
    events = [
        Event("dynamo_start", "3/0", {"stack": stack}, ""),
        Event("dynamo_graph_break_reason", "3/0", {}, text),
    ]
    (found,) = read_events(events, user_code=UserCodeFilter(library=["/library"])).breaks
    assert (found.place, found.function, found.source) == ("/user/model.py:5", "forward", "return chosen(x)")
    assert found.library == "/library/heads/loss.py:9"


@pytest.mark.parametrize(
    "introduction",
    [
        "Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):",
        "Encountered graph break that we cannot resume from. Graph break encountered:",
    ],
)
def test_a_reason_is_what_stands_behind_its_introduction(introduction):
    assert parse_message(f"{introduction}\n\nCould not guard on u0 > 3\n")[0] == "Could not guard on u0 > 3"
    assert parse_message(introduction)[0] == introduction


LIBRARY_BREAK = """Graph break in user code at /library/heads/loss.py:9
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Dynamic shape operator
  Explanation: Operator `aten.nonzero.default`'s output shape depends on input Tensor data.

User code traceback:
{stack}  File "/library/heads/loss.py", line 9, in chosen
    return (labels >= 0).nonzero()
"""
CALLED = '  File "/user/model.py", line 5, in forward\n    return chosen(x).sum()\n'


def library_breaks(*stacks):
    events = [
        Event("dynamo_graph_break_reason", f"{number}/0", {}, LIBRARY_BREAK.format(stack=stack))
        for number, stack in enumerate(stacks)
    ]
    return read_events(events, user_code=UserCodeFilter(torch="/library/torch", library=["/library"])).breaks


def test_a_break_in_a_library_is_the_users_line_even_where_one_message_leaves_it_out():
    (found,) = library_breaks("", CALLED)
    assert (found.place, found.function, found.source) == ("/user/model.py:5", "forward", "return chosen(x).sum()")
    assert (found.library, found.times, found.compile_ids) == ("/library/heads/loss.py:9", 2, ("0/0", "1/0"))
    (unknown,) = library_breaks("")
    assert unknown.place == "/library/heads/loss.py:9"


MARKED = """Graph break in user code at /user/model.py:5
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

Unsupported Tensor.item() call with capture_scalar_outputs=False

User code traceback:
  File "/user/model.py", line 9, in forward
    return first(x)
           ^^^^^^^^
  File "/user/model.py", line 5, in first
    return x + x.sum().item()
{marks}
"""


@pytest.mark.parametrize(
    ("marks", "columns"),
    [
        ("               ^^^^^^^^^^^^^^", (11, 25)),
        ("           ~~^~~~~~~~~~~~~~~", (7, 24)),
        ("", (0, 25)),  # Python marks nothing where all of the line is meant
    ],
)
def test_what_broke_in_a_line_is_read_from_its_marks(marks, columns):
    event = Event("dynamo_graph_break_reason", "0/0", {}, MARKED.format(marks=marks))
    (found,) = read_events([event]).breaks
    assert (found.line, found.source, found.columns) == (5, "return x + x.sum().item()", columns)
    assert [frame.line for frame in found.stack] == [9, 5]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("0/0: ___stack0 == 0.5  # if not self.training:  # model.py:9 in forward", "Python value"),
        ("0/0: self.training  # x = self.drop(x)  # model.py:9 in forward", "train / eval mode"),
        ("0/0: not hasattr(self, 'mask')", "None or absent"),
        ("0/0: not ___dict_contains(4, self.cache)", "container keys"),
        ("0/0: not self.kept", "container length"),
        ("0/0: (x.size()[0] % 8) == 0", "symbolic shape"),
        ("0/0: 2 <= x.size()[0]", "symbolic shape"),
        ("0/0: expected type of 'm' to be a tensor type, ' but found <class 'NoneType'>", "None or absent"),
        ("0/0: something new", "other"),
    ],
)
def test_the_cause_of_a_recompilation_is_its_guards_and_not_its_lines(text, cause):
    (found,) = read_events([Event("recompile_reasons", "0/1", {}, json.dumps([text]))]).recompiles
    assert found.cause == cause


def test_a_number_that_the_graph_takes_as_a_tensor_is_named_as_in_the_code():
    text = "0/0: ___as_tensor(___stack0).item() == 0.5  # begin()  # model.py:9 in forward"
    (found,) = read_events([Event("recompile_reasons", "0/1", {}, json.dumps([text]))]).recompiles
    assert found.guard == "___stack0 == 0.5"


@pytest.mark.parametrize(
    ("guard", "sentence"),
    [
        (
            "tensor 'kwargs['ids']' size mismatch at index 1. expected 12, actual 20",
            "kwargs['ids'] has size 20 in dimension 1, compiled for 12",
        ),
        (
            "tensor '___stack0' rank mismatch. expected 1, actual 2",
            "a value that the lines before computed has rank 2, compiled for 1",
        ),
        ("2 <= ___stack3[0].size()[1]", "a value that the lines before computed is no longer at least 2"),
        ("tensor 'x' dtype mismatch. expected Float, actual BFloat16", "x is bfloat16, compiled for float32"),
        ("tensor 'x' requires_grad mismatch. expected requires_grad=0", "x now needs a gradient"),
        (
            "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, Meta), actual DispatchKeySet(CPU)",
            "x has other dispatch keys, without Meta: another device, or inference mode",
        ),
        (
            "expected type of 'args[0]' to be a tensor type, ' but found <class 'a.b.Lazy'>",
            "args[0] is of type Lazy, compiled for a tensor",
        ),
        ("GLOBAL_STATE changed: autocast(cpu)_enabled", "torch.autocast has changed"),
        (
            'Duplicate tensors found: ["inputs[0]", "inputs[1]"]',
            "inputs[0] and inputs[1] are one tensor, compiled for different ones",
        ),
        ("___check_type_id(inputs[0], 9470), type=<class 'a.b.Normal'>", "inputs[0] is no longer of type Normal"),
        ("___check_obj_id(function.__code__, 1400), type=<class 'code'>", "function is another function"),
        ("not ___dict_contains(4, self.cache)", "4 is in self.cache now"),
        ("not hasattr(self, 'mask')", "self has an attribute mask now"),
        ("self.mask is not None", "self.mask is None now"),
        ("x1 is x2", "x1 and x2 are no longer the same object"),
        ("G['_scale'] == 2", "_scale is no longer 2"),
        ("self._modules['layer']._modules['0'].training", "self.layer[0].training is no longer true"),
        ("object.__getattribute__(self, 'seen') == 3", "self.seen is no longer 3"),
        ("len(extra) != 1", "len(extra) is now 1"),
        ("not args", "args is no longer empty, None or False"),
        ("(x.size()[0] % 8) == 0", "x.size(0) % 8 is no longer 0"),
        ("2 <= x.storage_offset()", "x.storage_offset() is no longer at least 2"),
        ("something new", "the guard `something new` no longer holds"),
    ],
)
def test_a_failed_guard_reads_as_a_sentence(guard, sentence):
    assert Recompile("m.py", 3, guard, compile_id="0/1", function="f").what_changed == sentence


GUARD_IN_A_HELPER = """0/1: len(self.seen) == 1  # self.seen.append(x)  # {shown} in helper
User stack trace:
  File "/user/model.py", line 9, in forward
    return helper(self, x)
{stack}"""
IN_USER_CODE = '  File "/user/other.py", line 3, in helper\n    self.seen.append(x)'
IN_LIBRARY = '  File "/library/other.py", line 3, in helper\n    self.seen.append(x)'
FORWARD = Event(
    "compilation_metrics", "0/2", {"co_filename": "/user/model.py", "co_firstlineno": 8, "co_name": "forward"}
)


@pytest.mark.parametrize(
    ("reason", "place", "caller"),
    [
        (GUARD_IN_A_HELPER.format(shown="other.py:3", stack=IN_USER_CODE), "/user/other.py:3", ""),
        (GUARD_IN_A_HELPER.format(shown="other.py:3", stack=IN_LIBRARY), "/library/other.py:3", "/user/model.py:9"),
        ("0/1: self.calls == 3  # self.calls += 1  # /user/model.py:5 in forward", "/user/model.py:5", ""),
        ("0/1: self.calls == 3  # self.calls += 1  # er/model.py:5 in forward", "/user/model.py:5", ""),
        ("0/1: self.calls == 3  # self.calls += 1  # /user/other.py:5 in forward", "/user/model.py:8", ""),
    ],
    ids=["a helper", "a library", "without a stack", "a path without its begin", "another file"],
)
def test_a_recompilation_is_at_the_innermost_line_that_made_the_guard(reason, place, caller):
    events = [FORWARD, Event("recompile_reasons", "0/2", {}, json.dumps([reason]))]
    (found,) = read_events(events, user_code=UserCodeFilter(library=["/library"])).recompiles
    assert (found.place, found.called_from) == (place, caller)


ASKED = """Graph break in user code at /user/model.py:5
Graph Break Reason: Call to `torch._dynamo.graph_break()`
  Explanation: User-inserted graph break. Message: None
  Hint: Remove the `torch._dynamo.graph_break()` call.

User code traceback:
  File "/user/model.py", line 5, in step
    optimizer.step()
{stack}"""


@pytest.mark.parametrize(
    ("stack", "category", "hint"),
    [
        ("", "asked for by the code", "Remove the"),
        (
            '  File "/library/torch/optim/optimizer.py", line 70, in _use_grad\n    torch._dynamo.graph_break()\n',
            "call Dynamo will not enter",
            "PyTorch itself keeps this call out of graphs",
        ),
    ],
)
def test_a_break_that_pytorch_asks_for_is_not_the_codes(stack, category, hint):
    event = Event("dynamo_graph_break_reason", "0/0", {}, ASKED.format(stack=stack))
    (found,) = read_events([event], user_code=UserCodeFilter(torch="/library/torch")).breaks
    assert (found.place, found.category) == ("/user/model.py:5", category)
    assert found.hints[0].startswith(hint)


def spans(*entries):
    return [{"name": name, "ph": ph, "ts": seconds * 1e6} for name, ph, seconds in entries]


def test_each_instant_belongs_to_the_innermost_phase():
    phases = phase_seconds(
        spans(
            ("dynamo", "B", 0),
            ("backend_compile", "B", 1),
            ("inductor_compile", "B", 3),
            ("a name of a later torch", "B", 4),
            ("compile_file", "B", 5),
            ("compile_file", "E", 9),
            ("a name of a later torch", "E", 10),
            ("inductor_compile", "E", 10),
            ("backend_compile", "E", 10),
            ("dynamo", "E", 10.5),
        )
    )
    assert phases == pytest.approx({"Dynamo": 1.5, "AOTAutograd": 2.0, "Inductor": 3.0, "C++/Triton compiler": 4.0})


def test_spans_of_several_threads_are_counted_once():
    phases = phase_seconds(
        spans(
            ("inductor_compile", "B", 0),
            ("compile_file", "B", 1),
            ("compile_file", "B", 2),
            ("compile_file", "E", 3),
            ("compile_file", "E", 5),
            ("inductor_compile", "E", 6),
        )
    )
    assert phases == pytest.approx({"Inductor": 2.0, "C++/Triton compiler": 4.0})


def test_time_between_compilations_is_nobodys():
    events = spans(("dynamo", "B", 0), ("dynamo", "E", 1), ("dynamo", "E", 2), ("dynamo", "B", 7), ("dynamo", "E", 9))
    assert phase_seconds(events) == pytest.approx({"Dynamo": 3.0})


@pytest.mark.parametrize(
    ("reason", "category"),
    [
        ("Data-dependent branching", "data-dependent control flow"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "tensor value read by Python"),
        ("Dynamic shape operator", "data-dependent shape"),
        ("Call to `torch._dynamo.graph_break()`", "asked for by the code"),
        ("Attempted to call function marked as skipped", "call Dynamo will not enter"),
        ("Skip calling `torch.compiler.disable()`d function", "call Dynamo will not enter"),
        ("Unsupported context manager", "context manager"),
        ("setattr() on Tensor.requires_grad", "autograd"),
        ("setattr() on unsupported type", "side effect"),
        ("Backend compiler exception", "backend failed"),
        ("Missing tp_iternext", "Python construct"),
        ("sort with non-constant keys", "tensor value read by Python"),
        ("Attempted to use `torch.nn.functional.one_hot` with data-dependent output shape", "data-dependent shape"),
        ("Attempted to copy.deepcopy a tensor", "call Dynamo will not enter"),
        ("attempted to trace numpy function unsupported by PyTorch", "call Dynamo will not enter"),
        ("torch.* op returned non-Tensor", "call Dynamo will not enter"),
        ("Attempted to wrap sparse Tensor with VariableTracker", "tensor Dynamo cannot represent"),
        ("Unsupported Tensor.resize_() call", "tensor Dynamo cannot represent"),
        ("Something new", "other"),
    ],
)
def test_category_of_a_reason(reason, category):
    assert categorise(reason) == category


def test_phases_do_not_contain_pauses():
    def event(name, kind, seconds):
        return {"name": name, "ph": kind, "ts": seconds * 1e6}

    outer, inner = "entire_frame_compile", "inductor_compile"
    events = [event(outer, "B", 10), event(inner, "B", 12), event(inner, "E", 20), event(outer, "E", 21)]
    plain = phase_seconds(events)
    # Two seconds within the inner span, and one and a half that lie half in it, half behind it.
    rest = phase_seconds(without_pauses(events, [(5.0, 9.0), (14.0, 16.0), (19.0, 20.5)]))
    assert sum(plain.values()) == pytest.approx(11)
    assert sum(rest.values()) == pytest.approx(11 - 2 - 1.5)
    (more,) = (phase for phase in plain if plain[phase] == pytest.approx(8))
    assert rest[more] == pytest.approx(8 - 2 - 1)
    assert without_pauses(events, []) == events


def test_a_failed_operator_gives_its_own_error_as_the_reason():
    text = (
        "RuntimeError when making fake tensor call\n"
        "  Explanation: Dynamo failed to run FX node with fake tensors: call_function own.f.default(*(x,), "
        "**{}): got RuntimeError('There was no fake impl registered for <CustomOpDef(own::f)>. This is necessary. ')\n"
        "  Hint: Your code may result in an error when running in eager.\n"
    )
    fake = "RuntimeError when making fake tensor call: There was no fake impl registered for <CustomOpDef(own::f)>"
    assert parse_message(text)[0] == fake
    met = Break("lib/model.py", 5, "f", "", fake, "", (), "compile error", whole_frame=True)
    for advice in (advice_to_the_caller(met, [met]), advice_on_break((), met, (), static_shapes=False)[0].text):
        assert "torch.library.register_fake" in advice
