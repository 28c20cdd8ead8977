"""What a `peers` run says: how long each engine takes, as a multiple of ours, and who is ahead.

Ratios are theirs over ours, paired inside a round, within one cell and one precision: above 1 ours
is faster. A lead or a lag is claimed only where the interval of the ratio lies beyond what the A/A
arm showed to be noise. Goals are data here, so that a run says by how much each is met or missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanoserve.bench.findings import (
    Table,
    aa_from_record,
    counted,
    interval_text,
    machine_name,
    marked,
    milliseconds,
    noise_sentence,
    off,
    times,
)
from nanoserve.bench.findings.roofline import GOALS as FLOOR_GOALS
from nanoserve.bench.measure import FAILED, Sample, paired_ratios
from nanoserve.bench.metrics import Distribution, describe
from nanoserve.bench.peers.face import PART, Cell
from nanoserve.bench.record import Record, Run

OURS = "nanoserve"
FAMILIES = ("float32", "bfloat16", "int8", "int4")
NOTHING = "-"

Verdict = Literal["ahead", "behind", "level"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How many times as long as ours a peer should take, at least."""

    peer: str
    family: str
    cell: str
    ratio: float


def goals_against(peer: str, family: str, **ratios: float) -> list[Goal]:
    return [
        Goal(peer=peer, family=family, cell=GOAL_CELLS[name], ratio=ratio)
        for name, ratio in ratios.items()
    ]


GOAL_CELLS = {
    "b1": "decode, batch 1",
    "b8": "decode, batch 8",
    "b32": "decode, batch 32",
    "p512": "prefill 512, all logits",
}

