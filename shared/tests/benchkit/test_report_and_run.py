"""Reports as a pure function of results, and the command line that every lens has."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from benchkit import UserError, report
from benchkit.device import resolve_device
from benchkit.environment import Gpu, capture
from benchkit.report import plotting
from benchkit.results import Quantity, Record, Recorder, Results, load, load_report
from benchkit.run import committed_reports, own_reports, report_directories
from benchkit.timing import Timing, limits
from benchkit.timing.comparison import last_level_cache
from benchkit.timing.limits import datasheet, fraction_of_limit, memory_limits, product_ceiling, product_limits
from benchkit.timing.vector_copies import vector_copies

HERE = Path(__file__).parent


def test_a_run_measures_and_writes_and_render_only_reproduces_it_byte_for_byte(lens, own, run):
    done = run(lens, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    directory = own
    assert done.stdout.strip() == str(directory / "report.md")
    assert sorted(path.name for path in directory.rglob("*") if path.is_file()) == [
        "report.md",
        "results.json",
        "times.svg",
    ]
    text = (directory / "report.md").read_text()
    figure = (directory / "figures" / "times.svg").read_bytes()
    assert text.startswith("# A lens\n\n**2 sizes were measured.**\n\nMeasured on a")
    assert "| 2 | 2.00 ms (1.80–2.20) |" in text
    assert "![A line](figures/times.svg)" in text
    assert "- Not in this report: **the moon** (it is not up)." in text
    headings = [line for line in text.splitlines() if line.startswith("##")]
    assert headings == [
        "## Times",
        "### What was asked",
        "### The machine",
        "### How it was measured",
        "## What this does not show",
    ]
    folded = text[text.index("<details>") : text.index("</details>")]
    assert "### What was asked" in folded
    assert "### How it was measured" in folded
    (directory / "report.md").write_text("edited by hand")
    assert run(lens, "--render-only").returncode == 0
    assert (directory / "report.md").read_text() == text
    assert (directory / "figures" / "times.svg").read_bytes() == figure


def test_a_figure_that_a_report_no_longer_has_is_removed_and_files_of_others_stay(lens, own, run):
    run(lens, "--device", "cpu")
    (own / "report.md").write_text((own / "report.md").read_text() + "\n![Another](figures/another.svg)\n")
    for name in ("another.svg", "mine.svg"):
        (own / "figures" / name).write_text("<svg/>")
    assert run(lens, "--render-only").returncode == 0
    assert sorted(path.name for path in (own / "figures").iterdir()) == ["mine.svg", "times.svg"]


def test_a_quick_run_leaves_the_full_report_alone(lens, own, run):
    run(lens, "--device", "cpu")
    before = (own / "report.md").read_bytes()
    assert run(lens, "--device", "cpu", "--quick").returncode == 0
    assert (own / "report.md").read_bytes() == before
    assert len(load(own.with_name(f"{own.name}-quick") / "results.json").select("time")) == 1
    assert [path.name for path in report_directories(lens)] == [own.name, f"{own.name}-quick"]
    assert own_reports(lens) == [own]
    assert committed_reports(lens) == []


def test_only_a_run_that_is_published_writes_the_committed_place(lens, own, run):
    published = own.with_name(own.name.removeprefix("own-"))
    done = run(lens, "--device", "cpu", "--publish")
    assert done.stdout.strip() == str(published / "report.md")
    before = (published / "report.md").read_bytes()
    assert run(lens, "--device", "cpu").returncode == 0
    assert (published / "report.md").read_bytes() == before
    assert committed_reports(lens) == [published]
    assert own_reports(lens) == [own]
    refused = run(lens, "--device", "cpu", "--publish", "--quick")
    assert refused.stderr == (
        "a-lens: --publish writes the report of a whole run to its own place; remove --quick or --out\n"
    )


def test_an_interrupted_run_keeps_what_it_measured_and_the_report_of_the_run_before(lens, own, run):
    run(lens, "--device", "cpu")
    directory = own
    before = {name: (directory / name).read_bytes() for name in ("report.md", "results.json")}
    stopped = run(lens, "--device", "cpu", INTERRUPT_AT="2")
    assert stopped.returncode == 130
    assert "interrupted; 1 records are kept in" in stopped.stderr
    assert [r.labels["n"] for r in load(directory / "results.partial.json").records] == [1]
    assert {name: (directory / name).read_bytes() for name in before} == before


def test_a_sweep_has_a_document_of_its_own_and_survives_being_killed(lens, own, run):
    assert run(lens).returncode == 0
    sweep = own / "sweep.json"
    killed = run(lens, "--device", "cpu", "--sweep", KILL_AT="5000")
    assert killed.returncode == -signal.SIGKILL
    assert [record.labels["n"] for record in load(sweep).records] == [2, 3]
    assert load(sweep).complete
    assert run(lens, "--device", "cpu", "--sweep", "--budget", "60s").returncode == 0
    assert len(load(sweep).records) == 2
    done = run(lens, "--device", "cpu", "--sweep")
    assert done.returncode == 0, done.stderr
    assert [record.labels["n"] for record in load(sweep).records] == [2, 3, 5000]
    assert load(sweep).configuration == {"sizes": [1, 2], "sweep": [2, 3, 5000]}
    assert not list(own.glob("*.partial.json"))


def test_neither_a_main_run_nor_a_sweep_loses_the_other(lens, own, run):
    run(lens, "--device", "cpu")
    run(lens, "--device", "cpu", "--sweep")
    kept = (own / "sweep.json").read_bytes()
    assert [record.labels["n"] for record in load(own / "results.json").select("time")] == [1, 2]
    assert run(lens, "--device", "cpu").returncode == 0
    assert (own / "sweep.json").read_bytes() == kept
    text = (own / "report.md").read_text()
    assert "| 5000 | 5.00 s |" in text
    assert text.count("| 2 | 2.00 ms") == 1
    assert "| 2 | 2.00 ms (1.80–2.20) |" in text  # the main run's stands


def test_a_sweep_of_another_torch_is_left_out_of_the_report_and_said(lens, own, run):
    run(lens, "--device", "cpu")
    run(lens, "--device", "cpu", "--sweep")
    version = load(own / "sweep.json").environment.packages["torch"]
    text = (own / "sweep.json").read_text().replace(f'"torch": "{version}"', '"torch": "1.0"')
    (own / "sweep.json").write_text(text)
    assert run(lens, "--render-only").returncode == 0
    report = (own / "report.md").read_text()
    assert "5.00 s" not in report
    assert f"**What `--sweep` measures** (`sweep.json` was measured with torch 1.0, this is {version};" in report
    refused = run(lens, "--device", "cpu", "--sweep")
    assert refused.returncode == 2
    assert "sweep.json was measured with torch 1.0" in refused.stderr
    assert refused.stderr.strip().endswith("remove it, or name another folder with --out")


def test_a_sweep_that_cannot_be_read_loses_no_main_run(tmp_path):
    environment = capture("cpu", root=HERE)
    Recorder(tmp_path, lens="a-lens", environment=environment, configuration={}).finish()
    (tmp_path / "sweep.json").write_text('{"schema_version": 1}')
    (missing,) = load_report(tmp_path).absences
    assert missing.what == "What `--sweep` measures"
    assert missing.why == (
        "`sweep.json`: expected schema_version 2, got 1; remove it, and measure it again with --sweep"
    )
    with pytest.raises(UserError, match="remove it, and measure it again"):
        Recorder.going_on(tmp_path, lens="a-lens", environment=environment, configuration={})


def test_a_sweep_stands_by_itself_where_no_run_was(lens, run, tmp_path):
    done = run(lens, "--device", "cpu", "--sweep", "--quick", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert len(load(tmp_path / "out" / "sweep.json").records) == 3


def test_what_cannot_be_done_is_one_line(lens, run, tmp_path):
    for arguments, more, line in (
        (("--sweep",), {"NO_SWEEP": "1"}, "a-lens: a-lens has no long part; remove --sweep"),
        (("--again", ""), {}, "a-lens: --again is for the long part, whose rows stay from call to call; add --sweep"),
        (("--render-only", "--budget", "5s"), {}, "a-lens: --render-only measures nothing; remove it, or --budget"),
    ):
        done = run(lens, "--device", "cpu", *arguments, "--out", str(tmp_path / "out"), **more)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(line)
        assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert "there is no report yet to render again" in run(lens, "--render-only").stderr


def test_results_of_another_torch_are_not_gone_on_with(tmp_path):
    environment = capture("cpu", root=HERE)
    Recorder.going_on(tmp_path, lens="a-lens", environment=environment, configuration={"a": 1}).begin()
    again = Recorder.going_on(tmp_path, lens="a-lens", environment=environment, configuration={"b": 2})
    assert again.results.configuration == {"a": 1, "b": 2}
    other = dataclasses.replace(environment, packages={**environment.packages, "torch": "1.0"})
    with pytest.raises(UserError, match=r"sweep.json was measured with torch .*, this is 1.0; remove it"):
        Recorder.going_on(tmp_path, lens="a-lens", environment=other, configuration={})
    with pytest.raises(UserError, match="with lens a-lens, this is another"):
        Recorder.going_on(tmp_path, lens="another", environment=environment, configuration={})


def test_what_another_commit_measured_stays_until_it_is_measured_again(tmp_path):
    def go_on(commit, *again):
        here = dataclasses.replace(capture("cpu", root=HERE), commit=commit)
        recorder = Recorder.going_on(tmp_path, lens="a-lens", environment=here, configuration={}, again=again)
        recorder.begin()
        return recorder, sorted(str(record.labels["variant"]) for record in recorder.results.records)

    def on_disk():
        return {str(r.labels["variant"]): (r.data or {}).get("commit") for r in load(tmp_path / "sweep.json").records}

    before, _ = go_on("old")
    for variant in ("own", "own, sharded", "plain"):
        before.add(Record("row", {"variant": variant}, {}, {"commit": "old"}))
    before.add(Record("note", {"variant": "own, too"}))
    assert go_on("new")[1] == ["own", "own, sharded", "own, too", "plain"]
    assert go_on("new", "variant=p")[1] == ["own", "own, sharded", "own, too"]
    recorder, known = go_on("new", "own")
    assert known == ["own, too", "plain"]
    recorder.add(Record("row", {"variant": "own"}, {}, {"commit": "new"}))
    assert on_disk() == {"own": "new", "own, sharded": "old", "own, too": None, "plain": "old"}
    assert go_on("new", "own")[1] == ["own", "own, too", "plain"]
    assert go_on("new", "")[1] == ["own", "own, too"]


def test_a_folder_that_cannot_be_written_shows_before_anything_is_measured(lens, own, run):
    (lens / "reports").write_text("a file where the folder should be")
    failed = run(lens, "--device", "cpu", INTERRUPT_AT="1")  # the first measurement would end it with 130
    assert failed.returncode == 2
    assert len(failed.stderr.strip().splitlines()) == 1
    assert f"reports/{own.name} cannot be written: Not a directory; remove the file that stands" in failed.stderr


def test_corrupt_results_are_one_line_and_nothing_is_overwritten(lens, own, run):
    run(lens, "--device", "cpu")
    directory = own
    before = (directory / "report.md").read_bytes()
    (directory / "results.json").write_text("{")
    failed = run(lens, "--render-only")
    assert failed.returncode == 2
    assert len(failed.stderr.strip().splitlines()) == 1
    assert "is not a JSON document" in failed.stderr
    assert (directory / "report.md").read_bytes() == before
    assert (directory / "results.json").read_text() == "{"


def test_results_of_another_lens_are_not_rendered(lens, own, run):
    run(lens, "--device", "cpu")
    before = (own / "report.md").read_bytes()
    (own / "results.json").write_text((own / "results.json").read_text().replace('"a-lens"', '"b-lens"'))
    failed = run(lens, "--render-only")
    assert failed.returncode == 2
    assert f"{own.name} holds results of b-lens, not of a-lens; name another folder" in failed.stderr
    assert (own / "report.md").read_bytes() == before


def test_cuda_without_a_gpu_is_one_line_and_nothing_is_written(lens, run):
    failed = run(lens, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert failed.returncode == 2
    assert failed.stderr.startswith("a-lens: --device cuda was asked for, but ")
    assert len(failed.stderr.strip().splitlines()) == 1
    assert not (lens / "reports").exists()


def test_another_device_word_is_refused():
    with pytest.raises(UserError, match="--device takes auto, cpu or cuda, got 'tpu'"):
        resolve_device("tpu")
    assert resolve_device("cpu") == "cpu"


def test_a_driver_that_is_too_old_is_one_line_on_the_way_to_the_cpu_and_an_error_for_who_insists(monkeypatch, capsys):
    def is_available():
        warnings.warn("CUDA initialization: The NVIDIA driver on your system is too old.\nmore", stacklevel=1)
        return False

    monkeypatch.setattr("torch.cuda.is_available", is_available)
    assert resolve_device("auto") == "cpu"
    assert capsys.readouterr().err == (
        "the CPU is used, because torch cannot use the GPU: "
        "CUDA initialization: The NVIDIA driver on your system is too old.\n"
    )
    with pytest.raises(UserError, match=r"driver on your system is too old.*use --device cpu"):
        resolve_device("cuda")


def test_an_interrupted_document_renders_and_says_so(tmp_path):
    recorder = Recorder(tmp_path / "out", lens="a", environment=capture("cpu", root=HERE), configuration={})

    def spec(results):
        return report.Report("A lens", "Nothing yet.", [], [], ["How long?"], ["With a clock."], ["All."])

    text = report.render(recorder.results, spec)
    assert "> This run was interrupted" in text
    gpu = "NVIDIA Something 9000"
    on_gpu = dataclasses.replace(
        recorder.results,
        environment=dataclasses.replace(
            recorder.results.environment,
            gpu=Gpu(gpu, "9.0", 132, 2**37, 2**25, "13.0", "580"),
        ),
    )
    assert f"| GPU | {gpu}, compute capability 9.0, 132 multiprocessors" in report.render(on_gpu, spec)


def test_a_cell_cannot_break_a_table():
    assert report.markdown_table(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n|---|---:|\n| x\\|y | 1 2 |"


def test_limits_are_measured_and_agree_with_the_byte_formula():
    found = {
        record.labels["traffic"]: record for record in memory_limits("cpu", bytes_per_tensor=1 << 22, seconds=0.05)
    }
    assert set(found) == {"1 read 1 write", "2 reads 1 write"}
    for record in found.values():
        assert record["tensor"].value == 1 << 22
        assert record["cache"].value == last_level_cache()
        if vector_copies("streaming") is not None:  # the limit is the faster of the two kinds of stores
            assert record["ordinary"].value <= record["bandwidth"].value
        rate = record["bandwidth"]
        assert rate.unit == "B/s"
        assert 0 < rate.low <= rate.value <= rate.high
    rates = {record.labels["dtype"]: record["rate"] for record in product_limits("cpu", size=128, seconds=0.05)}
    assert set(rates) == {"float32", "bfloat16"}
    assert all(rate.value > 0 for rate in rates.values())


@pytest.mark.parametrize(
    ("rates", "dtype", "products"),
    [
        ({"float32": 1e11, "bfloat16": 1e9}, "bfloat16", "float32"),  # emulated
        ({"float32": 1e11, "bfloat16": 2e11}, "bfloat16", "bfloat16"),
        ({"float32": 1e11, "bfloat16": 2e11}, "float32", "float32"),
        ({"float16": 8e14, "tf32": 4e14, "float32": 5e13}, "float16", "float16"),
        ({"float32": 1e11}, "bfloat16", None),  # not measured: a GPU's can be many times float32's
    ],
)
def test_the_ceiling_of_emulated_products_is_that_of_float32(rates, dtype, products):
    records = tuple(
        Record("product limit", {"dtype": name, "size": 64}, {"rate": Quantity(rate, "FLOP/s")})
        for name, rate in rates.items()
    )
    results = Results("a-lens", capture("cpu", root=HERE), {}, records)
    ceiling = product_ceiling(results, dtype)
    assert (ceiling and ceiling.labels["dtype"]) == products


def test_a_cpus_limit_is_measured_well_beyond_its_last_level_cache(monkeypatch):
    sizes = []

    def compare(ways, *, inputs, **_):
        sizes.extend(tensor.numel() * tensor.element_size() for tensor in inputs[0])
        return {way: Timing((1.0,), 1, "wall-clock", 1.0) for way in ways}

    monkeypatch.setattr(limits, "compare", compare)
    for cache, size in ((1 << 20, 64 << 20), (40 << 20, 160 << 20)):
        monkeypatch.setattr(limits, "last_level_cache", lambda cache=cache: cache)
        next(iter(memory_limits("cpu")))
        assert sizes[-2:] == [size, size]


def test_the_last_level_cache_is_the_highest_that_linux_states(tmp_path):
    for index, (level, size) in enumerate((("1", "32K"), ("3", "32768K"), ("2", "1024K"))):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(f"{level}\n")
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 32 << 20
    assert last_level_cache(tmp_path / "none") == 32 << 20


@pytest.mark.parametrize("stores", ["streaming", "ordinary"])
def test_copies_by_vectors(stores):
    copies = vector_copies(stores)
    if copies is None:
        pytest.skip("no C compiler, or not x86-64")
    x, y = torch.randn(1 << 12), torch.randn(1 << 12)
    assert torch.equal(copies.copy(x, torch.empty_like(x)), x)
    bits = copies.combine(x, y, torch.empty_like(x)).view(torch.int32)
    assert torch.equal(bits, x.view(torch.int32) ^ y.view(torch.int32))
    with pytest.raises(ValueError, match="a multiple of 64 bytes, got 20 bytes"):
        copies.copy(x[:5], y[:5])


def test_the_fraction_of_a_limit_and_the_datasheet():
    assert fraction_of_limit(2e9, 1e-3, 4e12) == pytest.approx(0.5)
    assert datasheet("NVIDIA H200").bandwidth == 4.8e12
    assert datasheet("NVIDIA H200").flops["bfloat16"] == pytest.approx(989.5e12)
    for other in ("Some other card", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert datasheet(other) is None


def test_ticks_have_thousands_separated_on_either_kind_of_axis():
    figure, axes = plotting.new_figure()
    axes.plot([0, 600_000], [0.5, 2_000])
    axes.set_yscale("log")
    plotting.label_ticks(axes.xaxis)
    plotting.label_ticks(axes.yaxis, (1, 2, 5))
    figure.draw_without_rendering()
    assert {"200,000", "600,000"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert {"0.5", "1", "20", "1,000"} <= {label.get_text() for label in axes.get_yticklabels()}
    assert not any(label.get_text() for label in axes.get_yticklabels(minor=True))


def test_figures_have_no_date_and_are_equal_for_equal_data(tmp_path):
    def draw(path: Path) -> bytes:
        figure, axes = plotting.new_figure()
        axes.bar(["a", "b"], [1, 2], hatch=plotting.HATCHES[1])
        plotting.draw_limit(axes, 2.5, "the limit")
        plotting.save(figure, path)
        return path.read_bytes()

    first, second = draw(tmp_path / "a.svg"), draw(tmp_path / "b.svg")
    assert first == second
    assert b"<dc:date>" not in first


def test_benchkit_loads_neither_torch_nor_jax():
    program = """
