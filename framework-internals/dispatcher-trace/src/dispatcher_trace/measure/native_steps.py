"""Single-step the CPU kernels of a few cases, to name the routines below them."""

from __future__ import annotations

from dataclasses import asdict

from benchkit import Quantity
from benchkit.run import Run
from dispatcher_trace.capture import native_step
from dispatcher_trace.capture.shims import installed
from dispatcher_trace.capture.user_stack import calls_user_code
from dispatcher_trace.measure.cases import STEPPED, Case
from dispatcher_trace.recording import record

calls_user_code(__file__)

# Cases that take under a second each: a loop over elements, a library's matrix product, a reduction.
_QUICK = (("a + b", "f32"), ("a @ b", "f32"), ("torch.softmax(a, -1)", "f32"))
_SIZE = 32  # rows and columns: large enough to reach every routine, small enough that no loop takes long


def stepped_cases(*, quick: bool) -> list[tuple[str, str]]:
    """The cases to single-step, as expression and dtype."""
    return [case for case in STEPPED if not quick or case in _QUICK]


def record_native_steps(run: Run) -> None:
    """Record the routines below the CPU kernels of the configured cases, or why there are none."""
    if run.device != "cpu":
        run.absent(
            "Routines below a kernel by single-stepping", "they run on the device; the profiler names its kernels"
        )
        return
    if reason := native_step.unavailable():
        run.absent("The routine below the CPU kernel (vectorised loop, BLAS or oneDNN)", reason)
        return
    with installed("core") as shims:
        for expression, dtype in run.configuration["stepped"]:
            evaluate = Case(expression, dtype, "plain", _SIZE, run.device).prepare()
            evaluate()
            with record(shims, kernels=False, native=True) as trace:
                evaluate()
            for hop in trace.hops:
                if hop.native_step is not None and hop.key == "CPU":
                    step = asdict(hop.native_step)
                    labels = {"expression": expression, "dtype": dtype, "operator": hop.operator}
                    run.record("native_step", labels, {"instructions": Quantity(step["instructions"], "")}, step)
