"""Two recorded results held together: two machines, two commits, two executors.

`nanoserve bench compare A B` takes folders or files. The last complete runs of the same experiment
are paired cell by cell (group, arm, timed part). The two were not measured in turns, so a
difference is claimed only if the intervals of both medians leave no room for less, and only beyond
what either run's own A/A arm showed to be noise. What is not shown is counted, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table as RichTable

from nanoserve.bench.findings import Table, aa_from_record, machine_name, milliseconds, times
from nanoserve.bench.metrics import Distribution, Interval, describe
from nanoserve.bench.record import Run, read_runs
from nanoserve.bench.session import Screen

USAGE_TEXT = "usage: nanoserve bench compare A B (two folders or files of results)"
OF_ONE_REQUEST = re.compile(r" \d+$")
"""A part whose name ends in a number is the time of one request: a timeline, no cell."""

Cell = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One cell in both runs, in seconds; `ratio` is B over A, with the widest it may be."""

    cell: Cell
    a: Distribution
    b: Distribution
    ratio: float
    interval: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs of one experiment. `left_out` counts cells by the reason why they are not shown."""

    name: str
    a: Run
    b: Run
    noise: float
    differences: tuple[Difference, ...]
    left_out: Mapping[str, int]


# --- reading --------------------------------------------------------------------------------------


def last_runs(path: Path) -> tuple[dict[tuple[str, str], Run], list[str]]:
    """The last complete run of every file by (experiment, name), and lines that were skipped.

    A folder is a machine's, or holds those of machines. Raises ValueError if nothing is there.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: {USAGE_TEXT}")
    files = [path] if path.is_file() else sorted([*path.glob("*.jsonl"), *path.glob("*/*.jsonl")])
    found: dict[tuple[str, str], Run] = {}
    skipped: list[str] = []
    for file in files:
        runs, notes = read_runs(file)
        skipped += notes
        for run in [run for run in runs if run.is_complete][-1:]:
            found[key_of(run, found)] = run
    if not found:
        raise ValueError(f"{path} holds no complete run: give a folder or a file of results")
    return found, skipped


def key_of(run: Run, taken: Mapping[tuple[str, str], Run]) -> tuple[str, str]:
    """Experiment and name; where a folder holds several machines, the machine too."""
    scale = " --quick" if run.header["setup"]["quick"] else ""
    key = (run.header["experiment"], run.name + scale)
    return key if key not in taken else (key[0], f"{key[1]} on {machine_name(run)}")


def paired(
    ours: Mapping[tuple[str, str], Run], theirs: Mapping[tuple[str, str], Run]
) -> tuple[list[tuple[str, Run, Run]], list[str]]:
    """Runs of the same experiment and name; a line for each that has no partner.

    Two single files of one experiment are partners whatever their names. Raises ValueError if
    there is nothing in common.
    """
    if len(ours) == len(theirs) == 1:
        (mine,), (yours,) = ours, theirs
        if mine[0] == yours[0]:
            name = mine[1] if mine == yours else f"{mine[1]} / {yours[1]}"
            return [(f"{mine[0]} {name}", ours[mine], theirs[yours])], []
    common = [key for key in ours if key in theirs]
    if not common:
        raise ValueError(f"nothing in common: A has {names_text(ours)}; B has {names_text(theirs)}")
    alone = [f"only in A: {' '.join(key)}" for key in ours if key not in theirs]
    alone += [f"only in B: {' '.join(key)}" for key in theirs if key not in ours]
    return [(" ".join(key), ours[key], theirs[key]) for key in common], alone


def names_text(runs: Mapping[tuple[str, str], Run]) -> str:
    return ", ".join(" ".join(key) for key in runs)


# --- comparing ------------------------------------------------------------------------------------


def cells_of(run: Run) -> dict[Cell, Distribution]:
    """Every timed part of every arm, dropped rounds and single requests left out."""
    seconds: dict[Cell, list[float]] = {}
    for sample in run.final_samples:
        if not sample.dropped:
            for part, value in sample.seconds.items():
                if not OF_ONE_REQUEST.search(part):
                    seconds.setdefault((sample.group, sample.arm, part), []).append(value)
    return {cell: describe(values) for cell, values in seconds.items() if min(values) > 0}


def noise_of(run: Run) -> float:
    """The smallest difference that the run's own A/A arm lets anyone claim."""
    return aa_from_record(run.checks[-1]).smallest_effect or 0.0


