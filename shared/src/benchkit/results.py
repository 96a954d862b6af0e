"""One typed, versioned JSON document per run: the only source of every report.

A run writes ``results.partial.json`` after each record and renames it to ``results.json`` when it is complete. An
interrupted run therefore keeps its records, and never damages the results of an earlier run. What a sweep measures
stands in ``sweep.json`` beside it, so that neither of the two loses the other.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

from benchkit.environment import Environment
from benchkit.errors import UserError, machine_fault

SCHEMA_VERSION = 2

# What a folder of reports holds: the document of the main run, and that of the sweep.
MAIN, SWEEP = "results.json", "sweep.json"

# Suffix of a temporary file, which replaces its target when it is written.
WRITING = ".writing"

# Entry of a configuration: sentences that say which sizes are smaller than asked for, to fit into the memory.
SMALLER = "smaller"

# Why something is absent that a larger budget brings.
_NO_TIME = "no time was left; a run with a larger --budget measures them"

Label = str | int | float | bool
Json = Any  # anything that json.dumps accepts without a custom encoder


_FIGURE_TYPES = {  # as JSON has them
    "value": int | float,
    "unit": str,
    "low": int | float | None,
    "high": int | float | None,
    "samples": int,
    "interval": str,
}

RANGE = "range"  # the interval of fewer samples than a confidence needs


@dataclass(frozen=True)
class Quantity:
    """One measured or counted figure.

    Attributes:
        value: The figure, in base units: seconds, bytes, bytes per second, operations per second.
        unit: ``"s"``, ``"B"``, ``"B/s"``, ``"FLOP/s"``, ``"tokens/s"``, ``"×"`` for a ratio, ``""`` for a count.
        low: Lower end of the interval; None for an exact figure.
        high: Upper end of the interval; None for an exact figure.
        samples: Number of samples.
        interval: Kind of interval: ``"p20-p80"``, ``"bootstrap 95%"``, ``"range"`` of too few samples for a
            confidence; empty for an exact figure.
    """

    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    samples: int = 1
    interval: str = ""

    @property
    def decides(self) -> bool:
        """Whether a verdict may rest on the interval; the range of a few samples often misses the median."""
        return self.interval != RANGE

    def per(self, amount: float, unit: str) -> Quantity:
        """Turn a time into a rate, ``amount`` / time. The ends of the interval change places.

        Args:
            amount: Bytes, operations or tokens processed in the time.
            unit: Unit of the rate.
        """
        return Quantity(
            amount / self.value,
            unit,
            None if self.high is None else amount / self.high,
            None if self.low is None else amount / self.low,
            self.samples,
            self.interval,
        )


@dataclass(frozen=True)
class Record:
    """What one measurement found.

    Attributes:
        name: What was measured, such as ``"forward"``; the same for all variants.
        labels: Which variant, such as ``{"backend": "triton", "dtype": "bfloat16"}``.
        values: The figures, by name.
        data: Anything else as plain JSON, such as a loss curve or a source text.
    """

    name: str
    labels: Mapping[str, Label] = field(default_factory=dict)
    values: Mapping[str, Quantity] = field(default_factory=dict)
    data: Json = None

    def __getitem__(self, value: str) -> Quantity:
        return self.values[value]


@dataclass(frozen=True)
class Absence:
    """Something that a reader may look for and that this run did not measure.

    Attributes:
        what: What is missing, as a noun phrase.
        why: The reason, as a clause.
    """

    what: str
    why: str


@dataclass(frozen=True)
class Results:
    """Everything that a run measured, and where and how it ran.

    Attributes:
        lens: Name of the lens.
        environment: Machine, software and source at the start of the run.
        configuration: Sizes, dtypes and counts, as plain JSON.
        records: The measurements, in order.
        absences: What the run did not measure.
        complete: Whether the run reached its end.
        schema_version: Version of the document's format.
    """

    lens: str
    environment: Environment
    configuration: Mapping[str, Json]
    records: tuple[Record, ...] = ()
    absences: tuple[Absence, ...] = ()
    complete: bool = False
    schema_version: int = SCHEMA_VERSION

    def select(self, name: str, **labels: Label) -> list[Record]:
        """The records of that name whose labels include these, in order."""
        return [
            record
            for record in self.records
            if record.name == name and all(record.labels.get(key) == value for key, value in labels.items())
        ]

    def one(self, name: str, **labels: Label) -> Record:
        """The only record of that name whose labels include these.

        Raises:
            LookupError: If there is none, or more than one.
        """
        records = self.select(name, **labels)
        if len(records) != 1:
            raise LookupError(f"expected one record {name!r} with {labels}, found {len(records)}")
        return records[0]


class Recorder:
    """Collects the records of one run and keeps the file on disk up to date.

    Args:
        directory: Folder of ``results.json``; the first write creates it.
        lens: Name of the lens.
        environment: The environment at the start of the run.
        configuration: Sizes, dtypes and step counts, as plain JSON.

    Attributes:
        path: The file that contains the records.
        partial_path: The file that contains them until the run is complete.
        kept_path: The file with the records of an earlier run that did not reach its end.
    """

    def __init__(
        self, directory: Path, *, lens: str, environment: Environment, configuration: Mapping[str, Json]
    ) -> None:
        self.directory = directory
        self.results = Results(lens, environment, dict(configuration))
        self.path = self.partial_path = directory / "results.partial.json"
        self.kept_path = directory / "results.before.partial.json"
        self._outdated: list[Record] = []
        self._texts: list[str] = []  # of the records: each is put into JSON once, not again with all that come after it

    @classmethod
    def going_on(
        cls,
        directory: Path,
        *,
        lens: str,
        environment: Environment,
        configuration: Mapping[str, Json],
        again: Collection[str] = (),
    ) -> Recorder:
        """Make a recorder that adds to the ``sweep.json`` of earlier calls, or creates the file.

        The file always counts as complete: a run that is killed loses only what it had not added yet.

        Args:
            directory: Folder of ``sweep.json``.
            lens: Name of the lens.
            environment: The environment of this run; the file keeps the environment of its first run.
            configuration: Entries that replace those of the file.
            again: Texts; the results do not have records of other commits with one of them in a ``label=value``. In the
                file each stays until a record with the same labels is added.

        Raises:
            UserError: If the file cannot be read, or belongs to another lens, machine or version of torch or triton.
        """
        recorder = cls(directory, lens=lens, environment=environment, configuration=configuration)
        recorder.path = directory / SWEEP
        if recorder.path.exists():
            before = load(recorder.path)
            if different := _other_ground(before, recorder.results):
                raise UserError(
                    f"{recorder.path} was measured with {different}; remove it, or name another folder with --out"
                )
            recorder._outdated = [r for r in before.records if _is_outdated(r, environment.commit, again)]
            kept = tuple(record for record in before.records if record not in recorder._outdated)
            recorder.results = replace(before, configuration={**before.configuration, **configuration}, records=kept)
        else:
            recorder.results = replace(recorder.results, complete=True)
        return recorder

    def begin(self) -> None:
        """Write the file for the first time, so that an unwritable folder is reported before anything is measured.

        The records of an earlier run that did not reach its end stay in :attr:`kept_path` until this run is complete.
        """
        if self.path == self.partial_path and _has_records(self.partial_path):
            with reported(self.kept_path):
                self.partial_path.replace(self.kept_path)
        self._update()

    def add(self, record: Record) -> None:
        """Append a record and write everything so far."""
        self.add_all((record,))

    def add_all(self, records: Iterable[Record]) -> None:
        """Append records that belong together and write everything so far, once."""
        self._update(records=(*self.results.records, *records))

    def absent(self, what: str, why: str) -> None:
        """Record something that this run does not measure."""
        self._update(absences=(*self.results.absences, Absence(what, why)))

    def left_out(self, what: Iterable[str]) -> None:
        """Record for what no time was left, in one line with what was left out before."""
        others = tuple(absence for absence in self.results.absences if absence.why != _NO_TIME)
        before = [absence.what for absence in self.results.absences if absence.why == _NO_TIME]
        line = "; ".join([*before, *what])
        self._update(absences=(*others, Absence(line[:1].upper() + line[1:], _NO_TIME)))

    def finish(self) -> Path:
        """Mark the run complete and rename its file to ``results.json``.

        Returns:
            The path of ``results.json``.
        """
        self._update(complete=True)
        final = self.directory / MAIN
        with reported(final):
            self.partial_path.replace(final)
            self.kept_path.unlink(missing_ok=True)
        return final

    def _update(self, **changes: Any) -> None:
        results = replace(self.results, **changes)
        texts = [_record_text(record) for record in results.records[len(self._texts) :]]
        self.results, self._texts = results, self._texts + texts  # a record that is refused is not among them
        self._outdated = [old for old in self._outdated if not results.select(old.name, **old.labels)]
        write_text_atomically(self.path, _document(self.results, self._texts + list(map(_record_text, self._outdated))))


def _is_outdated(record: Record, commit: str | None, again: Collection[str]) -> bool:
    """Whether another commit measured a record with one of these texts in a ``label=value``, as far as it says so."""
    if not isinstance(record.data, Mapping) or "commit" not in record.data:
        return False
    other = commit is None or record.data["commit"] != commit
    return other and any(text in f"{key}={label}" for text in again for key, label in record.labels.items())


def dump(results: Results) -> str:
    """The JSON text of ``results``, with a stable order of keys and one trailing newline.

    Raises:
        ValueError: If a number is NaN or infinite; the message names the record.
        TypeError: If a record holds anything but plain JSON, likewise.
    """
    return _document(results, [_record_text(record) for record in results.records])


def _document(results: Results, records: Sequence[str]) -> str:
    """The JSON text of results whose records are texts already."""
    members = {name: _text(value, depth=1) for name, value in asdict(replace(results, records=())).items()}
    if records:
        members["records"] = "[\n  " + ",\n  ".join(records) + "\n ]"
    return "{\n " + ",\n ".join(f'"{name}": {text}' for name, text in members.items()) + "\n}\n"


def _record_text(record: Record) -> str:
    """A record as JSON with a line for each figure; a figure's fields that have their default are left out."""
    for key, quantity in record.values.items():
        for name, kind in _FIGURE_TYPES.items():
            part = getattr(quantity, name)
            if not isinstance(part, kind):
                raise TypeError(f"record {record.name!r} {dict(record.labels)}: {name} of {key} is {part!r}")
            if isinstance(part, float) and not math.isfinite(part):
                raise ValueError(f"record {record.name!r} {dict(record.labels)}: {key} is {part}")
    try:
        figures = [f"{_line(key)}: {_line(_without_defaults(quantity))}" for key, quantity in record.values.items()]
        values = "{\n    " + ",\n    ".join(figures) + "\n   }" if figures else "{}"
        members = {"name": _line(record.name), "labels": _line(dict(record.labels)), "values": values}
        if record.data is not None:
            members["data"] = _line(record.data)
    except (TypeError, ValueError) as error:
        raise type(error)(f"record {record.name!r} {dict(record.labels)}: {error}") from error
    return "{" + ", ".join(f'"{name}": {text}' for name, text in members.items()) + "}"


