"""What an `arrivals` run says: latencies and goodput by load and arm, and how well they were
predicted.

A cell is one schedule, and each request of it is a sample: percentiles are given where there are
enough requests for an interval, and left open elsewhere. A percentile of latencies is no median of
repetitions, so two arms are told apart only by more than the A/A arms differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nanoserve.bench.arrivals import Schedule
from nanoserve.bench.findings import (
    Table,
    aa_from_record,
    machine_name,
    milliseconds,
    noise_sentence,
    off,
)
from nanoserve.bench.findings.kvcache import subject
from nanoserve.bench.measure import Sample
from nanoserve.bench.metrics import (
    Goodput,
    RequestTimes,
    e2e,
    goodput,
    median,
    min_samples,
    queue_delay,
    supported_percentile,
    throughput_out,
    tpot,
    ttft,
)
from nanoserve.bench.record import Record, Run

STATIC, TIMEOUT = "static", "static, waiting"
WHOLE, CHUNKED = "continuous", "continuous, chunked"
WAITING_ARMS = (STATIC, TIMEOUT, WHOLE, CHUNKED)
"""In the order in which they are told."""

GOOD_SHARE = 0.9
"""A load is carried where at least this share of all requests meets both objectives."""

PERCENTILES = (0.9, 0.95, 0.99)
MAX_LAG_SHARE = 0.01
"""A sender that lags by more than this share of the mean gap distorts what it measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What a request must meet to be counted in goodput, and what they are multiples of."""

    factor: float
    max_ttft_s: float
    max_tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFindings:
    """One arm on one schedule. `gaps` are percentiles of all gaps between tokens, by name."""

    arm: str
    requests: tuple[RequestTimes, ...]
    gaps: Mapping[str, float]
    lag_mean_s: float
    lag_max_s: float
    predicted: Mapping[str, float]
    goodput: Goodput

    @property
    def ttfts(self) -> list[float]:
        return [ttft(request) for request in self.requests]

    @property
    def tpots(self) -> list[float]:
        return [gap for request in self.requests if (gap := tpot(request)) is not None]

    @property
    def queue_delays(self) -> list[float]:
        return [queue_delay(request) for request in self.requests]

    @property
    def tokens_per_s(self) -> float:
        return throughput_out(self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFindings:
    """One schedule and what each arm made of it."""

    name: str
    load: float
    is_swept: bool
    schedule: Schedule
    gap_cv: float
    arms: Mapping[str, ArmFindings]

    @property
    def num_requests(self) -> int:
        return len(self.schedule.arrivals)

    @property
    def mean_gap_s(self) -> float:
        return fmean(self.schedule.gaps_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalsFindings:
    """Everything the arrivals experiment concludes. `swept` are the Poisson cells, by load."""

    run: Run
    slots: int
    timeout_s: float
    budget: int
    saturation: Mapping[str, float]
    objectives: Objectives
    unloaded: Mapping[str, float]
    cells: tuple[CellFindings, ...]

    @property
    def swept(self) -> list[CellFindings]:
        return [cell for cell in self.cells if cell.is_swept]

    @property
    def others(self) -> list[CellFindings]:
        return [cell for cell in self.cells if not cell.is_swept]

    @property
    def main(self) -> CellFindings:
        """The swept cell whose distributions are shown: the last that the engine can carry."""
        below = [cell for cell in self.swept if cell.load < 0.9]
        return below[-1] if below else self.swept[0]

    @property
    def burst(self) -> CellFindings:
        """The cell whose arrivals are the most irregular."""
        return max(self.cells, key=lambda cell: cell.gap_cv)


def arrivals_findings(run: Run) -> ArrivalsFindings:
    """All conclusions of one complete run of the arrivals experiment."""
    header, setup = run.header, run.header["setup"]
    slo = header["slo"]
    objectives = Objectives(
        factor=slo["factor"], max_ttft_s=slo["ttft_s"], max_tpot_s=slo["tpot_s"]
    )
    samples = {(s.group, s.arm): s for s in run.final_samples if not s.dropped}
    return ArrivalsFindings(
        run=run,
        slots=setup["slots"],
        timeout_s=setup["batching_timeout_s"],
        budget=setup["max_num_batched_tokens"],
        saturation=setup["saturation"],
        objectives=objectives,
        unloaded=header["unloaded"],
        cells=tuple(
            read_cell(name, record, samples, objectives) for name, record in header["cells"].items()
        ),
    )


def read_cell(
    name: str,
    record: Record,
    samples: Mapping[tuple[str, str], Sample],
    objectives: Objectives,
) -> CellFindings:
    """One cell; the second of the equal arms only serves the A/A check."""
    schedule = Schedule.from_json(record["schedule"])
    return CellFindings(
        name=name,
        load=record["load"],
        is_swept=record["is_swept"],
        schedule=schedule,
        gap_cv=record["gap_cv"],
        arms={
            arm: read_arm(arm, schedule, samples[name, arm], record["predicted"][arm], objectives)
            for arm in WAITING_ARMS
        },
    )


def read_arm(
    arm: str, schedule: Schedule, sample: Sample, predicted: Record, objectives: Objectives
) -> ArmFindings:
    """What one arm's only repetition says of each request."""
    requests = request_times(schedule, sample.seconds)
    return ArmFindings(
        arm=arm,
        requests=requests,
        gaps={n: value for n, value in sample.seconds.items() if n.startswith("itl ")},
        lag_mean_s=sample.seconds["lag mean"],
        lag_max_s=sample.seconds["lag max"],
        predicted=predicted,
        goodput=goodput(
            requests,
            num_offered=len(schedule.arrivals),
            max_ttft_s=objectives.max_ttft_s,
            max_tpot_s=objectives.max_tpot_s,
        ),
    )


