"""What triage's survey finds, what hides behind a break, and what is no finding."""

import ast
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_bench import Case, Harness
from compile_bench.capture.collector import Collector, CudaGraphSkips, backend_of, settings, user_code_filter
from compile_bench.capture.eager_frames import EagerFrame, EagerWatch, lost_cuda_graphs, silent_functions
from compile_bench.capture.frames import RESUMED, Frame, UserCodeFilter
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.fixes.fixer import Fixer
from compile_bench.measure import survey as survey_module
from compile_bench.measure.accuracy import draws_random_numbers
from compile_bench.measure.records import Survey, place_of
from compile_bench.measure.steps import load_case
from compile_bench.measure.survey import (
    GraphTimer,
    costs_of,
    reasons_without_cuda_graphs,
    run_until_settled,
    survey,
)
from compile_bench.targets.overlay import changeable_blocks, handlers_around, is_in_block, resumable
from compile_bench.triage.run import _Triage

from .triage_models import InThisProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the models do

NO_LINE = "torch 2.10 does not say at which line it gave up a function for a loop"


def surveyed(folder, program, *, train=False):
    (folder / "triage_model.py").write_text(program)
    return survey(Case(f"{folder / 'triage_model.py'}:target", "cpu", train=train), seeds=(0,))


BLOCKS = """\
import threading

import torch

LOCK = threading.Lock()


def blocks(x, seen):
    for key, value in {"a": x, "b": x + 1}.items():
        with LOCK, open(__file__) as file:
            seen.append((key, file.readline()))
        try:
            with torch.no_grad():
                seen.append(value)
        except ZeroDivisionError:
            seen.append("never")
        else:
            seen.append("else")
    try:
        return seen
    finally:
        seen.append("finally")
"""


def test_changed_blocks_keep_their_lines_and_what_they_compute(tmp_path):
    path = tmp_path / "blocks.py"
    path.write_text(BLOCKS)
    file = str(path)
    changed = {(file, line) for line in (9, 10, 12, 19)}
    assert set().union(*(changeable_blocks(file, line) for line in (11, 14, 20))) == changed
    assert handlers_around(file, 14) == {(file, 12)}
    assert handlers_around(file, 16) == set()
    assert is_in_block(file, 11)
    assert not is_in_block(file, 5)
    (tree,) = resumable(changed).values()
    names, original = {"__file__": file}, {"__file__": file}
    exec(compile(tree, file, "exec"), names)
    exec(BLOCKS, original)
    assert names["blocks"](1, []) == original["blocks"](1, [])
    lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    assert {11, 14, 18, 20, 22} <= lines
    assert {13} == {node.lineno for node in ast.walk(tree) if isinstance(node, (ast.With, ast.Try))}


HANDLED = """\
import copy
import threading

import torch

LOCK = threading.Lock()
HISTORY = []


def scale(x):
    scale = 1.0
    for bound in (0.5, 1e9):
        try:
            scale = scale / float((x > bound).sum())
        except (KeyError, ZeroDivisionError):
            scale = scale * 2.0
    x = x * scale
    print("mean", end="")
    return x


def model(x):
    with LOCK:
        x = scale(x)
    stats = {name: each.item() for name, each in {"mean": x.mean(), "std": x.std()}.items()}
    HISTORY.append(copy.deepcopy(stats))
    return x


def target():
    return model, (torch.ones(3),)
"""


def test_only_what_follows_a_handler_that_runs_stays_hidden(folder, capsys):
    """Line 18 follows a break in a try whose handler the model needs."""
    found = surveyed(folder, HANDLED)
    places = {(each.file, each.line) for each in found.breaks}
    lines = {line for file, line in places if file == str(folder / "triage_model.py")}
    assert {14, 23, 25} <= lines <= {14, 23, 25, 26}  # 26: copy.deepcopy, which torch 2.11 does not trace
    assert len(places) == len(lines)
    (note,) = found.notes
    assert note.startswith("breaks behind triage_model.py:14")
    assert note.endswith("may stay hidden: Dynamo skips the frame there")


LOOPING = """\
import torch


class Looping(torch.nn.Module):
    def forward(self, x):
        kept = []
        rows = x.relu().sum(1) + 1
        while rows.numel() > 1:
            kept.append(float(rows[0]))
            try:
                rows = rows[1:][rows[1:] > rows.mean().item() - 9]
            except ZeroDivisionError:
                break
        if rows.sum() > 0:
            x = x * max(kept)
        return x.sin() * rows.norm().item()


def target():
    torch.manual_seed(0)
    return Looping(), (torch.rand(4, 3),)
"""


