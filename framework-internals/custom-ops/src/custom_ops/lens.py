"""What a run of the report measures, at which sizes and in which order."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchkit import UserError
from benchkit.device import Device
from benchkit.errors import first_line
from benchkit.results import Json, Record
from benchkit.run import Lens, Run
from benchkit.timing.comparison import last_level_cache
from benchkit.timing.limits import memory_limits, product_limits
from custom_ops.bench import attention, avx2, beyond_cache, build_costs, loss, measure, resident_memory, speed, training
from custom_ops.bench.cases import benchmark_cases
from custom_ops.builds.loading import load
from custom_ops.operators.checks import DTYPES
from custom_ops.report.spec import REPORT
from native_build import BuildError


def build_lens(root: Path) -> Lens:
    """Make the lens with the folder ``root``."""
    return Lens("custom-ops", root, configure, collect, REPORT)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Sizes and sampling times: operands up to 512 MiB on a GPU and 16 MiB on a CPU, within and beyond the caches.

    On a CPU, bias_gelu is also timed at four times the last-level cache, and operands have several placements.
    """
    gpu = device == "cuda"
    powers = [12, 18] if quick else [*range(12, 26, 2), 27] if gpu else [12, 16, 20, 22]
    return {
        "builds": not quick,
        "call_counts": [1, 1024] if quick else [1, 16, 1024],
        "counts": [2**power for power in powers],
        "columns": 4096 if gpu else 1024,
        "dtypes": ["float32"] if quick and not gpu else ["float32", "bfloat16"],
        "large_count": 2**18 if quick else 2 ** (27 if gpu else 22),
        "placements": 1 if gpu else speed.PLACEMENTS,
        "beyond_cache_bytes": 4 * last_level_cache() >> (6 if quick else 0),
        "correctness_count": 100_003 if quick else 500_003,
        "attention": _attention_sizes(gpu, quick),
        "loss": _loss_sizes(gpu, quick),
        "large_loss": {"rows": 8192, "width": 2048, "classes": 128_256} if gpu and not quick else None,
        "preset": None if quick else "gpt2-124m" if gpu else "tiny",
        "seconds": 0.05 if quick else 0.3 if gpu else 0.1,
    }


def _loss_sizes(gpu: bool, quick: bool) -> dict[str, Json]:
    """The last layer of GPT-2 for eight sequences on a GPU; a few ten milliseconds per call on a CPU."""
    rows, width, classes = (64, 32, 512) if quick else (8192, 768, 50_304) if gpu else (512, 256, 8192)
    return {"rows": rows, "width": width, "classes": classes}


def _attention_sizes(gpu: bool, quick: bool) -> dict[str, Json]:
    """Sizes for attention: 16,384 tokens with a width of 2048 on a GPU; a few milliseconds per call on a CPU."""
    longest = 14 if gpu else 10
    return {
        "lengths": [256] if quick else [1024, 4096, 16384] if gpu else [128, 512, 2048],
        "causal_lengths": [] if quick or gpu else [8192],  # with a causal mask and the first head size only
        "head_sizes": [64] if quick else [64, 128],
        "tokens": 16384 if gpu else 512,
        "width": 2048 if gpu else 128,
        "accuracy_lengths": [2**power for power in range(7, 10 if quick else longest + 1)],
        "accuracy_dtypes": ["float32", "float16", "bfloat16"],
        "kernel_length": 1024 if gpu else 256,
        "memory_lengths": [1024] if quick else [1024, 4096, 16384] if gpu else [1024, 8192],
        "seconds": 0.02 if quick else 0.2 if gpu else 0.05,
    }


def collect(run: Run) -> None:
    """Take all measurements of the report."""
    _collect_builds(run)
    info = load()
    run.record(
        "serving",
        {"road": str(info.road), "cuda": str(info.cuda), "autograd": info.autograd, "sha256": str(info.sha256)},
        data=dict(info.missing),
    )
    _collect_limits(run)
    _collect_correctness(run)
    _collect_calls(run)
    _collect_speed(run)
    _collect_attention(run)
    _collect_loss(run)
    _collect_training(run)
    if run.device == "cpu":
        run.absent("The CUDA kernels", "this run was on a CPU")
        run.absent("Peak memory of bias_gelu", "torch does not track the CPU's memory")


