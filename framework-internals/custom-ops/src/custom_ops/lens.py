"""What a run of the report measures, at which sizes and in which order."""

from __future__ import annotations

import itertools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch

from benchkit.device import Device
from benchkit.processes import budget, memory
from benchkit.results import SMALLER, Json, Record
from benchkit.run import Lens, Run, Step
from benchkit.timing.comparison import last_level_cache
from benchkit.timing.limits import memory_limits, product_limits
from custom_ops.bench import attention, avx2, beyond_cache, build_costs, loss, measure, resident_memory, speed, training
from custom_ops.bench.cases import benchmark_cases
from custom_ops.bench.speed import name_of
from custom_ops.builds.loading import load, usable_build
from custom_ops.operators.checks import DTYPES
from custom_ops.report.page import report
from torch_baseline.config import TrainConfig
from torch_baseline.throughput import eager_step_that_fits

_BUILD_SECONDS = 100.0  # of processor time, for all roads
_LONGEST_CUDA_BUILD = 70.0  # seconds of the longest source for a GPU, however many cores compile the others

# What an operator's forms take for an element: operands in two sets, and the results of torch's operators in float32.
_ELEMENT_BYTES = 64


def build_lens(root: Path) -> Lens:
    """Make the lens with the folder ``root``."""
    return Lens("custom-ops", root, configure, collect, report, fit=fit)


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
        "linear": None if gpu else {"rows": 64 if quick else 256, "depth": 512, "columns": 1024},
        "large_loss": {"rows": 8192, "width": 2048, "classes": 128_256} if gpu and not quick else None,
        "preset": None if quick else "gpt2-124m" if gpu else "tiny",
        "batch_size": None,
        "seconds": 0.05 if quick else 0.3 if gpu else 0.1,
    }


def fit(asked: Mapping[str, Json], device: Device, available: int) -> Mapping[str, Json]:
    """Make the largest operands and the batch of the training step so small that they fit."""
    most = memory.largest_that_fits(
        memory.halved(asked["large_count"]), lambda count: _ELEMENT_BYTES * count, available
    )
    changes: dict[str, Json] = {}
    smaller = []
    if most < asked["large_count"]:
        changes |= {"large_count": most, "counts": list(dict.fromkeys(min(count, most) for count in asked["counts"]))}
        smaller.append(f"operands have at most {most:,} elements instead of {asked['large_count']:,}")
    if asked["preset"] is not None:
        wanted = (asked["preset"], TrainConfig.preset(asked["preset"]).batch_size)
        chosen = eager_step_that_fits(*wanted, models=len(training.PARTS), available=available)
        if chosen != wanted:
            changes |= {"preset": chosen[0], "batch_size": chosen[1]}
            smaller.append(f"the training step takes batch {chosen[1]} of `{chosen[0]}` instead of {wanted[1]}")
    if smaller:
        changes[SMALLER] = [f"{' and '.join(smaller)}, since {memory.gib(available)} were free"]
    return changes


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
        "feature_length": 0 if quick else 8192 if gpu else 2048,  # FlexAttention's compilation takes half a minute
        "seconds": 0.02 if quick else 0.2 if gpu else 0.05,
    }


def collect(run: Run) -> None:
    """Take all measurements of the report, the most important first.

    Builds from scratch come first, since the run uses what they make; with a budget they come last.

    Raises:
        native_build.BuildError: If there is no build of the operators and no compiler, so that nothing can be measured.
    """
    usable_build()
    builds_first = math.isinf(budget.left())
    if builds_first:
        _collect_builds(run)
    run.steps([Step("the build of the operators", _load_operators)])
    if run.recorder.results.select("serving"):
        run.steps(_measurements(run))
    else:
        run.absent("Every measurement of an operator", "there is no build of the operators")
    if not builds_first:
        _collect_builds(run)
    if run.configuration["preset"] is None:
        run.absent("The operators in a training step", "a quick run does not train")
    if run.device == "cpu":
        run.absent("The CUDA kernels", "this run was on a CPU")
        run.absent("Peak memory of bias_gelu", "torch does not track the CPU's memory")
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            run.absent("Attention limited to AVX2", "torch uses no more than AVX2 here, so the other rows show it")


def _load_operators() -> list[Record]:
    with budget.apart():
        info = load()
    labels = {"road": info.road, "cuda": info.cuda, "autograd": info.autograd, "sha256": info.sha256}
    return [Record("serving", {name: str(label) for name, label in labels.items()}, data=dict(info.missing))]


def _collect_builds(run: Run) -> None:
    """Build every road from scratch. The run reuses the results instead of compiling them again."""
    if not run.configuration["builds"]:
        run.absent("What each road's build costs", "a quick run does not build from scratch")
        return
    outcomes: dict[str, build_costs.Built | Exception] = {}
    needs = max(_BUILD_SECONDS / (os.cpu_count() or 1), _LONGEST_CUDA_BUILD if run.device == "cuda" else 0.0)
    with tempfile.TemporaryDirectory() as folder:
        build = partial(build_costs.build_all, Path(folder), outcomes)
        run.steps([Step("what each road's build costs", build, needs=needs)])
        if not outcomes:
            return
        steps = [
            Step(f"what a build costs: {road}", partial(_load_and_use, outcome)) for road, outcome in outcomes.items()
        ]
        steps.append(Step(f"what a build costs: {build_costs.RUN_TIME}", build_costs.build_at_run_time))
        with budget.at_least(budget.TIMING * len(steps)):  # what is built is loaded, which takes a second each
            run.steps(steps)


