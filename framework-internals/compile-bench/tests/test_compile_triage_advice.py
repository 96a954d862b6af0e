"""What triage advises, and for whom."""

from dataclasses import replace

import pytest

from compile_bench import Case
from compile_bench.capture.frames import Frame
from compile_bench.capture.trace import RECOMPILE_LIMIT, Break, CompileTrace, Recompile
from compile_bench.catalogue import CAUSES
from compile_bench.cli.triaging import describe_report, write_patches
from compile_bench.fixes.types import Fix
from compile_bench.measure.records import Survey
from compile_bench.triage import findings as triage_findings
from compile_bench.triage.findings import (
    TriageReport,
    advice_from_guard,
    advice_to_the_caller,
    recompile_advice,
    without_refuted,
)

from .printed import printed_text
from .triage_models import BREAK, finding_at

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the models do


def test_a_guess_of_pytorchs_that_the_code_is_wrong_is_no_advice():
    guess = "Your code may result in an error when running in eager. Please double check that your code …"
    assert triage_findings._hint((guess, "Avoid calling it.")) == "Avoid calling it."
    rules = "It may be possible to write Dynamo tracing rules for this code. Please report an issue to PyTorch."
    assert triage_findings._hint((guess,)) == triage_findings._hint((rules,)) == triage_findings._hint(()) == ""


def test_advice_fits_the_place(tmp_path):
    """A break out of a loop is no torch.where; no empty words."""
    path = tmp_path / "model.py"
    path.write_text("def f(x):\n    while True:\n        if x.max() > 3:\n            x = x + 1\n            break\n")
    branch = Break(str(path), 3, "f", "if x.max() > 3:", "Data-dependent branching", "", (), "", False)
    branch = replace(branch, category="data-dependent control flow")
    survey = Survey(Case("m"), (), (), (), CompileTrace(), (), 3, (), 0, 0, frozenset({str(path)}))
    leaving = triage_findings.finding_of_break(branch, survey, (branch,))
    assert (leaving.case, leaving.advice) == ("loop-until-value", CAUSES["loop-until-value"].advices[0].text)

    empty = ("Avoid calling `<class 'method'>`.", "If it is a Python builtin, please file an issue", "Do that.")
    assert triage_findings._hint(empty) == "Do that."


PACKAGE = """\
def remembered(method):
    def g(self, x):
        print("seen")
        return method(self, x)
    return g


class Kernel:
    def __call__(self, x):
        sizes = tuple(each.item() for each in x)
        return self.covariance(x, sizes)

    @remembered
    def covariance(self, x, sizes):
        if x.sum() > 0:
            logger.warning("positive")
        return x

    @property
    def scale(self):
        return self.raw.item()

    def forward(self, x):
        return self(x)
"""


def test_advice_on_a_package_is_for_its_caller(tmp_path):
    """It names functions that can be imported, and says what keeping them out of the graph brings; or a setting."""
    file = tmp_path / "site-packages" / "gp" / "kernels.py"
    file.parent.mkdir(parents=True)
    file.write_text(PACKAGE)
    call, expression, wrapper, method = (
        Frame(str(file), line, name, PACKAGE.splitlines()[line - 1].strip())
        for line, name in ((11, "__call__"), (10, "<genexpr>"), (4, "g"), (15, "covariance"))
    )
    user = Frame("/m.py", 3, "forward", "return self.kernel(x)")
    skipped = Break("/m.py", 3, "forward", "", "Attempted to call function marked as skipped", "", (), "", False)
    inside = replace(skipped, stack=(user, call, wrapper))
    branch = replace(skipped, reason="Data-dependent branching", stack=(user, call, wrapper, method))
    reading = replace(
        skipped, reason="Unsupported Tensor.item() call", stack=(user, replace(call, line=10), expression)
    )

    def advice(found, *others):
        return advice_to_the_caller(found, (found, *others))

    out = "out of the graph with torch.compiler.disable: "
    assert advice(reading, inside).startswith("Set torch._dynamo.config.capture_scalar_outputs = True")
    assert advice(branch) == advice(inside) == "See whether a newer version of gp can be traced."
    then = "All of it runs eagerly then."
    together = f"Keep gp.kernels.Kernel.__call__ {out}1 break instead of 2. {then}"
    assert advice(branch, inside, reading) == advice(inside, branch) == together
    scale = replace(branch, stack=(user, call, replace(method, line=21)))
    assert advice(scale, inside) == together  # nobody can disable a property
    whole = replace(branch, whole_frame=True)
    assert (
        advice(whole)
        == f"Keep gp.kernels.Kernel.covariance {out}the frames around are split there instead of skipped. {then}"
    )
    model = replace(method, line=24, function="forward", source="return self(x)")
    assert advice(replace(whole, stack=(user, model, wrapper))) == "See whether a newer version of gp can be traced."
    elsewhere = replace(branch, file="/other.py", stack=(replace(user, file="/other.py"), call))
    assert advice(branch, elsewhere) == "See whether a newer version of gp can be traced."
    written = replace(branch, stack=(user, replace(method, source='logger.warning("positive")'), wrapper))
    limit = replace(branch, category=RECOMPILE_LIMIT, stack=(user,))
    assert "recompile_limit allows more" in advice(limit)
    state = Recompile("/m.py", 3, "self.param_groups[0]['lr'] == 0.01", compile_id="0/1", function="step")
    assert advice_to_the_caller(limit, (limit,), (state,)) == ""
    assert advice(written).startswith("Call the model once before it is compiled if the message is written once")