NESTED = """\
import torch


class Nested(torch.nn.Module):
    def forward(self, x):
        rows = [self.chosen(row) for row in zip(x, x.sin())]
        for each in self.scaled(
            x.max()
            .item()
        ), self.scaled(2.0):
            x = x * each
        return x, rows

    def chosen(self, pair):
        some = torch.nonzero(pair[0] > 0).flatten()
        total = 0.0
        while some.numel() > total:
            total += some[0].float().item() + 1.0
            if (least := pair[1].min()) > 2:
                break
        return total * least

    def scaled(self, factor):
        try:
            return float(torch.tensor(factor).cos())
        finally:
            torch._dynamo.graph_break()


def target():
    return Nested(), (torch.ones(2, 3),)
"""


def test_what_a_broken_line_calls_is_looked_into(folder, capsys):
    """Dynamo skips the frames of the callers too."""
    found = surveyed(folder, NESTED)
    assert {each.line for each in found.breaks} >= {9, 15, 18, 19, 25, 27}
    skipped = "breaks behind triage_model.py:15 may stay hidden: Dynamo skips the frame there"
    # From Python 3.12 on a comprehension is a part of its function, and Dynamo skips the frame that it calls.
    assert found.notes == (() if sys.version_info < (3, 12) else (skipped,))


BOXED = """\
import torch


class Box:
    def __init__(self, row):
        self.row = row
        self.size = 1.0


class Boxed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        boxes = [Box(row) for row in self.linear(x)]
        return self.added(self.first(boxes))

    def first(self, boxes):
        for _ in range(2):
            best = max(boxes, key=lambda box: box.size)
        return best.row

    def added(self, row):
        for _ in range(2):
            scale = float(row.mean())
            print(end="")
            row = row * scale
        return row


def target():
    torch.manual_seed(0)
    return Boxed(), (torch.ones(2, 3),)
"""


def test_lines_behind_a_skipped_frame_of_a_helper_are_found(folder, capsys):
    found = surveyed(folder, BOXED, train=True)
    assert {each.line for each in found.breaks} == {21, 26, 27}
    (note,) = found.notes
    assert note.startswith("breaks behind triage_model.py:21 may stay hidden: Dynamo skips the frame there")


HOOKED = """\
import torch


class Hooked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.linear.register_full_backward_hook(lambda module, grads, above: None)

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
        least = x.min().item()
        return x * least * x.max().item()


def target():
    return Hooked(), (torch.ones(2, 2),)
"""


SCALING = """\
import torch

SCALES = [
    lambda x: x / x.abs().max().item(),
    lambda x: x + 1,
]


class Scaling(torch.nn.Module):
    def forward(self, x):
        total = 0.0
        for scale in SCALES:
            x = scale(x)
        for low, high in zip(x.amin(1).tolist(), x.amax(1).tolist()):
            total += high - low
        if total == 0.0:
            raise ValueError("the same in every column")
        return x * x.norm().item()


def target():
    return Scaling(), (torch.rand(4, 3),)
"""


GROWING = """\
import torch

from compile_bench.targets.target import Target


class Growing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.past = []

    def forward(self, x):
        self.past.append(x)
        return torch.stack(self.past).mean(0)


def target():
    return Target(Growing(), (torch.ones(3),), schedule=((torch.ones(3),),) * 10)
"""


@settings({"recompile_limit": 3})  # PyTorch's 8 take twice as long
def test_nothing_is_looked_for_behind_the_recompile_limit(folder, capsys):
    """Until a function reaches the limit, all of it is traced."""
    found = surveyed(folder, GROWING)
    assert [(each.line, each.category) for each in found.breaks] == [(12, "recompile limit")]
    assert found.notes == ()


READING = """\
import torch


class Reading(torch.nn.Module):
    def forward(self, x):
        for _ in range(2):
            with open(__file__, encoding="utf-8") as file:
                first = file.readline()
            with open(__file__ + ".log", "w") as log:
                log.write(first)
            if x.sum() > 0:
                x = x * len(first)
        return x.cos() * x.mean().item()


def target():
    return Reading(), (torch.ones(4, 3),)
"""


