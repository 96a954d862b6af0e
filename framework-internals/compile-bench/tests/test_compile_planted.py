"""Models with planted trouble, as other people write them: is every marked line found, in training and in eval?

`tests/planted` holds them; a comment at the end of a line says what is to be found there.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from compile_bench import Case
from compile_bench.measure.survey import survey

pytestmark = pytest.mark.filterwarnings("ignore")  # the models warn, and so does PyTorch's compiler about what they do

FOLDER = Path(__file__).parent / "planted"
MARK = re.compile(r"# (breaks in training|breaks|limit|method|silent)$")
TARGETS = [
    *((path.stem, "target") for path in sorted(FOLDER.glob("*.py")) if "def target" in path.read_text()),
    ("quiet", "cached"),
]

# What the README shows, and what Dynamo is silent about. The others take a second or two each.
QUICK = {("gates", "target"), ("quiet", "cached")}
EITHER = [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in TARGETS]


@cache
def found(name, function):
    """Places by kind of step."""
    places = {}
    for train in (True, False):
        seen = survey(Case(f"{FOLDER / name}.py:{function}", "cpu", train), seeds=(0,))
        places[train] = {(Path(each.file).name, each.line) for each in seen.breaks}
        places[train] |= {(Path(each.frame.file).name, each.frame.line) for each in seen.eager}
    torch.compiler.reset()
    return places


def marked(name, function):
    """What is to be found, by place."""
    marks = {}
    for path in (FOLDER / f"{name}.py", FOLDER / f"helpers_of_{name}.py"):
        for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
            if mark := MARK.search(line):
                marks[path.name, number] = mark[1]
    if name == "quiet":
        own = ("silent", "breaks") if function == "cached" else ("limit", "method")
        marks = {place: mark for place, mark in marks.items() if mark in own}
    return marks


def missed(name, function):
    places = found(name, function)
    return {
        place
        for place, mark in marked(name, function).items()
        if place not in places[True] or (mark == "breaks" and place not in places[False])
    }


@pytest.mark.parametrize(("name", "function"), EITHER)
def test_every_marked_line_is_found(name, function, capsys):
    # Behind a break in a context manager's generator, the rest of the generator stays hidden.
    allowed = {("metered.py", 16)} if name == "metered" else set()
    assert missed(name, function) <= allowed


@pytest.mark.parametrize(("name", "function"), EITHER)
def test_nothing_else_is_reported(name, function, capsys):
    places = found(name, function)
    assert places[True] | places[False] <= set(marked(name, function))


@pytest.mark.slow
def test_training_only_breaks_are_not_seen_in_inference(capsys):
    marks = marked("layerdrop", "target")
    only = {place for place, mark in marks.items() if mark == "breaks in training"}
    assert only
    assert not only & found("layerdrop", "target")[False]
