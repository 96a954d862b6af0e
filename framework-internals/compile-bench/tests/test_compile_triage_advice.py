"""What triage advises, and for whom."""

from dataclasses import replace

import pytest

from compile_bench import Case
from compile_bench.capture.frames import Frame
from compile_bench.capture.trace import Break, CompileTrace, Recompile
from compile_bench.catalogue import CAUSES
from compile_bench.cli.triaging import describe_report, write_patches
from compile_bench.measure.survey.types import Survey
from compile_bench.triage import findings as triage_findings
from compile_bench.triage.advice import advice_from_guard
from compile_bench.triage.library_breaks import advice_to_the_caller
from compile_bench.triage.types import Finding, TriageReport

from .triage_models import BREAK

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
    leaving = triage_findings.finding_of_break(branch, (0,), survey, (branch,))
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
    assert advice(written).startswith("Call the model once before it is compiled if the message is written once")


def test_advice_on_a_packages_guard_is_for_its_caller():
    size = "tensor 'x1' size mismatch at index 0. expected 20, actual 40"
    assert "mark_dynamic" in advice_from_guard(size, "", "")
    assert advice_from_guard(size, "", "gpytorch").startswith(
        "Pass the same sizes in every call, or compile with dynamic=True"
    )
    assert advice_from_guard("len(inputs) == 1", "", "gpytorch") == ""
    assert advice_from_guard("x2 is None", "", "gpytorch") == ""
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


def test_a_recompilation_is_told_with_what_to_do():
    known = Recompile("1/1", "forward", "/elsewhere/model.py", 9, "self.calls == 1", "self.calls += 1")
    new = Recompile("2/1", "forward", "/elsewhere/model.py", 12, "something new")
    printed = describe_report(TriageReport("m", (), (known, replace(known, guard="self.calls == 2"), new), ()), {})
    assert printed.count("(catalogue: counter)") == 1
    assert f"  do, for model.py:9: {CAUSES['counter'].advice} (catalogue: counter)" in printed
    assert "  model.py:9: self.calls is no longer 1" in printed
    assert "  model.py:12: the guard `something new` no longer holds" in printed


def test_the_same_advice_is_given_once_for_all_its_lines():
    """Two breaks of one line, a break of another, and recompilations of both lines and of a third."""
    counter = CAUSES["counter"]
    texts = ("f", "self.calls += 1", "c", "limit", "", counter.advice, "counter")
    limit = Finding("recompile limit", "/e/m.py", 9, 9, *texts, ("training",), (0,), 8)
    inside = replace(limit, kind="graph break", reason="skipped", library="/e/library.py:3")
    again = Recompile("1/1", "forward", "/e/m.py", 9, "self.calls == 1", "self.calls += 1")
    findings = (limit, inside, replace(limit, line=12, end_line=12))
    printed = describe_report(TriageReport("m", findings, tuple(replace(again, line=n) for n in (9, 12, 15)), ()), {})
    assert "| m.py:9 | recompile limit, graph break | c | training |" in printed
    assert (
        "m.py:9: recompile limit, graph break\n    self.calls += 1\n  limit\n  skipped, in library.py:3\n  do: "
        in printed
    )
    assert printed.count(counter.advice) == 1
    assert "m.py:12: limit\n    self.calls += 1\n  do: as for m.py:9\n" in printed
    assert "self.calls is no longer 1, 3 lines: m.py:9, m.py:12, m.py:15" in printed
    assert "  do, for m.py:15: as for m.py:9" in printed


def test_patches_of_an_earlier_triage_are_removed(tmp_path):
    for name in ("07-item.patch", "all.patch", "mine.patch"):
        (tmp_path / name).write_text("")
    assert write_patches(TriageReport("", (), (), ()), tmp_path) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["mine.patch"]