def test_advice_on_a_packages_guard_is_for_its_caller():
    size = "tensor 'x1' size mismatch at index 0. expected 20, actual 40"
    assert "mark_dynamic" in advice_from_guard(size, "", "")
    assert advice_from_guard(size, "", "gpytorch").startswith(
        "Pass the same sizes in every call, or compile with dynamic=True"
    )
    assert advice_from_guard("len(inputs) == 1", "", "gpytorch") == ""
    assert advice_from_guard("x2 is None", "", "gpytorch") == ""
    assert advice_from_guard("self.param_groups[0]['lr'] == 0.01", "", "torch") == ""
    assert "allow_unspec_int_on_nn_module" in advice_from_guard("self.norm.count == 3", "", "timm")
    assert advice_from_guard("self.norm.scale == 0.5", "", "timm") == ""
    assert "mark_dynamic" in advice_from_guard(size, "", "torch")
    assert advice_from_guard("self.table is None", "", "e3nn").startswith("Call the model once before it is compiled")
    assert advice_from_guard("GLOBAL_STATE changed: grad_mode", "", "peft") == advice_from_guard(
        "GLOBAL_STATE changed: grad_mode", "", ""
    )


def test_one_line_that_calls_many_of_a_library_is_one_finding(tmp_path):
    frames = [Frame(f"<eval_with_key>.{n}", 4, "forward") for n in range(3)] + [Frame("/v/other.py", 9, "f")]
    breaks = [
        replace(BREAK, file="/m.py", category="", stack=(Frame("/m.py", BREAK.line, "forward"), frame))
        for frame in frames
    ]
    assert len({each.identity for each in breaks}) == 2
    survey = Survey(Case("m"), tuple(breaks), ((0,),) * 4, (), CompileTrace(), (), 3, (), 0, 0)
    (found,) = triage_findings.findings_of([survey])
    assert (found.library, found.times, found.kinds) == ("<torch.fx>:4, /v/other.py:9", 4, ("training",))


COUNTING = """\
class Mean(torch.nn.Module):
    def __init__(self):
        self.calls, self.total = 0, torch.zeros(())

    def add(self, y):
        self.calls += 1
        self.total = self.total + y.detach()

    def forward(self, y):
        self.add(y)
        return self.total / self.calls
"""


@pytest.fixture
def counting(tmp_path, monkeypatch):
    """A file with an attribute that one line changes and another one reads, and a recompilation at each."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.py"
    path.write_text(COUNTING)
    again = Recompile(str(path), 6, "self.calls == 1", "self.calls += 1", compile_id="1/1", function="forward")
    return again, replace(again, line=11, source="return self.total / self.calls")


def test_an_attribute_has_one_advice_at_all_its_lines(counting):
    new = replace(counting[0], line=9, guard="something new")
    printed = printed_text(describe_report, TriageReport("m", recompiles=(*counting, new)), {})
    assert printed.count("(catalogue: counter)") == 1
    assert "annealed" not in printed
    assert "  do, for self.calls at m.py:6, self.calls at m.py:11: Use a buffer, and replace it by the sum" in printed
    assert "then self.calls = self.calls + …" in printed
    assert "  m.py:9: the guard `something new` no longer holds" in printed
    assert "  do, for m.py:9: no safe change known" in printed


def test_a_number_that_also_becomes_text_gets_no_tensor(counting, tmp_path):
    (tmp_path / "m.py").write_text(COUNTING + "        self.name = f'{self.calls}'\n")
    assert [recompile_advice(each) for each in counting] == ["", ""]


def test_the_same_advice_is_given_once_for_all_its_lines(counting):
    """Two breaks of one line, a break of another, and a recompilation of a third."""
    again, other = counting
    advice = recompile_advice(again).removesuffix(" (catalogue: counter)")
    texts = {"source": "self.calls += 1", "category": "c", "reason": "limit", "advice": advice, "case": "counter"}
    limit = replace(finding_at(f"{again.file}:6", **texts, end_line=6), kind="recompile limit")
    inside = replace(limit, kind="graph break", reason="skipped", library="/e/library.py:3")
    findings = (limit, inside, replace(limit, place=f"{again.file}:7", end_line=7))
    printed = printed_text(describe_report, TriageReport("m", findings=findings, recompiles=(again, other)), {})
    assert "| m.py:6 | recompile limit, graph break | c | training |" in printed
    both = "recompile limit, graph break\n    self.calls += 1\n  limit\n  skipped, in library.py:3\n  do: "
    assert f"m.py:6: {both}" in printed
    assert printed.count(advice) == 1
    assert "m.py:7: limit\n    self.calls += 1\n  do: as for m.py:6\n" in printed
    assert "  do, for self.calls at m.py:11: as for m.py:6" in printed


def test_where_no_advice_fits_pytorchs_page_is_named():
    unknown = finding_at("/e/m.py:9", reason="why", registry="GB0098", hint="Avoid calling it.")
    printed = printed_text(describe_report, TriageReport("m", findings=(unknown,)), {})
    page = "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0098.html"
    assert f"  do: no safe change known; PyTorch describes this break: {page}\n" in printed
    assert "  PyTorch proposes, not checked here: Avoid calling it." in printed
    refused = replace(unknown, fix=Fix("keep", cases="item", verdict="it still breaks"))
    assert "proposes" not in printed_text(
        describe_report, TriageReport("m", findings=(refused,)), {}
    )  # it may be just that change


def test_advice_that_triage_refuted_is_withdrawn():
    found = finding_at("/e/m.py:9", advice="Keep a tensor.", case="item", others=(("item-captured", "Set it."),))
    assert without_refuted(found, ("print",)) == found
    other = without_refuted(found, ("item",))
    assert (other.case, other.advice) == ("item-captured", "Set it.")
    assert without_refuted(found, ("item", "item-captured")).advice == ""


LAYERS = """\
class Layer:
    def forward(self, x):
        print(x)
        return x


