"""Causes of the catalogue on this torch: each happens as recorded, and its fix gives one graph with equal outputs."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compile_bench.capture.trace import what_changed
from compile_bench.catalogue import CAUSES, match, match_recompile
from compile_bench.catalogue.examine import Outcome, examine
from compile_bench.catalogue.page import describe, program, write_page
from compile_bench.catalogue.programs import makers
from compile_bench.catalogue.versions import (
    RECORDED,
    outcomes_as_text,
    read_outcomes,
    recorded,
    status,
    this_torch,
    write_outcomes,
)
from compile_bench.cli import app
from compile_bench.fixes.rewrites import REWRITES

PAGE = Path(__file__).parents[1] / "catalogue"

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns about what the causes do


# The fast tests run the first cause of each theme and kind, and the causes that triage fixes. All take minutes.
FIRST = {(cause.theme, cause.kind): name for name, cause in reversed(CAUSES.items())}
QUICK = {*FIRST.values(), *(rewrite.case for rewrite in REWRITES)}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CAUSES]
)
def test_cause(name):
    outcome = examine(CAUSES[name])
    known = recorded().get(this_torch(), {}).get(name)
    if known is None:
        pytest.skip(f"torch {this_torch()} is not on record; compile-bench catalogue --record adds it")
    assert (outcome.happens, outcome.whole, outcome.equal) == (known.happens, known.whole, known.equal), outcome


def test_every_cause_has_a_program():
    assert set(makers()) == set(CAUSES)


def test_at_least_eighty_causes_hold_on_the_tested_torch():
    hold = [name for name in CAUSES if status(name, "2.13.0") == "holds"]
    assert len(hold) == len(CAUSES) >= 80
    assert {CAUSES[name].kind for name in hold} == {"break", "recompile", "silent"}


def test_every_cause_has_an_outcome_and_every_outcome_a_cause():
    assert list(recorded()) == ["2.10.0", "2.11.0", "2.13.0", "2.15.0"]
    assert set(recorded()["2.13.0"]) == set(CAUSES)  # who adds a cause need not have the other versions
    for outcomes in recorded().values():
        assert set(outcomes) <= set(CAUSES)


def test_the_recorded_outcomes_are_written_as_they_are_read():
    assert RECORDED.read_text(encoding="utf-8") == outcomes_as_text(read_outcomes(RECORDED))


OUTCOME = Outcome(True, ("a reason",), ("GB0001",), True, True)
LATER = Outcome(True, ("another reason",), (), True, None)
FAILED = Outcome(False, (), (), False, None, "ValueError: not there")


@pytest.mark.parametrize("versions", [("2.9.1", "2.10.0"), ("2.10.0", "2.9.1")])
def test_outcomes_come_back_as_they_were_written(versions, tmp_path):
    outcomes = {versions[0]: {"same": OUTCOME, "changed": OUTCOME}, versions[1]: {"same": OUTCOME, "changed": LATER}}
    outcomes["2.11.0"] = {"same": OUTCOME}
    outcomes["2.12.0"] = {"same": FAILED, "changed": LATER, "new": OUTCOME}
    path = tmp_path / "outcomes.json"
    path.write_text(outcomes_as_text(outcomes))
    assert read_outcomes(path) == outcomes
    assert list(read_outcomes(path)) == ["2.9.1", "2.10.0", "2.11.0", "2.12.0"]
    assert path.read_text().count("a reason") == 3  # once a cause: an outcome that stays is not written again


def test_outcomes_of_this_torch_are_added_to_those_of_others(tmp_path):
    path = tmp_path / "outcomes.json"
    path.write_text(outcomes_as_text({"1.0": {"old": OUTCOME}, this_torch(): {"old": OUTCOME, "other": OUTCOME}}))
    write_outcomes(path, {"old": LATER, "new": OUTCOME})
    ours = {"old": LATER, "other": OUTCOME, "new": OUTCOME}
    assert read_outcomes(path) == {"1.0": {"old": OUTCOME}, this_torch(): ours}


def test_a_recorded_guard_names_no_machine():
    guards = [each for name, cause in CAUSES.items() if cause.kind == "recompile" for each in seen_on_all(name)]
    assert guards
    assert not [each for each in guards if re.search(r"\.py\b|0x[0-9a-f]+|\d{9}", each)]


def seen_on_all(name):
    return [each for outcomes in recorded().values() if name in outcomes for each in outcomes[name].seen]


def test_every_rewrite_is_of_a_cause():
    assert {rewrite.case for rewrite in REWRITES} <= set(CAUSES)


def test_patterns_are_expressions():
    for cause in CAUSES.values():
        re.compile(cause.pattern)
        re.compile(cause.code)


@pytest.mark.parametrize(
    ("reason", "source", "name"),
    [
        ("Data-dependent branching", "if x.sum() > 0:", "branch-on-value"),
        ("Unsupported Tensor.item() call with capture_scalar_outputs=False", "x = x / y.item()", "item"),
        ("Attempted to call function marked as skipped", "t = time.perf_counter()", "clock"),
        ("Data-dependent branching", "if self.training and torch.rand([]) < 0.3:", "layer-dropped"),
        ("Attempted to wrap RNN, GRU, or LSTM", "x, _ = self.lstm(x)", "rnn-allowed"),
        ("Attempted to call function marked as skipped", "h, _ = pad_packed_sequence(h)", "packed-sequence"),
        ("Data-dependent branching", 'assert x.max() < n, "too large"', "raise-on-value"),
        ("Data-dependent branching", "if x.isnan().any(): raise ValueError", "raise-on-value"),
        ("Data-dependent branching", "if x.sum() > 1: logger.warning('large')", "warn-on-value"),
        ("Unsupported Tensor.item() call", "if x.sum().item() > 1: raise ValueError", "raise-on-value"),
        ("Unsupported Tensor.item() call", "if x.max().item() > 1e4:", "branch-on-item"),
        (
            "Unsupported Tensor.item() call",
            "self.seen[int(label)] = self.seen.get(int(label), 0) + 1",
            "key-from-value",
        ),
        ("Unsupported Tensor.item() call", "steps = arange(lengths.amax().item())", "sizes-from-tensor"),
        ("Uninitialized nn.Module", "loss = DiceLoss(softmax=True)(x, y)", "parameter-made-inside"),
        ("Unsupported context manager", "with self._LOCK:", "lock"),
        ("Attempted to call function marked as skipped", "start = perf_counter()", "clock"),
        ("Data-dependent branching", "if x.sum() > 1: x = torch.log(x)", "branch-on-value"),
        ("Data-dependent branching", "if keep.any(): keep[0] = True", "branch-on-value"),
        ("Unsupported Tensor.item() call", "if 3 in x:", "any-of-values"),
        ("Unsupported Tensor.item() call", "if x.item() in known:", "item"),
        ("setattr() on unsupported type", "wrapper.calls += 1", "function-attribute"),
        ("Attempted to call function marked as skipped", "y = frobnicate(x)", None),
    ],
)
def test_a_break_is_recognised(reason, source, name):
    cause = next(iter(match(reason, source)), None)
    assert (cause and cause.name) == name


# The source line decides between causes with the same guard. Only an option tells the ones in ALIKE apart.
GUARDED_BY = {"growing-sequence": "return torch.cat([cache, x]).sum(0)", "counter": "self.calls += 1"}
ALIKE = {"static-shapes": "last-batch"}


@pytest.mark.parametrize(
    ("name", "version"),
    [
        (name, version)
        for name, cause in CAUSES.items()
        for version in recorded()
        if cause.kind == "recompile" and name in recorded()[version]
    ],
)
def test_a_recompilation_is_recognised_by_its_guard(name, version):
    outcome = recorded()[version][name]
    assert outcome.happens
    likeliest = [match_recompile(guard, GUARDED_BY.get(name, ""))[:1] for guard in outcome.seen]
    assert ALIKE.get(name, name) in [cause.name for causes in likeliest for cause in causes], outcome.seen


@pytest.mark.parametrize(
    ("guard", "name"),
    [
        ("2 <= x.size()[0]", "batch-of-one"),
        ("tensor 'inputs[0]' size mismatch at index 2. expected 16, actual 17", "sequence-length"),
        ("tensor 'x' size mismatch at index 1. expected 16, actual 1", "batch-of-one"),
        ("args[1] == 3", "integer-argument"),
        ("rate == 1e-05", "float-argument"),
        ("mode == True", "text-argument"),
        ("___check_obj_id(mode, 140297705885840), type=<class 'model.Mode'>", "text-argument"),
        ("CodeGuardAccessor: Not a function on f.__code__", "another-function"),
        ("kwargs['mode'] == 'sin'", "configuration-object"),
        ("self.mode == 'sin'", "configuration-object"),
        ("self.started == False", "filled-by-first-call"),
        ("self._modules['block'].epoch == 3", "annealed-attribute"),
        ("object.__getattribute__(self._modules['model'].config, 'problem_type') is None", "filled-by-first-call"),
        ("not hasattr(self, 'mask')", "filled-by-first-call"),
        ("self._buffers['positions'] is None", "filled-by-first-call"),
        ("not ___dict_contains(4, self.cache)", "filled-by-first-call"),
        ("not ___dict_contains('mask', batch)", "dictionary-keys"),
        ("expected type of 'm' to be a tensor type, ' but found <class 'NoneType'>", "optional-argument"),
        ("expected type of 's' to be a tensor type, ' but found <class 'int'>", "parameter-or-tensor"),
        ("GLOBAL_STATE changed: num_threads", "torch-setting"),
        ("___check_torch_function_mode_stack()", "torch-setting"),
        ("___tuple_iterator_len(it) == 3", "growing-list"),
        ("something new", None),
    ],
)
def test_a_guard_is_recognised(guard, name):
    cause = next(iter(match_recompile(guard)), None)
    assert (cause and cause.name) == name


def test_what_broke_in_the_line_decides_between_causes():
    reason, source = "Unsupported Tensor.item() call", "self.seen[name] = float(value)"
    assert match(reason, source, (18, 30))[0].name == "item"
    assert match(reason, source, (0, 15))[0].name == "list-indexed-by-tensor"
    assert match(reason, source, (40, 41)) == match(reason, source)  # no entry is about that


def test_the_committed_index_is_current(pages):
    committed = (PAGE / "INDEX.md").read_text(encoding="utf-8")
    assert committed == pages["INDEX.md"], "run: compile-bench catalogue --render catalogue"
    assert all(f"| {name} " in committed for name in CAUSES)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_page(folder)
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_the_markdown_page_describes_every_cause(pages):
    text = pages["CATALOGUE.md"]
    assert [name for name in CAUSES if f"\n### `{name}` — " not in text] == []
    assert text.count("\n```python\ndef _") + text.count("\n```python\n@broken(") == len(CAUSES)


def test_the_html_page_is_whole_and_loads_nothing(pages):
    opened = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            opened.append((tag, dict(attributes)))

    Reader().feed(pages["CATALOGUE.html"])
    assert {entry["id"] for tag, entry in opened if tag == "details"} == set(CAUSES)
    assert not [entry for _, entry in opened if "src" in entry or "href" in entry]


def test_a_program_is_shown_with_its_fix():
    text = program(CAUSES["print"])
    assert text.startswith("def _print() -> Repro:\n    def broken(x: Tensor) -> Tensor:")
    assert "return Repro(broken, fixed," in text
    short = program(CAUSES["sleep"])
    assert short.startswith('@broken("sleep", fixed=sine_and_cosine')
    assert "\n\n\ndef sine_and_cosine(x: Tensor) -> Tensor:" in short


def test_commands():
    runner = CliRunner()
    listed = runner.invoke(app, ["catalogue"])
    assert listed.exit_code == 0
    assert all(f"| {name} " in listed.output for name in CAUSES)
    assert describe(CAUSES["item"]) in runner.invoke(app, ["catalogue", "item"]).output
    checked = runner.invoke(app, ["catalogue", "item", "--check"])
    assert (checked.exit_code, checked.output) == (0, "1 of 1 cause as stated on this torch\n")
    unknown = runner.invoke(app, ["catalogue", "iten"])
    assert unknown.exit_code == 2
    assert "no cause 'iten' in the catalogue; like it: item" in unknown.output
    assert "; compile-bench catalogue lists them all" in unknown.output


def test_every_guard_of_the_catalogue_reads_as_a_sentence():
    """The guards that torch 2.10 to 2.15 printed for the catalogue's programs."""
    causes = {name for name, each in CAUSES.items() if each.kind == "recompile"}
    seen = (
        each.seen for of_version in read_outcomes(RECORDED).values() for each in map(of_version.get, causes) if each
    )
    guards = {guard.replace(", N)", ", 9470)") for each in seen for guard in each}
    assert len(guards) > 40
    assert {guard for guard in guards if "`" in what_changed(guard)} == set()
