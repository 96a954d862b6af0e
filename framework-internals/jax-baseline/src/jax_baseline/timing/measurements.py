"""Half of the main job: parity, planted mistakes, throughput, meshes, and training to the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from benchkit import Quantity
from benchkit.device import Device
from benchkit.results import Json
from benchkit.run import Run
from jax_baseline.timing.engines import EngineSpec, bench_config, named_engines
from torch_baseline.config import GPTConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.parity.planted_mistakes import Verdict


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return what this half does on a device."""
    bench: dict[str, Json]
    if device == "cuda":
        size = {"steps": 10 if quick else 30, "batch_size": 16}
        dtypes = dict.fromkeys(("float64", "float32", "bfloat16"), size)
        names = ["torch-compile", "cudnn", "torch-eager", "torch-compile-bf16-residual"]
        if not quick:
            names += ["cudnn-no-triton-gemm", "cudnn-bf16-residual", "cudnn-4-steps", "cudnn-scan", "jit-donated"]
        bench = {"preset": "gpt2-124m", "batch_size": 32, "dtype": "bfloat16", "rounds": 5 if quick else 8, "steps": 8}
        # At this batch an engine holds 20 to 60 GB, and more while its compiler tries kernels.
        bench["together"] = 2
    else:
        dtypes = {"float32": {"steps": 4, "batch_size": 2}}
        names = ["torch-eager", "jit-donated"]
        if not quick:
            # On a CPU a step in float64 or bfloat16 costs several in float32, and there are five sides to each.
            small: dict[str, Json] = {"steps": 10, "batch_size": 4}
            dtypes = {"float64": small, "float32": {"steps": 16, "batch_size": 4}, "bfloat16": small}
            names = ["torch-eager", "jit", "jit-donated", "torch-compile", "jit-scan"]
        bench = {"preset": "tiny", "batch_size": 2, "dtype": "float32", "rounds": 6, "steps": 4}
        bench["together"] = None
    engines = {name: asdict(spec) for name, spec in named_engines(names).items()}
    # Compiling takes most of a quick run, and longer for every block.
    layers = 1 if quick and device == "cpu" else None
    learned = {"preset": "tiny", "steps": 200 if quick else 1000, "seeds": [0, 1, 2]} if device == "cuda" else None
    return {
        "parity": {"preset": "tiny", "layers": layers, "seed": 0, "lr": 1e-3, "controls": 3, "dtypes": dtypes},
        "mutations": {
            "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "tie_embeddings": False},
            "training": {"steps": 5, "batch_size": 8, "warmup": 2, "lr": 1e-3, "min_lr": 1e-4, "clip": 0.5},
            # The later ones leave the gradient as it is, and so need no compilation of their own.
            # On a GPU's machine they are the same, on its CPU.
            "last": 6 if quick else 26 if device == "cuda" else None,
        },
        "bench": {**bench, "layers": layers, "engines": engines, "reference": names[0]},
        "meshes": {
            "model": {"n_layer": 2, "n_embd": 64, "block_size": 32},
            "training": {"steps": 8, "batch_size": 8, "warmup": 2, "lr": 1e-3, "min_lr": 1e-4},
            "shapes": [[2, 2]] if quick or device == "cuda" else [[4, 1], [1, 4], [2, 2]],
        },
        "convergence": learned,
    }


def sections(run: Run) -> list[tuple[str, Callable[[Run], None]]]:
    """What this half measures, part by part: the name under which a report would miss it, and the work.

    What needs the CPU alone begins at once on a GPU's machine, beside parity. On a CPU, where parity takes every core,
    the meshes begin with the mistakes, which keep one core busy. All is over before anything is timed.
    """
    mistakes: Callable[[], list[Verdict]] = partial(_try_mutations, run.configuration)
    meshes = _once(partial(_try_meshes, run.configuration))
    if run.device == "cuda":
        mistakes = _once(mistakes)().result
        meshes()
    return [
        *(
            (f"Parity in {dtype}", partial(_collect_parity, dtype=dtype))
            for dtype in run.configuration["parity"]["dtypes"]
        ),
        ("Planted mistakes", partial(_collect_mutations, result=mistakes, beside=meshes)),
        ("Meshes of devices", partial(_collect_meshes, begin=meshes)),
        ("Tokens per second", _collect_bench),
        ("Training to the end in both frameworks", _collect_convergence),
    ]