import sys
import benchkit, benchkit.run, benchkit.report, benchkit.timing.limits, benchkit.report.plotting
import benchkit.command.progress, benchkit.processes.server
assert not {"torch", "jax", "triton"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.gpu
def test_limits_of_a_gpu_stay_under_its_datasheet():
    import torch

    sheet = datasheet(torch.cuda.get_device_name())
    traffic = {record.labels["traffic"]: record["bandwidth"].value for record in memory_limits("cuda")}
    rates = {record.labels["dtype"]: record["rate"].value for record in product_limits("cuda")}
    assert set(traffic) == {"1 read 1 write", "2 reads 1 write", "2 reads 2 writes"}
    if sheet is None:
        pytest.skip("no datasheet for this GPU")
    assert all(0 < rate < sheet.bandwidth for rate in traffic.values())  # how far below is up to what shares the GPU
    assert all(0 < rate <= sheet.flops[name] for name, rate in rates.items())


@pytest.mark.gpu
def test_two_reads_two_writes_computes_what_it_says():
    import torch

    from benchkit.timing.stream_kernels import add_and_subtract

    x, y = (torch.randn(100_003, device="cuda") for _ in range(2))
    total, difference = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    add_and_subtract(x, y, total, difference)
    assert torch.equal(total, x + y)
    assert torch.equal(difference, x - y)


@pytest.mark.parametrize(
    ("rates", "ratios", "said"),
    [
        ({"eager": 100, "a": 120}, {"a": 1.19}, ""),
        ({"eager": 100, "a": 80.3}, {"a": 0.848}, "a is 0.803× eager by the medians and 0.848× by the paired ratio"),
        ({"eager": 100, "a": 101}, {"a": 0.995}, "a is 1.01× eager by the medians and 0.995× by the paired ratio"),
        (
            {"eager": 100, "jit": 115, "donated": 119},
            {"jit": 1.18, "donated": 1.16},
            "donated is faster than jit by the medians and slower by the paired ratios (1.16× and 1.18×)",
        ),
        ({"eager": 100, "a": 110, "b": 110}, {"a": 1.1, "b": 1.11}, ""),
        (
            {"eager": 100, "a": 110, "b": 120, "c": 130},
            {"a": 1.2, "b": 1.5, "c": 1.4},
            "disagree:** b is 1.20× eager by the medians and 1.50× by the paired ratio; "
            "a is 1.10× eager by the medians and 1.20× by the paired ratio; 2 more. A paired",
        ),
    ],
)
def test_medians_that_disagree_with_paired_ratios_are_noted(rates, ratios, said):
    note = report.paired_ratio_note(rates, ratios, "eager")
    assert said in note
    assert bool(note) == bool(said)
