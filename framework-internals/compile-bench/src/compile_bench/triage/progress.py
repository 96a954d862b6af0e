"""Tells what triage does while it does it, one line at a time."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from benchkit import Quantity, numbers
from compile_bench.capture.text import short_place, shorten, some
from compile_bench.capture.trace import Break
from compile_bench.fixes.types import Tried
from compile_bench.measure.survey.types import Seen
from compile_bench.triage.types import Finding


class Progress:
    """The stages of a triage, by name and in order; ``tell`` is called with each line."""

    def __init__(self, tell: Callable[[str], None], stages: Sequence[str]) -> None:
        self._tell = tell
        self._stages = list(stages)
        self._current = ""
        self._told: set[object] = set()
        self._one_at_a_time = threading.Lock()
        self.seen: dict[bool, list[Break]] = defaultdict(list)  # breaks that unfinished surveys have reported, by train
        self.removed: list[str] = []  # lines whose break an accepted change removes, before the proof

    def stage(self, name: str, text: str) -> None:
        """A stage begins."""
        self._current = name
        self._tell(f"[{self._stages.index(name) + 1}/{len(self._stages)}] {name}: {text}")

    def hear(self, message: object) -> None:
        """Tell a message of a child process. Several threads may call this."""
        with self._one_at_a_time:
            if isinstance(message, Seen) and self._current == "breaks":  # a trial has a survey, too
                self.seen[message.case.train].append(message.met)
                self._tell_once(f"  {short_place(message.met.place)}: {message.met.reason}")
            elif isinstance(message, Tried):
                place = f"{shorten(message.place[0])}:{message.place[1]}"
                outcome = message.verdict or "the break is gone, and the eager results are the same"
                self.removed += [] if message.verdict else [place]
                self._tell_once(f"  {place}, change {message.index + 1}: {outcome}")

    def take_back(self, findings: Sequence[Finding]) -> None:
        """Say of each break that was told and is no finding what became of it.

        Later steps may show the user's line that calls a library's line, or that a break belongs to another line.
        """
        reported = {(finding.place, finding.reason) for finding in findings}
        for met in [met for seen in self.seen.values() for met in seen]:
            if (met.place, met.reason) in reported:
                continue
            same = [finding for finding in findings if finding.reason == met.reason]
            called = [finding for finding in same if met.place in finding.library.split(", ")]
            now = next((short_place(finding.place) for finding in called or same), "")
            what = f"it is the break of {now}" if now else "no later step met it"
            self._tell_once(f"  taken back: {short_place(met.place)}: {met.reason}: {what}")

    def costs(self, findings: Sequence[Finding]) -> None:
        """What is lost between two graphs, as far as it is known, with all lines that cause it."""
        lost: dict[tuple[Quantity, int], list[str]] = {}
        for finding in findings:
            cost = finding.cost
            if cost is not None and cost.time_lost is not None:
                lost.setdefault((cost.time_lost, cost.output_bytes), []).append(short_place(finding.place))
        for (time_lost, _), places in lost.items():
            lines = list(dict.fromkeys(places))
            verb = "loses" if len(lines) == 1 else "together lose"
            self._tell(f"  {some(lines)}: {verb} {numbers.with_unit(time_lost.value, 's')} per step")

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._tell(line)
