"""Measures every variant of the step in one run, then profiles each; the sweep measures some at other sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchkit import Comparison, Quantity, Record
from benchkit.device import Device
from benchkit.environment import capture
from benchkit.processes import RemoteObject, budget, memory
from benchkit.results import SMALLER, Json
from benchkit.run import Lens, Run, Step
from benchkit.timing.limits import memory_limits, product_limits
from engines.fit import fit_settings
from engines.measure import EngineFigures, MeasuredEngine, measure_engines, mfu_per_token
from engines.spec import EngineSpec, bench_config
from torch_baseline.config import GPTConfig
from whole_step import gpus, nanogpt
from whole_step.dissection import make_dissected_engine, steps_before_loss
from whole_step.report import GRAPH_PEER, NANOGPT, PEER, report
from whole_step.tuning import tune, tuned
from whole_step.variants import by_importance, variants

NAME = "end-to-end"

_QUICKLY = ("eager", "compiled", "optimizer", "operators compiled", "jax")

# Initial weights of further runs of torch.compile, whose losses say how far two equally good runs lie apart.
_SEEDS = (1, 2, 3)

# Further sizes at which the first variant is compared with the others: model, batch, rounds, steps a sample, variants.
_WIDE = GPTConfig(n_layer=4, n_head=8, n_embd=512, block_size=256)
_GPT2 = "`gpt2-124m`, 32 × 1024 tokens"
_SIZES: Mapping[Device, Mapping[str, tuple[GPTConfig, int, int, int, tuple[str, ...]]]] = {
    "cpu": {"4 blocks, 512 wide, 2 × 256 tokens": (_WIDE, 2, 6, 2, ("eager", "all", "compiled", "optimizer"))},
    "cuda": {
        _GPT2: (
            GPTConfig.preset("gpt2-124m"), 32, 8, 4, ("compiled", "optimizer", "graph", "residual"),
        ),
        "2 blocks, 4096 wide, 4 × 2048 tokens": (gpus.WIDE, 4, 8, 4, ("compiled", "optimizer")),
    },
}  # fmt: skip


def build_lens(root: Path) -> Lens:
    """The end-to-end report as ``benchkit.run`` and the index of reports see it."""
    return Lens(NAME, root, configure, collect, report, sweep, fit)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Sizes for a machine, as plain JSON."""
    size: dict[str, Any]
    if device == "cuda":
        size = {"preset": "gpt2-124m", "batch_size": 8, "dtype": "bfloat16", "rounds": 6 if quick else 10, "steps": 8}
    else:
        # A step takes a hundredth of a second, and other work on the machine comes and goes within seconds.
        size = {"preset": "tiny", "batch_size": 4, "dtype": "float32", "rounds": 6 if quick else 24, "steps": 4}
    chosen = {
        name: {key: value for key, value in asdict(variant).items() if key != "spec"} | {"engine": asdict(variant.spec)}
        for name, variant in variants(device).items()
    }
    # Compile time grows with the number of blocks, and one block has every kind of kernel. These variants use every
    # lens. They compile at once, with what the last quick run left in Inductor's cache.
    if quick:
        chosen = {name: _beside_one_of(_QUICKLY, chosen, name) for name in _QUICKLY}
    small: dict[str, Any] = {
        "layers": 1 if quick else None, "empty_caches": not quick, "dissect": not quick, "limits": not quick,
        "tune": not quick,
    }  # fmt: skip
    sizes = {
        name: {"model": asdict(model), "batch_size": batch, "rounds": rounds, "steps": steps, "variants": list(names)}
        for name, (model, batch, rounds, steps, names) in ({} if quick else _SIZES[device]).items()
    }
    if _GPT2 in sizes and (file := nanogpt.checkout()) is not None:
        engine = EngineSpec("torch", network="whole_step.nanogpt:network")
        sizes[_GPT2]["peers"] = {
            NANOGPT: {"title": f"nanoGPT (model.py {nanogpt.fingerprint(file)})", "engine": asdict(engine)}
        }
    model, _ = bench_config(size["preset"], batch_size=1, dtype=size["dtype"], layers=small["layers"])
    return {
        **size, **small, "model": asdict(model), "variants": chosen, "reference": "eager", "sweep": sizes,
        "gpus": {} if quick else gpus.configure(device),
    }  # fmt: skip


def _beside_one_of(names: Collection[str], variants: Mapping[str, Mapping[str, Json]], name: str) -> dict[str, Json]:
    """A variant beside the nearest that is among the names, with all that is different from it."""
    variant = dict(variants[name])
    while (over := variant["over"]) and over not in names:
        passed = variants[over]
        variant |= {"over": passed["over"], "change": f"{passed['change']}; {variant['change']}"}
    return variant