def request_times(schedule: Schedule, seconds: Mapping[str, float]) -> tuple[RequestTimes, ...]:
    """From the recorded ends of each request. Tokens between are put where their mean has them:
    no metric of a request depends on them, and gaps are recorded as such."""
    found = []
    for number, arrival in enumerate(schedule.arrivals):
        first_s, last_s = seconds[f"first {number}"], seconds[f"end {number}"]
        count = arrival.length.output
        step_s = (last_s - first_s) / (count - 1) if count > 1 else 0.0
        found.append(
            RequestTimes(
                arrival_s=arrival.at_s,
                first_scheduled_s=seconds[f"start {number}"],
                token_s=(*(first_s + i * step_s for i in range(count - 1)), last_s),
            )
        )
    return tuple(found)


# --- tables ---------------------------------------------------------------------------------------


def percentile_text(values: Sequence[float], share: float) -> str:
    value = supported_percentile(values, share) if values else None
    return "-" if value is None else milliseconds(value)


def latency_table(findings: ArrivalsFindings) -> Table:
    """Every cell and arm: queueing, first token and the tokens after it, in milliseconds."""
    heads = ["schedule", "n", "arm", "queue p50", "TTFT p50", "p90", "p95"]
    heads += ["TPOT p50", "p90", "ITL p99", "E2E p50"]
    return heads, [latency_row(cell, arm) for cell in findings.cells for arm in cell.arms.values()]


def latency_row(cell: CellFindings, arm: ArmFindings) -> list[str]:
    return [
        cell.name,
        str(cell.num_requests),
        arm.arm,
        milliseconds(median(arm.queue_delays)),
        *(percentile_text(arm.ttfts, share) for share in (0.5, 0.9, 0.95)),
        *(percentile_text(arm.tpots, share) for share in (0.5, 0.9)),
        milliseconds(arm.gaps["itl p99"]) if "itl p99" in arm.gaps else "-",
        milliseconds(median([e2e(request) for request in arm.requests])),
    ]