def _keep(run: Run, what: str, measured: Callable[[], Iterable[Record]]) -> None:
    """Add the records of one measurement to the run. If it fails, report that and go on.

    Args:
        run: The run in progress.
        what: Name of the measurement, as the report's readers know it.
        measured: Starts the measurement.
    """
    with run.working(what):
        try:
            for record in measured():
                run.add(record)
        except UserError as error:  # this machine lacks something
            run.absent(what[:1].upper() + what[1:], str(error).rstrip("."))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            run.absent(what[:1].upper() + what[1:], f"it ended with {first_line(error)}")


def _collect_limits(run: Run) -> None:
    seconds = run.configuration["seconds"]
    _keep(run, "the limit of memory", partial(memory_limits, run.device, seconds=seconds))
    size = None if run.configuration["builds"] else 256
    _keep(run, "the limit of products", partial(product_limits, run.device, size=size, seconds=seconds))


def _collect_training(run: Run) -> None:
    what, preset = "the operators in a training step", run.configuration["preset"]
    if preset is None:
        run.absent(what.capitalize(), "a quick run does not train")
        return
    seconds = 5 * run.configuration["seconds"]
    _keep(run, what, partial(training.training_steps, run.device, preset, seconds=seconds))


def _collect_builds(run: Run) -> None:
    """Build every road from scratch. The run reuses the results instead of compiling them again."""
    if not run.configuration["builds"]:
        run.absent("What each road's build costs", "a quick run does not build from scratch")
        return
    with tempfile.TemporaryDirectory() as folder:
        with run.working("building every road from scratch"):
            outcomes = build_costs.build_all(Path(folder))
        for road, outcome in outcomes.items():
            what = f"what a build costs: {road}"
            _keep(run, what, partial(_load_and_use, outcome))
    _keep(run, f"what a build costs: {build_costs.RUN_TIME}", lambda: [build_costs.build_at_run_time()])


def _load_and_use(built: build_costs.Built | BuildError) -> list[Record]:
    if isinstance(built, BuildError):
        raise built
    record = built.record()
    build_costs.use(built)
    return [record]


