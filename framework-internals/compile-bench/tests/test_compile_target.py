"""Targets: names that load, and a one-line error for each name that does not."""

import re
import sys
import threading

import pytest
import torch
from torch import nn

from benchkit import UserError
from compile_bench import Case
from compile_bench.measure.accuracy import widened
from compile_bench.measure.survey import triage
from compile_bench.targets.loading import load_target
from compile_bench.targets.target import Target, describe_error

FILE = """
import torch

def good():
    return torch.nn.Linear(4, 2), (torch.ones(3, 4),)

def raises():
    raise KeyError("no such layer")

def leaves():
    raise SystemExit(3)

def number():
    return 7

def not_a_model():
    return 7, (torch.ones(3),)

def function():
    return (lambda x, y=0: x + y), (torch.ones(3),), {"y": 2}

def step():
    return torch.ones(3, requires_grad=True).sum()

def kwargs_of_another_kind():
    return torch.nn.Linear(4, 2), (), [1]

def schedule_of_another_kind():
    from compile_bench.targets.target import Target, describe_error
    return Target(torch.nn.Linear(4, 2), (torch.ones(3, 4),), schedule=4)

def needs_arguments(device):
    return torch.nn.Linear(4, 2), (torch.ones(3, 4),)

def loose_args():
    return torch.nn.Linear(4, 2), torch.ones(3, 4)

def gpu():
    return torch.nn.Linear(4, 2, device="cuda"), (torch.ones(3, 4, device="cuda"),)

model = torch.nn.Linear(4, 2)

class Experiment:
    @classmethod
    def target(cls):
        return good()
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "my_targets.py"
    path.write_text(FILE)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return path


@pytest.mark.parametrize("name", ["good", "Experiment.target"])
def test_a_function_in_a_file(file, name):
    target = load_target(f"{file}:{name}", "cpu")
    assert target.forward(target.model).shape == (3, 2)


def test_a_file_of_a_package_imports_its_neighbours(file, tmp_path):
    inner = tmp_path / "my_package_of_layers" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("")
    (inner.parent / "sizes_of_layers.py").write_text("WIDTH = 4\n")
    (inner / "more_sizes.py").write_text("HEIGHT = 3\n")
    (inner / "model.py").write_text(
        "import torch\nfrom more_sizes import HEIGHT\nfrom ..sizes_of_layers import WIDTH\n\n\n"
        "def target():\n    return torch.nn.Linear(WIDTH, 2), (torch.ones(HEIGHT, WIDTH),)\n"
    )
    target = load_target(f"{inner / 'model.py'}:target", "cpu")
    assert target.forward(target.model).shape == (3, 2)


def test_a_function_in_a_module(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    target = load_target("my_targets:good", "cpu")
    assert isinstance(target, Target)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raised KeyError: 'no such layer'"),
        ("leaves", "raised SystemExit: 3"),
        ("number", r"returned an object of type int; expected \(model, args\)"),
        ("not_a_model", "returned a model of type int; expected a torch.nn.Module or a function"),
        ("kwargs_of_another_kind", "returned kwargs of type list; expected a mapping"),
        ("schedule_of_another_kind", "returned a schedule of type int; expected calls to iterate over"),
        ("needs_arguments", "raised TypeError: needs_arguments.. missing 1 required positional argument"),
        ("loose_args", "returned args of type Tensor; expected a tuple"),
        ("model", "is of type Linear; expected a function without arguments"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_bad_function_is_one_line(file, name, message):
    with pytest.raises(UserError, match=message) as caught:
        load_target(f"{file}:{name}", "cpu")
    assert "\n" not in str(caught.value)


def test_a_schedule_that_raises_is_one_line(tmp_path):
    path = tmp_path / "loader.py"
    path.write_text(
        "import torch\nfrom compile_bench.targets.target import Target\n"
        "def calls():\n    yield torch.ones(2, 1)\n    raise OSError('the disk is gone')\n"
        "def target():\n    return Target(torch.nn.Linear(1, 1), (torch.ones(3, 1),), schedule=calls())\n"
    )
    with pytest.raises(UserError, match="OSError: the disk is gone"):
        load_target(f"{path}:target", "cpu")


def test_a_file_that_reads_a_command_line_of_its_own_is_one_line(tmp_path):
    path = tmp_path / "training.py"
    path.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--lr', '1'])\n")
    with pytest.raises(UserError, match=r"training\.py cannot be loaded: SystemExit: 2"):
        load_target(f"{path}:target", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_target_that_needs_a_gpu_says_so(file):
    with pytest.raises(UserError, match="it needs a GPU, and torch sees none"):
        load_target(f"{file}:gpu", "cpu")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("no_such_package.module:f", "cannot be imported"),
        ("resnet50", "one of bert, gpt, gpt-one-layer, gpt2"),
    ],
)
def test_a_bad_place_is_one_line(name, message):
    with pytest.raises(UserError, match=message):
        load_target(name, "cpu")


def test_a_broken_file_is_one_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import torch\nx = (\n")
    with pytest.raises(UserError, match=r"broken\.py cannot be loaded: SyntaxError"):
        load_target(f"{path}:f", "cpu")


def test_an_error_is_told_with_its_cause():
    """Transformers says that a module cannot be imported, and raises that from the error that says why."""
    try:
        try:
            raise ModuleNotFoundError("No module named 'tokenizers'")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Could not import module 'GPT2Config'.") from error
    except ModuleNotFoundError as error:
        raised = error
    why = "ModuleNotFoundError: No module named 'tokenizers'"
    assert describe_error(raised) == f"ModuleNotFoundError: Could not import module 'GPT2Config'; its cause: {why}"
    assert describe_error(raised.__cause__) == why
    assert describe_error(UserError("f.py has no 'x'.")) == "f.py has no 'x'"


def test_a_training_step_leaves_gradients_and_an_inference_step_none():
    target = load_target("mlp", "cpu")
    model = target.copied()
    loss = target.step(model, train=True)()
    assert loss.ndim == 0
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    output = target.step(model, train=False)()
    assert output.shape == (64, 10)
    assert all(p.grad is None for p in model.parameters())


def test_the_gpt_step_is_the_training_loops():
    target = load_target("gpt-one-layer", "cpu")
    model = target.copied()
    step = target.step(model, train=True)
    first, second = float(step()), float(step())
    assert second < first  # the optimizer is part of it, on one batch
    assert torch.equal(target.model.embedding.weight, load_target("gpt-one-layer", "cpu").model.embedding.weight)


def test_a_function_stands_for_a_model_and_gets_its_keyword_arguments(file):
    target = load_target(f"{file}:function", "cpu")
    assert target.step(target.copied(), train=False)().tolist() == [3, 3, 3]


def test_a_function_that_returns_a_tensor_is_the_step_itself(file):
    target = load_target(f"{file}:step", "cpu")
    assert target.is_step
    step = target.step(target.copied(), train=True)
    assert step().item() == 3
    step().backward()  # it stands as it is: no gradient is switched off, and no backward pass is added
    compiled = torch.compile(target.copied(), backend="eager")
    assert target.step(compiled, train=True)().item() == 3
    torch.compiler.reset()


def test_no_backward_pass_where_nothing_asks_for_a_gradient(file):
    target = load_target(f"{file}:function", "cpu")
    assert target.step(target.copied(), train=True)().item() == 9


def test_a_model_that_holds_a_lock_is_copied_all_the_same():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].lock = threading.Lock()
    model[1].seen = [1]
    target = Target(model, (torch.ones(2),))
    copied = target.copied()
    assert copied[1].lock is model[1].lock
    assert copied[1].seen is not model[1].seen
    assert copied[1].weight is not model[1].weight
    torch.testing.assert_close(target.forward(copied), target.forward(model))
    assert widened(target).model[1].weight.dtype == torch.float64
    assert model[1].weight.dtype == torch.float32


def test_an_entry_of_the_schedule_is_a_tuple_a_mapping_or_a_tensor():
    model = torch.nn.Linear(1, 1)
    one = torch.ones(2, 1)
    target = Target(model, (one,), schedule=[(one[:1],), {"input": one}, one, [one]]).moved("cpu")
    calls = list(target.calls())
    assert [len(call.args) for call in calls] == [1, 1, 0, 1, 1]
    shapes = [call.step(call.copied(), train=False)().shape for call in calls]
    assert shapes == [(2, 1), (1, 1), (2, 1), (2, 1), (2, 1)]


def test_a_tensor_that_occurs_twice_stays_one_on_another_device_and_a_leaf_stays_a_leaf():
    x = torch.ones(2, 1, requires_grad=True)
    moved = Target(torch.nn.Linear(1, 1), (x, x), schedule=[(x, x)]).moved("meta")
    for one, other in (moved.args, moved.schedule[0]):
        assert one is other
        assert (one.device.type, one.is_leaf, one.requires_grad) == ("meta", True, True)


def test_a_schedule_that_raises_is_told_as_such(file):
    def batches():
        yield (torch.ones(3, 4),)
        raise OSError("shard 7 is truncated")

    load_target(f"{file}:good", "cpu")
    sys.modules["my_targets"].iterated = lambda: Target(torch.nn.Linear(4, 2), (torch.ones(3, 4),), schedule=batches())
    with pytest.raises(UserError, match=r"my_targets:iterated: its schedule raised OSError: shard 7 is truncated$"):
        load_target("my_targets:iterated", "cpu")


def test_output_without_floats_needs_a_loss():
    target = Target(torch.nn.Linear(1, 1), ())
    with pytest.raises(UserError, match="give the target a loss"):
        target.scalar(torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("turn_off", "reason"),
    [
        ("os.environ['TORCHDYNAMO_DISABLE'] = '1'", "TORCHDYNAMO_DISABLE is set to 1; unset it"),
        ("torch._dynamo.config.disable = True", "torch._dynamo.config.disable is True; leave it False"),
        ("torch.compiler.set_stance('force_eager')", 'set_stance("force_eager") is in effect'),
    ],
)
def test_a_target_that_turns_the_compiler_off_has_no_verdict(tmp_path, turn_off, reason, monkeypatch):
    """Nothing is compiled, so nothing breaks."""
    (tmp_path / "off.py").write_text(f"import os\nimport torch\n\n{turn_off}\n{FILE}")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    before = torch._dynamo.config.disable
    try:
        with pytest.raises(UserError, match=re.escape(reason)):
            triage(Case(f"{tmp_path / 'off.py'}:good", train=False))
    finally:
        torch._dynamo.config.disable = before
        torch.compiler.set_stance("default")