@pytest.mark.skipif(torch.__version__ < (2, 11), reason=NO_LINE)
def test_files_that_a_loop_reads_hide_nothing_behind_them(folder):
    path = folder / "triage_model.py"
    path.write_text(READING)
    found = survey(Case(f"{path}:target", "cpu", train=False), seeds=(0,))
    assert {each.line for each in found.breaks} >= {7, 9, 11, 13}
    assert found.notes == ()
    assert Path(f"{path}.log").read_text() == "import torch\n"


MASKED = """\
import torch


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.filler = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x, mask):
        h = self.linear(x)
        h = self.filled(h, mask)
        return h.sin()

    def filled(self, h, mask):
        h[mask] = self.filler
        return h


def target():
    torch.manual_seed(0)
    return Masked(), (torch.ones(2, 4, 3), torch.rand(2, 4) > 0.5)
"""


def test_what_the_backend_fails_for_has_the_line_of_the_operator(folder, capsys):
    (folder / "triage_model.py").write_text(MASKED)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu")
    found = survey(case, seeds=(0,))
    # Only the backward pass needs to know how many there are.
    assert [(each.line, each.function, each.category) for each in found.breaks] == [(16, "filled", "backend failed")]
    assert survey(replace(case, train=False), seeds=(0,)).breaks == ()


YIELDING = """\
import torch


class Yielding(torch.nn.Module):
    def rows(self, x):
        for row in x:
            yield row.sin() * 2

    def forward(self, x):
        total = x.sum()
        for row in self.rows(x):
            if row.sum() > 0:
                total = total + row.cos().sum()
        return total


def target():
    return Yielding(), (torch.ones(3, 2),)
"""


def test_a_generator_in_a_function_that_was_skipped_is_no_finding(folder, capsys):
    found = surveyed(folder, YIELDING)
    assert [each.line for each in found.breaks] == [12]
    assert found.eager == ()


RAISING = """\
import torch


@torch.compiler.disable
def picked(x, index):
    return x * [1.0, 2.0][index]


class Picking(torch.nn.Module):
    def forward(self, x):
        x = picked(x, 2 if torch.compiler.is_compiling() else 1)
        return x.sin()


def target():
    return Picking(), (torch.ones(3),)
"""


def test_an_error_of_the_compiled_model_alone_has_its_line(folder, capsys):
    found = surveyed(folder, RAISING, train=True)
    assert found.failures == ("IndexError: list index out of range",)
    (raised,) = (each for each in found.breaks if each.category == "compile error")
    assert (raised.line, raised.function) == (6, "picked")
    assert raised.reason == "IndexError: list index out of range; the model by itself does not raise it"


HIDING = """\
import os

import torch


class Hiding(torch.nn.Module):
    def forward(self, x):
        print(end="")
        for _ in range(2):
            self.process = os.getpid()
        return x / x.norm().item()


def target():
    return Hiding(), (torch.ones(3),)
"""


@pytest.mark.skipif(torch.__version__ < (2, 11), reason=NO_LINE)
def test_what_stays_hidden_is_neither_counted_as_fixed_nor_proved(folder, capsys):
    (folder / "triage_model.py").write_text(HIDING)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu", train=False)
    found = survey(case, seeds=(0,))
    assert [each.line for each in found.breaks] == [8, 10, 11]
    assert found.hidden == {place_of(found.breaks[2])}
    fix_results = Fixer(InThisProcess(folder), case, [found], folder).fix([place_of(met) for met in found.breaks])
    fixes = {line: fix for (_, line), fix in fix_results.fixes.items()}
    assert (fixes[8].accepted, fixes[8].before.breaks, fixes[8].after.breaks) == (True, 3, 2)
    assert not fixes[11].accepted
    assert "Dynamo still skips a frame around it" in fixes[11].verdict
    assert fix_results.combined.accepted


def test_the_rest_of_a_function_that_was_skipped_is_no_finding():
    skipped = Break("/user/model.py", 9, "forward", "if x.sum() > 0:", "", "", (), "", whole_frame=True)
    rest = EagerFrame(Frame("/user/model.py", 5, f"{RESUMED}forward_at_5"), ())
    assert silent_functions([rest], CompileTrace(breaks=(skipped,))) == []
    (silent,) = silent_functions([rest], CompileTrace())
    assert (silent.kind, silent.function) == ("silent eager", "forward")


