"""What a `batching` run says: how much longer static batching takes, why, and if that was foreseen.

A makespan is the time from the burst to the last token; the gain is static over continuous, inside
rounds. Computed over asked counts decode rows: what static batching computes for requests that are
finished already. The predicted gain comes from simulated schedules and separately timed steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.bench.findings import (
    AACheck,
    Table,
    aa_from_record,
    counted,
    duration_text,
    interval_text,
    machine_name,
    off,
    times,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import Sample, paired_ratios
from nanoserve.bench.metrics import Distribution, describe, median
from nanoserve.bench.record import Run

STATIC, CONTINUOUS = "static", "continuous"
LATENCIES = ("latency mean", "latency p95", "ttft mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyForecast:
    """One policy on one workload, simulated without a model."""

    makespan_s: float
    num_steps: int
    computed_rows: int
    asked_rows: int

    @property
    def waste(self) -> float:
        """Decode rows computed per token asked for."""
        return self.computed_rows / self.asked_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Both policies as they ran. `latency_s` maps "latency mean" and so on to [static, continuous].

    A percentile is absent where there were too few requests for one.
    """

    static_s: Distribution
    continuous_s: Distribution
    gain: Distribution
    latency_s: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFindings:
    """One workload over so many slots. `measured` None: it was simulated only."""

    name: str
    workload: str
    transform: str
    slots: int
    num_requests: int
    num_output_tokens: int
    is_main: bool
    is_control: bool
    arithmetic_waste: float
    static: PolicyForecast
    continuous: PolicyForecast
    measured: Measured | None

    @property
    def predicted_gain(self) -> float:
        return self.static.makespan_s / self.continuous.makespan_s

    @property
    def reached(self) -> float | None:
        """Measured over predicted gain."""
        return None if self.measured is None else self.measured.gain.median / self.predicted_gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One request in its slot, in measured seconds: done at `end_s`, the slot free at `freed_s`."""

    slot: int
    start_s: float
    end_s: float
    freed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingFindings:
    """Everything the batching experiment concludes. `bars` are of the main case, by policy."""

    run: Run
    cases: tuple[CaseFindings, ...]
    check: AACheck
    bars: dict[str, tuple[Bar, ...]]

    @property
    def main(self) -> CaseFindings:
        return next(case for case in self.cases if case.is_main)

    @property
    def control(self) -> CaseFindings:
        return next(case for case in self.cases if case.is_control)

    @property
    def others(self) -> list[CaseFindings]:
        """Further workloads, over the main case's slots."""
        main = self.main
        return [
            case
            for case in self.cases
            if case.slots == main.slots and not case.is_main and not case.is_control
        ]

    @property
    def by_slots(self) -> list[CaseFindings]:
        """The main workload, fewest slots first."""
        same = [case for case in self.cases if case.workload == self.main.workload]
        return sorted(same, key=lambda case: case.slots)

    @property
    def control_is_even(self) -> bool | None:
        """Whether equal lengths show no difference beyond the noise; None where that is unknown."""
        effect, measured = self.check.smallest_effect, self.control.measured
        if effect is None or measured is None:
            return None
        return abs(measured.gain.median - 1) <= effect


def batching_findings(run: Run) -> BatchingFindings:
    """All conclusions of one complete run of the batching experiment."""
    samples = run.final_samples
    cases = tuple(
        case_findings(name, values, samples) for name, values in run.header["cases"].items()
    )
    main = next(case for case in cases if case.is_main)
    return BatchingFindings(
        run=run,
        cases=cases,
        check=aa_from_record(run.checks[-1]),
        bars={
            policy: timeline(run.header["spans"][policy], samples, main.name, policy)
            for policy in (STATIC, CONTINUOUS)
        },
    )


