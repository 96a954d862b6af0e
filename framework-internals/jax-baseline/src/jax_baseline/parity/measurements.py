"""The parity part of the lens: steps against torch, planted mistakes, meshes of devices, and full training runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

from benchkit import Quantity
from benchkit.device import Device
from benchkit.processes import budget, result_of
from benchkit.results import Json
from benchkit.run import Run
from jax_baseline.gpt.devices import share_the_gpu
from jax_baseline.parity.records import Deviation, MeshRecord, MistakeRecord, ParityRecord
from torch_baseline.config import GPTConfig, Precision, TrainConfig

if TYPE_CHECKING:
    from jax_baseline.parity.gpt.meshes import MeshRun

# The mistakes and the meshes take so long: with less time they would only slow down what comes first.
_BACKGROUND_SECONDS = 120.0

# Runs by (data, fsdp), the one device first; and the losses of one device with permuted rows.
MeshRuns: TypeAlias = "tuple[dict[tuple[int, int], MeshRun], list[list[float]]]"


def configure(device: Device, quick: bool) -> Mapping[str, Json]:
    """Return the settings of this part."""
    if device == "cuda":
        size = {"steps": 6 if quick else 30, "batch_size": 16}
        dtypes = dict.fromkeys(("float32",) if quick else ("float64", "float32", "bfloat16"), size)
    elif quick:
        dtypes = {"float32": {"steps": 4, "batch_size": 2}}
    else:
        # On a CPU a step in float64 or bfloat16 takes several times as long as in float32, and five models take it.
        small = {"steps": 10, "batch_size": 4}
        dtypes = {"float64": small, "float32": {"steps": 16, "batch_size": 4}, "bfloat16": small}
    # Compiling takes most of a quick run, and its time grows with the number of blocks.
    layers = 1 if quick else None
    return {
        "parity": {"preset": "tiny", "layers": layers, "seed": 0, "lr": 1e-3, "controls": 3, "dtypes": dtypes},
        "mutations": {
            "model": {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "tie_embeddings": False},
            "training": {"steps": 5, "batch_size": 8, "warmup": 2, "lr": 1e-3, "min_lr": 1e-4, "clip": 0.5},
            # The last mistakes of the list do not change the gradient, so they share the correct step's compilation.
            # Mistakes always run on the CPU. On a machine with a GPU the others would only repeat the report of a CPU.
            "last": 6 if quick else 26 if device == "cuda" else None,
        },
        "meshes": {
            "model": {"n_layer": 2, "n_embd": 64, "block_size": 32},
            "training": {"steps": 8, "batch_size": 8, "warmup": 2, "lr": 1e-3, "min_lr": 1e-4},
            "shapes": [[2, 2]] if quick or device == "cuda" else [[4, 1], [1, 4], [2, 2]],
        },
        "convergence": (
            {"preset": "tiny", "steps": 200 if quick else 1000, "seeds": [0, 1, 2]} if device == "cuda" else None
        ),
    }


def sections(run: Run) -> list[tuple[str, Callable[[Run], None]]]:
    """Return the measurements of this part, each with the name that the report uses if it is missing.

    On a machine with a GPU, the mistakes and the meshes start at once in the background where there is time for them,
    because they need only the CPU. On a CPU, parity uses every core; the meshes then start with the mistakes, which use
    one core. Nothing is timed here, and all of it is finished before the timing starts.
    """
    mistakes: Callable[[], list[MistakeRecord]] = partial(_run_mistakes, run.configuration)
    meshes = _in_background(partial(_run_meshes, run.configuration))
    if run.device == "cuda" and budget.left() > _BACKGROUND_SECONDS:
        mistakes = partial(result_of, _in_background(mistakes)())
        meshes()
    return [
        *(
            (f"Parity in {dtype}", partial(_record_parity, dtype=dtype))
            for dtype in run.configuration["parity"]["dtypes"]
        ),
        ("Planted mistakes", partial(_record_mistakes, result=mistakes, start_meshes=meshes)),
        ("Meshes of devices", partial(_record_meshes, start=meshes)),
    ]


def _in_background(work: Callable[[], Any]) -> Callable[[], Future[Any]]:
    """Return a function that starts the work in a thread when it is first called, and returns its future."""

    @cache
    def start() -> Future[Any]:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(work)
        pool.shutdown(wait=False)
        return future

    return start


def _record_parity(run: Run, dtype: Precision) -> None:
    # Imported here, and in the functions below, so that rendering a report loads neither framework.
    from jax_baseline.parity import REPORTED
    from jax_baseline.parity.gpt import adapters

    settings = run.configuration["parity"]
    size = settings["dtypes"][dtype]
    with run.working(f"parity in {dtype}"):
        setup = adapters.Setup.preset(
            settings["preset"],
            seed=settings["seed"],
            dtype=dtype,
            device=run.device,
            lr=settings["lr"],
            least_controls=settings["controls"],
            n_layer=settings["layers"],
            **size,
        )
        compared = adapters.run(setup)
    divergence = compared.divergence()
    units = {quantity: "nats" if quantity == "loss" else "" for quantity in REPORTED}
    run.add(
        ParityRecord(
            dtype,
            **size,
            deviations={
                quantity: Deviation(
                    Quantity(compared.largest(quantity), unit),
                    Quantity(compared.control_largest(quantity), unit),
                    Quantity(compared.worst_ratio(quantity), ""),
                )
                for quantity, unit in units.items()
            },
            times_control=Quantity(compared.margin, ""),
            torch=compared.reference,
            jax=compared.candidate,
            controls=compared.controls,
            bounds=tuple(compared.bounds("loss")),
            divergence=None if divergence is None else str(divergence),
        ).record()
    )


def _run_mistakes(configuration: Mapping[str, Any]) -> list[MistakeRecord]:
    from jax_baseline.parity.gpt import adapters, planted_mistakes

    share_the_gpu()  # JAX initialises every device, even if only the CPU is used
    settings = configuration["mutations"]
    setup = adapters.Setup(GPTConfig(**settings["model"]), TrainConfig(**settings["training"], dtype="float32"))
    last = settings["last"]
    return planted_mistakes.plant_mistakes(setup, planted_mistakes.MISTAKES[-last:] if last else None)


def _record_mistakes(
    run: Run, result: Callable[[], list[MistakeRecord]], start_meshes: Callable[[], Future[Any]]
) -> None:
    from jax_baseline.parity.gpt.planted_mistakes import MISTAKES

    with run.working("planted mistakes"):
        start_meshes()
        records = result()
    for record in records:
        run.add(record.record())
    if last := run.configuration["mutations"]["last"]:
        run.absent(
            f"The first {len(MISTAKES) - last} of the {len(MISTAKES)} planted mistakes",
            "each changes the gradient and needs a compilation; the report of a full run on a CPU has them",
        )


def _run_meshes(configuration: Mapping[str, Any]) -> MeshRuns:
    from benchkit.processes import RemoteObject
    from jax_baseline.parity.gpt.meshes import MeshTrial

    settings = configuration["meshes"]
    devices = max(data * fsdp for data, fsdp in settings["shapes"])
    # The meshes run on the CPU of every machine, because a CPU can emulate any number of devices. LLVM need not
    # optimise, because no times are recorded.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    arguments = {"model": settings["model"], "training": settings["training"]}
    rows = settings["training"]["batch_size"]
    permuted_rows = [(row * 3) % rows for row in range(rows)]
    with RemoteObject(MeshTrial, arguments, environment=environment) as trial:
        runs = {(1, 1): trial.call("run", data=1, fsdp=1)}
        control: MeshRun = trial.call("run", data=1, fsdp=1, rows=permuted_rows)
        for data, fsdp in settings["shapes"]:
            runs[data, fsdp] = trial.call("run", data=data, fsdp=fsdp)
    return runs, [control.losses]


def _record_meshes(run: Run, start: Callable[[], Future[MeshRuns]]) -> None:
    with run.working("meshes"):
        runs, controls = result_of(start())
    expected = runs[1, 1].losses
    for (data, fsdp), mesh in runs.items():
        difference = max(abs(loss - other) for loss, other in zip(mesh.losses, expected, strict=True))
        run.add(
            MeshRecord(
                data,
                fsdp,
                Quantity(mesh.state_bytes, "B"),
                Quantity(difference, "nats"),
                mesh.collectives,
                tuple(mesh.losses),
                tuple(tuple(losses) for losses in controls),
            ).record()
        )


def record_convergence(run: Run) -> None:
    """Train with both frameworks to the end and record the validation losses."""
    from jax_baseline.parity.gpt import convergence

    settings = run.configuration["convergence"]
    if settings is None:
        run.absent(
            "Training to the end in both frameworks",
            "it takes half an hour on two cores: `jax-baseline converge --steps 1000`",
        )
        return
    with run.working("training to the end"):
        runs, summary = convergence.run(
            GPTConfig.preset(settings["preset"]),
            replace(TrainConfig.preset(settings["preset"]), steps=settings["steps"]),
            seeds=settings["seeds"],
            device=run.device,
        )
    for record in (*runs, summary):
        run.add(record.record())
