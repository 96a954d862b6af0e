"""Changes of the source: what they make of a statement, what they leave alone, and that patches apply."""

import subprocess
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from compile_bench.capture.frames import Frame
from compile_bench.capture.trace import Break, categorise
from compile_bench.catalogue.source import Edit, Source, line_before, unified_diff
from compile_bench.fixes.rewrites import candidates, with_torch

BRANCH = "Data-dependent branching"
ITEM = "Unsupported Tensor.item() call with capture_scalar_outputs=False"
SKIPPED = "Attempted to call function marked as skipped"
SHAPE = "Dynamic shape operator"
HEAD = "import torch\nimport time, sys, gc, logging\n\nlog = logging.getLogger()\n\n\n"


def source_of(body, head=HEAD):
    return Source(Path("model.py"), (head + textwrap.dedent(body).lstrip("\n")).encode())


def proposals(source, reason, function="f"):
    """Rewritten bodies by case (the first of it), for a break at the line that is marked."""
    line = next(n for n, text in enumerate(source.content.decode().splitlines(), 1) if text.endswith("# here"))
    found = Break("model.py", line, function, "", reason, "", (), categorise(reason), False)
    made = reversed(list(candidates(source, found)))
    return {c.rewrite.case: source.apply(c.edits).decode().removeprefix(HEAD) for c in made}


def first(body, reason, head=HEAD):
    answer = proposals(source_of(body, head), reason)
    return next(reversed(answer.items())) if answer else (None, None)


def test_output_is_guarded_and_keeps_its_lines():
    case, text = first(
        """
        def f(x):
            print(  # here
                "norm",
                x.norm().item(),
            )
            return x
        """,
        "Failed to trace builtin operator",
    )
    assert case == "print"
    assert text == textwrap.dedent(
        """\
        def f(x):
            if not torch.compiler.is_compiling():
                print(  # here
                    "norm",
                    x.norm().item(),
                )
            return x
        """
    )


def test_lines_of_a_string_stay_where_they_are():
    _, text = first('def f(x):\n    print("""a\n  b""")  # here\n', "Failed to trace builtin operator")
    assert text.endswith('        print("""a\n  b""")  # here\n')


def test_a_clock_that_was_imported_by_its_name_is_read_only_while_not_compiling():
    body = (
        "from time import perf_counter as now\n\n\ndef f(x):\n    start = now()  # here\n    return x, now() - start\n"
    )
    case, text = first(body, "Attempted to call function marked as skipped")
    assert case == "clock"
    assert "start = (0.0 if torch.compiler.is_compiling() else now())  # here" in text
    assert "def now" not in text


@pytest.mark.parametrize(
    "body",
    [
        "    if time.monotonic() > self.deadline:  # here\n        raise TimeoutError\n    return x\n",
        "    start = time.time()  # here\n    took = time.time() - start\n    return x.sin() if took < 1 else x\n",
        "    start = time.time()  # here\n    self.best = min(self.best, time.time() - start)\n    return x\n",
        "    now = time.time()  # here\n    self.last = now\n    return x\n\n\ndef g(s):\n    return self.last > 3\n",
        "    now = time.time()  # here\n    return x.sin() if self.due(now) else x\n",  # whatever it does with it
        "    if int(time.time()) // 60:  # here\n        self.shown = True\n    return x\n",
        "    self.sizes[time.time_ns()] = len(x)  # here\n    return x\n",  # compiled, all have one key
    ],
)
def test_a_clock_that_decides_something_is_left_alone(body):
    assert "clock" not in proposals(source_of("def f(self, x):\n" + body), SKIPPED)