def compare(name: str, a: Run, b: Run) -> Pair:
    """All cells of two runs, and those that differ for sure."""
    ours, theirs = cells_of(a), cells_of(b)
    noise = max(noise_of(a), noise_of(b))
    left_out = {
        "in one of the two alone": len(ours.keys() ^ theirs.keys()),
        "too few rounds for an interval": 0,
        "unsteady (marked invalid)": 0,
        "within the noise": 0,
    }
    differences = []
    for cell in (cell for cell in ours if cell in theirs):
        reason, difference = judge(cell, ours[cell], theirs[cell], noise)
        if difference is None:
            left_out[reason] += 1
        else:
            differences.append(difference)
    return Pair(name=name, a=a, b=b, noise=noise, differences=tuple(differences), left_out=left_out)


def judge(
    cell: Cell, a: Distribution, b: Distribution, noise: float
) -> tuple[str, Difference | None]:
    """("", difference) if it is one for sure, else (reason, None)."""
    if a.interval is None or b.interval is None:
        return "too few rounds for an interval", None
    if "invalid" in (a.mark, b.mark):
        return "unsteady (marked invalid)", None
    widest = Interval(low=b.interval.low / a.interval.high, high=b.interval.high / a.interval.low)
    if widest.low <= 1 + noise and widest.high >= 1 - noise:
        return "within the noise", None
    ratio = b.median / a.median
    return "", Difference(cell=cell, a=a, b=b, ratio=ratio, interval=widest)


# --- showing --------------------------------------------------------------------------------------


def pair_table(pair: Pair) -> Table:
    """Every difference: milliseconds of both, B over A, and the widest interval of that."""
    heads = ["group", "arm", "part", "A ms", "B ms", "B / A", "at least - at most"]
    return heads, [
        [
            *difference.cell,
            milliseconds(difference.a.median),
            milliseconds(difference.b.median),
            times(difference.ratio),
            f"{times(difference.interval.low)[:-1]}-{times(difference.interval.high)}",
        ]
        for difference in pair.differences
    ]


def pair_lines(pair: Pair) -> list[str]:
    """What is compared with what, and what is not shown and why."""
    left_out = [f"{count} {reason}" for reason, count in pair.left_out.items() if count]
    return [
        f"{pair.name}: differences beyond {pair.noise:.1%}, which either run's A/A arm calls noise",
        f"  A: {describe_run(pair.a)}",
        f"  B: {describe_run(pair.b)}",
        *(f"  they differ in {', '.join(what)}" for what in [differing(pair)] if what),
        f"  left out: {'; '.join(left_out) or 'nothing'}",
    ]


def describe_run(run: Run) -> str:
    header, software = run.header, run.header["setup"]["machine"]["software"]
    what = f"{header.get('executor')}, {header.get('dtype', 'no dtype')}"
    commit = software.get("commit") or "an installed package"
    return f"run {run.run_id}, {machine_name(run)}, {what}, commit {commit}"


def differing(pair: Pair) -> list[str]:
    """What of both runs is not the same, beyond machine and commit."""
    names = ("model", "weights", "executor", "kernels", "device", "dtype", "tokens_sha256")
    different = [n for n in names if pair.a.header.get(n) != pair.b.header.get(n)]
    engines = [run.header["setup"].get("engine", {}).get("threads") for run in (pair.a, pair.b)]
    return [*different, *["threads"] * (engines[0] != engines[1])]


def run(arguments: Sequence[str], screen: Screen) -> int:
    """The command; its exit code. Raises ValueError for a wrong request."""
    if len(arguments) != 2 or any(text.startswith("-") for text in arguments):
        raise ValueError(USAGE_TEXT)
    (ours, skipped), (theirs, also_skipped) = (last_runs(Path(text)) for text in arguments)
    for line in [*skipped, *also_skipped]:
        screen.say(line)
    pairs, alone = paired(ours, theirs)
    for name, a, b in pairs:
        if a.checks and b.checks:
            show(compare(name, a, b), screen)
        else:
            screen.show(f"{name}: left out, since without an A/A arm nothing is known to be noise")
    for line in alone:
        screen.show(line)
    return 0


def show(pair: Pair, screen: Screen) -> None:
    for line in pair_lines(pair):
        screen.show(line)
    if not pair.differences:
        screen.show("  no difference that is certain\n")
        return
    heads, rows = pair_table(pair)
    made = RichTable(box=None, padding=(0, 1, 0, 2))
    for place, head in enumerate(heads):
        made.add_column(head, justify="left" if place < 3 else "right")
    for row in rows:
        made.add_row(*row)
    screen.show(made)
    screen.show("")