class Net:
    def forward(self, x):
        states = [1 for _ in self.layers]
        for layer in self.layers:
            x = layer(x)
        return x
"""


def test_what_follows_from_a_skipped_function_is_shown_under_its_break(tmp_path, monkeypatch):
    """The comprehension and the inner function are compiled by themselves only since the outer function is skipped."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.py"
    path.write_text(LAYERS)
    file = str(path)
    cause = replace(BREAK, file=file, line=3, whole_frame=True, compiled=(Frame(file, 8, "forward"),))
    call = Frame(file, 9, "forward")
    iterator = replace(
        BREAK, file=file, line=9, function="<listcomp>", reason="Missing tp_iternext", called_at=call, registry="GB4347"
    )
    again = Recompile(
        file, 2, "tensor 'x' requires_grad mismatch. expected requires_grad=0", compile_id="2/1", function="forward"
    )
    again = replace(again, called_at=Frame(file, 11, "forward"))
    breaks = (cause, iterator)
    survey = Survey(
        Case("m"), breaks, ((0,),) * 2, (), CompileTrace(), (again,), 3, (), 0, 0, user_files=frozenset({file})
    )
    findings = triage_findings.findings_of([survey])
    assert [each.follows_from for each in findings] == ["", f"{file}:3"]
    printed = printed_text(
        describe_report,
        replace(TriageReport.of_surveys("m", (survey,)), findings=tuple(findings), recompiles=(again,)),
        {},
    )
    under = "  follows from it, since Dynamo compiles what is called here by itself:\n    m.py:9: Missing tp_iternext\n"
    assert f"{under}    m.py:2: compiled again, x now needs a gradient" in printed
    assert "m.py:9: Missing tp_iternext\n    states" not in printed
    assert "| m.py:9 | graph break, follows from m.py:3 |" in printed
    assert "compiled again, because" not in printed
    # In a function that is not skipped, the same reason is a break of its own.
    alone = replace(iterator, called_at=Frame(file, 3, "forward"))
    (own,) = triage_findings.findings_of([replace(survey, breaks=(alone,), seeds=((0,),))])
    assert own.follows_from == ""


def test_a_function_without_a_known_caller_follows_from_the_skipped_one_that_calls_it(tmp_path):
    """Dynamo's stack of what is compiled below a skipped function lacks the skipped one."""
    path = tmp_path / "m.py"
    path.write_text("def forward(x):\n    while len(x):\n        x = x[overlap(x) < 0.5]\n    return x\n")
    cause = replace(BREAK, file=str(path), line=3, whole_frame=True, compiled=(Frame(str(path), 1, "forward"),))
    guard = "tensor 'boxes' size mismatch at index 0. expected 24, actual 23"
    again = Recompile(str(tmp_path / "boxes.py"), 5, guard, compile_id="1/1", function="overlap")
    assert triage_findings.break_before(again, [cause]) is cause
    assert triage_findings.break_before(replace(again, function="other"), [cause]) is None
    assert triage_findings.break_before(again, [replace(cause, whole_frame=False)]) is None


def test_patches_of_an_earlier_triage_are_removed(tmp_path):
    for name in ("07-item.patch", "all.patch", "mine.patch"):
        (tmp_path / name).write_text("")
    assert write_patches(TriageReport(""), tmp_path) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["mine.patch"]