def fit(asked: Mapping[str, Json], device: Device, available: int) -> Mapping[str, Json]:
    """Make the step so small that a variant fits beside those that all are compared with."""
    variants = asked["variants"]
    engines = {name: EngineSpec(**variant["engine"]) for name, variant in variants.items()}
    changes = fit_settings(asked, engines, device=device, available=available, references=_references(variants))
    if changes:
        length, layers = changes["block_size"], changes["layers"]
        changes["model"] = {**asked["model"], "n_layer": layers, "block_size": length}
    if gpus.present(device) > 1 and asked["gpus"]:
        smaller = gpus.fit(asked, device, available)
        if smaller != asked["gpus"]:
            said = f"on several GPUs, since {memory.gib(available)} were free: {'; '.join(smaller['sizes'])}"
            changes |= {"gpus": smaller, SMALLER: [*changes.get(SMALLER, []), said]}
    return changes


def collect(run: Run) -> None:
    """Time every variant against the others, then profile each.

    Where no row says yet which lowerings are faster on this machine, that is measured first, and the variants take it.

    Records: ``tuning``, ``variant``, ``seed``, ``dissection``, ``hop``, ``memory limit``, ``product limit``.
    """
    asked = run.configuration
    _build(run)
    steps = [Step("one training step, every variant", partial(_measure_variants, run))]
    if not tuned(run.device):
        if asked["tune"]:
            steps.insert(0, Step("the choice of lowerings for this machine", partial(tune, run)))
        else:
            run.absent("The choice of lowerings for this machine", "quick runs take the formula where no row says more")
    run.steps(steps)
    if asked["dissect"]:
        run.steps([Step("the cost of a hop", _hop_costs)])
    else:
        run.absent("Where the time goes", "quick runs profile no step")
    if asked["limits"]:
        run.steps(
            [
                Step("the limit of memory", partial(memory_limits, run.device)),
                Step("the limit of matrix products", partial(product_limits, run.device)),
            ]
        )
    else:
        run.absent("The least time of a step", "quick runs measure no limits")
    if run.device == "cpu":
        run.absent("Peak memory and model FLOPs utilisation", "they are measured on a GPU")


def _build(run: Run) -> None:
    """Build the operators, which no budget counts; otherwise the first process that uses one would do it."""

    def load() -> None:
        import custom_ops
        from rmsnorm_fused.impl import native

        with budget.apart():
            custom_ops.load()
            native.load(run.device)

    run.steps([Step("the build of the operators", load)])


