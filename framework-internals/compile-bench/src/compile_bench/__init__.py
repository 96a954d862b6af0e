"""torch.compile measured: what it costs, what it gives, what breaks the graph."""

from benchkit.processes import ChildFailure
from compile_bench.measure.harness import Harness
from compile_bench.measure.records import Bench, Triage
from compile_bench.measure.verdict import Verdict, judge
from compile_bench.targets.case import Case

__all__ = ["Bench", "Case", "ChildFailure", "Harness", "Triage", "Verdict", "judge"]
