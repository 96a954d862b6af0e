"""Measures every variant of the step in one run, then profiles each; the sweep measures some at other sizes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchkit import Quantity, UserError
from benchkit.device import Device
from benchkit.environment import capture
from benchkit.processes import ChildFailure, RemoteObject
from benchkit.results import Json
from benchkit.run import Lens, Run
from benchkit.timing.limits import memory_limits, product_limits
from engines.measure import EngineFigures, MeasuredEngine, measure_engines, mfu_per_token, steps_taken
from engines.spec import EngineSpec, bench_config
from torch_baseline.config import GPTConfig, TrainConfig
from whole_step import nanogpt
from whole_step.dissection import make_dissected_engine
from whole_step.report import GRAPH_PEER, NANOGPT, PEER, REPORT
from whole_step.variants import variants

NAME = "end-to-end"

_QUICKLY = ("eager", "compiled", "operators compiled", "jax")

# Initial weights of further runs of torch.compile, whose losses say how far two equally good runs lie apart.
_SEEDS = (1, 2, 3)

# Further sizes at which the first variant is compared with the others: model, batch, rounds, steps a sample, variants.
_WIDE = GPTConfig(n_layer=4, n_head=8, n_embd=512, block_size=256)
_GPT2 = "`gpt2-124m`, 32 × 1024 tokens"
_LLAMA = GPTConfig(vocab_size=50_304, n_layer=2, n_head=32, n_embd=4096, block_size=2048)
_SIZES: Mapping[Device, Mapping[str, tuple[GPTConfig, int, int, int, tuple[str, ...]]]] = {
    "cpu": {"4 blocks, 512 wide, 2 × 256 tokens": (_WIDE, 2, 6, 2, ("eager", "all", "compiled", "optimizer"))},
    "cuda": {
        _GPT2: (
            GPTConfig.preset("gpt2-124m"), 32, 8, 4, ("compiled", "optimizer", "graph", "residual"),
        ),
        "2 blocks, 4096 wide, 4 × 2048 tokens": (_LLAMA, 4, 8, 4, ("compiled", "optimizer")),
    },
}  # fmt: skip


def build_lens(root: Path) -> Lens:
    """The end-to-end report as ``benchkit.run`` and the index of reports see it.

    Args:
        root: The folder that holds ``reports/<machine>/``.
    """
    return Lens(NAME, root, configure, collect, REPORT, sweep)


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Sizes for a machine, as plain JSON."""
    size: dict[str, Any]
    if device == "cuda":
        size = {"preset": "gpt2-124m", "batch_size": 8, "dtype": "bfloat16", "rounds": 6 if quick else 10, "steps": 8}
    else:
        size = {"preset": "tiny", "batch_size": 4, "dtype": "float32", "rounds": 6 if quick else 10, "steps": 4}
    chosen = {
        name: {key: value for key, value in asdict(variant).items() if key != "spec"} | {"engine": asdict(variant.spec)}
        for name, variant in variants(device).items()
    }
    # Compile time grows with the number of blocks, and one block has every kind of kernel. These four variants use
    # every lens.
    if quick:
        chosen = {name: chosen[name] for name in _QUICKLY}
    small: dict[str, Any] = {
        "layers": 1 if quick else None, "empty_caches": not quick, "dissect": not quick, "limits": not quick
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
    return {**size, **small, "model": asdict(model), "variants": chosen, "reference": "eager", "sweep": sizes}


def collect(run: Run) -> None:
    """Time every variant against the others, then profile each.

    Records: ``variant``, ``seed``, ``dissection``, ``hop``, ``memory limit``, ``product limit``.
    """
    asked = run.configuration
    model, training = bench_config(
        asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"], layers=asked["layers"]
    )
    engines = {name: EngineSpec(**variant["engine"]) for name, variant in asked["variants"].items()}
    last: dict[str, float] = {}
    of_seeds: dict[int, float] = {}
    apart: dict[str, Mapping[str, Any]] = {}

    def inspect(name: str, worker: RemoteObject) -> None:
        last[name] = worker.call("next_loss")
        if asked["dissect"]:
            try:
                apart[name] = worker.call("dissect")
            except (ChildFailure, UserError) as error:  # the times stand without it
                run.absent(f"Where the time of {name} goes", str(error).rstrip("."))
        if name == PEER:
            before = steps_taken(asked["rounds"], asked["steps"])
            try:
                of_seeds.update(zip(_SEEDS, worker.call("losses_from", seeds=_SEEDS, steps=before), strict=True))
            except (ChildFailure, UserError) as error:
                run.absent("The spread of the losses over initial weights", str(error).rstrip("."))

    try:
        with run.working("one training step, every variant"):
            measured = measure_engines(
                engines,
                model,
                training,
                device=run.device,
                rounds=asked["rounds"],
                steps=asked["steps"],
                together=asked.get("together"),
                references=_references(engines),
                empty_caches=asked["empty_caches"],
                factory=make_dissected_engine,
                inspect=inspect,
            )
    except ChildFailure as error:  # no variant runs
        measured = dict.fromkeys(engines, str(error))
    _record_variants(run, _found(run, measured), last, model, training)
    for seed, loss in of_seeds.items():
        run.record("seed", {"seed": seed}, {"last loss": Quantity(loss, "nats")})
    if asked["dissect"]:
        _record_dissections(run, apart)
    else:
        run.absent("Where the time goes", "quick runs profile no step")
    if asked["limits"]:
        with run.working("the limits of memory and matrix products"):
            run.add_all([*memory_limits(run.device), *product_limits(run.device)])
    else:
        run.absent("The least time of a step", "quick runs measure no limits")
    if run.device == "cpu":
        run.absent("Peak memory and model FLOPs utilisation", "they are measured on a GPU")


def sweep(run: Run, seconds: float | None) -> None:
    """Time some variants at the sizes that the results do not have yet. Records: ``size``.

    Args:
        run: The run, with the sizes that earlier calls measured.
        seconds: Time for all sizes; none begins after it. None for no limit.
    """
    start, asked = time.monotonic(), run.configuration
    engines = {name: EngineSpec(**variant["engine"]) for name, variant in asked["variants"].items()}
    _, training = bench_config(asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"])
    done = {record.labels["size"] for record in run.recorder.results.select("size")}
    for name, size in asked["sweep"].items():
        if name in done or (seconds is not None and time.monotonic() - start > seconds):
            continue
        with run.working(f"the step with {name}"):
            _record_size(run, name, size, engines, training)


def _references(engines: Iterable[str]) -> list[str]:
    """The variants that run in every group, because others are compared with them."""
    return [name for name in engines if name in (PEER, GRAPH_PEER)]


def _found(run: Run, measured: Mapping[str, MeasuredEngine | str]) -> dict[str, MeasuredEngine]:
    for name, engine in measured.items():
        if isinstance(engine, str):
            run.absent(run.configuration["variants"][name]["title"], engine.rstrip("."))
    return {name: engine for name, engine in measured.items() if not isinstance(engine, str)}


def _record_variants(
    run: Run,
    measured: Mapping[str, MeasuredEngine],
    last: Mapping[str, float],
    model: GPTConfig,
    training: TrainConfig,
) -> None:
    asked = run.configuration
    tokens, mfu = training.batch_size * model.block_size, mfu_per_token(model, training, run.device, devices=1)
    for name, engine in measured.items():
        values = _values(engine.figures(tokens, asked["steps"], mfu))
        if name in last:
            values["last loss"] = Quantity(last[name], "nats")
        rivals = engine.rounds.timings.keys() - {name}
        if (over := asked["variants"][name]["over"]) in rivals:
            values["change"] = engine.rounds.speedup(name, over=over)
        for peer in (PEER, GRAPH_PEER):
            if peer in rivals and peer != over:
                values[f"over {peer}"] = engine.rounds.speedup(name, over=peer)
        run.record("variant", {"variant": name}, values)
        for what, why in engine.missing.items():
            asked_for = {"inspection": "last loss"}.get(what, what)
            run.absent(
                f"The {asked_for} of {asked['variants'][name]['title']}",
                f"asking for it failed: {why.rstrip('.:')}",
            )


def _record_size(
    run: Run, name: str, size: Mapping[str, Any], engines: Mapping[str, EngineSpec], training: TrainConfig
) -> None:
    model = GPTConfig(**size["model"])
    peers = size.get("peers", {})
    chosen = {variant: engines[variant] for variant in size["variants"] if variant in engines}
    chosen |= {peer: EngineSpec(**asked["engine"]) for peer, asked in peers.items()}
    try:
        measured = measure_engines(
            chosen, model, replace(training, batch_size=size["batch_size"]),
            device=run.device, rounds=size["rounds"], steps=size["steps"], empty_caches=False,
            together=size.get("together"), references=_references(chosen),
        )  # fmt: skip
    except (ChildFailure, UserError) as error:  # the other sizes stand without it
        run.absent(f"The step with {name}", str(error).rstrip("."))
        return
    found = {variant: engine for variant, engine in measured.items() if not isinstance(engine, str)}
    for variant, engine in measured.items():
        if isinstance(engine, str):
            title = {**run.configuration["variants"], **peers}[variant]["title"]
            run.absent(f"{title} with {name}", engine.rstrip("."))
    tokens, source = size["batch_size"] * model.block_size, capture(run.device, root=Path(__file__).parent).source
    for variant, engine in found.items():
        mfu = None if variant in peers else mfu_per_token(model, training, run.device, devices=1)
        values = _values(engine.figures(tokens, size["steps"], mfu))
        for other in ("eager", PEER, NANOGPT):
            if other in engine.rounds.timings and other != variant:
                values[f"over {other}"] = engine.rounds.speedup(variant, over=other)
        run.record("size", {"size": name, "variant": variant}, values, source)


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


def _record_dissections(run: Run, apart: Mapping[str, Mapping[str, Any]]) -> None:
    from dispatcher_trace.measure.hop_cost import hop_costs

    for kind, cost in hop_costs().items():
        run.record("hop", {"kind": kind}, {"cost": cost})
    times = ("kernel_seconds", "operator_seconds", "compiled_seconds", "profiled_seconds")
    units = {"operators": "", "kernels": "", **dict.fromkeys(times, "s")}
    for name, found in apart.items():
        values = {key: Quantity(found[key], unit) for key, unit in units.items() if key in found}
        if values:
            data = {"hops": found.get("hops", {}), "groups": found["groups"]}
            run.record("dissection", {"variant": name}, values, data)