def test_a_check_whose_error_the_caller_handles_is_left_alone(tmp_path):
    body = "def f(x):\n    if x.sum() > 0:  # here\n        raise ValueError\n    return x\n"
    assert "raise-on-value" in proposals(source_of(body), BRANCH)
    handled = "\n\ndef g(x):\n    try:\n        return f(x)\n    except ValueError:\n        return -x\n"
    assert "raise-on-value" not in proposals(source_of(body + handled), BRANCH)
    caller = tmp_path / "caller.py"
    caller.write_text(
        "def h(block, x):\n    try:\n        return block(x)\n    except ValueError:\n        return -x\n"
    )
    found = Break(
        "model.py", 8, "f", "", BRANCH, "", (), categorise(BRANCH), False, stack=(Frame(str(caller), 3, "h"),)
    )
    source = source_of(body)
    assert "raise-on-value" not in {each.rewrite.case for each in candidates(source, found)}
    assert "raise-on-value" in {each.rewrite.case for each in candidates(source, replace(found, stack=()))}


def test_torch_is_imported_behind_a_last_line_without_an_end():
    body = "def f(x):\n    print(x)  # here\n    return x\n\n\nfrom os import path  # noqa"
    source = Source(Path("model.py"), body.encode())
    assert source.apply(with_torch(source)).decode() == f"{body}\nimport torch\n"


def test_a_check_that_only_reports_is_made_while_not_compiling():
    case, text = first("def f(x):\n    if x.isnan().any():  # here\n        log.warning('nan')\n    return x\n", BRANCH)
    assert case == "warn-on-value"
    assert "    if not torch.compiler.is_compiling() and x.isnan().any():  # here\n        log.warning('nan')\n" in text
    _, text = first("def f(x):\n    if x.max() > 9 or x.min() < -9:  # here\n        print(x)\n", BRANCH)
    assert "if not torch.compiler.is_compiling() and (x.max() > 9 or x.min() < -9):  # here" in text


@pytest.mark.parametrize(
    "body",
    [
        "    if x.max() > 9:  # here\n        print(x)\n        x = x + y\n",
        "    if x.max() > 9:  # here\n        print(x)\n    else:\n        y = y + x\n",
        "    if self.seen(x):  # here\n        print(x)\n",
        "    if y is None:\n        y = x\n    elif x.max() > 9:  # here\n        print(x)\n",
    ],
)
def test_a_check_that_does_more_than_report_is_left_alone(body):
    assert "print" not in proposals(source_of(f"def f(self, x, y):\n{body}"), BRANCH)


def test_a_print_that_does_something_else_is_left_alone():
    assert first("def f(x):\n    print(self.count())  # here\n", "Failed to trace builtin operator") == (None, None)
    assert first("def f(x):\n    print(n := 3)  # here\n", "Failed to trace builtin operator") == (None, None)


def test_tabs_and_one_line_blocks_are_kept():
    _, text = first("def f(x):\n\tlog.info('a')  # here\n", "logging.Logger method not supported")
    assert text == "def f(x):\n\tif not torch.compiler.is_compiling():\n\t\tlog.info('a')  # here\n"
    _, text = first("def f(x):\n    if x: print(1)  # here\n", "Failed to trace builtin operator")
    assert text == "def f(x):\n    if x: print(1) if not torch.compiler.is_compiling() else None  # here\n"