def goodput_table(findings: ArrivalsFindings) -> Table:
    """Every cell: the share of requests that met both objectives, and their number a second."""
    heads = ["schedule", "n", "requests/s", "gap CV", *WAITING_ARMS]
    return heads, [
        [
            cell.name,
            str(cell.num_requests),
            f"{cell.schedule.rate:.2f}",
            f"{cell.gap_cv:.2f}",
            *(
                f"{arm.goodput.share:.0%} ({arm.goodput.requests_per_s:.2f}/s)"
                for arm in cell.arms.values()
            ),
        ]
        for cell in findings.cells
    ]


def throughput_table(findings: ArrivalsFindings) -> Table:
    """Every cell: output tokens per second, from the first arrival to the last token."""
    heads = ["schedule", "load", *WAITING_ARMS]
    return heads, [
        [cell.name, f"{cell.load:g}", *(f"{arm.tokens_per_s:,.0f}" for arm in cell.arms.values())]
        for cell in findings.cells
    ]


def prediction_table(findings: ArrivalsFindings) -> Table:
    """Every cell and arm: TTFT as simulated before the run, as measured, and the error."""
    heads = ["schedule", "arm", "TTFT p50 predicted", "measured", "error"]
    heads += ["p95 predicted", "measured", "error"]
    return heads, [
        [cell.name, arm.arm, *compared(arm, 0.5), *compared(arm, 0.95)]
        for cell in findings.cells
        for arm in cell.arms.values()
    ]


def compared(arm: ArmFindings, share: float) -> list[str]:
    """Predicted, measured, error; dashes where there are too few requests."""
    measured = supported_percentile(arm.ttfts, share)
    predicted = arm.predicted.get(f"ttft p{100 * share:g}")
    if measured is None or predicted is None:
        return ["-", "-", "-"]
    return [milliseconds(predicted), milliseconds(measured), off(predicted, measured)]


# --- sentences ------------------------------------------------------------------------------------


def notes_text(findings: ArrivalsFindings) -> str:
    """Which requests these were, and what the arms are."""
    transforms = dict.fromkeys(
        f"{cell.name} = {cell.schedule.transform}" for cell in findings.others
    )
    swept = findings.swept[0].schedule.transform
    counts = [cell.num_requests for cell in findings.cells]
    allowed = [f"p{100 * s:g} {min_samples(s)}" for s in PERCENTILES]
    replays = "".join(f"; {text}" for text in transforms)
    return (
        f"Workloads: poisson = {swept}{replays}. Load is the share of "
        f"{findings.saturation['conv']:.2f} requests/s, which a burst saturates the continuous arm "
        f"at ({saturations(findings)}). Arms, {findings.slots} slots each: {STATIC} (a batch "
        f"begins with whoever is there and drains), {TIMEOUT} (it begins when it is full or its "
        f"oldest has waited {findings.timeout_s * 1e3:,.0f} ms), {WHOLE} (prompts whole), "
        f"{CHUNKED} (steps of at most {findings.budget} tokens). Goodput counts requests with "
        f"TTFT <= {milliseconds(findings.objectives.max_ttft_s)} ms and TPOT <= "
        f"{milliseconds(findings.objectives.max_tpot_s)} ms, {findings.objectives.factor:g} x what "
        f"a request of {findings.unloaded['prompt']:.0f} + {findings.unloaded['output']:.0f} "
        f"tokens has that is alone; its denominator is all that were offered. Cells have "
        f"{min(counts)} to {max(counts)} requests; a percentile needs so many: "
        f"{', '.join(allowed)}. {lag_sentence(findings)}"
    )


def saturations(findings: ArrivalsFindings) -> str:
    return ", ".join(f"{name} {rate:.2f}/s" for name, rate in findings.saturation.items())


def lag_sentence(findings: ArrivalsFindings) -> str:
    """How late the sender was, and whether that matters."""
    worst = max(
        (arm.lag_mean_s / cell.mean_gap_s, arm.lag_mean_s)
        for cell in findings.cells
        for arm in cell.arms.values()
    )
    said = "which is too much to trust" if worst[0] > MAX_LAG_SHARE else "which does not matter"
    return (
        f"The sender lagged by {worst[1] * 1e6:,.0f} us on average in the worst run, "
        f"{worst[0]:.2%} of the mean gap, {said}."
    )