def _without_defaults(quantity: Quantity) -> dict[str, Json]:
    values = {part: getattr(quantity, part.name) for part in fields(quantity)}
    return {part.name: value for part, value in values.items() if value != part.default}


def _line(plain: Any) -> str:
    return json.dumps(plain, ensure_ascii=False, allow_nan=False)


def _text(plain: Any, *, depth: int) -> str:
    """JSON as it stands inside so many brackets; every line break is one between lines, for strings escape theirs."""
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False).replace("\n", "\n" + depth * " ")


def load(path: Path) -> Results:
    """Read a ``results.json``.

    Raises:
        UserError: If the file cannot be read, is not JSON, has an unknown schema version, or lacks a field or has
            one of another type.
    """
    remedy = "run the lens again to make a new one"
    if path.name == SWEEP:  # to which the next call would add
        remedy = "remove it, and measure it again with --sweep"
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_refuse)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a JSON document ({error}); {remedy}") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        if isinstance(version, int) and version > SCHEMA_VERSION:
            remedy = "a newer state of this repository wrote it: read it with that one, or " + remedy
        raise UserError(f"{path}: expected schema_version {SCHEMA_VERSION}, got {version!r}; {remedy}")
    try:
        return Results(
            lens=_typed(document, "lens", str),
            environment=Environment.from_json(document["environment"]),
            configuration=_typed(document, "configuration", dict),
            records=tuple(
                Record(
                    _typed(entry, "name", str),
                    _typed(entry, "labels", dict),
                    {key: _quantity(value) for key, value in entry["values"].items()},
                    entry.get("data"),
                )
                for entry in document["records"]
            ),
            absences=tuple(Absence(**entry) for entry in document["absences"]),
            complete=_typed(document, "complete", bool),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not fit schema version {version} ({error}); {remedy}") from error


def _typed(entry: Mapping[str, Any], name: str, kind: type | UnionType) -> Any:
    value = entry[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}")
    return value


def _quantity(entry: Mapping[str, Any]) -> Quantity:
    quantity = Quantity(**entry)
    for name in entry:
        _typed(entry, name, _FIGURE_TYPES[name])
    return quantity


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        _refuse(text)
    return number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def load_report(directory: Path) -> Results:
    """Read what a folder of reports holds: the main run, with the records of the sweep after its own.

    A sweep that cannot be read, or of another machine or version of torch or triton, is left out, and an absence says
    so. Where both have a record of the same name and labels, the main run's stands.

    Args:
        directory: The folder ``reports/<machine>/``, with one of the two documents or both.

    Raises:
        UserError: As for :func:`load`, where there is but one document or the main run's cannot be read.
    """
    paths = [path for path in (directory / MAIN, directory / SWEEP) if path.exists()]
    if len(paths) < 2:
        return load(paths[0] if paths else directory / MAIN)
    main = load(directory / MAIN)
    try:
        sweep = load(directory / SWEEP)
        if different := _other_ground(sweep, main):
            raise UserError(f"`{SWEEP}` was measured with {different}; measure it again")
    except UserError as error:
        missing = Absence("What `--sweep` measures", str(error).replace(str(directory / SWEEP), f"`{SWEEP}`"))
        return replace(main, absences=(*main.absences, missing))
    known = {(record.name, frozenset(record.labels.items())) for record in main.records}
    further = [r for r in sweep.records if (r.name, frozenset(r.labels.items())) not in known]
    return replace(
        main,
        configuration={**sweep.configuration, **main.configuration, "sweep": sweep.configuration["sweep"]},
        records=(*main.records, *further),
        absences=(*main.absences, *(absence for absence in sweep.absences if absence not in main.absences)),
    )


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the old content or the new, even after a crash, and never a part.

    Args:
        path: The file. Missing folders are created.
        text: The content, written as UTF-8. What cannot be (a byte of a file name) is an escape, which JSON reads back.

    Raises:
        UserError: If the file cannot be written, for example because the disk is full; the old content then remains.
    """
    write_bytes_atomically(path, text.encode("utf-8", "backslashreplace"))


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write a binary file atomically, see :func:`write_text_atomically`.

    Args:
        path: The file. Missing folders are created.
        content: The content.

    Raises:
        UserError: If the file cannot be written; the old content then remains.
    """
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=WRITING)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).chmod(0o644)  # mkstemp makes it private; a report is for everyone
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def require_writable(path: Path) -> None:
    """Try the folder of a file, which is made if it is missing, before a measurement that takes long.

    Raises:
        UserError: If no file can be written there.
    """
    with reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=WRITING):
            pass


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait until no other process changes a file, and keep others waiting inside the block.

    Raises:
        UserError: If the folder, which is created if it does not exist, cannot be opened.
    """
    with _locked(path.parent, named=path):
        yield


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Around the atomic writing of a file: turn an OSError into a UserError that names the file and the remedy.

    Raises:
        UserError: In place of an OSError.
    """
    try:
        yield
    except OSError as error:
        known = machine_fault(OSError(error.errno, error.strerror))  # without the name of the temporary file
        what = known or f"{error.strerror or error}; name another folder"
        raise UserError(f"{path} cannot be written: {what}; what was there is untouched") from error


@contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Keep other runs from writing into a folder inside the block, where the file system knows locks.

    Args:
        directory: The folder of a report or of a training run, which is created if it does not exist.

    Raises:
        UserError: If another run writes there, or the folder cannot be created.
    """
    busy = f"another run writes to {directory}; wait for it, end it, or name another folder with --out"
    with _locked(directory, named=directory, busy=busy):
        for folder_of_run in (directory, directory / "figures"):  # in others, another run may be writing
            for half_written in folder_of_run.glob(f".*{WRITING}"):  # left by a run that was killed
                half_written.unlink(missing_ok=True)
        yield


@contextmanager
def _locked(folder: Path, *, named: Path, busy: str = "") -> Iterator[None]:
    """Lock a folder, which is created if it does not exist, where the file system knows locks.

    The folder itself is locked, so that no lock file remains. Where another process has the lock, a UserError says
    ``busy``; if that is empty, the block waits. Other errors name ``named``.
    """
    with reported(named):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise UserError(busy) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        with suppress(OSError):  # a process that was forked meanwhile has the folder open, and would keep the lock
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _has_records(path: Path) -> bool:
    try:
        return bool(load(path).records)
    except UserError:  # there is none, or it was cut short
        return False


def _other_ground(before: Results, now: Results) -> str:
    """What keeps two documents from standing in one report; empty if nothing does."""
    for what, old, new in (
        ("lens", before.lens, now.lens),
        ("machine", before.environment.machine, now.environment.machine),
        ("torch", before.environment.packages.get("torch"), now.environment.packages.get("torch")),
        ("triton", before.environment.packages.get("triton"), now.environment.packages.get("triton")),
    ):
        if old != new:
            return f"{what} {old}, this is {new}"
    return ""