def test_import_of_torch_is_added_behind_the_others():
    _, text = first(
        "def f(x):\n    print(1)  # here\n", "Failed to trace builtin operator", head='"""Doc."""\nimport os\n'
    )
    assert text.startswith('"""Doc."""\nimport os\nimport torch\ndef f')


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "def f(x):\n    if x.mean() > 0:  # here\n        x = x * 0.5\n    return x\n",
            "def f(x):\n    # here\n    x = torch.where(x.mean() > 0, x * 0.5, x)\n    return x\n",
        ),
        (
            "def f(x):\n    if not (x > 0).all():  # here\n        y = x\n    else:\n        y = -x\n    return y\n",
            "def f(x):\n    # here\n    y = torch.where(torch.logical_not((x > 0).all()), x, -x)\n    return y\n",
        ),
        (
            "def f(x):\n    if x.max().item() > 3:  # here\n        return x.relu()\n    return x\n",
            "def f(x):\n    # here\n    return torch.where(x.max() > 3, x.relu(), x)\n",
        ),
        (
            "def f(x):\n    s = 2.0 if bool(x.sum() > 0) else 0.5  # here\n    return x * s\n",
            "def f(x):\n    s = torch.where(x.sum() > 0, 2.0, 0.5)  # here\n    return x * s\n",
        ),
        (
            "def f(self, x):\n    if self.training and x.sum() > 0:  # here\n        x = x + 1\n    return x\n",
            "def f(self, x):\n    if self.training:  # here\n"
            "        x = torch.where(x.sum() > 0, x + 1, x)\n    return x\n",
        ),
        (
            "def f(self, x):\n    if x.sum() > 0:  # here\n        return self.out(x * 2)\n    return self.out(x)\n",
            "def f(self, x):\n    # here\n    return self.out(torch.where(x.sum() > 0, x * 2, x))\n",
        ),
    ],
)
def test_branches_become_where(body, expected):
    assert proposals(source_of(body), BRANCH)["branch-on-value"] == expected


@pytest.mark.parametrize(
    ("test", "condition"),
    [
        ("(a - b).item() * 2 > 1", "(a - b).double() * 2 > 1"),
        ("-(a - b).item() > 1", "-(a - b).double() > 1"),
        ("(a > b).item() == True", "(a > b) == True"),
        ("a.any().item() + b.any().item() > 1", "a.any().double() + b.any().double() > 1"),  # not True
        ("a.max().item() + 1 > 255", "a.max().double() + 1 > 255"),  # uint8
        ("a.max().item() < 1e-8", "a.max().double() < 1e-8"),  # 0 in float16
        ("a.max().item() < 0.1", "a.max().double() < 0.1"),
        ("a.max().item() > -0.5", "a.max() > -0.5"),
        ("a.item() > b.item()", "a.double() > b.double()"),
        ("int(a) == 2", "torch.as_tensor(a, dtype=torch.float64).trunc() == 2"),
        ("int(a.item() / 3) == 2", "torch.as_tensor(a.double() / 3, dtype=torch.float64).trunc() == 2"),
        ("float(a.sum().item()) / 3 > 1", "a.sum().double() / 3 > 1"),
        ("float(a.item() / 3) > 1", "torch.as_tensor(a.double() / 3, dtype=torch.float64) > 1"),
        ("a.item()", "a"),
    ],
)
def test_a_condition_computes_as_python_does(test, condition):
    for body, case, changed in (
        ("x = x + 1", "branch-on-value", f"    x = torch.where({condition}, x + 1, x)\n"),
        ("raise ValueError('far')", "raise-on-value", f"(torch.logical_not({condition}), 'far')\n"),
    ):
        source = source_of(f"def f(x, a, b):\n    if {test}:  # here\n        {body}\n    return x\n")
        assert changed in proposals(source, BRANCH)[case]


def test_what_keeps_a_value_or_is_seeded_with_one_is_left_alone():
    keeping = ("self.log('loss', x.mean())", "wandb.log({'loss': x})", "self.catalog.log(x)", "catalog.debug(x)")
    for call in (*keeping, "self.logger.log({'loss': x})", "logger.log('loss', x)"):
        assert "print" not in proposals(source_of(f"def f(self, x):\n    {call}  # here\n    return x\n"), SKIPPED)
    logging = ("self.logger.info(x)", "LOG.warning(x)", "logging.debug(x)", "model_log.info(x)")
    for call in (*logging, "logger.log(logging.INFO, x)", "log.log(10, '%s', x)"):
        assert "print" in proposals(source_of(f"def f(self, x):\n    {call}  # here\n    return x\n"), SKIPPED)
    body = "    now = time.time_ns()  # here\n    torch.manual_seed(now)\n    return x\n"
    assert "clock" not in proposals(source_of("def f(x):\n" + body), SKIPPED)