def _load_and_use(built: build_costs.Built | Exception) -> list[Record]:
    if isinstance(built, Exception):
        raise built
    record = built.record()
    build_costs.use(built)
    return [record]


def _measurements(run: Run) -> Iterator[Step]:
    """What is measured of the operators, the most important first: what is seldom left out for time.

    First what targets judge and every program runs, then the operators of the first tables, then the loss, whose
    products in 16 bits take minutes where torch's are slow, and the details last.
    """
    seconds = run.configuration["seconds"]
    size = None if run.configuration["builds"] else 256
    yield Step("the limit of memory", partial(memory_limits, run.device, seconds=seconds))
    yield Step("the limit of products", partial(product_limits, run.device, size=size, seconds=seconds))
    yield from _correctness(run)
    yield from _attention_speeds(run)
    yield from _linear_speeds(run)
    yield from _beyond_cache(run)
    yield from _operator_speeds(run)
    yield from _loss_and_training(run)
    yield from _calls(run)
    yield from _details_of_operators(run)
    yield from _details_of_attention(run)


def _dtypes(names: Iterable[str]) -> list[torch.dtype]:
    return [getattr(torch, name) for name in names]


def _attention_speeds(run: Run) -> Iterator[Step]:
    """Each dtype and head size alone, the short sequences first: what does not fit takes nothing else with it."""
    device, sizes = run.device, run.configuration["attention"]
    limitable = device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    speeds = partial(
        attention.speeds, device, tokens=sizes["tokens"], width=sizes["width"], seconds=sizes["seconds"]
    )  # fmt: skip
    for dtype in _dtypes(run.configuration["dtypes"]):
        what = f"attention's speed in {name_of(dtype)}"
        for head_size in sizes["head_sizes"]:
            measure = partial(speeds, lengths=sizes["lengths"], head_sizes=[head_size], dtypes=[dtype])
            yield Step(f"{what}, head size {head_size}", measure)
        if longer := sizes["causal_lengths"]:
            measure = partial(speeds, lengths=longer, head_sizes=sizes["head_sizes"][:1], dtypes=[dtype], masks=(True,))
            yield Step(f"{what} on longer sequences", measure)
        if limitable:
            every = partial(speeds, lengths=sizes["lengths"], head_sizes=sizes["head_sizes"], dtypes=[dtype])
            name = f"attention's speed by AVX2 in {name_of(dtype)}"
            yield Step(name, partial(avx2.limited, every, "attention"))
            if dtype is torch.bfloat16:
                yield Step(f"{name}, oneDNN limited too", partial(avx2.limited, every, "attention", onednn_too=True))


def _linear_speeds(run: Run) -> Iterator[Step]:
    if run.configuration.get("linear") is None:
        return
    speeds = partial(measure.linears, **run.configuration["linear"], seconds=run.configuration["seconds"])
    yield Step("linear layers in 16 bits", speeds)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        limited = partial(avx2.limited, speeds, "linear layers", onednn_too=True)
        yield Step("linear layers in 16 bits by AVX2, oneDNN limited too", limited)


def _beyond_cache(run: Run) -> Iterator[Step]:
    configuration = run.configuration
    for dtype in _dtypes(configuration["dtypes"]) if run.device == "cpu" else ():
        beyond = partial(
            beyond_cache.speeds, configuration["beyond_cache_bytes"], [dtype], columns=configuration["columns"],
            seconds=10 * configuration["seconds"],
        )  # fmt: skip
        yield Step(f"bias_gelu beyond the last-level cache in {name_of(dtype)}", beyond)


def _operator_speeds(run: Run) -> Iterator[Step]:
    device, configuration = run.device, run.configuration
    seconds, columns, dtypes = configuration["seconds"], configuration["columns"], _dtypes(configuration["dtypes"])
    over_sizes = partial(
        speed.operators, device, counts=configuration["counts"], columns=columns, seconds=seconds,
        compiled=configuration["builds"] and device == "cuda",
    )  # fmt: skip
    for op in sorted(benchmark_cases(), key=lambda op: not op.startswith("bias_gelu")):  # the headline is of it
        for dtype in dtypes:
            yield Step(f"{op} over sizes in {name_of(dtype)}", partial(over_sizes, ops=[op], dtypes=[dtype]))


