"""A user's file as a module: alone, in a package, and what cannot be imported."""

import sys
from pathlib import Path

import pytest

from benchkit import UserError
from benchkit.command import user_file


@pytest.fixture
def package(tmp_path: Path):
    """A package with a module that imports its neighbours relatively, at its top and inside a function."""
    inner = tmp_path / "lens_under_test" / "layers"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("")
    (inner / "__init__.py").write_text("")
    (inner.parent / "constants.py").write_text("TWO = 2\n")
    (inner / "logging.py").write_text("NAME = 'ours'\n")
    (inner / "step.py").write_text(
        "import logging\nfrom ..constants import TWO\nfrom . import logging as ours\n"
        "def late():\n    from ..constants import TWO as again\n    return again\n"
        "class Model:\n    @staticmethod\n    def step(): return TWO\n"
    )
    path = list(sys.path)
    yield inner / "step.py"
    assert sys.path == path
    for name in [name for name in sys.modules if name.startswith("lens_under_test")]:
        del sys.modules[name]


def test_a_file_of_a_package_has_its_neighbours(package: Path):
    module = user_file.load_file(package, "prefix_")
    assert module.__name__ == "lens_under_test.layers.step"
    assert user_file.find(module, "Model.step")() == 2
    assert module.late() == 2
    assert hasattr(module.logging, "getLogger"), "Python's own, not the package's"
    assert module.ours.NAME == "ours"
    assert user_file.find(module, "Model.missing") is None
    assert user_file.find(module, "missing.step") is None


def test_a_package_whose_name_is_taken_is_refused(package: Path, tmp_path: Path):
    user_file.load_file(package, "prefix_")
    other = tmp_path / "elsewhere" / "lens_under_test" / "layers"
    other.mkdir(parents=True)
    for folder in (other.parent, other):
        (folder / "__init__.py").write_text("")
    (other / "step.py").write_text("")
    with pytest.raises(UserError, match=r"another of that name is imported already, from .*; rename the package"):
        user_file.load_file(other / "step.py", "prefix_")


def test_a_lone_file_imports_what_lies_beside_it(tmp_path: Path):
    (tmp_path / "beside_user_file.py").write_text("THREE = 3\n")
    (tmp_path / "json.py").write_text(
        "import beside_user_file, sys\ngiven = list(sys.argv)\n"
        "def late():\n    import beside_user_file as b\n    return b\n"
    )
    path, arguments = list(sys.path), list(sys.argv)
    module = user_file.load_file(tmp_path / "json.py", "prefix_")
    assert (module.__name__, module.beside_user_file.THREE) == ("prefix_json", 3)
    assert module.given == [str(tmp_path / "json.py")]  # not those of the tool
    del sys.modules["beside_user_file"]
    with user_file.importable(tmp_path / "json.py"):
        assert module.late().THREE == 3
        assert sys.argv == module.given
    assert (sys.path, sys.argv) == (path, arguments)
    for name in ("beside_user_file", "prefix_json"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.py", None, r"there is no file .*gone\.py'; expected a Python file"),
        ("notes.txt", "", r"its name must end in \.py"),
        ("broken.py", "1 / 0", r"broken\.py cannot be imported: ZeroDivisionError"),
        (
            "ends.py",
            "raise SystemExit(3)",
            r"ends\.py cannot be imported: SystemExit: 3; put the call that exits under if __n",
        ),
    ],
)
def test_what_cannot_be_imported_is_said(tmp_path: Path, name: str, text: str | None, message: str):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        user_file.load_file(tmp_path / name, "prefix_")
    assert f"prefix_{Path(name).stem}" not in sys.modules