@pytest.mark.parametrize(
    "body",
    [
        "def f(x):\n    if (m := x.max().item()) > 3:  # here\n        x = x / m\n    return x\n",  # m is a number
        "def f(x):\n    if x.sum() > 0:  # here\n        x += 1\n    return x\n",  # in place: others may hold x
        "def f(x):\n    if x.sum() > 0:  # here\n        x = x.sum(0)\n    return x\n",  # another shape
        "def f(x):\n    if x.sum() > 0:  # here\n        x = self.layer(x)\n    return x\n",  # may do anything
        "def f(x):\n    if x.sum() > 0:  # here\n        x = x + 1\n        self.n = 1\n    return x\n",
        "def f(x):\n    s = 0.1 if x.sum() > 0 else 0.2  # here\n    return x * s\n",  # not exact in float32
        "def f(x):\n    s = 2 if x.sum() > 0 else 0.5  # here\n    return x * s\n",  # two kinds of number
        "def f(self, x):\n    self.s = 2.0 if x.sum() > 0 else 0.5  # here\n    return x\n",  # it is kept
        "def f(x):\n    if x.sum() > 0:  # here\n        return x\n    y = x + 1\n    return y\n",
        "def f(x):\n    if self.on or x.sum() > 0:  # here\n        x = x + 1\n    return x\n",
        # A side is a tensor itself, and is written in place: by the next line, or by who gets it.
        "def f(self, x):\n    out = x * 2\n    if x.sum() > 0:  # here\n        out = self.peak\n    out.add_(1)\n",
        "def f(x):\n    if x.sum() > 0:  # here\n        x = x * 2\n    x += 1\n    return x\n",
        "def f(x):\n    if x.sum() > 0:  # here\n        x = x * 2\n    x[0] = 1\n    return x\n",
        "def f(x):\n    if x.sum() > 0:  # here\n        return x\n    return x * 2\n\ndef g(y):\n    f(y).add_(1)\n",
    ],
)
def test_branches_that_where_would_change_are_left_alone(body):
    assert "branch-on-value" not in proposals(source_of(body), BRANCH)


def test_an_error_is_raised_on_the_device_while_compiling():
    body = "def f(x):\n    if torch.isnan(x).any():  # here\n        raise ValueError('not a number')\n    return x\n"
    assert proposals(source_of(body), BRANCH)["raise-on-value"] == (
        "def f(x):\n    if torch.compiler.is_compiling():\n"
        "        torch._assert_async(torch.logical_not(torch.isnan(x).any()), 'not a number')\n"
        "    elif torch.isnan(x).any():  # here\n        raise ValueError('not a number')\n    return x\n"
    )


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        ("try:", "    except ValueError:\n        x = x + 1\n"),
        ("with contextlib.suppress(ValueError):", ""),
    ],
)
def test_an_error_that_the_function_catches_is_left_alone(head, tail):
    body = f"def f(x):\n    {head}\n        if x.sum() > 9:  # here\n            raise ValueError\n{tail}    return x\n"
    assert "raise-on-value" not in proposals(source_of(body), BRANCH)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    return x / x.abs().max().item()  # here\n", "    return x / x.abs().max().detach().sum()  # here\n"),
        (
            "    s = x.mean().item()  # here\n    return x / s\n",
            "    s = x.mean().detach()  # here\n    return x / s\n",
        ),
        (
            "    return x * float(x.std() + 1)  # here\n",
            "    return x * (x.std() + 1).detach().reshape(()).sum().float()  # here\n",
        ),
        (  # what is written into it later is not in the value
            "    s = int(self.m.item())  # here\n    self.m.mul_(2)\n    return x * s\n",
            "    s = self.m.detach().reshape(()).sum().long()  # here\n    self.m.mul_(2)\n    return x * s\n",
        ),
    ],
)
def test_a_value_stays_a_tensor_cut_from_the_gradient(body, expected):
    assert proposals(source_of("def f(x):\n" + body), ITEM)["item"] == "def f(x):\n" + expected