def _loss_and_training(run: Run) -> Iterator[Step]:
    configuration = run.configuration
    if (preset := configuration["preset"]) is not None:
        steps = partial(
            training.training_steps, run.device, preset,
            batch_size=configuration["batch_size"], seconds=5 * configuration["seconds"],
        )  # fmt: skip
        yield Step("the operators in a training step", steps)
    for dtype in _dtypes(configuration["dtypes"]):
        losses = partial(
            loss.losses, run.device, dtypes=[dtype], compiled=configuration["builds"] and run.device == "cuda",
            seconds=configuration["seconds"], **configuration["loss"],
        )  # fmt: skip
        yield Step(f"the loss of a language model in {name_of(dtype)}", losses)
    if sizes := configuration.get("large_loss"):  # today's vocabularies, in the dtype that they are trained in
        large = partial(
            loss.losses, run.device, dtypes=[torch.bfloat16], compiled=configuration["builds"],
            seconds=configuration["seconds"], record="large_loss", **sizes,
        )  # fmt: skip
        yield Step("the loss of a large vocabulary", large)
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    parts = partial(
        loss.parts, run.device, dtype=dtype, compiled=configuration["builds"] and run.device == "cuda",
        seconds=configuration["seconds"], **(configuration.get("large_loss") or configuration["loss"]),
    )  # fmt: skip
    yield Step("label smoothing and other parts of the loss", parts)


def _correctness(run: Run) -> Iterator[Step]:
    count = run.configuration["correctness_count"]
    yield Step("correctness", partial(measure.correctness, run.device, count, DTYPES))
    rows = max(count // 1024, 1)
    yield Step("accuracy", partial(measure.accuracy, run.device, DTYPES, rows=rows, columns=1024))


def _calls(run: Run) -> Iterator[Step]:
    counts, seconds = run.configuration["call_counts"], run.configuration["seconds"]
    yield Step("what each wrapper can do", partial(measure.capabilities, run.device))
    yield Step("what a call costs", partial(measure.call_times, run.device, counts, seconds=12 * seconds))
    yield Step("calls on one element", partial(measure.one_element, run.device, seconds=seconds))


def _details_of_operators(run: Run) -> Iterator[Step]:
    device, configuration = run.device, run.configuration
    seconds, large, columns = configuration["seconds"], configuration["large_count"], configuration["columns"]
    layouts = partial(measure.layouts, device, int(large**0.5), torch.float32, seconds=seconds)
    yield Step("operands with an awkward layout", layouts)
    yield Step("launches and bytes", partial(speed.fusions, device, large, torch.float32, columns=columns))
    images, pixels = 64 if device == "cuda" else 2, 56 if configuration["builds"] else 14
    convolutions = partial(measure.convolutions, device, batch=images, side=pixels, seconds=seconds)
    yield Step("the fused convolution", convolutions)
    for dtype in _dtypes(configuration["dtypes"]) if device == "cuda" else ():
        name = name_of(dtype)
        peak = partial(speed.peak_memory, device, large, dtype, columns=columns)
        yield Step(f"bias_gelu's peak memory in {name}", peak)
        sampled = {"columns": columns, "seconds": seconds}
        yield Step(
            f"bias_gelu's access to memory in {name}", partial(speed.accesses, device, large, [dtype], **sampled)
        )
        yield Step(
            f"the plans of bias_gelu's backward in {name}", partial(speed.plans, device, large, [dtype], **sampled)
        )


def _details_of_attention(run: Run) -> Iterator[Step]:
    device, sizes = run.device, run.configuration["attention"]
    width, head_sizes, dtypes = sizes["width"], sizes["head_sizes"], _dtypes(run.configuration["dtypes"])
    for head_size in head_sizes if sizes["feature_length"] else ():
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        yield Step(
            f"attention's window, packed sequences and a bias, head size {head_size}",
            partial(
                attention.features, device, sizes["feature_length"], head_size, dtype,
                width=width, seconds=sizes["seconds"],
            ),
        )  # fmt: skip
    for dtype in dtypes:
        kernels = partial(
            attention.kernels, device, sizes["kernel_length"], head_sizes, [dtype],
            width=width, seconds=sizes["seconds"],
        )  # fmt: skip
        yield Step(f"attention's kernels in {name_of(dtype)}", kernels)
    if device == "cuda":
        for dtype, length, form in itertools.product(dtypes, sizes["memory_lengths"], attention.MEMORY_FORMS):
            peak = partial(attention.memory, device, length, dtype, form, head_size=head_sizes[-1], width=width)
            name = f"attention's peak memory ({form}, {name_of(dtype)}, {length} tokens)"
            scores = attention.score_bytes(length, head_size=head_sizes[-1], width=width)
            yield Step(name, peak, memory=scores if form == attention.MATH else 0)
    else:
        for form, length in itertools.product(resident_memory.FORMS, sizes["memory_lengths"]):
            peak = partial(resident_memory.peak, form, length, head_size=head_sizes[-1], width=2 * width)
            yield Step(f"attention's peak memory ({form}, {length} tokens)", peak)
    for dtype in _dtypes(sizes["accuracy_dtypes"]):
        errors = partial(attention.accuracy, device, sizes["accuracy_lengths"], [dtype], head_size=head_sizes[0])
        yield Step(f"attention's errors in {name_of(dtype)}", errors)