def case_findings(name: str, values: dict[str, Any], samples: Sequence[Sample]) -> CaseFindings:
    """One case of a run, from its header's entry and the samples."""
    predicted = {policy: PolicyForecast(**entry) for policy, entry in values["predicted"].items()}
    return CaseFindings(
        name=name,
        **{
            key: values[key]
            for key in (
                "workload",
                "transform",
                "slots",
                "num_requests",
                "num_output_tokens",
                "is_main",
                "is_control",
                "arithmetic_waste",
            )
        },
        static=predicted[STATIC],
        continuous=predicted[CONTINUOUS],
        measured=measured_case(name, samples) if values["is_measured"] else None,
    )


def measured_case(name: str, samples: Sequence[Sample]) -> Measured:
    """Makespans, their ratio inside rounds, and the latencies of one case."""
    own = [sample for sample in samples if sample.group == name]
    makespans = counted(own, "makespan")
    latencies = {}
    for part in LATENCIES:
        found = counted(own, part)
        if (name, STATIC) in found:
            latencies[part] = (median(found[name, STATIC]), median(found[name, CONTINUOUS]))
    return Measured(
        static_s=describe(makespans[name, STATIC]),
        continuous_s=describe(makespans[name, CONTINUOUS]),
        gain=describe(paired_ratios(own, STATIC, CONTINUOUS, "makespan")),
        latency_s=latencies,
    )


def timeline(
    spans: Sequence[Sequence[int]], samples: Sequence[Sample], case: str, policy: str
) -> tuple[Bar, ...]:
    """The slots of one policy as its first counted run went, by slot and time.

    A slot is freed when the step ends in which the last of its batch does.
    """
    seconds = next(
        s.seconds for s in samples if (s.group, s.arm) == (case, policy) and not s.dropped
    )
    ends_s = {last: seconds[f"end {request}"] for request, _, _, last, _ in spans}
    bars = [
        Bar(
            slot=slot,
            start_s=seconds[f"start {request}"],
            end_s=seconds[f"end {request}"],
            freed_s=ends_s[freed],
        )
        for request, slot, _, _, freed in spans
    ]
    return tuple(sorted(bars, key=lambda bar: (bar.slot, bar.start_s)))


# --- tables and sentences -------------------------------------------------------------------------


def gain_table(findings: BatchingFindings) -> Table:
    """Every case: rows per token (static against continuous), makespans, gain, prediction."""
    heads = [
        "workload",
        "slots",
        "rows/token",
        "arithmetic",
        "static s",
        "cont. s",
        "gain",
        "95 %",
        "predicted",
    ]
    return heads, [case_row(case) for case in findings.cases]


def case_row(case: CaseFindings) -> list[str]:
    row = [
        case.workload,
        str(case.slots),
        f"{case.static.waste:.2f} / {case.continuous.waste:.2f}",
        f"{case.arithmetic_waste:.2f}",
    ]
    predicted = times(case.predicted_gain)
    measured = case.measured
    if measured is None:
        return [*row, "-", "-", "-", "simulated only", predicted]
    return [
        *row,
        seconds_marked(measured.static_s),
        seconds_marked(measured.continuous_s),
        times(measured.gain.median),
        interval_text(measured.gain),
        f"{predicted} ({off(case.predicted_gain, measured.gain.median)})",
    ]


def seconds_marked(distribution: Distribution) -> str:
    value = distribution.median
    text = f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{text} {distribution.mark}" if distribution.mark else text


def latency_table(findings: BatchingFindings) -> Table:
    """Mean and p95 latency, and the mean time to the first token: static / continuous, seconds."""
    heads = ["workload", "slots", *LATENCIES]
    rows = []
    for case in findings.cases:
        if case.measured is not None:
            row = [case.workload, str(case.slots)]
            for part in LATENCIES:
                both = case.measured.latency_s.get(part)
                row.append("-" if both is None else f"{both[0]:.2f} / {both[1]:.2f}")
            rows.append(row)
    return heads, rows


def transforms_text(findings: BatchingFindings) -> str:
    """How each workload came about, once each; and what the rows of finished requests skip."""
    transforms = {case.workload: case.transform for case in findings.cases}
    named = "; ".join(f"{name} = {text}" for name, text in transforms.items())
    return (
        f"Workloads: {named}. Rows that static batching computes for finished requests pass every "
        "layer but not the head, since nobody would read their logits: a static batcher that "
        "samples them too loses more than is shown here."
    )