@pytest.mark.parametrize(
    "body",
    [
        "    self.history.append(x.max().item())  # here\n",  # whoever reads it expects a number
        "    s = x.max().item()  # here\n    log(s)\n    return x * s\n",
        "    return x.max().item()  # here\n",
        "    self.ema = 0.9 * self.ema + 0.1 * x.mean().item()  # here\n    return x\n",
        "    self.log['mean'] = x.mean().item() / 2  # here\n    return x\n",
        "    self.history.append(-x.max().item())  # here\n    return x\n",
        "    return {'x': x, 'mean': 2 * x.mean().item()}  # here\n",
        "    s = x.max().item()  # here\n    self.top = s / 2\n    return x * s\n",
        "    s = x.max().item() * 2  # here\n    self.history.append(s)\n    return x * s\n",
        "    return x.max().item()  # here\n\n\ndef g(x):\n    return x / f(x)\n",  # f may be called elsewhere
        "    s = self.level.item()  # here\n    return x * 2**s\n",  # 0 for a level of -1, as an integer tensor
        "    s = self.level.item()  # here\n    return x * (1 << s)\n",
        "    return x * (x.sum().item() * 1099511628211 % 97)  # here\n",  # more than 64 bits hold
        "    s = self.level.item()  # here\n    if self.half:\n        s += 0.5\n    return x * s\n",
    ],
)
def test_a_value_that_leaves_arithmetic_stays_a_number(body):
    assert set(proposals(source_of("def f(x):\n" + body), ITEM)) == {"item-captured"}


@pytest.mark.parametrize("test", ["s != s", "not (s == s)", "0 < s <= s"])
def test_a_captured_number_is_not_compared_with_itself(test):
    """Dynamo takes a number that it captured to be equal to itself, and NaN is not."""
    body = f"s = x.norm().item()  # here\nif {test}:\n    return x\nreturn x[: int(s)]\n"
    assert not proposals(source_of("def f(x):\n" + textwrap.indent(body, "    ")), ITEM)


@pytest.mark.parametrize(
    ("uses", "allowed"),
    [
        ("return x / _peak(x)", True),
        ("return x / _peak(x), [*map(_peak, x)]", False),
        ("self.peak = _peak(x) * 2", False),
        ("return x[: int(_peak(x) + 1)]", False),
    ],
)
def test_a_value_that_a_private_function_returns_is_followed(uses, allowed):
    body = f"def _peak(x):\n    return x.max().item()  # here\n\n\ndef f(self, x):\n    {uses}\n"
    assert ("item" in proposals(source_of(body), ITEM)) == allowed


@pytest.mark.parametrize(
    ("given", "allowed"),
    [("s=1.0", False), ("*, s=True", False), ("s: float | torch.Tensor", False), ("s=None", True), ("s, k=2", True)],
)
def test_a_parameter_that_may_be_a_number_is_no_tensor(given, allowed):
    read = source_of(f"def f(x, {given}):\n    return x * float(s)  # here\n")
    assert ("item" in proposals(read, ITEM)) == allowed
    branch = source_of(f"def f(x, {given}):\n    if s > 2:  # here\n        x = x + 1\n    return x\n")
    assert ("branch-on-value" in proposals(branch, BRANCH)) == allowed
    both = source_of(f"def f(x, {given}):\n    if x.max() > s:  # here\n        x = x + 1\n    return x\n")
    assert "branch-on-value" in proposals(both, BRANCH)


def test_a_value_in_a_lambda_stays_a_tensor():
    body = "SCALES = [\n    lambda x: x / x.max().item(),  # here\n    lambda x: x.min().item() * x,\n]\n"
    expected = body.replace("x.max().item()", "x.max().detach().sum()")
    assert proposals(source_of(body), ITEM, "<lambda>")["item"] == expected


