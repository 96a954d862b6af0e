"""torch.compile measured: what it costs, what it gives, what breaks the graph."""

from compile_bench.harness import Harness, WorkerFailure
from compile_bench.results import Bench, Case, Triage
from compile_bench.verdict import Verdict, judge

__all__ = ["Bench", "Case", "Harness", "Triage", "Verdict", "WorkerFailure", "judge"]