GOALS: tuple[Goal, ...] = (
    *goals_against("OpenVINO", "float32", b1=1.2, b8=1.2, b32=1.4, p512=1.15),
    *goals_against("OpenVINO", "bfloat16", b1=1.3, b8=1.35, b32=1.55, p512=1.1),
    *goals_against("OpenVINO", "int8", b1=1.6, b8=1.6, b32=1.7, p512=1.6),
    *goals_against("llama.cpp", "int4", b1=1.6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One engine in one cell. `ratio` is its time over ours, None for ours."""

    name: str
    family: str
    cell: str
    step: Distribution
    ratio: Distribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Ours at batch 1 against the time its bytes take at the bandwidth measured in that round."""

    family: str
    step_s: float
    floor_s: float
    ratio: Distribution
    goal: float

    @property
    def is_possible(self) -> bool:
        """False where memory seems to be read faster than it can be: the probe fell short."""
        return self.ratio.median >= 1

    @property
    def verdict(self) -> str:
        if not self.is_possible:
            return "the probe fell short"
        excess = self.ratio.median / self.goal - 1
        return "met" if excess <= 0 else f"missed by {excess:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFindings:
    """Everything the experiment concludes. `smallest_effect` None: too few rounds to say."""

    run: Run
    cells: tuple[str, ...]
    timings: tuple[Timing, ...]
    floors: tuple[Floor, ...]
    failures: tuple[tuple[str, str, str], ...]
    smallest_effect: float | None

    def timing(self, name: str, family: str, cell: str) -> Timing | None:
        return next(
            (t for t in self.timings if (t.name, t.family, t.cell) == (name, family, cell)), None
        )

    def rivals(self, family: str, cell: str) -> list[Timing]:
        """Engines of others in one place, the fastest first."""
        found = [
            t
            for t in self.timings
            if (t.family, t.cell) == (family, cell) and not t.name.startswith(OURS)
        ]
        return sorted(found, key=lambda t: ratio_of(t).median)

    def verdict(self, ratio: Distribution) -> Verdict:
        """Of ours, beyond noise; without an interval, by the quartiles."""
        noise = self.smallest_effect or 0.0
        interval = ratio.interval
        low, high = (ratio.q1, ratio.q3) if interval is None else (interval.low, interval.high)
        if low > 1 + noise:
            return "ahead"
        return "behind" if high < 1 - noise else "level"

    @property
    def duels(self) -> list[tuple[Timing, Verdict]]:
        """Of every cell and precision the fastest rival, and how ours stands against it."""
        fastest = [
            rivals[0]
            for cell in self.cells
            for family in FAMILIES
            if (rivals := self.rivals(family, cell))
        ]
        return [(timing, self.verdict(ratio_of(timing))) for timing in fastest]


def ratio_of(timing: Timing) -> Distribution:
    """Theirs over ours."""
    assert timing.ratio is not None, "ours has no ratio to itself"
    return timing.ratio


def peer_findings(run: Run) -> PeerFindings:
    """All conclusions of one complete run of the peers experiment."""
    samples = run.final_samples
    cells = [Cell(**cell).name for cell in run.header["setup"]["cells"]]
    return PeerFindings(
        run=run,
        cells=tuple(cells),
        timings=tuple(timings_of(samples)),
        floors=tuple(floors_of(run, samples)),
        failures=tuple(failures_of(samples)),
        smallest_effect=aa_from_record(run.checks[-1]).smallest_effect,
    )


def timings_of(samples: Sequence[Sample]) -> list[Timing]:
    """Of every engine and cell that was timed at least once."""
    labels = {sample.group: sample.labels for sample in samples if "cell" in sample.labels}
    by_group: dict[str, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group, []).append(sample)
    found = []
    for (group, arm), seconds in counted(samples, PART).items():
        ratios = paired_ratios(by_group[group], arm, OURS, PART)
        if arm.endswith(" again") or not ratios:
            continue
        found.append(
            Timing(
                name=arm,
                family=labels[group]["family"],
                cell=labels[group]["cell"],
                step=describe(seconds),
                ratio=None if arm == OURS else describe(ratios),
            )
        )
    return found


def floors_of(run: Run, samples: Sequence[Sample]) -> list[Floor]:
    """Of each precision of ours at batch 1, rounds paired with that round's bandwidth."""
    rates = {
        s.round: s.labels["amount"] / s.seconds["run"]
        for s in samples
        if s.labels.get("unit") == "bytes" and not s.dropped
    }
    found = []
    for family, goal in FLOOR_GOALS.items():
        group = f"{GOAL_CELLS['b1']}, {family}"
        steps = {
            s.round: s.seconds[PART]
            for s in samples
            if (s.group, s.arm) == (group, OURS) and not s.dropped and PART in s.seconds
        }
        rounds = sorted(steps.keys() & rates.keys())
        if not rounds:
            continue
        num_bytes = run.header["predictions"][group]["num_bytes"]
        floors = [num_bytes / rates[number] for number in rounds]
        found.append(
            Floor(
                family=family,
                step_s=describe([steps[number] for number in rounds]).median,
                floor_s=describe(floors).median,
                ratio=describe(
                    [steps[number] / floor for number, floor in zip(rounds, floors, strict=True)]
                ),
                goal=goal,
            )
        )
    return found


def failures_of(samples: Sequence[Sample]) -> list[tuple[str, str, str]]:
    """(engine, precision, reason) of those that failed while they were measured."""
    found = {
        (sample.arm, sample.labels["family"]): sample.labels[FAILED]
        for sample in samples
        if FAILED in sample.labels and not sample.arm.endswith(" again")
    }
    return [(arm, family, reason) for (arm, family), reason in found.items()]


# --- tables ---------------------------------------------------------------------------------------


def entrants_of(findings: PeerFindings) -> list[Record]:
    entrants: list[Record] = findings.run.header["entrants"]
    return sorted(entrants, key=lambda e: FAMILIES.index(e["family"]))


def peers_table(findings: PeerFindings) -> Table:
    """A row an engine and precision: milliseconds in each cell, and how many times ours."""
    rows = [
        [
            entrant["family"],
            entrant["name"],
            *(cell_text(findings, entrant, cell) for cell in findings.cells),
        ]
        for entrant in entrants_of(findings)
        if any(findings.timing(entrant["name"], entrant["family"], c) for c in findings.cells)
    ]
    return ["precision", "engine", *(f"{cell} ms" for cell in findings.cells)], rows


def cell_text(findings: PeerFindings, entrant: Record, cell: str) -> str:
    timing = findings.timing(entrant["name"], entrant["family"], cell)
    if timing is None:
        return NOTHING
    if timing.ratio is not None:
        return f"{marked(timing.step)} ({times(timing.ratio.median)})"
    predicted = findings.run.header["predictions"][f"{cell}, {timing.family}"]["step_s"]
    return f"{marked(timing.step)} (predicted {milliseconds(predicted)}, " + (
        f"{off(predicted, timing.step.median)})"
    )


def goals_table(findings: PeerFindings) -> Table:
    """Each goal whose peer and cell were measured, and what came of it."""
    heads = ["precision", "against", "cell", "wanted", "measured", "interval", ""]
    return heads, [
        [
            goal.family,
            goal.peer,
            goal.cell,
            times(goal.ratio),
            times(ratio.median),
            interval_text(ratio),
            met(ratio.median, goal.ratio),
        ]
        for goal, ratio in measured_goals(findings)
    ]


def measured_goals(findings: PeerFindings) -> list[tuple[Goal, Distribution]]:
    """Goals with the ratio that was measured; without those that this run cannot judge."""
    return [
        (goal, ratio_of(timing))
        for goal in GOALS
        if (timing := findings.timing(goal.peer, goal.family, goal.cell)) is not None
    ]


def met(measured: float, wanted: float) -> str:
    """Whether a ratio that should be large is, else by how much it misses."""
    return "met" if measured >= wanted else f"missed by {1 - measured / wanted:.0%}"


def floors_table(findings: PeerFindings) -> Table:
    """Ours at batch 1 against what its bytes take."""
    heads = ["precision", "step ms", "floor ms", "step / floor", "interval", "at most", ""]
    return heads, [
        [
            floor.family,
            milliseconds(floor.step_s),
            milliseconds(floor.floor_s),
            times(floor.ratio.median),
            interval_text(floor.ratio),
            times(floor.goal),
            floor.verdict,
        ]
        for floor in findings.floors
    ]


def entrants_table(findings: PeerFindings) -> Table:
    """Who ran, how close its logits are to ours in fp32, and who did not run and why."""
    heads = ["precision", "engine", "version", "largest logit error", "same next token", "state"]
    return heads, [
        [
            entrant["precision"],
            entrant["name"],
            entrant.get("described", {}).get("version", NOTHING),
            f"{entrant['error']:.2g} sd" if "error" in entrant else NOTHING,
            f"{entrant['agreement']:.0%}" if "agreement" in entrant else NOTHING,
            state(findings, entrant),
        ]
        for entrant in entrants_of(findings)
    ]


def state(findings: PeerFindings, entrant: Record) -> str:
    """What became of it."""
    if entrant["gap"]:
        return str(entrant["gap"])
    failed = {(name, family): reason for name, family, reason in findings.failures}
    reason = failed.get((entrant["name"], entrant["family"]))
    return f"failed: {reason}" if reason else "ran"


def settings_table(findings: PeerFindings) -> Table:
    """With what each ran: whatever differs from its own defaults, and what it chose itself."""
    return ["precision", "engine", "settings"], [
        [
            entrant["precision"],
            entrant["name"],
            "; ".join(f"{key}: {value}" for key, value in entrant["described"].items()),
        ]
        for entrant in entrants_of(findings)
        if "described" in entrant
    ]


# --- in words -------------------------------------------------------------------------------------


def peers_paragraph(findings: PeerFindings) -> str:
    """Where ours is ahead of everybody, where not and by how much, and the goals."""
    run = findings.run
    threads = run.header["setup"]["engine"]["threads"]
    return " ".join(
        [
            f"On this machine, {machine_name(run)}, with {run.header['model']} "
            f"({run.header['weights']} weights) on {threads} thread{'s' * (threads != '1')}, "
            "each engine in its own process:",
            *standing_sentences(findings),
            *goal_sentences(findings),
            *floor_sentences(findings),
            *absence_sentences(findings),
            noise_sentence(run),
        ]
    )


def standing_sentences(findings: PeerFindings) -> list[str]:
    """Against the fastest rival of each cell and precision."""
    duels = findings.duels
    if not duels:
        return ["no other engine was there to compare with."]
    ahead, behind, level = (
        [timing for timing, verdict in duels if verdict == wanted]
        for wanted in ("ahead", "behind", "level")
    )
    sentences = [
        f"nanoserve is ahead of the fastest rival in {len(ahead)} of {len(duels)} comparisons "
        "(cell and precision)" + (f", from {extremes(ahead)}." if ahead else ".")
    ]
    if behind:
        sentences.append(f"It is behind in {len(behind)}: {listed(behind)}.")
    if level:
        sentences.append(f"No difference beyond noise: {listed(level)}.")
    return sentences


def extremes(ahead: Sequence[Timing]) -> str:
    """The smallest and the largest lead."""
    ordered = sorted(ahead, key=lambda timing: ratio_of(timing).median)
    texts = [
        f"{times(ratio_of(t).median)} ({t.cell}, {t.family}, {t.name})"
        for t in (ordered[0], ordered[-1])
    ]
    return " to ".join(dict.fromkeys(texts))


def listed(timings: Sequence[Timing]) -> str:
    return "; ".join(
        f"{t.cell}, {t.family}: {t.name} takes {times(ratio_of(t).median)} as long" for t in timings
    )


def goal_sentences(findings: PeerFindings) -> list[str]:
    measured = [(goal, ratio.median) for goal, ratio in measured_goals(findings)]
    if not measured:
        return []
    missed = [
        f"{goal.family} {goal.cell} against {goal.peer} {times(ratio)} of {times(goal.ratio)}"
        for goal, ratio in measured
        if ratio < goal.ratio
    ]
    text = f"Of {len(measured)} goals against OpenVINO and llama.cpp {len(measured) - len(missed)} "
    return [text + ("are met; not: " + "; ".join(missed) + "." if missed else "are met.")]


def floor_sentences(findings: PeerFindings) -> list[str]:
    if not findings.floors:
        return []
    said = ", ".join(f"{f.family} {times(f.ratio.median)}" for f in findings.floors)
    sentences = [f"Its step of one sequence, as a multiple of what its bytes take to read: {said}."]
    if not all(floor.is_possible for floor in findings.floors):
        sentences.append(
            "Below 1 memory would be faster than it is: the read probe, once a round, fell short "
            "here, and nothing follows from these (the roofline experiment reads more often)."
        )
    return sentences


def absence_sentences(findings: PeerFindings) -> list[str]:
    """Who is missing, so that no silence is taken for a victory."""
    gone = [f"{e['name']} {e['precision']}" for e in entrants_of(findings) if e["gap"]]
    sentences = [f"Not measured: {', '.join(gone)}."] if gone else []
    if findings.failures:
        names = ", ".join(f"{name} {family}" for name, family, _ in findings.failures)
        sentences.append(f"Failed while measured: {names}.")
    return sentences


def peers_numbers(findings: PeerFindings) -> dict[str, str]:
    """What prose may quote."""
    duels = findings.duels
    return {
        "comparisons": str(len(duels)),
        "ahead": str(sum(verdict == "ahead" for _, verdict in duels)),
        "behind": str(sum(verdict == "behind" for _, verdict in duels)),
        "paragraph": peers_paragraph(findings),
    }
