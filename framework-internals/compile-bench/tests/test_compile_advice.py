"""Every advice of the catalogue: a program where it appears and one where it must not."""

import ast
import inspect
import json
import re
import textwrap
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from compile_bench.capture.frames import Frame
from compile_bench.catalogue import CAUSES, advise, match, match_recompile
from compile_bench.catalogue.source import Source
from compile_bench.catalogue.use import Use

from .advice_programs import APPEAR, BRANCH, BREAKS, GUARDS, SILENT

read = cache(Source.read)

# What Dynamo of torch 2.13 said of each cause's own program: reason or guard, the line, and the part that broke.
CAPTURED = json.loads((Path(__file__).parent / "golden" / "advice-torch-2.13.0.json").read_text())


def program(text):
    """A program with its marked line."""
    if not text.startswith(("def ", "class ", "@")):
        text = "def f(self, x, n, flag):\n" + textwrap.indent(text, "    ") + "\n"
    source = Source(Path("model.py"), text.encode())
    return source, next(number for number, line in enumerate(text.splitlines(), 1) if line.endswith("#!"))


def on_break(source, line, reason, columns=None):
    """The use, and the causes in the order in which triage asks them."""
    code = source.code(line).strip()
    statement = source.statement(line)
    if isinstance(statement, ast.If):
        code += f" {source.code(statement.body[0].lineno).strip()}"
    return Use(source, line, columns), match(reason, code, columns)


def on_guard(source, line, guard, *, static_shapes=False):
    use = Use.of_guard(source, line, guard, static_shapes=static_shapes)
    return use, match_recompile(guard, use.code or source.line(line))


def own_program(name):
    """The line of a cause's own program that Dynamo named."""
    cause, (seen, text, columns) = CAUSES[name], CAPTURED[name]
    make = inspect.unwrap(cause.make)
    source = read(Path(inspect.getsourcefile(make)))
    lines, first = inspect.getsourcelines(make)
    numbers = [*range(first, first + len(lines)), *range(1, 400)]  # the function, or one of the module
    line = next(number for number in numbers if source.line(number).strip() == text)
    if cause.kind == "break":
        return on_break(source, line, seen, tuple(columns) if columns else None)
    return on_guard(source, line, seen, static_shapes=name == "static-shapes")


def cases_of(advised):
    return [each.case for each in advised]


# A break in a block has the cause of its own line. triage names the block beside it.
BLOCKS = {"break-in-loop", "break-in-try", "break-in-with"}


def test_every_cause_is_in_the_table():
    assert {*BREAKS, *GUARDS, *SILENT} == set(CAUSES) == {*CAPTURED, *APPEAR}


@pytest.mark.parametrize("name", CAPTURED)
def test_advice_appears_on_the_program_of_its_cause(name):
    use, causes = own_program(name)
    assert name in cases_of(advise([CAUSES[name]], use))
    assert name in BLOCKS or name in cases_of(advise(causes, use))


@pytest.mark.parametrize("name", [name for name in CAPTURED if CAUSES[name].kind != "break"])
def test_the_object_of_a_method_may_have_another_name(name):
    use, causes = own_program(name)
    other = Source(use.syntax.path, re.sub(rb"\bself\b", b"this", use.syntax.content))
    guard = other.with_self(re.sub(r"\bself\b", "this", use.guard), use.line)
    again, other_causes = on_guard(other, use.line, guard, static_shapes=use.static_shapes)
    assert advise(other_causes, again) == advise(causes, use)


@pytest.mark.parametrize("name", APPEAR)
def test_advice_appears_on_a_users_program(name):
    guard, text = APPEAR[name]
    use = Use.of_guard(*program(text), guard) if guard else Use(*program(text))
    assert cases_of(advise([CAUSES[name]], use)) == [name]


@pytest.mark.parametrize("name", BREAKS)
def test_advice_on_a_break_does_not_appear(name):
    reason, text = BREAKS[name]
    use, causes = on_break(*program(text), reason)
    assert name in BLOCKS or CAUSES[name] in causes, "the program must look like the cause"
    assert name not in cases_of(advise([*causes, CAUSES[name]], use))


@pytest.mark.parametrize("name", GUARDS)
def test_advice_on_a_guard_does_not_appear(name):
    guard, text = GUARDS[name]
    use, causes = on_guard(*program(text), guard)
    assert name not in cases_of(advise([*causes, CAUSES[name]], use))