def test_what_a_function_at_the_recompile_limit_calls_is_no_finding():
    calls = Frame("/user/model.py", 9, "forward")
    helper = EagerFrame(Frame("/user/other.py", 5, "helper"), (calls,))
    guard = (Frame("/user/model.py", 7, "forward"), Frame("/user/other.py", 2, "another"))
    limit = Break("/user/other.py", 2, "another", "", "", "", (), "recompile limit", whole_frame=True, stack=guard)
    assert silent_functions([helper], CompileTrace(breaks=(limit,))) == []
    assert silent_functions([helper], CompileTrace(breaks=(replace(limit, stack=guard[1:]),))) != []


STEPPING = """\
import torch

LAYER = torch.nn.Linear(4, 2)
OPTIMIZER = torch.optim.SGD(LAYER.parameters(), lr=0.1)


def train_step(x):
    loss = LAYER(x).square().mean()
    if loss.isnan():
        raise FloatingPointError
    loss.backward()
    return loss.detach()


def target():
    return train_step, (torch.ones(3, 4),)
"""


@pytest.mark.parametrize(
    ("program", "train", "lines"),
    [
        pytest.param(LOOPING, False, {9, 11, 14, 16}, id="behind the breaks of a loop", marks=pytest.mark.slow),
        pytest.param(SCALING, False, {4, 14, 18}, id="behind lambdas, in loops over a list and over a zip"),
        pytest.param(HOOKED, True, {12, 13, 14}, id="of a module with a backward hook"),
        pytest.param(STEPPING, True, {9, 11}, id="of a function with a backward pass of its own"),
    ],
)
def test_every_break_is_found(program, train, lines, folder, capsys):
    found = surveyed(folder, program, train=train)
    assert {each.line for each in found.breaks} == lines
    assert (found.failures, found.notes) == ((), ())


def test_the_innermost_line_is_the_users():
    user_code = UserCodeFilter("/site/torch", ["/site"], "/bench", ["zoo.py"])
    stack = [
        Frame("/bench/worker.py", 1, "main"),
        Frame("/site/torch/nn/modules/module.py", 1, "_call_impl"),
        Frame("/home/model.py", 5, "forward"),
        Frame("/site/other/layer.py", 7, "forward"),
    ]
    assert user_code.innermost(stack) == stack[2]
    assert user_code.model_frames(stack) == tuple(stack[2:])
    assert user_code.innermost([stack[0], stack[3]]) == stack[3]  # nothing of the user's
    assert user_code.innermost(stack[:2]) is None


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).relu()

    def encode(self, x):
        return self.layer(x) * 2

    def passed(self, x):
        return x


def test_functions_that_compute_eagerly_are_seen():
    torch.compiler.reset()
    model = Encoder()
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 4)
    compiled(x)
    watch = EagerWatch(model.modules(), user_code_filter())
    assert watch.run(lambda: compiled(x)) == ()
    assert watch.run(lambda: compiled.passed(x)) == ()
    (found,) = watch.run(lambda: compiled.encode(x))
    assert (found.frame.function, found.method_of) == ("encode", "Encoder")
    assert sys.getprofile() is None


HOOKED = """\
import torch


class Hooked(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight.register_hook(lambda gradient: gradient / gradient.norm() if gradient.norm() > 1 else gradient)


def target():
    return Hooked(), (torch.ones(2, 4),)
"""


def test_hooks_that_a_copy_lacks_are_said(folder):
    (folder / "triage_model.py").write_text(HOOKED)
    case = Case(f"{folder / 'triage_model.py'}:target", "cpu")
    (note,) = survey(case).notes
    assert note.startswith("hooks of weight are not looked at")
    assert survey(replace(case, train=False)).notes == ()


def test_a_hook_of_a_tensor_that_runs_in_the_backward_pass_is_seen():
    torch.compiler.reset()
    model, x = nn.Linear(2, 2), torch.ones(1, 2)

    def halved(gradient):
        return gradient / 2

    model.weight.register_hook(halved)
    compiled = torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    (found,) = EagerWatch(model.modules(), user_code_filter()).run(lambda: compiled(x).sum().backward())
    assert found.frame.function == "halved"


