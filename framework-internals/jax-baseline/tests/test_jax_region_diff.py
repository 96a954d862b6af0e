"""The comparison of two programs: labels, values where labels are missing, and the explanation."""

import json
import pickle
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from benchkit import Results
from benchkit.report import Chart
from benchkit.report.rendering import block_text
from jax_baseline.diff.alignment import assign_parts, match_values, same_values
from jax_baseline.diff.measurements import configure, diff_record, fit
from jax_baseline.diff.programs import KernelLaunch, Program, Tensor, sketch
from jax_baseline.diff.records import DiffRecord, StepRecord
from jax_baseline.diff.region_diff import compare_programs, difference_between, most_different
from jax_baseline.hlo.summary import region_of, star_blocks
from jax_baseline.report import hlo_sections
from jax_baseline.report.explanation import explain, summary

GENERATOR = np.random.default_rng(0)
SCORES, HIDDEN, SUM = (GENERATOR.standard_normal(shape) for shape in ((4, 8, 8), (8, 16), (8, 16)))


def moments(array):
    wide = np.real(array).astype(np.float64).ravel()
    if wide.size == 0:
        return None
    sums = wide.sum(), np.abs(wide).sum(), (wide**2).sum(), (wide**3).sum(), wide.max(), wide.min()
    return (float(wide.size), *map(float, sums))


def tensor(name, array, dtype="float32"):
    return Tensor(name, dtype, np.shape(array), 4 * np.size(array), moments(array))


def launch(name, labels, *writes, kind="fusion loop", phase="forward", seconds=1e-3, read=100, source=""):
    labels = tuple(tuple(label.split("/")) for label in labels)
    return KernelLaunch(
        name=name,
        kind=kind,
        category="element-wise",
        ops={"add": 1},
        phase=phase,
        label=labels[0] if labels else (),
        labels=labels,
        location="model.py:7",
        calls=1,
        bytes_read=read,
        bytes_written=sum(one.bytes for one in writes),
        flops=10,
        seconds=seconds,
        source=source,
        writes=writes,
    )


def programs():
    """XLA writes the scores that Inductor keeps inside one library call, and has no label for its last kernel."""
    xla = Program(
        "XLA",
        (
            launch("scores", ["block0/attention/core/formula"], tensor("scores", SCORES), source="%scores = …"),
            launch("softmax", ["block0/attention/core"], tensor("softmax", np.exp(SCORES))),
            launch("hidden", ["block0/attention/core"], tensor("hidden", HIDDEN)),
            launch("copied", ["block0/mlp"], tensor("copied", HIDDEN.T)),
            launch("nameless", [], tensor("nameless", SUM.reshape(-1))),
        ),
        5e-3,
        1.0,
        (tensor("result 0", [1.0, 2.0]),),
    )
    inductor = Program(
        "Inductor",
        (
            launch("0:aten.flash:1", ["block0/attention/core"], tensor("a", HIDDEN * (1 + 1e-6)), kind="aten.flash"),
            launch("0:cpp_fused_add_0:2", ["block0/mlp", "head"], tensor("b", SUM.T), kind="C++ kernel"),
        ),
        2e-3,
        9.0,
        (tensor("result 0", [1.0, 2.0]),),
    )
    return xla, inductor


def test_values_are_the_same_in_any_order_and_shape():
    assert same_values(tensor("a", HIDDEN), tensor("b", HIDDEN.T.reshape(2, -1)))
    assert same_values(tensor("a", HIDDEN), tensor("b", HIDDEN * (1 + 1e-6)))
    assert same_values(tensor("a", HIDDEN), tensor("b", HIDDEN * 1.01, "bfloat16"))


@pytest.mark.parametrize(
    "other",
    [HIDDEN[:4], -HIDDEN, HIDDEN * 1.01, np.abs(HIDDEN), SUM, np.where(HIDDEN.max() == HIDDEN, 9, HIDDEN)],
    ids=["part", "negated", "scaled", "absolute", "another", "one element"],
)
def test_other_values_are_not(other):
    assert not same_values(tensor("a", HIDDEN), tensor("b", other))


def test_constants_are_equal_to_nothing():
    assert not same_values(tensor("a", np.ones(8)), tensor("b", np.ones(8)))
    assert not same_values(tensor("a", HIDDEN), Tensor("b", "float32", (8, 16), 512, None))


def result(array):
    return replace(tensor("result 0", array), sketch=sketch(np.asarray(array)))


def difference(one, other):
    return difference_between(result(one), result(other))


LARGE = GENERATOR.standard_normal((40, 50))