def _collect_correctness(run: Run) -> None:
    count = run.configuration["correctness_count"]
    _keep(run, "correctness", partial(measure.correctness, run.device, count, DTYPES))
    rows = max(count // 1024, 1)
    _keep(run, "accuracy", partial(measure.accuracy, run.device, DTYPES, rows=rows, columns=1024))


def _collect_calls(run: Run) -> None:
    counts, seconds = run.configuration["call_counts"], run.configuration["seconds"]
    _keep(run, "what each wrapper can do", partial(measure.capabilities, run.device))
    _keep(run, "what a call costs", partial(measure.call_times, run.device, counts, seconds=4 * seconds))
    _keep(run, "calls on one element", partial(measure.one_element, run.device, seconds=seconds))


def _collect_speed(run: Run) -> None:
    device, configuration = run.device, run.configuration
    seconds, large, columns = configuration["seconds"], configuration["large_count"], configuration["columns"]
    dtypes = [getattr(torch, name) for name in configuration["dtypes"]]
    sampled: dict[str, Json] = {"columns": columns, "seconds": seconds}
    sizes = partial(
        speed.operators, device, list(benchmark_cases()), configuration["counts"], dtypes,
        compiled=configuration["builds"] and device == "cuda", **sampled,
    )  # fmt: skip
    _keep(run, "the operators over sizes", sizes)
    _keep(run, "launches and bytes", partial(speed.fusions, device, large, torch.float32, columns=columns))
    side = int(large**0.5)
    layouts = partial(measure.layouts, device, side, torch.float32, seconds=seconds)
    _keep(run, "operands with an awkward layout", layouts)
    images, pixels = 64 if device == "cuda" else 2, 56 if configuration["builds"] else 14
    convolutions = partial(measure.convolutions, device, batch=images, side=pixels, seconds=seconds)
    _keep(run, "the fused convolution", convolutions)
    if device == "cuda":
        _keep(run, "bias_gelu's access to memory", partial(speed.accesses, device, large, dtypes, **sampled))
        _keep(run, "the plans of bias_gelu's backward", partial(speed.plans, device, large, dtypes, **sampled))
        for dtype in dtypes:
            peak = partial(speed.peak_memory, device, large, dtype, columns=columns)
            _keep(run, f"bias_gelu's peak memory in {speed.name_of(dtype)}", peak)
    else:
        every_placement: dict[str, Json] = {"columns": columns, "seconds": 10 * seconds}
        beyond = partial(beyond_cache.speeds, configuration["beyond_cache_bytes"], dtypes, **every_placement)
        _keep(run, "bias_gelu beyond the last-level cache", beyond)


def _collect_loss(run: Run) -> None:
    dtypes = [getattr(torch, name) for name in run.configuration["dtypes"]]
    compiled = run.configuration["builds"] and run.device == "cuda"
    measured = partial(
        loss.losses, run.device, dtypes=dtypes, compiled=compiled, seconds=run.configuration["seconds"],
        **run.configuration["loss"],
    )  # fmt: skip
    _keep(run, "the loss of a language model", measured)
    if sizes := run.configuration.get("large_loss"):  # today's vocabularies; the 16-bit dtype that they are trained in
        large = partial(
            loss.losses, run.device, dtypes=[torch.bfloat16], compiled=compiled,
            seconds=run.configuration["seconds"], name="large_loss", **sizes,
        )  # fmt: skip
        _keep(run, "the loss of a large vocabulary", large)


def _collect_attention(run: Run) -> None:
    device, sizes = run.device, run.configuration["attention"]
    seconds, width, head_sizes = sizes["seconds"], sizes["width"], sizes["head_sizes"]
    dtypes = [getattr(torch, name) for name in run.configuration["dtypes"]]
    every = [getattr(torch, name) for name in sizes["accuracy_dtypes"]]
    errors = partial(attention.accuracy, device, sizes["accuracy_lengths"], every, head_size=head_sizes[0])
    _keep(run, "attention's accuracy", errors)
    instructions = torch.backends.cpu.get_cpu_capability() if device == "cpu" else ""
    if instructions == "AVX2":
        run.absent("Attention limited to AVX2", "torch uses no more than AVX2 here, so the other rows show it")
    for dtype in dtypes:
        speeds = partial(
            attention.speeds, device, sizes["lengths"], head_sizes, [dtype],
            tokens=sizes["tokens"], width=width, seconds=seconds,
        )  # fmt: skip
        _keep(run, f"attention's speed in {speed.name_of(dtype)}", speeds)
        if instructions == "AVX512":
            name = f"attention's speed by AVX2 in {speed.name_of(dtype)}"
            _keep(run, name, partial(avx2.limited, speeds))
            if dtype is torch.bfloat16:
                _keep(run, f"{name}, oneDNN limited too", partial(avx2.limited, speeds, onednn_too=True))
        longer = partial(
            attention.speeds, device, sizes["causal_lengths"], head_sizes[:1], [dtype],
            tokens=sizes["tokens"], width=width, seconds=seconds, masks=(True,),
        )  # fmt: skip
        _keep(run, f"attention's speed on longer sequences in {speed.name_of(dtype)}", longer)
    length = sizes["kernel_length"]
    kernels = partial(attention.kernels, device, length, head_sizes, dtypes, width=width, seconds=seconds)
    _keep(run, "attention's kernels", kernels)
    lengths, head_size = sizes["memory_lengths"], head_sizes[-1]
    peak = (
        partial(attention.memory, device, lengths, dtypes, head_size=head_size, width=width)
        if device == "cuda"
        else partial(resident_memory.peaks, lengths, head_size=head_size, width=2 * width)
    )
    _keep(run, "attention's peak memory", peak)