def test_watching_adds_no_break():
    """Dynamo skips the frame of a function with a sparse argument and compiles what that frame calls."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()

    class Spread(nn.Module):
        def forward(self, x):
            return torch.sparse.mm(x, torch.ones(3, 2)) * 2

    model, x = Spread(), torch.eye(3).to_sparse()
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    before = dict(torch._dynamo.utils.counters["graph_break"])
    assert before
    EagerWatch(model.modules(), user_code_filter()).run(lambda: compiled(x))
    assert dict(torch._dynamo.utils.counters["graph_break"]) == before


def test_code_that_cannot_be_hashed_is_watched():
    """Dynamo puts dictionaries among the constants of the code that it writes."""
    code = Encoder.encode.__code__
    encode = type(Encoder.encode)(code.replace(co_consts=(*code.co_consts, {})), Encoder.encode.__globals__)
    model = Encoder()
    (found,) = EagerWatch(model.modules(), user_code_filter()).run(lambda: encode(model, torch.ones(2, 4)))
    assert found.frame.function == "encode"


class Counting(nn.Module):
    """Reads a number of its own that changes: compiled anew at every call, until Dynamo gives it up."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = x + 1
        torch._dynamo.graph_break()
        return x * self.calls


@settings({"recompile_limit": 3})  # PyTorch's 8 take twice as long
def test_a_gap_is_measured_once_nothing_is_compiled_any_more(capsys):
    """Behind three compilations the function runs eagerly, and no graph is left around its break."""
    torch._dynamo.reset()
    profiler = GraphTimer(backend_of("eager"))
    model = torch.compile(Counting(), backend=profiler)
    with Collector() as collector:
        model(torch.ones(4))
        calls, settled = run_until_settled(lambda: model(torch.ones(4)), collector)
    assert settled
    assert calls > 3
    trace = collector.trace()
    (limit,) = (each for each in trace.breaks if each.category == "recompile limit")
    assert Path(limit.file).name == Path(__file__).name
    (asked,) = (each for each in trace.breaks if each.category != "recompile limit")
    costs = costs_of(profiler, lambda: model(torch.ones(4)), trace, settled=settled)
    assert costs[place_of(asked)].time_lost is None
    assert "is recompiled up to the recompile limit" in costs[place_of(asked)].not_measured
    again = [graph.compile_seconds for graph in trace.graphs if graph.function == "forward"][1:]
    assert len(again) == 2
    assert costs[place_of(limit)].compile_seconds == sum(again) > 0


def test_different_guards_are_never_one(folder):
    again = Recompile(
        "m.py", 3, "tensor 'cache' size mismatch at index 2. expected 5, actual 6", compile_id="0/1", function="f"
    )
    grown = replace(again, guard="tensor 'cache' size mismatch at index 2. expected 6, actual 7")
    batch = replace(again, guard="tensor 'cache' size mismatch at index 0. expected 1, actual 4")
    other = replace(again, guard="len(self._transform_matrices) == 1")
    surveys = [Survey(Case("m"), (), (), (), CompileTrace(), (each,), 3, (), 0, 0) for each in (again, grown, batch)]
    assert len({each.identity for each in (again, grown, batch, other)}) == 3
    triage = _Triage(Harness(folder, "cpu", 1.0), Case("m"), (True,), False, print)
    triage._surveys = surveys
    assert [each.guard for each in triage.report().recompiles] == [again.guard, batch.guard]


DROPPING = """\
import random

import torch

from compile_bench.targets.target import Target


class Dropping(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = False

    def forward(self, x):
        if self.drop:
            print(end="")
        return x * torch.rand(4)


def target():
    def make_step(model, args):
        def step():
            model.drop = random.random() < 0.2
            return model(*args)

        return step

    return Target(Dropping(), (torch.ones(4),), make_step=make_step)
"""


def test_other_seeds_are_further_steps_of_one_compiled_model(folder, monkeypatch, capsys):
    path = folder / "triage_model.py"
    path.write_text(DROPPING)
    made = []
    monkeypatch.setattr(survey_module, "own_model", lambda target, case: made.append(1) or target.model)
    case = Case(f"{path}:target", "cpu")
    assert survey(case, seeds=(0,)).breaks == ()  # 0.84, 0.76, 0.42, 0.26
    found = survey(case, seeds=(0, 1))  # 0.13
    assert [(each.line, seeds) for each, seeds in zip(found.breaks, found.seeds, strict=True)] == [(15, (1,))]
    assert len(made) == 2


STACK = 'File "/home/model.py", line 7, in forward\n    self.seen.add_(1)'