def _measure_variants(run: Run) -> None:
    asked = run.configuration
    if asked["tune"] and not tuned(run.device):
        run.absent("Lowerings other than formulas", "none was measured on such a machine before these steps")
    _, training = bench_config(asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"])
    model = GPTConfig(**asked["model"])
    before, last = steps_before_loss(asked["rounds"], asked["steps"]), dict[str, float]()

    def inspect(name: str, worker: RemoteObject) -> None:
        last[name] = worker.call("loss_after", total=before, steps=asked["steps"])
        if asked["dissect"]:
            run.steps([Step(f"where the time of {name} goes", partial(_dissect, name, worker))])
        if name == PEER:
            seeds = partial(_losses_of_seeds, worker, before)
            run.steps([Step("the spread of the losses over initial weights", seeds)])

    measured = measure_engines(
        {name: EngineSpec(**asked["variants"][name]["engine"]) for name in by_importance(asked["variants"])},
        model,
        training,
        device=run.device,
        rounds=asked["rounds"],
        steps=asked["steps"],
        references=_references(asked["variants"]),
        empty_caches=asked["empty_caches"],
        at_once=not asked["empty_caches"],
        factory=make_dissected_engine,
        inspect=inspect,
    )
    titles = {name: variant["title"] for name, variant in asked["variants"].items()}
    tokens, mfu = training.batch_size * model.block_size, mfu_per_token(model, training, run.device, devices=1)
    timed = _timed(run, measured, titles)
    for name in (name for name in asked["variants"] if name in timed):
        engine, over = timed[name], asked["variants"][name]["over"]
        others = {PEER: f"over {PEER}", GRAPH_PEER: f"over {GRAPH_PEER}", over: "change"}
        values = _values(engine.figures(tokens, asked["steps"], mfu)) | _ratios(engine.rounds, name, others)
        if not asked["empty_caches"]:
            del values["first step"]
        if name in last:
            values["last loss"] = Quantity(last[name], "nats")
        run.record("variant", {"variant": name}, values)
        for what, why in engine.missing.items():
            asked_for = {"inspection": "last loss"}.get(what, what)
            run.absent(f"The {asked_for} of {titles[name]}", f"asking for it failed: {why.rstrip('.:')}")


def _dissect(name: str, worker: RemoteObject) -> Iterator[Record]:
    dissection = worker.call("dissect")
    times = ("kernel_seconds", "operator_seconds", "compiled_seconds", "profiled_seconds")
    units = {"operators": "", "kernels": "", **dict.fromkeys(times, "s")}
    values = {key: Quantity(dissection[key], unit) for key, unit in units.items() if key in dissection}
    if values:
        data = {"hops": {}, **{key: dissection[key] for key in ("hops", "groups", "own") if key in dissection}}
        yield Record("dissection", {"variant": name}, values, data)


def _losses_of_seeds(worker: RemoteObject, steps: int) -> Iterator[Record]:
    for seed, loss in zip(_SEEDS, worker.call("losses_from", seeds=_SEEDS, steps=steps), strict=True):
        yield Record("seed", {"seed": seed}, {"last loss": Quantity(loss, "nats")})


def _hop_costs() -> Iterator[Record]:
    from dispatcher_trace.measure.hop_cost import hop_costs

    for kind, cost in hop_costs().items():
        yield Record("hop", {"kind": kind}, {"cost": cost})


def sweep(run: Run) -> None:
    """Measure what the results do not have yet, until the budget is spent: several GPUs, some variants at other sizes.

    Records: ``gpus``, ``loss on gpus``, ``size``.
    """
    _build(run)
    gpus.sweep(run)
    done = {record.labels["size"] for record in run.recorder.results.select("size")}
    for name, size in run.configuration["sweep"].items():
        if name not in done and budget.left() > 0:
            run.steps([Step(f"the step with {name}", partial(_measure_size, run, name, size))])


def _measure_size(run: Run, name: str, size: Mapping[str, Any]) -> None:
    asked = run.configuration
    _, training = bench_config(asked["preset"], batch_size=size["batch_size"], dtype=asked["dtype"])
    peers, model = size.get("peers", {}), GPTConfig(**size["model"])
    chosen = {name: asked["variants"][name] for name in size["variants"] if name in asked["variants"]} | peers
    measured = measure_engines(
        {variant: EngineSpec(**about["engine"]) for variant, about in chosen.items()}, model, training,
        device=run.device, rounds=size["rounds"], steps=size["steps"], empty_caches=False,
        references=_references(chosen),
    )  # fmt: skip
    timed = _timed(run, measured, {variant: f"{about['title']} with {name}" for variant, about in chosen.items()})
    source = capture(run.device, root=Path(__file__).parent).source
    others = {other: f"over {other}" for other in ("eager", PEER, NANOGPT)}
    for variant, engine in timed.items():
        mfu = None if variant in peers else mfu_per_token(model, training, run.device, devices=1)
        values = _values(engine.figures(size["batch_size"] * model.block_size, size["steps"], mfu))
        values |= _ratios(engine.rounds, variant, others)
        run.record("size", {"size": name, "variant": variant}, values, source)


def _timed(
    run: Run, measured: Mapping[str, MeasuredEngine | str], titles: Mapping[str, str]
) -> dict[str, MeasuredEngine]:
    """The variants that were measured; the others become absences with their reasons."""
    for name, engine in measured.items():
        if isinstance(engine, str):
            run.absent(titles[name], engine.rstrip("."))
    return {name: engine for name, engine in measured.items() if not isinstance(engine, str)}


def _references(names: Iterable[str]) -> list[str]:
    """The variants that run in every group, because others are compared with them."""
    return [name for name in names if name in (PEER, GRAPH_PEER)]


def _ratios(rounds: Comparison, name: str, others: Mapping[str, str]) -> dict[str, Quantity]:
    """The paired speed over each of the other variants of the same rounds, by the name that it has in a record."""
    return {
        key: rounds.speedup(name, over=other)
        for other, key in others.items()
        if other in rounds.timings and other != name
    }


def _values(figures: EngineFigures) -> dict[str, Quantity]:
    optional = {
        "speedup": figures.speedup,
        "peak memory": figures.peak_memory,
        "temporaries": figures.temporaries,
        "XLA FLOPs": figures.xla_flops,
        "MFU": figures.mfu,
    }
    return {
        "rate": figures.rate,
        "step": figures.step,
        "first step": figures.first_step,
        "loss": figures.loss,
        **{f"{stage} time": seconds for stage, seconds in figures.compile_stages.items()},
        **{name: figure for name, figure in optional.items() if figure is not None},
    }
