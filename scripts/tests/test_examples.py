"""Every command of examples/README.md, as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import native_build

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(r"\| `([^`]+)` \|$", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
# What each prints when it did what it is for.
SIGNS = {
    "trace_hugging_face.py": r"by key: CPU \d+, AutogradCPU \d+.*\n(.*\n)*copy: aten::copy_ under aten::addmm",
    "compile_hugging_face.py": r"modeling_wav2vec2\.py:\d+",
    "two_functions.py": r"Inductor",
    "fused_norms_in_llama.py": r"largest difference of a logit: \d\.\de-0[67]\na step with fused norms is ",
    "own_operator.sh": r"^\d+ passed",
}
QUICK = {"trace_hugging_face.py"}


def example_of(command: str) -> str:
    return re.search(r"examples/(\w+\.\w+)", command)[1]


def test_every_example_is_in_the_table():
    files = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".sh")}
    assert files == {example_of(command) for command in COMMANDS} == SIGNS.keys()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=example_of(command), marks=[] if example_of(command) in QUICK else pytest.mark.slow)
        for command in COMMANDS
    ],
)
def test_an_example_does_what_its_line_says(command, run_command, tmp_path):
    pytest.importorskip("transformers")
    if (reason := native_build.missing_cxx()) is not None:
        pytest.skip(reason)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = run_command(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(SIGNS[example_of(command)], done.stdout, re.MULTILINE), done.stdout