def _once(work: Callable[[], Any]) -> Callable[[], Future[Any]]:
    """A function whose first call begins the work, in a thread of its own; it returns what will hold the result."""

    @cache
    def begin() -> Future[Any]:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(work)
        pool.shutdown(wait=False)
        return future

    return begin


def _collect_parity(run: Run, dtype: Precision) -> None:
    # Here and below: imported when measuring, so that rendering a report loads neither framework.
    from jax_baseline.parity import adapters as sides
    from jax_baseline.parity import comparison as parity

    asked = run.configuration["parity"]
    size = asked["dtypes"][dtype]
    with run.working(f"parity in {dtype}"):
        setup = sides.Setup.preset(
            asked["preset"],
            seed=asked["seed"],
            dtype=dtype,
            device=run.device,
            lr=asked["lr"],
            controls=asked["controls"],
            **size,
        )
        found = sides.run(replace(setup, model=_with_layers(setup.model, asked["layers"])))
    divergence = found.divergence()
    run.record(
        "parity",
        {"dtype": dtype, **size},
        {
            f"{quantity}, {of}": Quantity(value, unit)
            for quantity in parity.QUANTITIES
            for of, value, unit in (
                ("jax", found.largest(quantity), "nats" if quantity == "loss" else ""),
                ("control", found.control_largest(quantity), "nats" if quantity == "loss" else ""),
                ("ratio", found.worst_ratio(quantity), ""),
            )
        }
        | {"times control": Quantity(parity.TIMES_CONTROL[dtype], "")},
        {
            "torch": list(found.reference),
            "jax": list(found.candidate),
            "controls": [list(losses) for losses in found.controls],
            "bounds": found.bounds("loss"),
            "divergence": None if divergence is None else str(divergence),
        },
    )


def _try_mutations(configuration: Mapping[str, Any]) -> list[Verdict]:
    from jax_baseline.parity import adapters as sides
    from jax_baseline.parity import planted_mistakes as mutations

    sides.share_the_gpu()  # looking for the CPU, JAX makes ready every device
    asked = configuration["mutations"]
    setup = sides.Setup(GPTConfig(**asked["model"]), TrainConfig(**asked["training"], dtype="float32"))
    return mutations.trial(setup, mutations.MUTATIONS[-asked["last"] :] if asked["last"] else None)


def _collect_mutations(run: Run, result: Callable[[], list[Verdict]], beside: Callable[[], Future[Any]]) -> None:
    from jax_baseline.parity.planted_mistakes import MUTATIONS

    with run.working("planted mistakes"):
        beside()
        verdicts = result()
    for verdict in verdicts:
        run.record(
            "mutation",
            {"mistake": verdict.name},
            {"times": Quantity(verdict.times, "")},
            {"step": verdict.step, "where": verdict.where},
        )
    if last := run.configuration["mutations"]["last"]:
        run.absent(
            f"The first {len(MUTATIONS) - last} of the {len(MUTATIONS)} planted mistakes",
            "each changes the gradient and would be compiled for itself; the report of a full run on a CPU has them",
        )


def _try_meshes(configuration: Mapping[str, Any]) -> tuple[list[tuple[int, int, Any]], list[list[float]]]:
    """What came of one device and of each mesh, and the losses on one device of the rows in another order."""
    from benchkit.processes import RemoteObject
    from jax_baseline.timing.mesh_trial import MeshTrial

    asked = configuration["meshes"]
    devices = max(data * fsdp for data, fsdp in asked["shapes"])
    # Always on the CPU: it can pretend to be any number of devices, a GPU cannot. Losses and collectives are asked for,
    # not speed, so that LLVM need not optimise.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    arguments = {"model": asked["model"], "training": asked["training"]}
    rows = asked["training"]["batch_size"]
    with RemoteObject(MeshTrial, arguments, environment=environment) as worker:
        order = [(row * 3) % rows for row in range(rows)]
        alone = worker.call("run", data=1, fsdp=1)
        controls = [worker.call("run", data=1, fsdp=1, rows=order)["losses"]]
        spread = [(data, fsdp, worker.call("run", data=data, fsdp=fsdp)) for data, fsdp in asked["shapes"]]
    return [(1, 1, alone), *spread], controls


