"""Both builds, the ways to wrap them, and which one serves."""

import sys
import types
from pathlib import Path

import pytest
import torch

import custom_ops
import native_build
from custom_ops import builds, measure
from custom_ops.roads import just_in_time
from custom_ops.roads.module import NAME
from custom_ops.roads.wrappers import SHIPPED, wrappers


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``builds`` choose anew, and forget the choice afterwards."""
    monkeypatch.setattr(builds, "extension", builds.functools.cache(builds.extension.__wrapped__))


def install(monkeypatch: pytest.MonkeyPatch, **attributes: object) -> types.ModuleType:
    module = types.ModuleType(NAME)
    module.__file__ = f"{NAME}.so"
    module.__spec__ = types.SimpleNamespace(name=NAME)  # type: ignore[assignment]
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def test_every_wrapper_adds(device: str) -> None:
    a, b = torch.randn(33, device=device), torch.randn(33, device=device)
    for name, function in wrappers().items():
        assert torch.equal(function(a, b), a + b), name


@pytest.mark.parametrize(
    ("form", "differentiable", "compilable"),
    [
        ("torch.add", True, True),
        ("pybind11 function", False, False),
        ("autograd.Function", True, False),
        ("torch.library, no autograd", False, True),
        (SHIPPED, True, True),
        ("custom_op decorator", True, True),
    ],
)
def test_what_each_wrapper_can_do(form: str, differentiable: bool, compilable: bool) -> None:
    a, b = torch.ones(3), torch.ones(3)
    assert measure.gradients_flow(wrappers()[form], a, b) is differentiable
    assert measure.compiles_whole(wrappers()[form], a, b) is compilable


def test_extension_that_serves_is_reported() -> None:
    module = builds.extension()
    found = custom_ops.build_info()
    assert found.file == Path(module.__file__)
    assert found.cuda is module.with_cuda
    assert module.torch_version == torch.__version__.split("+")[0]


@pytest.mark.usefixtures("fresh_choice")
def test_installed_wheel_is_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    version = torch.__version__.split("+")[0]
    module = install(monkeypatch, torch_version=version, with_cuda=False)
    assert builds.extension() is module
    found = builds.build_info()
    assert (found.road, found.cuda, found.file) == ("ahead-of-time", False, Path(module.__file__ or ""))
    assert set(found.not_served) == {"just-in-time", "CUDA kernels"}


@pytest.mark.usefixtures("fresh_choice")
def test_no_open_road_names_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(just_in_time, "missing", lambda: "no compiler (install one)")
    with pytest.raises(native_build.BuildError, match=r"ahead-of-time: no module .*; just-in-time: no compiler"):
        builds.extension()
    assert builds.build_info().road is None
