"""Results as they are written and read: JSON lines, appended whole, never rewritten.

A run is a header (kind "run": machine, model, engine, rules, seeds, ceilings, predictions), one
line per repetition (kind "sample"), one per A/A check, and an end. Only a run with an end that is
"complete" is ever reported. A line torn by a kill or a full disk is cut before the next is written;
a reader skips what it cannot use and says so. Absolute paths are refused, so none can be published.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from nanoserve.bench.measure import Sample

SCHEMA = 1
"""Version of the records. Raise it when the meaning of a field changes."""

Record = dict[str, Any]
FieldType = type | tuple[type, ...]
KINDS = ("run", "sample", "request", "aa", "prediction", "probe", "end")
ABSOLUTE_PATH = re.compile(r"(?:^|[\s=:,'\"(])(?:/[\w.~-]+){2,}|(?:^|[\s='\"(])[A-Za-z]:\\|^/|~/")

ABSENT = object()
NUMBER = (int, float)

COMMON_FIELDS: Mapping[str, FieldType] = {"run": str, "experiment": str}
FIELDS: Mapping[str, Mapping[str, FieldType]] = {
    "run": {
        "name": str,
        "setup.quick": bool,
        "setup.machine.cpu": str,
        "setup.machine.cores": int,
        "setup.machine.software": dict,
    },
    "sample": {
        "attempt": int,
        "group": str,
        "arm": str,
        "round": int,
        "position": int,
        "dropped": bool,
        "seconds": dict,
        "labels": dict,
    },
    "aa": {"n": int, "median": NUMBER, "interval": (list, NoneType)},
    "end": {"status": str},
}
"""What readers rely on in a record of each kind, whatever the experiment."""

USUAL_EXECUTOR = {"cpu": "native", "cuda": "eager"}
"""What `auto` means where everything is built: it goes without saying in a run's name."""

logger = logging.getLogger(__name__)