def batching_paragraph(findings: BatchingFindings) -> str:
    """What the numbers mean on this machine: gain, cause, latency, the other cases, the control."""
    main, header = findings.main, findings.run.header
    costs = header["step_costs"]
    return " ".join(
        [
            f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}: "
            f"{main.num_requests} requests that arrive at once ({main.workload}) share "
            f"{main.slots} slots, a step has at most {header['setup']['max_num_batched_tokens']} "
            "token rows.",
            f"Static batching keeps a slot until its whole batch is done: it computes "
            f"{main.static.waste:.2f} decode rows for each token asked for (longest over mean "
            f"output of its batches: {main.arithmetic_waste:.2f}), continuous batching "
            f"{main.continuous.waste:.2f}.",
            *gain_sentences(main),
            *other_sentences(findings),
            control_sentence(findings),
            f"Predictions simulate the scheduler without a model; {costs['num_steps']} single "
            f"steps, timed beforehand, say what a step costs, to {costs['median_error']:.0%} in "
            "the median.",
        ]
    )


def gain_sentences(case: CaseFindings) -> list[str]:
    """Makespans and latencies of one case that was measured."""
    measured = case.measured
    if measured is None:
        return [f"Not measured; a gain of {times(case.predicted_gain)} is predicted."]
    sentences = [
        f"The burst takes {duration_text(measured.static_s.median)} static and "
        f"{duration_text(measured.continuous_s.median)} continuous, "
        f"{times(measured.gain.median)} less (predicted {times(case.predicted_gain)}, "
        f"{off(case.predicted_gain, measured.gain.median)})."
    ]
    if "latency mean" in measured.latency_s:
        static_s, continuous_s = measured.latency_s["latency mean"]
        sentences.append(
            f"The mean request is done after {duration_text(continuous_s)} instead of "
            f"{duration_text(static_s)}."
        )
    return sentences


def other_sentences(findings: BatchingFindings) -> list[str]:
    """The other workloads, and the main one over more slots."""
    sentences = []
    for case in findings.others:
        gain = "not measured" if case.measured is None else times(case.measured.gain.median)
        sentences.append(
            f"{case.workload}: {gain}, predicted {times(case.predicted_gain)} (static computes "
            f"{case.static.waste:.2f} rows a token)."
        )
    widest = findings.by_slots[-1]
    if widest.slots > findings.main.slots:
        gain = times(
            widest.predicted_gain if widest.measured is None else widest.measured.gain.median
        )
        how = "predicted" if widest.measured is None else "measured"
        sentences.append(f"Over {widest.slots} slots the gain is {gain} ({how}).")
    return sentences


def control_sentence(findings: BatchingFindings) -> str:
    """What equal lengths show, and what the A/A arm allows to be claimed."""
    measured, effect = findings.control.measured, findings.check.smallest_effect
    if measured is None:
        return "The control of equal lengths was not measured."
    said = f"Where all lengths are equal the ratio is {measured.gain.median:.3f}"
    if effect is None:
        return f"{said}; there were too few repetitions to say how small a difference is noise."
    verdict = "which is noise" if findings.control_is_even else "more than noise explains"
    return f"{said}, {verdict}: differences under {effect:.1%} are."


def batching_numbers(findings: BatchingFindings) -> dict[str, str]:
    """What prose may quote."""
    main = findings.main
    numbers = {
        "slots": str(main.slots),
        "requests": str(main.num_requests),
        "static_waste": f"{main.static.waste:.2f}",
        "continuous_waste": f"{main.continuous.waste:.2f}",
        "predicted_gain": times(main.predicted_gain),
        "paragraph": batching_paragraph(findings),
    }
    if main.measured is not None:
        numbers["gain"] = times(main.measured.gain.median)
    return numbers