def carried_load(findings: ArrivalsFindings, arm: str) -> float | None:
    """The largest load up to which, without a break, the arm's goodput is `GOOD_SHARE`."""
    carried = None
    for cell in sorted(findings.swept, key=lambda cell: cell.load):
        if cell.arms[arm].goodput.share < GOOD_SHARE:
            break
        carried = cell.load
    return carried


def carried_text(findings: ArrivalsFindings) -> str:
    """Of each arm, how much it carries."""
    parts = []
    for arm in WAITING_ARMS:
        load = carried_load(findings, arm)
        parts.append(f"{arm} {'not one of these loads' if load is None else f'up to {load:g}'}")
    return "; ".join(parts)


def chunk_sentence(findings: ArrivalsFindings) -> str:
    """What cutting prompts does to the gaps between tokens, and to the first one."""
    cell = findings.main
    whole, chunked = cell.arms[WHOLE], cell.arms[CHUNKED]
    name = next((n for n in ("itl p99", "itl p95", "itl p90") if n in whole.gaps), None)
    if name is None or name not in chunked.gaps:
        return ""
    noise = aa_from_record(findings.run.checks[-1]).smallest_effect
    gap = change_text(whole.gaps[name], chunked.gaps[name], noise)
    first = change_text(median(whole.ttfts), median(chunked.ttfts), noise)
    return (
        f"There, where prompts are cut to {findings.budget} tokens a step, the "
        f"{name.removeprefix('itl ')} gap between two tokens {gap}, and the median TTFT {first}. "
    )


def change_text(before: float, after: float, noise: float | None) -> str:
    """How a time in seconds changed; no direction is claimed below the noise, or without knowing
    it."""
    times = f"from {milliseconds(before)} to {milliseconds(after)} ms"
    if noise is None or abs(after / before - 1) <= noise:
        return f"goes {times}, which may be noise"
    return f"{'falls' if after < before else 'rises'} {times}"


def prediction_sentence(findings: ArrivalsFindings) -> str:
    """How far the simulation was off."""
    errors = [
        abs(arm.predicted["ttft p50"] / median(arm.ttfts) - 1)
        for cell in findings.cells
        for arm in cell.arms.values()
        if "ttft p50" in arm.predicted
    ]
    if not errors:
        return ""
    return (
        f"The simulation, stored before, is off by {median(errors):.0%} in the median of all cells "
        f"and arms (at most {max(errors):.0%}) for the median TTFT. "
    )


def arrivals_paragraph(findings: ArrivalsFindings) -> str:
    """What staggered arrivals do here."""
    cell = findings.main
    static, best = cell.arms[STATIC], cell.arms[CHUNKED]
    return (
        f"On this machine, {machine_name(findings.run)}, with {subject(findings.run)}: at least "
        f"{GOOD_SHARE:.0%} of the requests meet both objectives with Poisson arrivals by arm: "
        f"{carried_text(findings)} of saturation. At load {cell.load:g} a request waits "
        f"{milliseconds(median(static.ttfts))} ms for its first token under static batching and "
        f"{milliseconds(median(best.ttfts))} ms under continuous batching with chunked prefill, "
        f"in the median. {chunk_sentence(findings)}{prediction_sentence(findings)}"
        f"{noise_sentence(findings.run)}"
    )


def arrivals_numbers(findings: ArrivalsFindings) -> dict[str, str]:
    """What prose may quote."""
    cell = findings.main
    return {
        "load": f"{cell.load:g}",
        "static_ttft_ms": milliseconds(median(cell.arms[STATIC].ttfts)),
        "chunked_ttft_ms": milliseconds(median(cell.arms[CHUNKED].ttfts)),
        "static_goodput": f"{cell.arms[STATIC].goodput.share:.0%}",
        "chunked_goodput": f"{cell.arms[CHUNKED].goodput.share:.0%}",
    }