class Journal:
    """Appends records to one file, a group at a time, each group in one write.

    Raises ValueError if the folder cannot be used at all (a wrong request), OSError if the machine
    fails later, a full disk above all; what was written before stays readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
            raise ValueError(
                f"results cannot be written to {path.parent} ({error.strerror}): "
                "choose another folder with --out"
            ) from error
        cut_torn_line(self._file)

    def append(self, records: Iterable[Record]) -> None:
        """Write whole lines. On failure none of them stays half-written."""
        lines = b"".join(encode(record) for record in records)
        before = os.fstat(self._file).st_size
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._file, lines[written:])
        except OSError as error:
            if written:
                os.ftruncate(self._file, before)
            raise OSError(
                error.errno,
                f"{error.strerror} while writing {self.path.name}; its complete lines are kept: "
                "free some space, then continue with --resume",
            ) from error

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cut_torn_line(file: int) -> None:
    """Drop what follows the last newline: a line that was being written when the writer died."""
    size = os.fstat(file).st_size
    end = size
    while end:
        start = max(0, end - 65_536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end != size:
        logger.warning("cut %d bytes of an unfinished line", size - end)
        os.ftruncate(file, end)


def encode(record: Record) -> bytes:
    """One line. Raises ValueError for an absolute path, NaN or infinity anywhere in the record."""
    for text in strings_in(record):
        if ABSOLUTE_PATH.search(text):
            raise ValueError(f"a record must not hold an absolute path: {text!r}")
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def strings_in(value: object) -> Iterable[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from strings_in(item)


def sample_record(sample: Sample, identity: Record, attempt: int) -> Record:
    """A repetition as recorded: what ran (`identity`), which one it was, and its seconds."""
    return {"kind": "sample", **identity, "attempt": attempt, **asdict(sample)}


def full_name(name: str, ran: Record) -> str:
    """What ran, as in the name of its file: `name`, and the executor unless it is the usual one.

    `ran` is a header or an identity. One that names no executor of ours has nothing to add.
    """
    executor, usual = ran.get("executor"), USUAL_EXECUTOR.get(ran.get("device", ""))
    is_usual = executor not in USUAL_EXECUTOR.values() or executor == usual
    return name if is_usual or name.endswith(f"-{executor}") else f"{name}-{executor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as read back. `end` is None while it is unfinished."""

    header: Record
    records: tuple[Record, ...]

    @property
    def run_id(self) -> str:
        return str(self.header["run"])

    @property
    def name(self) -> str:
        """Model, device and what else tells this run's file from others of its experiment."""
        return full_name(self.header["name"], self.header)

    @property
    def end(self) -> Record | None:
        return next((r for r in reversed(self.records) if r["kind"] == "end"), None)

    @property
    def is_complete(self) -> bool:
        return self.end is not None and self.end["status"] == "complete"

    @property
    def checks(self) -> list[Record]:
        """The A/A check of each attempt, in order."""
        return [r for r in self.records if r["kind"] == "aa"]

    def samples(self, attempt: int) -> list[Sample]:
        """The repetitions of one attempt; one that was measured twice counts as measured last."""
        latest: dict[tuple[int, str, str], Sample] = {}
        for record in self.records:
            if record["kind"] == "sample" and record["attempt"] == attempt:
                sample = Sample(**{name: record[name] for name in Sample.__dataclass_fields__})
                latest[sample.round, sample.group, sample.arm] = sample
        return list(latest.values())

    @property
    def final_samples(self) -> list[Sample]:
        """The repetitions of the attempt that stands: the last one that was made."""
        attempts = [r["attempt"] for r in self.records if r["kind"] == "sample"]
        return self.samples(max(attempts)) if attempts else []


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """All usable records of a file, and a line for each reason for which some were skipped."""
    records: list[Record] = []
    reasons: dict[str, list[int]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            records.append(decode(line))
        except ValueError as error:
            reasons.setdefault(str(error), []).append(number)
    skipped = [f"{path.name}, {lines_text(at)} skipped: {why}" for why, at in reasons.items()]
    return records, skipped


def lines_text(numbers: Sequence[int]) -> str:
    first, num_more = numbers[0], len(numbers) - 1
    return f"lines {first} and {num_more:,} more" if num_more else f"line {first}"


def decode(line: bytes) -> Record:
    """Inverse of `encode`. Raises ValueError saying why the line cannot be used."""
    if not line.endswith(b"\n"):
        raise ValueError("it is not finished")
    try:
        record = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(record, dict) or record.get("kind") not in KINDS:
        raise ValueError("it is not a record of nanoserve")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"it has schema {record.get('schema')}, this version reads {SCHEMA}")
    wanted = {**COMMON_FIELDS, **FIELDS.get(record["kind"], {})}
    if missing := [name for name in wanted if not isinstance(value_at(record, name), wanted[name])]:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}, or has them in another form")
    if not all(isinstance(value, NUMBER) for value in record.get("seconds", {}).values()):
        raise ValueError("its seconds are not numbers")
    return record


def refuse_constant(name: str) -> float:
    """Python's reader would take NaN and infinity, which are no JSON."""
    raise ValueError(name)


def value_at(record: object, name: str) -> object:
    """What `name`, dotted where it leads into objects, stands for; `ABSENT` if for nothing."""
    for part in name.split("."):
        record = record.get(part, ABSENT) if isinstance(record, dict) else ABSENT
    return record


def read_runs(path: Path) -> tuple[list[Run], list[str]]:
    """The runs of a file in the order in which they began; records without a header are skipped."""
    records, skipped = read_records(path)
    headers = {record["run"]: record for record in records if record["kind"] == "run"}
    members: dict[str, list[Record]] = {run_id: [] for run_id in headers}
    orphans = 0
    for record in records:
        if record["run"] not in members:
            orphans += 1
        elif record["kind"] != "run":
            members[record["run"]].append(record)
    if orphans:
        skipped.append(f"{path.name}: {orphans} records skipped: their run has no header")
    return [Run(header=headers[i], records=tuple(members[i])) for i in headers], skipped


def find_runs(results: Path, experiment: str) -> tuple[list[Run], list[str]]:
    """The last complete run of every file of `experiment` below `results`, in order of path."""
    found: list[Run] = []
    skipped: list[str] = []
    for path in sorted(results.glob(f"*/{experiment}-*.jsonl")):
        runs, notes = read_runs(path)
        skipped += notes
        found += [run for run in runs if run.is_complete][-1:]
    return found, skipped
