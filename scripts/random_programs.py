"""Run random programs against an oracle, record what they showed, and write ``docs/random_programs.md``.

The fixture ``fuzz`` of the root ``conftest.py`` gives a test a :class:`Fuzz`. The page is a pure function of
``docs/random_programs.json``; ``scripts/check_reports.py`` holds the one against the other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchkit.command.progress import track
from benchkit.environment import capture, commit_label
from benchkit.markdown import inert
from benchkit.report import markdown_table
from benchkit.results import write_text_atomically

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "random_programs.json"
PAGE = RECORDS.with_suffix(".md")
TEMPLATE = Path(__file__).parent / "templates" / PAGE.name
T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """What one run of random programs showed, or several from other seeds together.

    Attributes:
        lens: Name of the lens.
        programs: What the programs are.
        oracle: What each was compared with.
        wanted: Number of programs of a full run.
        run: Number of programs that were run.
        differences: Number of programs that differed from the oracle: 0 or 1, since a run ends at the first.
        outcomes: Number of programs by what the check returned, for a check that returns a text.
        seeds: Seeds of the generator.
        seconds: Duration of the runs.
        commit: The commit as Markdown.
        date: UTC, ISO 8601 to the second.
    """

    lens: str
    programs: str
    oracle: str
    wanted: int
    run: int
    differences: int
    outcomes: dict[str, int]
    seeds: tuple[int, ...]
    seconds: float
    commit: str
    date: str

    def __add__(self, later: Record) -> Record:
        """The programs of both."""
        outcomes = Counter(self.outcomes) + Counter(later.outcomes)
        return replace(
            later,
            run=self.run + later.run,
            outcomes=dict(sorted(outcomes.items())),
            seeds=self.seeds + later.seeds,
            seconds=round(self.seconds + later.seconds, 1),
        )


@dataclass(frozen=True)
class Fault:
    """A fault that random programs found and that is fixed.

    Attributes:
        lens: Name of the lens.
        fault: What was wrong, in one sentence.
        test: The test that keeps the shrunk program: ``FILE::FUNCTION``, from the root of the repository.
    """

    lens: str
    fault: str
    test: str


@dataclass
class Fuzz:
    """Runs random programs for one test.

    Attributes:
        lens: Name of the lens that the test belongs to.
        seed: Seed of the generator.
        seconds: Seconds after which a run ends; None runs all wanted programs.
        write: Called with the record of each run; None keeps no record.
    """

    lens: str
    seed: int = 0
    seconds: float | None = None
    write: Callable[[Record], None] | None = None

    def run(
        self, strategy: SearchStrategy[T], check: Callable[[T], str | None], *, programs: str, oracle: str, wanted: int
    ) -> Record:
        """Draw programs until one differs, ``wanted`` have been run, or the time is up.

        A program that differs is shrunk before its error is raised; the error shows it.

        Args:
            strategy: Draws a program.
            check: Compares a program with the oracle, and raises if it differs. A text that it returns is counted in
                :attr:`Record.outcomes`.
            programs: What the programs are, for the record.
            oracle: What they are compared with, for the record.
            wanted: Number of programs.
        """
        environment = capture("cpu", root=ROOT)
        counted = _Counted(check, self.seconds)
        try:
            with track(range(wanted), f"{self.lens}: {programs}") as shown:

                def each(program: T) -> None:
                    next(shown, None)
                    counted(program)

                _draw(strategy, each, wanted, self.seed)
        except _TimeIsUpError:
            pass
        finally:
            record = Record(
                lens=self.lens,
                programs=programs,
                oracle=oracle,
                wanted=wanted,
                seeds=(self.seed,),
                commit=commit_label(environment.commit, environment.dirty),
                date=environment.date,
                **counted.result(),
            )
            if self.write is not None:
                self.write(record)
        return record


class _TimeIsUpError(BaseException):
    """Ends a run. Hypothesis takes an Exception for a failure of the program."""


class _Counted:
    """A check that counts the programs up to the first that differs. The ones after it are attempts to shrink it."""

    def __init__(self, check: Callable[[Any], str | None], seconds: float | None) -> None:
        self._check = check
        self._start = time.monotonic()
        self._end = None if seconds is None else self._start + seconds
        self._run = 0
        self._outcomes: Counter[str] = Counter()
        self._found_after: float | None = None

    def __call__(self, program: Any) -> None:
        from hypothesis.errors import UnsatisfiedAssumption

        found = self._found_after is not None
        if not found and self._end is not None and time.monotonic() > self._end:
            raise _TimeIsUpError
        try:
            outcome = self._check(program)
        except UnsatisfiedAssumption:
            raise
        except Exception:
            if not found:
                self._run += 1
                self._found_after = time.monotonic() - self._start
            raise
        if not found:
            self._run += 1
            self._outcomes.update([outcome] if outcome else [])

    def result(self) -> dict[str, Any]:
        """The fields of the record that the run fills in."""
        seconds = time.monotonic() - self._start if self._found_after is None else self._found_after
        return {
            "run": self._run,
            "differences": int(self._found_after is not None),
            "outcomes": dict(sorted(self._outcomes.items())),
            "seconds": round(seconds, 1),
        }


def _draw(strategy: SearchStrategy[T], check: Callable[[T], None], wanted: int, seed: int) -> None:
    # Hypothesis belongs to the tests; the page is written without it.
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    @seeded(seed)
    @settings(
        max_examples=wanted,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(program=strategy)
    def each(program: T) -> None:
        check(program)

    each()


def load(path: Path = RECORDS) -> tuple[list[Record], list[Fault]]:
    """Return the committed records and the faults that were found."""
    document = json.loads(path.read_text(encoding="utf-8"))
    runs = [Record(**{**entry, "seeds": tuple(entry["seeds"])}) for entry in document["runs"]]
    return runs, [Fault(**entry) for entry in document["faults"]]


def keep(record: Record, path: Path = RECORDS) -> None:
    """Put a record in the place of an earlier one of the same programs and oracle, and write the page.

    A record is added to an earlier one of the same commit that ended early, if its seed is another.
    """
    runs, faults = load(path)

    def place(run: Record) -> tuple[str, str, str]:
        return run.lens, run.programs, run.oracle

    for run in runs:
        early = run.run < run.wanted and not run.differences and not set(run.seeds) & set(record.seeds)
        if place(run) == place(record) and run.commit == record.commit and early:
            record = run + record
    runs = sorted([*(run for run in runs if place(run) != place(record)), record], key=place)
    document = {"runs": [asdict(run) for run in runs], "faults": [asdict(fault) for fault in faults]}
    write_text_atomically(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    write_text_atomically(path.with_suffix(".md"), render(path))


def render(path: Path = RECORDS) -> str:
    """Return the text of the page."""
    runs, faults = load(path)
    header = ["lens", "programs", "oracle", "run", "differences", "outcomes", "seeds", "seconds", "commit, date"]
    table = markdown_table(header, [_cells(run) for run in runs], left=3)
    fault_table = markdown_table(
        ["lens", "fault", "test"],
        [[fault.lens, fault.fault, _link(fault.test)] for fault in sorted(faults, key=lambda fault: fault.lens)],
        left=3,
    )
    return inert(TEMPLATE.read_text(encoding="utf-8").format(table=table, faults=fault_table))


def _cells(run: Record) -> list[str]:
    amount = f"{run.run:,}" if run.run >= run.wanted else f"{run.run:,} of {run.wanted:,}"
    outcomes = ", ".join(f"{name}: {count:,}" for name, count in run.outcomes.items())
    figures = [amount, str(run.differences), outcomes or "–", ", ".join(map(str, run.seeds)), f"{run.seconds:,.0f}"]
    return [run.lens, run.programs, run.oracle, *figures, f"{run.commit}, {run.date[:10]}"]


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name}](../{path})"