@pytest.mark.parametrize(
    "other",
    [LARGE[::-1], LARGE[:, ::-1], LARGE * 1.01, LARGE * 3, LARGE * 0, LARGE * (1 + 1e-5), LARGE > 0, LARGE * 1j],
    ids=["rows reversed", "columns reversed", "scaled", "tripled", "zero", "rounded", "compared", "turned"],
)
def test_a_sketch_tells_how_far_apart_two_results_are(other):
    exact = np.linalg.norm(LARGE - other) / max(np.linalg.norm(LARGE), np.linalg.norm(other))
    # The root of a mean of 256 squares: its standard deviation is 4.4 %.
    assert difference(LARGE, other) == pytest.approx(exact, rel=0.15)
    assert difference(other, LARGE) == difference(LARGE, other)
    assert difference(LARGE, LARGE) == 0


def test_of_few_elements_the_distance_is_exact():
    other = np.where(HIDDEN.max() == HIDDEN, 9, HIDDEN)
    exact = np.linalg.norm(HIDDEN - other) / np.linalg.norm(other)
    assert difference(HIDDEN, other) == pytest.approx(exact, rel=1e-12)
    assert difference(np.zeros(3), np.zeros(3)) == difference(np.zeros((2, 0)), np.zeros((2, 0))) == 0


def test_sums_are_compared_over_the_larger_too():
    zeros, ones = (tensor("result 0", array) for array in (np.zeros(4), np.ones(4)))
    assert difference_between(zeros, ones) == difference_between(ones, zeros) == 1


def test_results_that_cannot_be_compared():
    assert difference(HIDDEN, HIDDEN.T) == np.inf
    nan, infinite = (np.where(HIDDEN.max() == HIDDEN, bad, HIDDEN) for bad in (np.nan, np.inf))
    assert difference(nan, nan) == difference(infinite, infinite) == 0
    assert difference(infinite, np.where(HIDDEN.min() == HIDDEN, 0, infinite)) > 0
    nowhere = np.full_like(HIDDEN, np.nan)
    apart = ((HIDDEN, nan), (infinite, HIDDEN), (nan, infinite), (infinite, -infinite), (nowhere, nowhere))
    assert all(np.isnan(difference(*pair)) for pair in apart)


def assigned(diff):
    """How many of XLA's kernels have a part by their label, by a value, and not at all."""
    ways = diff.compilers["XLA"].assigned
    return ways.label.value, ways.value.value, ways.nothing.value


def test_labels_first_then_values():
    xla, inductor = programs()
    matches = match_values(xla, inductor)
    aligned = {item.name: item for item in assign_parts(xla, inductor, matches)["XLA"]}
    assert aligned["scores"].part == ("block*", "attention", "core")  # the formula is XLA's alone
    assert (aligned["scores"].by, aligned["nameless"].by) == ("label", "value")
    assert aligned["nameless"].part == ("block*", "mlp")
    pairs = {(left[1].name, right[1].name) for left, right in matches.pairs}
    assert pairs == {("hidden", "a"), ("nameless", "b")}
    assert [one.name for _, one in matches.copies["XLA"]] == ["copied"]
    assert {one.name for _, one in matches.only["XLA"]} == {"scores", "softmax"}
    assert matches.only["Inductor"] == ()


def test_without_any_label_common_tensors_cut_the_programs():
    def bare(name, array):
        return launch(name, [], tensor(name, array))

    one = Program(
        "XLA",
        (bare("a", SCORES), bare("b", HIDDEN), bare("c", np.exp(SUM)), bare("d", SUM), bare("e", SUM**2)),
        None,
        0.0,
    )
    other = Program("Inductor", (bare("f", HIDDEN.T), bare("g", SUM)), None, 0.0)
    found = compare_programs(one, other)
    assert [
        (region.name, region.compiled["XLA"].kernels, region.compiled["Inductor"].kernels) for region in found.regions
    ] == [
        ("1: to float32[16,8]", 2, 1),
        ("2: to float32[8,16]", 2, 1),
        ("", 1, 0),
    ]
    assert assigned(found) == (0, 4, 1)


def test_without_values_no_tensor_is_said_to_be_in_one_program_only():
    xla, inductor = programs()
    found = compare_programs(xla.with_values({}), inductor)
    assert [program.only.value for program in found.compilers.values()] == [0, 0]
    assert assigned(found) == (4, 0, 1)


def test_regions_say_who_fuses_and_who_writes_what():
    found = compare_programs(*programs())
    regions = {(region.name, region.phase): region for region in found.regions}
    attention, mlp = regions["block*/attention", "forward"], regions["block*/mlp", "forward"]
    assert (attention.compiled["XLA"].kernels, attention.compiled["Inductor"].kernels) == (3, 1)
    assert attention.compiled["Inductor"].libraries == {"aten.flash": 1}
    assert {one.kernel for one in attention.only["XLA"]} == {"scores"}  # two of one shape and line are one entry
    assert attention.only["XLA"][0].count == 2
    assert [one.kernel for one in mlp.copies["XLA"]] == ["copied"]
    assert [region.name for region in most_different(found.regions, 1)] == ["block*/attention"]
    assert found.largest_difference.value == 0
    assert attention.compiled["XLA"].seconds == pytest.approx(3e-3)


