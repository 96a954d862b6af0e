"""What lies around a target: where its patches apply, files that hide Python's modules, scripts that exit."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchkit import UserError
from benchkit.errors import namesakes_of_standard_modules
from compile_bench.capture.trace import CompileTrace
from compile_bench.cli.triaging import _how_to_apply
from compile_bench.fixes.fixer import Fixer, patch_root
from compile_bench.fixes.types import Trial
from compile_bench.measure.records import Survey, place_of
from compile_bench.measure.survey import survey
from compile_bench.targets.case import Case
from compile_bench.targets.loading import load_target
from compile_bench.triage.findings import Finding
from compile_bench.triage.run import Progress

from .triage_models import BREAK, InThisProcess, finding_at

PRINTING = """\
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        print(end="")
        return x.sin()


def target():
    return Model(), (torch.ones(2),)
"""

# The working directory, the file, and where a repository is: all below one folder.
PLACES = {
    "beside": (".", "model.py", ""),
    "below": (".", "sub/model.py", ""),
    "spaces": (".", "with space/quote's/model.py", ""),
    "outside": ("work", "elsewhere/model.py", ""),
    "outside, in a repository": ("work", "elsewhere/sub/model.py", "elsewhere"),
    "in a folder of a repository": ("repository/sub", "repository/sub/model.py", "repository"),
    "elsewhere in the repository": ("repository/sub", "repository/other/model.py", "repository"),
    "outside of the repository": ("repository", "elsewhere/model.py", "repository"),
    "in an inner repository": ("repository", "repository/inner/model.py", "repository/inner"),
    "behind a link": ("work", "work/link/model.py", ""),
}
ENDINGS = ("crlf", "no newline at the end")


@pytest.fixture
def path_restored():
    before = list(sys.path)
    yield
    sys.path[:] = before  # first: the reset may import the compiler, and with it modules that the user's files hide
    torch.compiler.reset()


class Accepting(InThisProcess):
    """Accepts every change: where a patch applies does not depend on what it changes."""

    def trace(self, function, case, *, proposals, **arguments):
        return [[Trial("")] for _ in proposals]

    def ask(self, function, case, **arguments):
        return Trial("")


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    ("place", "ending"),
    [*((place, "lf") for place in PLACES), *((place, end) for place in ("beside", "outside") for end in ENDINGS)],
)
def test_the_command_that_triage_prints_applies_the_patch(place, ending, tmp_path, monkeypatch):
    here, file, repository = (tmp_path / name for name in PLACES[place])
    text = {"lf": PRINTING, "crlf": PRINTING.replace("\n", "\r\n"), "no newline at the end": PRINTING.rstrip("\n")}
    (tmp_path / "real").mkdir()
    here.mkdir(parents=True, exist_ok=True)
    if place == "behind a link":
        file.parent.symlink_to(tmp_path / "real")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text[ending].encode())
    if PLACES[place][2]:
        subprocess.run(["git", "init", "-q", str(repository)], check=True)
    monkeypatch.chdir(here)
    met = replace(BREAK, file=str(file), line=6)
    found = Survey(Case("m"), (met,), ((0,),), (), CompileTrace(breaks=(met,)), (), 3, (), 0.0, 0.0)
    root = patch_root([met.file], Path.cwd())
    fix = Fixer(Accepting(tmp_path), found.case, [found], root).fix([place_of(met)]).fixes[place_of(met)]
    patch = here / "patches folder" / "01.patch"
    patch.parent.mkdir()
    patch.write_text(fix.patch, newline="")
    (line,) = _how_to_apply(root, [patch.relative_to(Path.cwd())])
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["sh", "-c", line.removeprefix("apply it: ")], check=True, env=environment)
    changed = file.read_bytes()
    assert b"is_compiling" in changed
    assert changed.count(b"\r\n") == (changed.count(b"\n") if ending == "crlf" else 0)
    assert changed.endswith(b"\n") == (ending != "no newline at the end")


def test_files_with_the_names_of_standard_modules_are_named_where_an_import_fails(tmp_path, path_restored):
    (tmp_path / "queue.py").write_text("mine = 1\n")
    (tmp_path / "profile.py").write_text("")
    (tmp_path / "model.py").write_text("from queue import mine\n")
    with pytest.raises(
        UserError, match=r"ImportError.*'queue'.*queue\.py has the name of a module of Python's library"
    ) as caught:
        load_target(f"{tmp_path / 'model.py'}:target", "cpu")
    assert "profile.py" not in str(caught.value)
    assert namesakes_of_standard_modules([tmp_path], "KeyError: 'quiet'") == ""
    assert "profile.py, " in namesakes_of_standard_modules([tmp_path], "partially initialized module 'inspect'")


def test_a_target_may_have_the_name_of_a_standard_module(tmp_path, path_restored, capsys):
    path = tmp_path / "token.py"
    path.write_text(PRINTING)
    token = sys.modules["token"]
    found = survey(Case(f"{path}:target", "cpu", train=False), seeds=(0,))
    assert [each.line for each in found.breaks] == [6]
    assert sys.modules["token"] is token


SCRIPT = """\
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, {option})
size = parser.parse_args().size

def target():
    return torch.nn.Linear(size, 2), (torch.ones(1, size),)
"""


def test_what_an_argument_parser_prints_is_in_the_error(tmp_path, monkeypatch, path_restored):
    monkeypatch.setattr(sys, "argv", ["pytest", "--of-another-program"])
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(option="required=True"))
    message = (
        r'SystemExit: 2, which printed "script.py: error: the following arguments are required: --size"; '
        'put the code that exits, or reads arguments, under if __name__ == "__main__":'
    )
    with pytest.raises(UserError, match=message):
        load_target(f"{path}:target", "cpu")
    path.write_text(SCRIPT.format(option="default=3"))
    assert load_target(f"{path}:target", "cpu").args[0].shape == (1, 3)
    assert sys.argv == ["pytest", "--of-another-program"]


def test_a_missing_file_is_found_before_torch_or_matplotlib_is_imported(tmp_path):
    code = (
        "import sys\nfrom compile_bench.cli import app\n"
        "try:\n    app(sys.argv[1:])\nfinally:\n    print([m for m in ('torch', 'matplotlib') if m in sys.modules])\n"
    )
    call = [sys.executable, "-c", code, "triage", "missing.py:target", "--device", "cpu"]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "compile-bench: there is no file missing.py (target missing.py:target)\n"
    assert done.stdout.endswith("[]\n")


def test_what_a_file_in_the_working_directory_hides_does_not_reach_a_fork_server(tmp_path):
    (tmp_path / "token.py").write_text("raise ImportError('the user's token.py')\n".replace("user's", "wrong"))
    code = (
        "import os\nfrom benchkit.processes import Job, Runner\n"
        "print(Runner(limit=60).run(Job(os.getpid, 'ask', preload=('tokenize',))) > 0)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def finding(line: int, reason: str, **options: object) -> Finding:
    return finding_at(f"model.py:{line}", reason=reason, **options)


def test_what_the_first_stage_told_is_in_the_report_or_taken_back():
    told: list[str] = []
    progress = Progress(told.append, ("breaks",))
    moved = replace(BREAK, file="library.py", line=3, reason="moved")
    progress.seen[True] = [replace(BREAK, reason="kept"), moved, replace(BREAK, reason="gone")]
    progress.take_back([finding(7, "kept"), finding(9, "moved", library="library.py:3")])
    assert told == [
        "  taken back: library.py:3: moved: it is the break of model.py:9",
        "  taken back: model.py:7: gone: no later step met it",
    ]
