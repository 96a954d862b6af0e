"""The command line: what it prints, and one clear line for bad input."""

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dispatcher_trace import assertions, recording
from dispatcher_trace.capture import native_step
from dispatcher_trace.capture.key_sets import Scope
from dispatcher_trace.capture.shims import Shims
from dispatcher_trace.cli import app
from native_build.toolchain import missing_cxx

PACKAGE = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def remove_shims(usual_operators: list[str]) -> Iterator[Callable[[], None]]:
    """Let all traces of one scope that follow one another share the shims of the first: they take seconds.

    That they come and go is what test_installation.py and test_after_removal.py are about. The fixture removes them
    for a test that looks at the tables.
    """
    installed = recording.installed
    active: dict[Scope, Shims] = {}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def remove() -> None:
            stack.close()
            active.clear()

        def shared(scope: Scope) -> AbstractContextManager[Shims]:
            if scope not in active:
                remove()
                active[scope] = stack.enter_context(installed(scope, only=[*usual_operators, _OF_INDUCTOR, _OF_A_USER]))
            return nullcontext(active[scope])

        for module in (recording, assertions):
            patch.setattr(module, "installed", shared)
        yield remove


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_step(folder: Path, text: str, *options: str) -> Result:
    """Trace ``step`` of a file with that text, on the CPU and at the core keys."""
    file = folder / "mine.py"
    file.write_text(text)
    return call("run", f"{file}:step", "--device", "cpu", "--scope", "core", *options)


def test_op_prints_the_table(remove_shims: Callable[[], None]) -> None:
    remove_shims()
    result = call("op", "aten::add.Tensor")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any(
        re.match(r"CPU +kernel +aten/src/ATen/RegisterCPU\w*\.cpp:\d+ +at::native::structured", line) for line in lines
    )
    order = [line.split()[0] for line in lines[1:-1]]
    assert order.index("AutocastCPU") < order.index("AutogradCPU") < order.index("ADInplaceOrView") < order.index("CPU")
    assert "PrivateUse1" not in result.stdout
    assert "PrivateUse1" in call("op", "aten::add.Tensor", "--all").stdout


def test_expr_prints_tree_and_reasons() -> None:
    result = call("expr", "a + b", "--tensor", "a=f32[2,3]", "--tensor", "b=f32[3]", "--scope", "core", "--full")
    assert result.exit_code == 0, result.stderr
    assert "$2: f32[2, 3] = aten::add.Tensor($0: f32[2, 3], $1: f32[3])" in result.stdout
    assert re.search(r"1 AutogradCPU +autograd kernel", result.stdout)
    assert "\n2. `aten::add.Tensor` at CPU: AutogradCPU redispatched" in result.stdout
    assert "Python, PythonTLSSnapshot" in result.stdout  # what core does not watch


def test_the_default_output_is_an_answer_of_six_lines() -> None:
    common = ("--tensor", "a=f32[4,4]", "--tensor", "b=f32[4,4]", "--scope", "core")
    lines = call("expr", "a @ b", *common, "--autocast", "bf16").stdout.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("$4: bf16[4, 4] = aten::matmul($0: f32[4, 4], $1: f32[4, 4])  AutocastCPU → ")
    assert lines[1].startswith("AutocastCPU at hop 1, aten::matmul(f32): AutocastCPU is the highest key left")
    assert lines[2].startswith("copy, 2 times: aten::_to_copy under aten::matmul")
    assert lines[3].startswith("--full prints the tree of ")
    many = call("expr", "[(a + b).exp() @ a.double().t().reshape(4, 4).float() for i in range(9)]", *common).stdout
    assert many.startswith("63 calls: ")
    assert "aten::add.Tensor(f32) × 9" in many
    assert len(many.splitlines()) <= 7
    plain = call("expr", "a + b", *common).stdout
    assert len(plain.splitlines()) == 2  # nothing is unexpected


def test_the_end_of_a_long_trace_that_raises_is_printed() -> None:
    expression = "[torch.mm(a, a) + i for i in range(60)] and torch.mm(a, torch.ones(3, 3))"
    common = ("expr", expression, "--tensor", "a=f32[2,2]", "--scope", "core", "--max-lines", "60")
    for options in (("--full",), ("--format", "tree")):
        result = call(*common, *options)
        assert result.exit_code == 2
        assert re.search(r"aten::mm\(\$0: f32\[2, 2\], \$\d+: f32\[3, 3\]\)\n", result.stdout), result.stdout
        assert result.stdout.count("mat1 and mat2 shapes cannot be multiplied") == 1
        assert "lines more" in result.stdout
    assert "mat1 and mat2 shapes" in call(*common).stdout


