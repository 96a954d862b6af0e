"""The report, declared from the records only.

:mod:`~jax_baseline.report.training_sections` has parity and scaling, :mod:`~jax_baseline.report.engine_sections` the
throughput, :mod:`~jax_baseline.report.hlo_sections` the compiled program.
"""

from __future__ import annotations

from benchkit import Results
from benchkit.report import Report, bullets
from jax_baseline.report import engine_sections, hlo_sections, training_sections


def report(results: Results) -> Report:
    """Return the report of a run."""
    return Report(
        title="The same training in JAX",
        headline=headline(results),
        use=" ".join(filter(None, (training_sections.use(results), engine_sections.use(results)))),
        avoid=engine_sections.avoid(results),
        worst=engine_sections.worst(results),
        answer=[*engine_sections.answer(results), training_sections.parity(results)],
        findings=[*training_sections.sections(results), *hlo_sections.sections(results)],
        asked=_asked(results),
        method=_method(results),
        limits=_LIMITS,
    )


def headline(results: Results) -> str:
    """Whether JAX computes the same and how fast it is: the first sentence."""
    clauses = [clause for clause in (training_sections.headline(results), engine_sections.headline(results)) if clause]
    return f"{', and '.join(clauses)}." if clauses else "This run was interrupted before it measured anything."


def _asked(results: Results) -> list[str]:
    parity, bench = results.configuration["parity"], results.configuration["bench"]
    alone = ", one block alone" if parity.get("layers") == 1 else ""
    return [
        "Does a JAX port of the baseline compute the same as the PyTorch original, how fast is it, and which kernels "
        "does XLA compile it to?",
        bullets(
            [
                f"**Parity.** `{parity['preset']}`{alone}, seed {parity['seed']}, learning rate {parity['lr']}: the "
                f"same initial weights, the same batches, the same schedule, in {', '.join(parity['dtypes'])}.",
                "**Planted mistakes.** Which porting mistakes this comparison catches.",
                "**Throughput.** One whole training step (forward, backward, clipping, AdamW) of "
                f"`{bench['preset']}`{', one block alone,' if bench.get('layers') == 1 else ''} with "
                f"{bench['batch_size']} sequences in {bench['dtype']}.",
                "**Meshes.** Does the same loop compute the same on several devices?",
                "**The compiled step.** The kernels of XLA's optimised program, with their operations, costs, times "
                "and "
                "parts of the model. A comparison with Inductor on the same loss and gradients. The program of a GPU.",
            ]
        ),
    ]


def _method(results: Results) -> list[str]:
    parity, bench = results.configuration["parity"], results.configuration["bench"]
    return [
        "**Parity.** NumPy draws the initial weights once, for both frameworks; JAX's matrices are the transposes of "
        "torch's. At every step both report the loss, the gradient norm, the gradient of every parameter before "
        "clipping, and every weight and both Adam moments after the update. JAX is compared with torch: the loss by "
        f"|Δ|, the norm by |Δ| over the norm, every array by √Σ Δ² over √Σ x². {parity['controls']} *permuted "
        "references* measure the effect of rounding: torch with renumbered channels, inner units, heads, tokens and "
        "rows of the batch. They compute the same function in exact arithmetic, with another order of every sum in "
        "floating point. Every second one also writes its attention out. For every parameter, the bound of JAX's "
        "deviation is so many times the deviation that the permuted references had reached by that step: "
        f"{training_sections.bound_factors(results)}; and at least some epsilons of the sums. In bfloat16 both "
        "frameworks multiply matrices in bfloat16 and keep weights, residual stream, norms, softmax and loss in "
        "float32.",
        "**Throughput.** Each engine has a separate process, and one engine runs at a time. A sample is "
        f"{bench['steps']} step{'s' if bench['steps'] > 1 else ''}. There are {bench['rounds']} rounds, each in a new "
        "random order. A speed-up is the median of the rounds' ratios with a bootstrap interval. Batches are on the "
        "device before the timing starts. Compilation is part of the first step, and of no sample. Timing starts only "
        f"if the engines' first losses agree.{engine_sections.mfu_formula(results)}",
        "**The compiled step.** The shapes in XLA's optimised text give the operations, FLOPs and bytes of a kernel; "
        "JAX's profiler gives its time. Inductor's generated module runs with a hook around every launch, which "
        "observes its tensors. A clock around the launch gives its time on a CPU, and the profiler on a GPU. Bytes are "
        "those of the arrays that a kernel reads and writes, each once for each kernel. Hits in a cache between two "
        "kernels are not subtracted.",
    ]


_LIMITS = (
    "One seed and one learning rate. Training amplifies rounding, so a larger learning rate or a longer run increases "
    "the deviations of both JAX and the permuted references.",
    "Throughput is of the step only, without data loading, validation and checkpoints.",
    "A kernel with operations of several parts of the model counts for the part with most of its work.",
    "The times of the kernels add up to more than the step if kernels run at the same time, and to less if the device "
    "waits.",
    "FLOPs of Inductor's kernels are not counted. An embedding counts as a read of its whole table.",
)