def test_a_fusion_of_two_parts_is_found_only_where_the_other_has_none():
    known = launch("both", ["block0/mlp", "head"], tensor("x", HIDDEN))
    apart = [launch("m", ["block0/mlp"], tensor("y", HIDDEN)), launch("h", ["head"], tensor("z", SUM))]
    one, other = Program("XLA", tuple(apart), None, 0.0), Program("Inductor", (known,), None, 0.0)
    regions = {region.name: region for region in compare_programs(one, other).regions}
    (fusion,) = regions["block*/mlp"].fusions["Inductor"]
    assert fusion.parts == ("block*/mlp", "head")
    assert regions["head"].fused_into["Inductor"] == ("both",)
    text = explain(regions["head"])
    assert "Inductor has no separate kernel for it: the work is inside `both`." in text
    same = compare_programs(Program("XLA", (known,), None, 0.0), other)
    assert all(not fusions for region in same.regions for fusions in region.fusions.values())


def test_the_explanation_is_made_of_the_numbers():
    (region,) = most_different(compare_programs(*programs()).regions, 1)
    said = "`block*/attention`, forward: XLA runs 3 kernels, moving 2.79 KiB in 3.00 ms; Inductor runs 1 kernel, "
    assert summary(region).startswith(f"{said}moving 612 B in 1.00 ms")
    text = explain(region)
    assert "- Only XLA writes 2 × `float32[4,8,8]` (2.00 KiB, by `scores` for `model.py:7`) to memory" in text
    assert "Inductor calls `aten.flash` 1 ×." in text
    assert "```text\n%scores = …\n```" in text


def test_programs_pass_from_process_to_process():
    for program in programs():
        assert pickle.loads(pickle.dumps(program)) == program  # noqa: S301 - its own bytes


LABELS = {"preset": "tiny", "layers": 1, "batch_size": 2, "dtype": "float32", "attention": "xla", "repeats": 3}


def test_the_report_is_made_of_the_record():
    record = diff_record(LABELS, *programs()).record()
    through_json = replace(record, data=json.loads(json.dumps(record.data)))
    assert DiffRecord.of(through_json) == diff_record(LABELS, *programs())
    environment = SimpleNamespace(gpu=None)
    results = Results("jax-baseline", environment=environment, configuration={}, records=(through_json,))
    (section,) = filter(None, hlo_sections.sections(results))
    text = block_text(section)
    numbers = dict(line[2:-2].split(" | ", 1) for line in text.splitlines() if line.count(" | ") == 2)
    assert numbers["a run"] == "5.00 ms | 2.00 ms"
    assert numbers["kernels"] == "5 | 2"
    assert numbers["assigned by a value in memory"].startswith("1 | ")
    assert numbers["bytes read and written"] == "3.99 KiB | 1.20 KiB"
    outside, _, inside = text.partition("<details>")
    assert "- `block*/attention`, forward: XLA runs 3 kernels" in outside
    assert "#### `block*/attention`, forward" in inside
    assert "its kernels take 3.00 ms in XLA and 1.00 ms in Inductor" in outside
    assert "Only XLA writes 2 × `float32[4,8,8]` to memory there" in outside
    assert [line.split(" | ")[0] for line in inside.splitlines() if line.startswith("| block")] == [
        "| block*/attention",
        "| block*/mlp",
    ]
    (chart,) = (block for block in section.blocks if isinstance(block, Chart))
    assert [panel.values.label.replace("\n", " ") for panel in chart.panels] == [
        "time of the kernels (ms), lower is better",
        "bytes that they read and write (MiB), lower is better",
    ]


def test_names():
    assert star_blocks(("block12", "mlp", "h2o", "2")) == ("block*", "mlp", "h2o", "2")
    assert region_of(("block*", "mlp", "norm")) == "block*/mlp"
    assert region_of(("head", "norm")) == "head"
    assert region_of(()) == ""


def test_a_step_that_memory_made_smaller_is_recorded_and_named_with_its_length():
    changes = fit(configure("cuda", quick=True), "cuda", 6 << 30)
    for kind, settings in ((StepRecord, changes["step"]), (DiffRecord, changes["diffs"][0])):
        assert settings["batch_size"] < 16
        assert settings.keys() <= {field.name for field in fields(kind)}
    small = diff_record(changes["diffs"][0], *programs())
    assert DiffRecord.of(small.record()) == small
    length = f"{small.batch_size} sequences of {small.block_size} tokens"
    assert length in hlo_sections.scope(small)
    assert "tokens" not in hlo_sections.scope(replace(small, block_size=None))
