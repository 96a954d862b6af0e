"""The step on several GPUs (``scripts/end_to_end.py --sweep``): how fast, how well it scales, the same losses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from pathlib import Path

from benchkit import Quantity, Record, Results, numbers
from benchkit.device import Device
from benchkit.environment import capture, commit_label
from benchkit.errors import why_missing
from benchkit.processes import RemoteObject, budget
from benchkit.report import (
    Axis,
    Cell,
    Chart,
    Column,
    Limit,
    Panel,
    Point,
    Reached,
    Section,
    Share,
    Table,
    Target,
    Targets,
    series_by,
)
from benchkit.results import Json, Label
from benchkit.run import Run, Step
from engines.fit import fitted
from engines.kernel_times import GpuTime
from engines.measure import MeasuredEngine, ask_engines, measure_engines
from engines.spec import bench_config
from jax_baseline.timing.jax_engine import make_engine
from torch_baseline.config import GPTConfig
from whole_step.dissection import make_dissected_engine
from whole_step.variants import on_several

# Two blocks as wide as those of a model with seven billion parameters.
WIDE = GPTConfig(vocab_size=50_304, n_layer=2, n_head=32, n_embd=4096, block_size=2048)

_PLAIN, _OWN = "compiled", "own"
_TARGETS = (_PLAIN, _OWN)
_SHARDED = ", sharded"
_COUNTS = (1, 2, 4, 8)
_TORCH_SECONDS, _JAX_SECONDS = 30.0, 60.0  # to start processes and to compile; with a budget, less is not begun
_SEEDS = (1, 2, 3)

_OVER_PLAIN = Target("this repository's kernels over torch.compile + DDP, at every number of GPUs", 1.05, kind="times")
_EFFICIENCY = {count: Target(f"efficiency on {count} GPUs", least, digits=1) for count, least in ((2, 0.95), (8, 0.92))}


def configure(device: Device) -> Mapping[str, Json]:
    """Sizes for several devices, as plain JSON: the batch is that of each, the losses' that of all together."""
    if device == "cpu":
        models = {"`tiny`, 4 × 128 tokens": (GPTConfig.preset("tiny"), 4)}
    else:
        models = {
            "`gpt2-124m`, 32 × 1024 tokens": (GPTConfig.preset("gpt2-124m"), 32),
            "2 blocks, 4096 wide, 4 × 2048 tokens": (WIDE, 4),
        }
    sizes = {name: {"model": asdict(model), "batch_size": batch} for name, (model, batch) in models.items()}
    # A sample begins with idle GPUs and hosts that start one after another, which a training does once.
    return {
        "sizes": sizes,
        "rounds": 5,
        "steps": 8,
        "losses": {"size": next(iter(sizes)), "batch_size": 32, "steps": 50},
    }


def fit(asked: Mapping[str, Json], device: Device, available: int) -> dict[str, Json]:
    """Return the sizes of the whole step's configuration, so small that two variants fit at once on each device."""
    engines = {name: spec for name, (_, spec) in on_several(device, 1).items()}
    fitting: dict[str, Json] = {}
    for name, size in asked["gpus"]["sizes"].items():
        _, training = bench_config(asked["preset"], batch_size=size["batch_size"], dtype=asked["dtype"])
        wanted = GPTConfig(**size["model"])
        model, chosen = fitted(engines, wanted, training, device=device, available=available)
        if (model, chosen) != (wanted, training):
            name += f", made {chosen.batch_size} × {model.block_size} (blocks: {model.n_layer}) to fit"
        fitting[name] = {"model": asdict(model), "batch_size": chosen.batch_size}
    first = next(iter(fitting))
    batch = max(min(asked["gpus"]["losses"]["batch_size"], fitting[first]["batch_size"]), _COUNTS[-1])
    return {
        **asked["gpus"],
        "sizes": fitting,
        "losses": {**asked["gpus"]["losses"], "size": first, "batch_size": batch},
    }