def _collect_meshes(
    run: Run, begin: Callable[[], Future[tuple[list[tuple[int, int, Any]], list[list[float]]]]]
) -> None:
    with run.working("meshes"):
        trials, controls = begin().result()
    alone = trials[0][2]
    for data, fsdp, found in trials:
        run.record(
            "mesh",
            {"data": data, "fsdp": fsdp},
            {"state": Quantity(found["state_bytes"], "B"), "difference": Quantity(_apart(found, alone), "nats")},
            {"collectives": found["collectives"], "losses": found["losses"], "controls": controls},
        )


def _apart(found: Mapping[str, Any], alone: Mapping[str, Any]) -> float:
    return max(abs(one - other) for one, other in zip(found["losses"], alone["losses"], strict=True))


def _collect_convergence(run: Run) -> None:
    from jax_baseline.parity import convergence

    asked = run.configuration["convergence"]
    if asked is None:
        run.absent(
            "Training to the end in both frameworks",
            "it takes half an hour on two cores: `jax-baseline converge --steps 1000`",
        )
        return
    with run.working("training to the end"):
        found = convergence.run(
            GPTConfig.preset(asked["preset"]),
            replace(TrainConfig.preset(asked["preset"]), steps=asked["steps"]),
            seeds=asked["seeds"],
            device=run.device,
        )
    for seed, theirs, ours in zip(found.seeds, found.torch, found.jax, strict=True):
        run.record("converged", {"seed": seed}, {"torch": Quantity(theirs, "bits"), "jax": Quantity(ours, "bits")})
    run.record(
        "convergence",
        values={
            "difference": Quantity(found.difference, "bits"),
            "seed noise": Quantity(found.seed_noise, "bits"),
            "unigram": Quantity(found.unigram_bits, "bits"),
        },
        data={"alike": found.alike},
    )


def _collect_bench(run: Run) -> None:
    from jax_baseline.timing.bench import measure_engines, mfu_per_token
    from torch_baseline.model import flops_per_token

    asked = run.configuration["bench"]
    model, training = bench_config(
        asked["preset"], batch_size=asked["batch_size"], dtype=asked["dtype"], layers=asked["layers"]
    )
    engines = {name: EngineSpec(**spec) for name, spec in asked["engines"].items()}
    with run.working("tokens per second"):
        found = measure_engines(
            engines,
            model,
            training,
            device=run.device,
            rounds=asked["rounds"],
            steps=asked["steps"],
            together=asked["together"],
        )
    tokens = training.batch_size * model.block_size
    for name, engine in found.items():
        if isinstance(engine, str):
            run.absent(f"The engine `{name}`", f"it failed: {engine.rstrip('.')}")
            continue
        devices = engines[name].devices
        mfu = mfu_per_token(model, training, run.device, devices)
        values = engine.figures(tokens * devices, asked["steps"], mfu)
        run.record("engine", {"engine": name, **asked["engines"][name]}, values)
        for what, why in engine.missing.items():
            run.absent(f"The {what} of `{name}`", f"asking for it failed: {why.rstrip('.:')}")
    run.record(
        "model", values={"FLOPs": Quantity(flops_per_token(model) * tokens, "FLOP")}, data=_plain(model, training)
    )
    if run.device == "cpu":
        run.absent("Model FLOPs utilisation", "no datasheet peak is kept for CPUs")
        run.absent("cuDNN's attention", "it needs a CUDA GPU")


def _with_layers(model: GPTConfig, layers: int | None) -> GPTConfig:
    return model if layers is None else replace(model, n_layer=layers)


def _plain(model: GPTConfig, training: TrainConfig) -> dict[str, Any]:
    return {"model": asdict(model), "training": training.as_plain()}