def test_a_budget_of_hops_on_the_command_line() -> None:
    expression = "[a + a for i in range(200)]"
    common = ("expr", expression, "--tensor", "a=f32[2]", "--scope", "core")
    assert "400 hops" in call(*common, "--max-hops", "0").stdout
    counted = call(*common, "--max-hops", "30").stdout
    assert counted.startswith("200 calls: aten::add.Tensor(f32) × 200\n")
    assert "hops in calls alike to earlier ones were counted there" in counted


def test_findings_of_a_trace_that_dropped_hops_say_so(tmp_path: Path) -> None:
    text = "import torch\ndef step():\n    for size in range(1, 60):\n        torch.ones(size).sin()\n"
    found = run_step(tmp_path, text, "--format", "findings", "--max-hops", "20").stdout
    assert found.startswith("no findings\n")
    assert "were dropped" in found


def test_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "m\udcff"
    folder.mkdir()
    done = run_step(folder, "import torch\ndef step():\n    torch.ones(3, 4).t().reshape(-1)\n", "--format", "findings")
    assert done.exit_code == 0, done.stderr
    assert "m\\udcff/mine.py:3 in step" in done.stdout


def test_a_finding_names_its_line_as_it_is() -> None:
    result = call("expr", "a.t().reshape(-1)", "--tensor", "a=f32[2,3]", "--scope", "core", "--full")
    assert result.exit_code == 0, result.stderr
    assert "; `<expression>:1 in <lambda>`\n" in result.stdout
    assert "&lt;" not in result.stdout