def sweep(run: Run) -> None:
    """Measure each size on each number of GPUs that the results do not have yet; nothing where there is one GPU.

    Records: ``gpus``, ``loss on gpus``.
    """
    asked, there = run.configuration.get("gpus"), present(run.device)
    if not asked or there < 2:
        return
    counts = [count for count in _COUNTS if count <= there]
    order = (1, *counts[:0:-1])  # what the others are compared with, then the most
    steps = [_step(run, name, count, _TARGETS) for name in asked["sizes"] for count in order]
    steps += [
        Step(f"losses, GPUs: {count}", partial(measure_losses, run, count, counts[-1]), _TORCH_SECONDS)
        for count in counts[::-1]
    ]
    steps += [_step(run, name, count) for count in order for name in asked["sizes"]]
    for step in steps:
        if budget.left() > step.needs:
            run.steps([step])  # each by itself, since one may take all the time that is left


def _step(run: Run, size: str, count: int, variants: Collection[str] = ()) -> Step:
    """The step that measures some variants, or all, which have no record yet."""
    seconds = _TORCH_SECONDS if variants else _JAX_SECONDS
    return Step(f"{size}, GPUs: {count}", partial(measure, run, size, count, variants), seconds)


def present(device: Device) -> int:
    """Return how many devices there are to spread a step over; a CPU is one."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 1


def measure(run: Run, size: str, count: int, variants: Collection[str] = ()) -> None:
    """Time these variants, or all, that have no record yet; one that fails has its reason in its record."""
    asked = run.configuration["gpus"]
    dtype, preset = run.configuration["dtype"], run.configuration["preset"]
    _, training = bench_config(preset, batch_size=asked["sizes"][size]["batch_size"], dtype=dtype)
    model = GPTConfig(**asked["sizes"][size]["model"])
    chosen = on_several(run.device, count)
    known = {record.labels["variant"] for record in run.recorder.results.select("gpus", size=size, gpus=count)}
    if not (missing := (chosen.keys() & set(variants or chosen)) - known):
        return
    times: dict[str, GpuTime | None] = {}

    def inspect(name: str, worker: RemoteObject) -> None:
        if chosen[name][1].framework == "torch":
            times[name] = worker.call("gpu_time", steps=asked["steps"])

    measured = measure_engines(
        {name: spec for name, (_, spec) in chosen.items() if name == _PLAIN or name in missing}, model, training,
        device=run.device, rounds=asked["rounds"], steps=asked["steps"], empty_caches=False, at_once=True,
        factory=make_engine, inspect=inspect,
    )  # fmt: skip
    tokens = training.batch_size * model.block_size * count
    source = capture(run.device, root=Path(__file__).parent).source
    for name, engine in measured.items():
        if name not in missing or (isinstance(engine, str) and budget.left() <= 0):  # the next call measures it
            continue
        labels: dict[str, Label] = {"size": size, "gpus": count, "variant": name}
        if isinstance(engine, str):
            run.record("gpus", labels, data={**source, "failed": engine.rstrip(".")})
            continue
        values = _values(engine, tokens, asked["steps"])
        if (time := times.get(name)) is not None:
            values |= {part: Quantity(seconds, "s") for part, seconds in time._asdict().items()}
        run.record("gpus", labels, values, source)


def _values(engine: MeasuredEngine, tokens: int, steps: int) -> dict[str, Quantity]:
    figures = engine.figures(tokens, steps, None)
    optional = {"speedup": figures.speedup, "peak memory": figures.peak_memory}
    return {
        "rate": figures.rate,
        "step": figures.step,
        "loss": figures.loss,
        **{name: value for name, value in optional.items() if value is not None},
    }


def measure_losses(run: Run, count: int, of_seeds: int) -> None:
    """Train with the same global batch on so many devices, and record the loss after some steps.

    On ``of_seeds`` devices plain PyTorch also begins from other weights, which says how far equally good runs differ.
    """
    asked = run.configuration["gpus"]
    about = asked["losses"]
    if run.recorder.results.select("loss on gpus", gpus=count):
        return
    dtype, preset = run.configuration["dtype"], run.configuration["preset"]
    _, training = bench_config(preset, batch_size=about["batch_size"] // count, dtype=dtype)
    chosen = on_several(run.device, count)

    turn = threading.Lock()  # one trains while others compile: those that share GPUs wait long for each other's ranks

    def losses(name: str, worker: RemoteObject) -> dict[int | str, float]:
        worker.call("prepare")
        with turn:
            own: dict[int | str, float] = {
                "": worker.call("loss_after", total=about["steps"], steps=about["steps"] - 1)
            }
            if name != _PLAIN or count != of_seeds:
                return own
            others = worker.call("losses_from", seeds=_SEEDS, steps=about["steps"])
            return {**own, **dict(zip(_SEEDS, others, strict=True))}

    source = capture(run.device, root=Path(__file__).parent).source
    found = ask_engines(
        {name: spec for name, (_, spec) in chosen.items() if spec.framework == "torch"},
        GPTConfig(**asked["sizes"][about["size"]]["model"]), training, losses,
        device=run.device, factory=make_dissected_engine,
    )  # fmt: skip
    for name, answer in found.items():
        if isinstance(answer, Exception):
            run.absent(f"The losses of {chosen[name][0]} (GPUs: {count})", why_missing(answer))
            continue
        for seed, loss in answer.items():
            labels: dict[str, Label] = {"gpus": count, "variant": name, "seed": seed}
            run.record("loss on gpus", labels, {"loss": Quantity(loss, "nats")}, source)


def on_several_gpus(results: Results) -> Section:
    """Speed, efficiency, time without computing and memory by number of GPUs, the losses, and the targets."""
    records = sorted(results.select("gpus"), key=_order(results))
    timed = [record for record in records if "rate" in record.values]
    sizes = dict.fromkeys(str(record.labels["size"]) for record in timed)
    sources = dict.fromkeys(
        f"on {record.data['date'][:10]} at {commit_label(record.data['commit'], record.data['dirty'])}"
        for record in records
    )
    own = {_kind(record) for record in timed if str(record.labels["variant"]).startswith(_OWN)}
    return Section(
        "On several GPUs",
        [
            Targets(_reached(results, timed)),
            Table(
                records,
                [
                    Column("step", "size"),
                    Column("GPUs", "gpus"),
                    Column("variant", _title, left=True),
                    Column("tokens/s", lambda record: _rate(record) or f"failed: {record.data['failed']}"),
                    Column("against torch.compile", _over_plain, optional=True),
                    Column("efficiency", lambda record: _efficiency(results, record), optional=True),
                    Column("communication alone", _share_of_step("communicating"), optional=True),
                    Column("GPU idle", _share_of_step("idle"), optional=True),
                    Column("peak memory of a GPU", "peak memory", optional=True),
                ],
            ),
            _losses(results),
            Chart(
                "gpus",
                "lines",
                [
                    Panel(
                        series_by(
                            [r for r in timed if r.labels["size"] == size and _alone(results, r) is not None],
                            _kind,
                            lambda r: Point(float(r.labels["gpus"]), _share(results, r)),
                            own=own,
                        ),
                        title=size.replace("`", ""),
                        limits=[Limit(1.0, "as fast as one, times their number")],
                    )
                    for size in sizes
                ],
                Axis("% efficiency, higher is better", scale=100),
                caption="Tokens per second over those of one GPU times the number of GPUs, by how the step is spread.",
                alt="Lines: efficiency over the number of GPUs, by how the step is spread",
                places=Axis("GPUs", log=2, ticks=[c for c in _COUNTS if any(r.labels["gpus"] == c for r in timed)]),
            ),
            f"Measured by `scripts/end_to_end.py --sweep` ({', '.join(sources)}) where there is more than one GPU: the "
            "batch of the table is that of each GPU. The variants on the same GPUs run in the same rounds, in random "
            "order, and their ratios are paired; efficiency compares medians of different rounds. torch runs under "
            "torchrun; large models and those of FSDP2 are compiled block by block, so that they exchange gradients "
            "during the backward pass; FSDP2 gathers small blocks together. The lowerings are those that rank 0 knows. "
            "*Communication alone* is the share of a step in which only kernels of NCCL run, waiting for other GPUs "
            "included (torch's profiler, mean of the GPUs).",
        ],
    )


def _order(results: Results) -> Callable[[Record], tuple[int, int, int]]:
    sizes = list(dict.fromkeys(record.labels["size"] for record in results.select("gpus")))
    names = list(on_several("cpu", 2))

    def order(record: Record) -> tuple[int, int, int]:
        return (
            sizes.index(record.labels["size"]),
            int(record.labels["gpus"]),
            names.index(str(record.labels["variant"])),
        )

    return order


def _title(record: Record) -> str:
    return on_several("cpu", int(record.labels["gpus"]))[str(record.labels["variant"])][0]


def _kind(record: Record) -> str:
    """The title of a variant on more than one GPU, also for that on one that it is compared with."""
    return on_several("cpu", 2)[str(record.labels["variant"])][0]


def _rate(record: Record) -> str:
    return numbers.quantity(record["rate"]).replace(" tokens/s", "") if "rate" in record.values else ""


def _over_plain(record: Record) -> Cell:
    return "1" if record.labels["variant"] == _PLAIN else record.values.get("speedup")


def _share_of_step(what: str) -> Callable[[Record], Share | None]:
    def share(record: Record) -> Share | None:
        if what not in record.values:
            return None
        return Share(record[what].value / sum(record[part].value for part in ("computing", "communicating", "idle")))

    return share


def _alone(results: Results, record: Record) -> Record | None:
    """The record of the same kernels on one GPU."""
    variant = str(record.labels["variant"]).removesuffix(_SHARDED)
    alone = results.select("gpus", size=record.labels["size"], gpus=1, variant=variant)
    return alone[0] if alone and "rate" in alone[0].values else None


def _share(results: Results, record: Record) -> float:
    alone = _alone(results, record)
    assert alone is not None
    return record["rate"].value / alone["rate"].value / int(record.labels["gpus"])


def _efficiency(results: Results, record: Record) -> Cell:
    if record.labels["gpus"] == 1 or "rate" not in record.values or _alone(results, record) is None:
        return None
    return Share(_share(results, record))


def _reached(results: Results, timed: list[Record]) -> list[Reached]:
    own = [record for record in timed if record.labels["variant"] == _OWN]
    ratios = [(record["speedup"].value, record) for record in own if "speedup" in record.values]
    shares = [(_share(results, record), record) for record in own if _alone(results, record) is not None]
    values = {_OVER_PLAIN: ratios}
    values |= {target: [pair for pair in shares if pair[1].labels["gpus"] == n] for n, target in _EFFICIENCY.items()}
    worst = {target: min(pairs, key=itemgetter(0)) for target, pairs in values.items() if pairs}
    return [
        Reached(target, value, f"{record.labels['size']}, GPUs: {record.labels['gpus']}", _why(record))
        for target, (value, record) in worst.items()
    ]


def _why(record: Record) -> str:
    communicating, idle = (_share_of_step(part)(record) for part in ("communicating", "idle"))
    if communicating is None or idle is None:
        return ""
    return (
        f"communication alone takes {numbers.percent(communicating.fraction)} of the step, and the GPU is idle for "
        f"{numbers.percent(idle.fraction)}."
    )


def _losses(results: Results) -> str:
    """How far the losses of different numbers of GPUs lie apart, beside those of different seeds."""
    records = results.select("loss on gpus")
    equal = [record["loss"].value for record in records if record.labels["seed"] == ""]
    seeded = max((int(record.labels["gpus"]) for record in records if record.labels["seed"] != ""), default=0)
    seeds = [r["loss"].value for r in records if r.labels["gpus"] == seeded and r.labels["variant"] == _PLAIN]
    counts = sorted({int(record.labels["gpus"]) for record in records})
    if len(counts) < 2 or len(seeds) < 2:
        return ""
    about = results.configuration["gpus"]["losses"]
    apart, of_seeds = max(equal) - min(equal), max(seeds) - min(seeds)
    verdict = "within" if apart <= of_seeds else "**not** within"
    *first, last = map(str, counts)
    return (
        f"With the same {about['batch_size']} sequences a step on {', '.join(first)} and {last} GPUs, the losses of "
        f"torch's variants after {about['steps']} steps lie within {numbers.error_size(apart)} nats of one another: "
        f"{verdict} the spread of {len(seeds)} seeds of the initial weights on {seeded}, "
        f"{numbers.error_size(of_seeds)} nats."
    )