def test_every_statement_of_a_line_is_looked_at():
    body = "def f(x):\n    log.debug('%s', x); x = x * 2  # here\n    return x\n"
    assert first(body, "Logger")[0] == "print"
    body = "def f(x):\n    if x.sum() > 0: x = x + 1  # here\n    return x\n"
    assert first(body, BRANCH)[1] == "def f(x):\n    x = torch.where(x.sum() > 0, x + 1, x)  # here\n    return x\n"


def test_settings_go_behind_the_imports():
    text = proposals(source_of("def f(x):\n    return x[x > 0].mean()  # here\n"), SHAPE)["dynamic-shape-captured"]
    assert text.startswith("import torch\nimport time, sys, gc, logging\n\ntorch._dynamo.config.capture_dynamic_output")


def test_small_ones():
    assert first("def f(x):\n    torch._dynamo.graph_break()  # here\n    return x\n", "graph_break()") == (
        "graph-break-call",
        "def f(x):\n    return x\n",
    )
    assert first("def f(x):\n    gc.collect()  # here\n    return x\n", SKIPPED)[0] == "upkeep"
    assert first("def f(x):\n    t = time.time()  # here\n", SKIPPED) == (
        "clock",
        "def f(x):\n    t = (0.0 if torch.compiler.is_compiling() else time.time())  # here\n",
    )
    # With one of two clocks left as it is, what lies between them would be the time since 1970.
    body = "def f(x):\n    t = time.time()\n    y = x + 1\n    log.t = time.time() - t  # here\n    return y\n"
    clock = "(0.0 if torch.compiler.is_compiling() else time.time())"
    assert first(body, SKIPPED)[1] == body.replace("time.time()", clock)
    text = proposals(source_of("def f(x):\n    return x[x > 0].sum()  # here\n"), SHAPE)["boolean-mask"]
    assert text == "def f(x):\n    return x.where(x > 0, 0).sum()  # here\n"


def test_a_line_of_a_changed_file_is_known_by_what_it_was():
    before = b"a\nsame\nb\nsame\nc\n"
    assert [line_before(before, b"new\na\nsame\nb\nc\n", line) for line in range(1, 6)] == [0, 1, 2, 3, 5]
    assert [line_before(before, b"a\nif x:\n  same\nB\nsame\nc\n", line) for line in range(1, 7)] == [1, 2, 3, 3, 4, 5]


def test_overlapping_edits_are_refused():
    with pytest.raises(ValueError, match="overlap"):
        source_of("a = 1\n").apply([Edit(0, 5, "x"), Edit(3, 8, "y")])


@pytest.mark.parametrize("ending", ["", "\n"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("tool", [["git", "apply"], ["patch", "-p1", "--binary", "-i"]])
def test_patches_apply(tmp_path, ending, newline, tool):
    if tool[0] == "patch" and subprocess.run(["which", "patch"], capture_output=True).returncode:
        pytest.skip("there is no patch here")
    before = f"# é{newline}def f(x):{newline}    return x{ending.replace(chr(10), newline)}".encode()
    after = before.replace(b"return x", b"return x + 1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.py").write_bytes(before)
    (tmp_path / "a.patch").write_bytes(unified_diff("sub/model.py", before, after).encode())
    subprocess.run([*tool, "a.patch"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "sub" / "model.py").read_bytes() == after


def test_a_decorator_is_deleted_only_where_it_is_known_to_be_the_called_functions():
    disabled = "@torch.compiler.disable\n"
    body = f"{disabled}@torch.no_grad()\ndef g(x):\n    return x\n\n\ndef f(x):\n    return g(x)  # here\n"
    reason = "Skip calling `torch.compiler.disable()`d function"
    assert proposals(source_of(body), reason)["disabled-function"] == body.replace(disabled, "")
    cached = body.replace("@torch.no_grad()", "@functools.cache")  # which Dynamo looks through
    namesake = body + f"\n\nclass Other:\n    {disabled}    def g(self, x):\n        return x\n"
    assert "disabled-function" not in proposals(source_of(cached), reason)
    assert "disabled-function" not in proposals(source_of(namesake), reason)