def test_expr_with_autocast_and_backward_as_json(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    specs = ("--tensor", "a=f32[4,4]", "--tensor", "b=bf16[4,4]")
    options = ("--autocast", "bf16", "--backward", "--scope", "core", "--format", "json", "--out", str(out))
    result = call("expr", "a @ b", *specs, *options)
    assert result.exit_code == 0, result.stderr
    calls = json.loads(out.read_text(encoding="utf-8"))["calls"]
    assert calls[0]["hops"][0]["key"] == "AutocastCPU"
    assert any(hop["node"].startswith("MmBackward0") for call in calls for hop in call["hops"])


_OF_INDUCTOR = "aten::mm.out"  # what a compiled product calls


@pytest.mark.slow
def test_the_compiled_call_is_traced_without_the_compiler() -> None:
    if reason := missing_cxx():
        pytest.skip(reason)
    result = call("expr", "a @ a", "--tensor", "a=f32[4,4]", "--compile", "--scope", "core", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    operators = re.findall(r" = (\S+)\(", result.stdout)
    assert operators[0] == _OF_INDUCTOR
    assert len(operators) < 10


def test_a_function_gets_its_tensors_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def loss(x, w):\n    return (x.t() @ w).contiguous().sum()\n")
    specs = ("--tensor", "x=f32[4,3]", "--tensor", "w=f32[4,2]", "--device", "cpu")
    result = call("run", f"{file}:loss", *specs, "--backward", "--scope", "core", "--cost", "--format", "findings")
    assert result.exit_code == 0, result.stderr
    (found, *_), (head, *_) = (part.splitlines() for part in result.stdout.split("\n\n"))
    assert found.startswith("copy: aten::clone under aten::mm")  # the expanded gradient of sum() is laid out for mm
    assert found.endswith("mine.py:2 in loss")
    assert head == "Operators over 5 % of the operators' own time, untraced:"
    mapped = call("run", f"{file}:loss", *specs, "--vmap", "--scope", "core", "--format", "findings")
    assert "the traced code raised" in mapped.stderr  # one dimension is mapped away: .t() of a vector


def test_cost_leaves_the_trace_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\nw = torch.nn.Parameter(torch.ones(3))\n\ndef loss():\n    return (w * w).sum()\n")
    common = ("run", f"{file}:loss", "--backward", "--device", "cpu", "--scope", "core", "--format", "tree")
    alone, costed = call(*common), call(*common, "--cost")
    assert costed.exit_code == 0, costed.stderr
    trace, _, costs = costed.stdout.partition("\nOperators over 5 %")
    operators = [re.findall(r" = (\S+)\(", text) for text in (alone.stdout, trace)]
    assert operators[0] == operators[1]  # after another run AccumulateGrad would add where it now keeps the gradient
    assert "aten::detach" in operators[0]
    assert costs


def test_code_that_runs_only_once_is_named_for_cost(tmp_path: Path) -> None:
    text = "import torch\nstock = [1.0]\n\ndef step():\n    return torch.ones(1) * stock.pop()\n"
    result = run_step(tmp_path, text, "--cost")
    assert result.exit_code == 2
    assert "the second, untraced run for --cost (leave --cost out if the code runs only once) raised" in result.stderr


def test_native_step_on_the_command_line() -> None:
    if reason := native_step.unavailable():
        pytest.skip(reason)
    result = call("expr", "a + a", "--tensor", "a=f32[8]", "--native", "--scope", "core", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"native step: [\d,]+ instructions", result.stdout)


def test_pages_and_traces(tmp_path: Path) -> None:
    page, events = tmp_path / "trace.html", tmp_path / "trace.perfetto.json"
    common = ("expr", "a + a", "--tensor", "a=f32[2]", "--scope", "core")
    for form, path in (("html", page), ("perfetto", events)):
        result = call(*common, "--format", form, "--out", str(path))
        assert result.exit_code == 0, result.stderr
        assert result.stdout.strip() == str(path)
    assert "<title>a + a</title>" in page.read_text(encoding="utf-8")
    assert json.loads(events.read_text(encoding="utf-8"))["traceEvents"]


def test_diff_of_two_traces(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    common = ("expr", "a @ a", "--tensor", "a=f32[2,2]", "--scope", "core", "--format", "json")
    assert call(*common, "--out", str(a)).exit_code == 0
    assert call(*common, "--autocast", "bf16", "--out", str(b)).exit_code == 0
    same, other = call("diff", str(a), str(a)), call("diff", str(a), str(b))
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    assert other.exit_code == 1
    assert "keys: aten::matmul (A hop 1 / B hop 1): AutogradCPU | AutocastCPU" in other.stdout
    b.write_text(json.dumps({**json.loads(a.read_text()), "scope": "all"}), encoding="utf-8")
    scopes = call("diff", str(a), str(b))
    assert (scopes.exit_code, scopes.stdout) == (2, "")
    assert "recorded with --scope core" in scopes.stderr
    b.write_text("{}", encoding="utf-8")
    refused, missing = call("diff", str(a), str(b)), call("diff", str(a), str(tmp_path / "none.json"))
    assert refused.stderr == f"dispatcher-trace: {b}: not a trace: expected what --format json writes\n"
    assert "none.json: No such file or directory" in missing.stderr
    b.write_text("keys = 1\n", encoding="utf-8")
    python = call("diff", str(a), str(b))
    assert python.stderr.startswith(f"dispatcher-trace: {b}: not JSON (")
    assert python.stderr.endswith("): expected what --format json writes\n")
    assert (refused.exit_code, missing.exit_code, python.exit_code) == (2, 2, 2)


def test_run_traces_a_function(tmp_path: Path) -> None:
    text = "import torch\n\ndef step():\n    return torch.ones(2).exp()\n"
    result = run_step(tmp_path, text, "--inference-mode", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    assert "aten::exp($0: f32[2])" in result.stdout
    assert "AutogradCPU" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("op", "add.tensr"), "no operator 'add.tensr'; near names: aten::add.Tensor"),
        (
            ("op", "aten::add"),
            "no operator 'aten::add'; near names: aten::add.Scalar, aten::add.Scalar_out, aten::add.Tensor",
        ),
        (("op", "torch.ops.aten.mul.Tensor"), "no operator 'torch.ops.aten.mul.Tensor'; near names: aten::mul.Tensor"),
        (("op", "aten::mm.default"), "no operator 'aten::mm.default'; near names: aten::mm"),
        (("op", "torch.mm"), "no operator 'torch.mm'; near names: aten::mm"),
        (("op", "::"), "no operator '::'"),
        (("op", ""), "no operator ''"),
        (("expr", "a +"), "cannot read the expression 'a +'"),
        (("expr", "await a", "--tensor", "a=f32[2]"), "cannot use the expression 'await a': 'await' outside async"),
        (
            ("expr", "a @ a", "--tensor", "a=f32[2,2]", "--autocast", "f64"),
            "--autocast: torch has no autocast to f64 on cpu; use bf16 or f16",
        ),
        (
            ("expr", "[a @ b for b in (c, F.relu(a))]", "--tensor", "a=f32[2]"),
            "the expression uses c, which no --tensor names; add --tensor c=f32[4,4], with its own dtype and sizes",
        ),
        (("expr", "a", "--tensor", "a=f33[2]"), "--tensor: unknown dtype 'f33'; one of f32"),
        (("expr", "a", "--tensor", "a:f32[2]"), "--tensor takes NAME=DTYPE[SIZES]"),
        (("expr", "a", "--tensor", "a=f32[2,,3]"), "--tensor: sizes are whole numbers between commas"),
        (("expr", "a", "--tensor", "a=f32[2]@mps"), "--tensor: the device after @ is cpu, cuda or cuda:N, got 'mps'"),
        (("expr", "a", "--tensor", "a=f32[2]@auto"), "--tensor: the device after @ is cpu, cuda or cuda:N, got 'auto'"),
        (("expr", "a", "--tensor", "a=f32[2]@cpu:x"), "got 'cpu:x' in 'a=f32[2]@cpu:x'; without @ it is --device's"),
        (("expr", "a", "--tensor", "a=f32[2]@cuda:99"), "--tensor: 'a=f32[2]@cuda:99' asks for GPU 99, and torch "),
        (("expr", "a", "--tensor", "for=f32[2]"), "--tensor: expected a variable's name, got Python's keyword 'for'"),
        (
            ("expr", "a", "--tensor", "a=f32[2]", "--tensor", "b=f32[2]", "--tensor", "a=bf16[3]"),
            "--tensor: 'a' is given twice, as a=f32[2]@cpu and as a=bf16[3]@cpu; give each tensor another name",
        ),
        (("expr", "a", "--tensor", "a=f32[99999999999999]"), "torch cannot make a=f32[99999999999999]@cpu (Runtime"),
        (("expr", "a", "--tensor", "a=f32[99999999999999999999]"), "; take smaller sizes, or a dtype of f32, "),
        (("expr", "a", "--tensor", "a=qint8[2]"), "--tensor: torch cannot make a=qint8[2]@cpu (RuntimeError: "),
        (
            ("expr", "a + a", "--tensor", "a=f32[2]", "--scope", "core", "--only", "aten::ad"),
            "--only aten::ad: no such call in the trace; near names: aten::add.Tensor",
        ),
        (
            ("expr", "3", "--backward", "--scope", "core"),
            "found no tensor that requires a gradient in the result, of type int",
        ),
        (("expr", "3", "--autocast", "half-ish"), "--autocast: unknown dtype 'half-ish'"),
        (("run", "OWN:two", "--tensor", "y=f32[2]"), "cannot be called with --tensor y: missing a required argument"),
        (("expr", "3", "--cost", "--format", "html"), "--cost prints a table: use --format markdown, tree or findings"),
        (("expr", "3", "--vmap"), "--vmap maps over the first dimension of each --tensor: give at least one"),
        (("expr", "3", "--backward", "--inference-mode"), "exclude each other: inference mode records no graph"),
        (("run", "nowhere.py:f"), "no file 'nowhere.py'; expected FILE.py:FUNCTION, the file from here ("),
        (("run", "nowhere"), "expected FILE.py:FUNCTION, got 'nowhere'"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def two(x):\n    return x * 2\n")
    result = call(*(argument.replace("OWN", str(file)) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def stepp():\n    return 1 / 0\n")
    missing, raising = call("run", f"{file}:step"), call("run", f"{file}:stepp", "--scope", "core")
    assert "has no function 'step'; near names: stepp" in missing.stderr
    assert "the traced code raised ZeroDivisionError: division by zero" in raising.stderr
    file.write_text("raise OSError('broken')\n")
    broken = call("run", f"{file}:step")
    assert "cannot be imported: OSError: broken" in broken.stderr
    file.write_text("raise SystemExit(0)\n")
    ending = call("run", f"{file}:step")
    assert 'imported: SystemExit: 0; put the call that exits under if __name__ == "__main__":' in ending.stderr
    assert [result.exit_code for result in (missing, raising, broken, ending)] == [2, 2, 2, 2]


def test_an_exception_leaves_the_trace_up_to_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def step(x):\n    y = x.sin()\n    raise ValueError('not here')\n")
    common = ("run", f"{file}:step", "--tensor", "x=f32[2]", "--device", "cpu", "--scope", "core")
    printed, document = call(*common, "--full"), call(*common, "--format", "json")
    assert (printed.exit_code, document.exit_code) == (2, 2)
    assert "$1: f32[2] = aten::sin($0: f32[2])" in printed.stdout
    assert "- The traced code raised ValueError: not here, at " in printed.stdout
    assert printed.stderr == document.stderr
    assert re.search(r"the traced code raised ValueError: not here, at [^ ]+/mine\.py:3 in step\n$", printed.stderr)
    assert [each["operator"] for each in json.loads(document.stdout)["calls"]] == ["aten::sin"]


def test_a_message_with_every_backend_is_printed_once_in_its_first_sentences(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\n\ndef step(x):\n    return torch.cumsum(x.to_sparse(), 0)\n")
    common = ("run", f"{file}:step", "--tensor", "x=f32[2,2]", "--device", "cpu", "--scope", "core")
    answer, tree, document = call(*common), call(*common, "--full"), call(*common, "--format", "json")
    assert [result.exit_code for result in (answer, tree, document)] == [2, 2, 2]
    assert (answer.stdout + answer.stderr).count("Could not run 'aten::cumsum'") == 1
    assert answer.stderr.startswith("dispatcher-trace: the traced code raised NotImplementedError at hop ")
    assert "/mine.py:4 in step" in answer.stdout
    assert "only available for these backends" not in answer.stdout + document.stderr
    assert document.stderr.endswith("from the 'SparseCPU' backend, at " + document.stderr.rpartition(", at ")[2])
    assert tree.stdout.count("only available for these backends") == 1


def test_an_exception_names_the_users_line_that_called_a_library(tmp_path: Path) -> None:
    text = "import json\n\ndef read(text):\n    return json.loads(text)\n\ndef step():\n    read('{')\n"
    result = run_step(tmp_path, text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.rstrip().endswith("/mine.py:4 in read")
    bare = run_step(tmp_path, "import torch\n\nstep = torch.linalg.inv\n", "--tensor", "x=f32[2,3]")
    assert bare.exit_code == 2
    assert ", at " not in bare.stderr  # a builtin has no line


_STOPPED_BETWEEN = "def step(x):\n    x.sin()\n    raise KeyboardInterrupt\n"
_OF_A_USER = "interrupted::stop"
_STOPPED_INSIDE = f"""
import torch

@torch.library.custom_op("{_OF_A_USER}", mutates_args=())
def stop(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt

def step(x):
    x.sin()
    stop(x)
"""


@pytest.mark.parametrize(
    ("text", "what"),
    [(_STOPPED_BETWEEN, "KeyboardInterrupt"), (_STOPPED_INSIDE, "what hop 4 raised")],
    ids=["between operators", "inside one"],
)
def test_an_interrupt_leaves_the_trace_up_to_it(text: str, what: str, tmp_path: Path) -> None:
    result = run_step(tmp_path, text, "--tensor", "x=f32[2]")
    assert result.exit_code == 130
    assert " = aten::sin($0: f32[2])" in result.stdout
    assert f"The traced code raised {what}, at " in result.stdout


def test_the_operator_that_raises_is_in_the_trace() -> None:
    result = call("expr", "a @ a", "--tensor", "a=f32[2,3]", "--scope", "core", "--format", "tree")
    assert result.exit_code == 2
    assert "the traced code raised RuntimeError: mat1 and mat2" in result.stderr
    assert re.search(
        r"aten::mm\(.*\n +2 AutogradCPU .* raised the same\n +3 CPU .* raised RuntimeError: mat1", result.stdout
    )


_CALLABLES = """
import functools
import torch

builtin = torch.add
partial_of_a_builtin = functools.partial(torch.add, torch.ones(2))

class Module(torch.nn.Module):
    def forward(self, x):
        return x + 1

    def method(self, x):
        return x + 2

module = Module()

def by_position(x, /):
    return x + 3
"""


@pytest.mark.parametrize("name", ["builtin", "partial_of_a_builtin", "module", "module.method", "by_position"])
def test_every_kind_of_callable_runs(name: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(_CALLABLES)
    tensors = ["--tensor", "x=f32[2]", *(("--tensor", "other=f32[2]") if name == "builtin" else ())]
    result = call("run", f"{file}:{name}", *tensors, "--device", "cpu", "--scope", "core", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    assert " = aten::add.Tensor($0: f32[2], " in result.stdout


def test_a_long_trace_fits_on_ten_screens_and_says_what_it_leaves_out() -> None:
    expression = "[(a.sin() + i).cos() for i in range(120)] and [torch.mm(a, a) for i in range(120)]"
    common = ("expr", expression, "--tensor", "a=f32[2,2]", "--scope", "core")
    tree, whole = call(*common, "--format", "tree"), call(*common, "--format", "tree", "--max-lines", "0")
    lines = tree.stdout.splitlines()
    assert len(lines) == 400
    left = len(whole.stdout.splitlines()) - 399
    assert lines[-1] == f"… {left:,} lines more (--max-lines 0 prints them, --depth and --only choose)"
    assert whole.stdout.startswith(tree.stdout[:4000])
    page = call(*common, "--full").stdout.splitlines()
    assert 390 <= len(page) <= 400
    assert sum(line.startswith("… ") and "lines more" in line for line in page) == 2  # of the tree and of the reasons
    only = call(*common, "--format", "tree", "--only", "aten::m?").stdout
    assert re.findall(r" = (aten::\w+)", only)[0] == "aten::mm"  # torch 2.10 on asks mm for resolve_conj inside
    assert "aten::sin" not in only
    assert "… the call above 119 times more, hops " in only
    shallow = call(*common, "--format", "tree", "--depth", "1", "--max-lines", "0").stdout
    assert "    … 3 calls inside" in shallow
    assert "aten::_to_copy" in whole.stdout
    assert "aten::_to_copy" not in shallow


def test_findings_that_repeat_are_printed_once_and_limited_with_the_rest() -> None:
    expression = "[[a * torch.ones(2, 3, dtype=d) for i in range(30)] for d in (torch.float64, torch.half)]"
    common = ("expr", expression, "--tensor", "a=f32[2,3]", "--scope", "core")
    found = call(*common, "--format", "findings").stdout.splitlines()
    assert len(found) == 2
    assert found[0].startswith("copy, 30 times: aten::_to_copy under aten::mul.Tensor (first at hop ")
    assert re.search(r"cast to f64; <expression>:1 in <\w+>$", found[0])  # listcomp before Python 3.12
    assert call(*common, "--format", "findings", "--max-lines", "1").stdout.splitlines() == [
        "… 2 lines more (--max-lines 0 prints them, --depth and --only choose)",
    ]
    page = call(*common, "--full", "--max-lines", "40").stdout
    assert len(page.splitlines()) <= 40
    assert page.count("\n- copy, 30 times: ") == 2


@pytest.mark.filterwarnings("error")  # a coroutine that nobody awaits
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def step():\n    yield 1\n", "the traced code returned a generator, which has not run; trace a function"),
        ("async def step():\n    return 1\n", "the traced code returned a coroutine, which has not run"),
        ("async def step():\n    yield 1\n", "the traced code returned an asynchronous generator"),
        ("def step():\n    return map(str, [1])\n", "the traced code returned a map, which has not run"),
        ("def step():\n    raise SystemExit(0)\n", "the traced code raised SystemExit: 0, at "),
    ],
)
def test_code_that_does_not_run_to_its_end_is_one_line(body: str, message: str, tmp_path: Path) -> None:
    result = run_step(tmp_path, body)
    assert message in result.stderr
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("form", ["tree", "findings", "markdown"])
def test_an_empty_trace_says_so(form: str) -> None:
    result = call("expr", "3", "--scope", "core", "--format", form)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.removeprefix("- ").startswith("No operator was called.\n")


@pytest.mark.parametrize("expression", ["a * 2", "a.conj()"])
def test_backward_of_a_complex_result(expression: str) -> None:
    specs = ("--tensor", "a=c64[3]", "--scope", "core", "--format", "tree")
    result = call("expr", expression, *specs, "--backward")
    assert result.exit_code == 0, result.stderr
    assert "aten::view_as_real" in result.stdout
    assert "in AccumulateGrad" in result.stdout


def test_a_file_with_annotations_as_text_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "json.py"  # its name is a module's of Python's own, which it must not hide
    file.write_text(
        "from __future__ import annotations\nimport dataclasses, torch\n\n@dataclasses.dataclass\nclass Sizes:\n    n: "
        "int = 2\n\ndef step():\n    return torch.ones(Sizes().n).exp()\n"
    )
    result = call("run", f"{file}:step", "--device", "cpu", "--scope", "core", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    assert "aten::exp($0: f32[2])" in result.stdout
    assert sys.modules["json"] is json


@pytest.mark.parametrize("where", ["top", "function"])
def test_a_file_imports_its_neighbours_wherever_it_does(where: str, tmp_path: Path) -> None:
    neighbour = f"beside_{where}"
    (tmp_path / f"{neighbour}.py").write_text("import torch\n\ndef ones():\n    return torch.ones(2)\n")
    top, inside = (f"{indent}import {neighbour}\n" for indent in ("", "    "))
    file = tmp_path / "mine.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, 'not the first entry')\n{top if where == 'top' else ''}\ndef "
        f"step():\n{inside if where == 'function' else ''}    return {neighbour}.ones().exp()\n"
    )
    before = list(sys.path)
    options = ("--device", "cpu", "--scope", "core", "--cost", "--format", "tree")
    try:
        result = call("run", f"{file}:step", *options)
        assert result.exit_code == 0, result.stderr
        assert "aten::exp($0: f32[2])" in result.stdout
        assert sys.path == ["not the first entry", *before]
    finally:
        sys.path[:] = before


def test_a_method_in_a_package_whose_tensor_has_a_greek_name(tmp_path: Path) -> None:
    package = tmp_path / "traced_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text("def twice(x):\n    return x * 2\n")
    (package / "mine.py").write_text(
        "from .layers import twice\n\nclass Model:\n    def step(self, α):\n        return twice(α).exp()\n\nmodel = "
        "Model()\n"
    )
    options = ("--tensor", "α=f32[2]", "--device", "cpu", "--scope", "core", "--format", "tree")
    result = call("run", f"{package / 'mine.py'}:model.step", *options)
    assert result.exit_code == 0, result.stderr
    assert "aten::exp($2: f32[2])" in result.stdout


def test_the_output_goes_where_the_command_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    result = run_step(tmp_path, "import os\n\ndef step():\n    os.chdir('other')\n", "--out", "trace.txt")
    assert result.stdout == "trace.txt\n"
    assert (tmp_path / "trace.txt").is_file()


def test_what_the_code_prints_does_not_stand_in_the_json(tmp_path: Path) -> None:
    text = "print('loaded')\n\ndef step(x):\n    print('ran')\n    return x + x\n"
    result = run_step(tmp_path, text, "--tensor", "x=f32[2]", "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["calls"]
    assert result.stderr == "loaded\nran\n"


def test_backward_finds_the_tensors_of_a_dataclass(tmp_path: Path) -> None:
    text = "import dataclasses\n\n@dataclasses.dataclass\nclass Output:\n    loss: object\n    steps: int\n"
    text += "\ndef step(x):\n    return Output(x.exp(), 3)\n"
    result = run_step(tmp_path, text, "--tensor", "x=f32[2]", "--backward", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    assert "in ExpBackward0" in result.stdout


def test_expr_under_vmap() -> None:
    result = call("expr", "a.sum()", "--tensor", "a=f32[2,3]", "--vmap", "--format", "tree")
    assert result.exit_code == 0, result.stderr
    assert "FuncTorchBatched" in result.stdout


PAGES = [PACKAGE / "README.md", PACKAGE.parents[1] / "docs" / "dispatcher-trace.md"]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_documented_commands_run(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remove_shims: Callable[[], None]
) -> None:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    documented = [line for line in lines if line.startswith("dispatcher-trace ")]
    commands = [line for line in documented if ("--compile" in line) == compiled]
    assert len(commands) >= (1 if compiled else 5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef step():\n    return torch.ones(2, requires_grad=True).exp()\n"
    )
    for command in commands:
        if compiled:
            remove_shims()  # the compiler runs before the trace
        result = call(*shlex.split(command.partition("  #")[0])[1:])
        assert result.exit_code == 0, f"{command}: {result.stderr}"


def test_the_readme_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(snippet, "README.md", "exec"), {})
    assert "AutocastCPU" in capsys.readouterr().out