@pytest.mark.parametrize("name", SILENT)
def test_advice_on_silent_eager_does_not_appear(name):
    use = Use(*program(SILENT[name]), value="self.n" if name == "recompile-limit-reached" else "")
    assert advise([CAUSES[name]], use) == []


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("class Cache:", ""),
        ("class Cache(dict):", ""),
        ("class Cache(nn.Module):", "self.seen = self.seen + …"),
        ("class Base(torch.nn.Module):\n    pass\n\nclass Cache(Base):", "self.seen = self.seen + …"),
    ],
)
def test_a_buffer_is_for_modules_and_named_as_its_class_names_it(head, expected):
    text = f"{head}\n    def step(self, x):\n        self.seen += 1\n        return x * self.seen  #!\n"
    use, causes = on_guard(*program(text), "self.cache.seen == 1")
    advised = [each.text for each in advise(causes, use)][:1]
    assert [expected in each for each in advised] == ([True] if expected else [])


@pytest.mark.parametrize(("body", "removable"), [("print(o)", True), ("kept.append(o)", False)])
def test_a_hook_that_keeps_values_is_not_to_be_removed(body, removable):
    use = Use(*program(f"layer.register_forward_hook(lambda m, a, o: {body})  #!"))
    assert bool(advise([CAUSES["hook-with-side-effect"]], use)) is removable


@pytest.mark.parametrize(
    ("line", "advised"),
    [
        ("self.kept.append(x)", True),
        ("self.kept.append(x.norm().item())", False),  # a number, which needs no tensor
        # What a hook returns replaces the gradient.
        ("self.weight.register_hook(lambda g: self.kept.append(g))", False),
    ],
)
def test_what_can_be_returned_is_a_tensor_of_a_function(line, advised):
    use = Use.of_guard(*program(f"{line}  #!\nreturn x"), "len(self.kept) == 1")
    assert bool(advise([CAUSES["kept-activations"]], use)) is advised


def test_a_number_of_numpy_is_no_tensor():
    for value, advised in (("np.percentile(x.numpy(), 90)", False), ("x.max()", True)):
        use = Use(*program(f"q = {value}\nreturn x * float(q)  #!"))
        assert bool(advise([CAUSES["item"]], use)) is advised


@pytest.mark.parametrize(
    ("body", "advised"),
    [
        ("if x.max() > 9:  #!\n    x = x / 9\nreturn self.layer(x)", True),
        ("if x.max() > 9:  #!\n    x = x / 9\nself.calls += 1\nreturn self.layer(x)", True),
        ("if x.max() > 9:  #!\n    x = x / 9\nx.mul_(2)\nreturn self.layer(x)", False),
        ("if x.max() > 9:  #!\n    x = x / 9\nx[0] = 0\nreturn self.layer(x)", False),
        ("if x.max() > 9:  #!\n    x = x / 9\nx[0].view(-1).add_(1)\nreturn self.layer(x)", False),
        ("if x.max() > 9:  #!\n    x = x / 9\nx += 1\nreturn self.layer(x)", False),
        ("if x.max() > 9:  #!\n    x = x / 9\ntorch.mul(x, 2, out=x)\nreturn self.layer(x)", False),
        ("if x.max() > 9:  #!\n    y = x\nelse:\n    y = x / 9\ny.mul_(2)\nreturn y", False),
        ("if x.max() > 9:  #!\n    x = x / 9\nz = x\nz.mul_(2)\nreturn self.layer(x)", False),
        ("n.add_(1)\ny = x * 2\nif y.max() > 9:  #!\n    y = y / 9\nreturn self.layer(y)", True),
    ],
)
def test_a_side_that_is_the_callers_tensor_is_not_chosen_where_it_is_changed(body, advised):
    use, causes = on_break(*program(body), BRANCH)
    assert bool(advise(causes, use)) is advised


def test_a_check_whose_error_a_caller_catches_is_not_to_be_made_on_the_device(tmp_path):
    check = "def check(x):\n    if x.max() > 9:  #!\n        raise ValueError\n    return x\n"
    handled = "def {}(x):\n    try:\n        return {}(x)\n    except ValueError:\n        return -x\n"
    (caller := tmp_path / "caller.py").write_text(handled.format("forward", "block"))
    use, causes = on_break(*program(check), BRANCH)
    assert cases_of(advise(causes, use)) == ["raise-on-value"]
    assert not advise(causes, replace(use, stack=(Frame(str(caller), 3, "forward"),)))
    inside, causes = on_break(*program(check + "\n\n" + handled.format("forward", "check")), BRANCH)
    assert not advise(causes, inside)


def test_advice_about_unknown_code_comes_with_its_condition():
    (advice,) = advise(match_recompile("n == 3"), None)
    assert advice.text.startswith("Pass self.value as a tensor. (Where the number goes into arithmetic")


def test_every_advice_has_a_condition_in_words():
    for cause in CAUSES.values():
        assert cause.advices
        assert all(each.when.text and not each.when.text.endswith(".") for each in cause.advices)