SKIPS = {
    "a whole graph": (
        "torch._inductor.cudagraph_utils.__cudagraphs",
        (f"skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   {STACK}\n",),
        "mutated inputs (1 instances)",
    ),
    "handed on": (
        "torch._inductor.cudagraph_utils.__cudagraphs",
        (f"skipping cudagraphs due to skipping cudagraphs due to cpu device (ones). Found from : \n   {STACK}\n",),
        "cpu device (ones)",
    ),
    "torch 2.10, a part": (
        "torch._inductor.utils.__perf_hints",
        (f"cudagraph partition due to non gpu ops. Found from : \n   {STACK}", "cudagraph partition into 3 partitions"),
        "non gpu ops (a part of the graph)",
    ),
    "torch 2.11, a part": (
        "torch._inductor.scheduler.__cudagraphs",
        (
            "Created 3 graph partitions: 2 cudagraphable, 1 non-cudagraphable",
            "  Partition 1: 2 nodes, non-cudagraphable, inputs=1, outputs=1",
            "    op1: reason=DeviceCopy ops, ir=DeviceCopy, fx=prims.device_put.default(sin, cpu)",
            *(" " * 9 + line for line in STACK.split("\n")),
            "    op2: reason=DeviceCopy ops, ir=DeviceCopy, fx=prims.device_put.default(mul, cpu)",
            '         File "/home/model.py", line 9, in forward',
            "    op3: reason=partition includes all ops when cudagraphs is disabled, ir=ComputedBuffer",
            '         File "/home/model.py", line 10, in forward',
        ),
        "DeviceCopy ops (a part of the graph)",
    ),
}


@pytest.mark.parametrize(("logger", "messages", "reason"), SKIPS.values(), ids=SKIPS)
def test_a_lost_cuda_graph_has_its_line(logger, messages, reason):
    with CudaGraphSkips() as skips:
        for message in messages:
            logging.getLogger(logger).debug(message)
    (found,) = lost_cuda_graphs(skips.reasons, skips.messages, UserCodeFilter())
    assert (found.frame.file, found.frame.line) == ("/home/model.py", 7)
    assert found.frame.source == "self.seen.add_(1)"
    assert found.reason == f"CUDA graphs are not used: {reason}"


@pytest.mark.gpu
def test_a_lost_cuda_graph_is_found(folder):
    (folder / "triage_model.py").write_text(
        "import torch\n\n\nclass Moved(torch.nn.Module):\n    def forward(self, x):\n"
        "        return x + x.cpu().sin().to(x.device)\n\n\ndef target():\n    return Moved(), (torch.ones(4),)\n"
    )
    found = reasons_without_cuda_graphs(Case(f"{folder / 'triage_model.py'}:target", "cuda", train=False))
    assert {each.kind for each in found} == {"CUDA graph lost"}
    assert (Path(found[0].frame.file).name, found[0].frame.line) == ("triage_model.py", 6)


def test_a_hook_is_no_method_of_the_module_that_it_is_given():
    """Nobody calls it on the compiled model."""

    def scaled(module, gradients, _):
        return (gradients[0] * 2,)

    model = nn.Linear(4, 4)
    model.register_full_backward_hook(scaled)
    x = torch.ones(2, 4, requires_grad=True)
    (found,) = EagerWatch(model.modules(), user_code_filter()).run(lambda: model(x).sum().backward())
    assert (found.frame.function, found.method_of) == ("scaled", "")


SUBCLASS = """
import torch

class Marked(torch.Tensor):
    pass

def target():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4).as_subclass(Marked),)
"""


def test_an_argument_that_the_compiler_cannot_take_raises_in_inference_too(folder):
    (failure,) = surveyed(folder, SUBCLASS).failures
    assert failure.startswith("TypeError: Multiple dispatch failed")


SCRIPTED = """
import torch

def target():
    return torch.jit.script(torch.nn.Linear(4, 4)), (torch.ones(2, 4),)
"""


@pytest.mark.parametrize("train", [False, True])
def test_a_scripted_model_raises_only_when_it_is_compiled(folder, train):
    (failure,) = surveyed(folder, SCRIPTED, train=train).failures
    assert failure.startswith("RuntimeError: torch.compile does not support compiling torch.jit.script")
    assert failure.endswith("; compile the original eager module instead")


EXPORTED = """
import torch

def target():
    arguments = (torch.ones(2, 4),)
    return torch.export.export(torch.nn.Linear(4, 4), arguments).module(), arguments
"""


@pytest.mark.parametrize("train", [False, True])
def test_an_exported_program_keeps_its_mode(folder, train):
    found = surveyed(folder, EXPORTED, train=train)
    assert (found.failures, found.breaks) == ((), ())
    assert found.notes == ("the model is not put into this mode: its own one is fixed, as that of an exported program",)
    target = load_case(found.case)
    assert not draws_random_numbers(target, train=train, fresh=True)
