"""What if requests do not come all at once?

Requests of a real trace come one after another: independently (Poisson), in bursts (gamma gaps), or
just as they came (replay). Each schedule is written to a file before anything runs, at a share of
the throughput that a burst was measured to saturate the engine at, and every arm is sent the same:
static batching, static batching that waits for company, continuous batching with whole prompts, and
with prompts in chunks. Latencies count from the scheduled arrival; the sender's own lag is kept.
Before that, single steps are timed, and every arm is simulated on every schedule: those are the
predictions. Nothing is recorded unless a request's tokens are the same in all arms, in the gate and
in every timed run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from nanoserve.bench.arrivals import (
    DEFAULT_CV,
    Process,
    Schedule,
    TracePart,
    make_schedule,
    trace_part,
    write_schedules,
)
from nanoserve.bench.calibrate import calibrate, make_probes, twin_scheduler
from nanoserve.bench.conduct import AAArms, Pace, Trial, VoidError, conduct, results_path
from nanoserve.bench.experiments.batch import make_trial
from nanoserve.bench.experiments.batching import serve, write_lengths
from nanoserve.bench.experiments.kvcache import Gate
from nanoserve.bench.findings.arrivals import CHUNKED, TIMEOUT, WAITING_ARMS, WHOLE
from nanoserve.bench.findings.arrivals import STATIC as STATIC_ARM
from nanoserve.bench.measure import Arm, Group, Rounds, Rules, Stopwatch, now_s
from nanoserve.bench.metrics import (
    duration,
    e2e,
    median,
    supported_percentile,
    tpot,
    ttft,
)
from nanoserve.bench.openloop import (
    SHARES,
    Played,
    gap_seconds,
    make_prompts,
    play,
    request_seconds,
)
from nanoserve.bench.record import Record, Run, read_runs
from nanoserve.bench.session import MAX_STEP_TOKENS, Options, Screen, open_engine, weights_at_hand
from nanoserve.bench.simulate import simulate_arrivals
from nanoserve.bench.stepcosts import StepCosts
from nanoserve.bench.traces import Length, TraceName
from nanoserve.engine.engine import Engine

QUESTION = "what if requests do not come all at once?"

AA = AAArms(arm=CHUNKED, same_arm=f"{CHUNKED} again", part="latency mean")
ARRIVAL_SEED = 7
SLO_FACTOR = 5.0
"""The objectives: TTFT and TPOT of at most so many times what a request has that is alone."""

MAX_GATE_OUTPUT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: Poisson at each of `loads`, the others at `other_load`.

    A cell has the requests that come in `cell_s`, but at least `min_requests` and at most
    `max_requests`. Lengths are divided by `divisor`. `longest` is the largest prompt that is timed
    to predict from.
    """

    slots: int
    divisor: int
    loads: tuple[float, ...]
    other_load: float
    cv: float | None
    replays: tuple[TraceName, ...]
    cell_s: float
    min_requests: int
    max_requests: int
    saturating_requests: int
    repetitions: int
    longest: int


FULL = Scale(
    slots=8,
    divisor=8,
    loads=(0.3, 0.5, 0.7, 0.85, 0.95, 1.1),
    other_load=0.7,
    cv=DEFAULT_CV,
    replays=("conv", "code"),
    cell_s=8.0,
    min_requests=40,
    max_requests=130,
    saturating_requests=48,
    repetitions=2,
    longest=256,
)
QUICK = Scale(
    slots=8,
    divisor=16,
    loads=(0.5, 0.95),
    other_load=0.7,
    cv=DEFAULT_CV,
    replays=(),
    cell_s=0.8,
    min_requests=8,
    max_requests=40,
    saturating_requests=20,
    repetitions=1,
    longest=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One schedule, that all arms are sent. The A/A arm runs where `is_swept`: Poisson, by load."""

    name: str
    load: float
    trace: TraceName
    schedule: Schedule
    is_swept: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """A request of middling lengths that is alone on the engine."""

    length: Length
    ttft_s: float
    tpot_s: float


class Engines:
    """One engine an arm, on one set of weights. The timeout is known only after measuring."""

    def __init__(self, options: Options, slots: int, screen: Screen) -> None:
        self._options, self._slots = options, slots
        self._load_format, remark = weights_at_hand(options)
        if remark:
            screen.say(remark)
        self.made: dict[str, Engine] = {}
        self.make(WHOLE, max_num_batched_tokens=MAX_STEP_TOKENS)
        self.make(CHUNKED, max_num_batched_tokens=None)
        self.make(STATIC_ARM, max_num_batched_tokens=MAX_STEP_TOKENS)

    def make(
        self, arm: str, *, max_num_batched_tokens: int | None, timeout_s: float | None = None
    ) -> None:
        """Static engines compute whole prompts: only the policy differs from `WHOLE`."""
        self.made[arm] = open_engine(
            self._options,
            self._load_format,
            layout="paged",
            max_num_seqs=self._slots,
            batching="continuous" if arm in (WHOLE, CHUNKED) else "static",
            batching_timeout=timeout_s,
            max_num_batched_tokens=max_num_batched_tokens,
            donor=next(iter(self.made.values()), None),
        )

    def make_waiting(self, timeout_s: float) -> None:
        """The static one whose batches wait for company."""
        self.make(TIMEOUT, max_num_batched_tokens=MAX_STEP_TOKENS, timeout_s=timeout_s)

    @property
    def in_order(self) -> dict[str, Engine]:
        return {arm: self.made[arm] for arm in WAITING_ARMS}


# --- what the machine can do ----------------------------------------------------------------------


def measure_saturation(engine: Engine, lengths: Sequence[Length]) -> float:
    """Requests per second of a burst, while more wait than run.

    Output tokens written until the last request began, over the mean output: a burst's end, where
    slots run empty, would make the engine look slower than one that is never short of requests.
    """
    serving = serve(engine, lengths)
    until_s = max(serving.first_scheduled_s)
    if until_s <= serving.arrival_s:  # all began at once
        until_s = max(times[-1] for times in serving.token_s)
    num_tokens = sum(at_s <= until_s for times in serving.token_s for at_s in times)
    num_tokens = max(1, num_tokens)
    return num_tokens / (until_s - serving.arrival_s) / fmean(n.output for n in lengths)


def measure_unloaded(engine: Engine, lengths: Sequence[Length], repetitions: int) -> Unloaded:
    """Medians over a few repetitions, the first of which only warms up."""
    length = Length(
        prompt=round(median([n.prompt for n in lengths])),
        output=max(2, round(median([n.output for n in lengths]))),
    )
    requests = [serve(engine, [length]).times()[0] for _ in range(repetitions + 2)][1:]
    return Unloaded(
        length=length,
        ttft_s=median([ttft(request) for request in requests]),
        tpot_s=median([gap for request in requests if (gap := tpot(request)) is not None]),
    )


# --- schedules ------------------------------------------------------------------------------------


def num_requests(rate: float, part: TracePart, scale: Scale) -> int:
    """As many as come in a cell's time, within the limits and what the trace has."""
    wanted = min(scale.max_requests, max(scale.min_requests, round(rate * scale.cell_s)))
    return min(wanted, len(part.lengths))


def make_cells(
    parts: Mapping[TraceName, TracePart],
    saturation: Mapping[TraceName, float],
    scale: Scale,
    seed: int,
) -> list[Cell]:
    """Poisson at every load, then the same lengths in bursts, then the traces as they came."""
    wanted: list[tuple[str, Process, TraceName, float]] = [
        ("poisson", "poisson", "conv", load) for load in scale.loads
    ]
    if scale.cv is not None:
        wanted.append((f"gamma, CV {scale.cv:g}", "gamma", "conv", scale.other_load))
    wanted += [(f"{name} replayed", "trace", name, scale.other_load) for name in scale.replays]
    cells = []
    for name, process, trace, load in wanted:
        part, rate = parts[trace], round(load * saturation[trace], 6)
        cells.append(
            Cell(
                name=f"{name}, load {load:g}",
                load=load,
                trace=trace,
                schedule=make_schedule(
                    process,
                    part,
                    num_requests(rate, part, scale),
                    rate,
                    cv=scale.cv or DEFAULT_CV,
                    seed=seed,
                ),
                is_swept=process == "poisson",
            )
        )
    return cells


# --- playing --------------------------------------------------------------------------------------


class Expected:
    """The tokens of each schedule's requests, as the first arm wrote them."""

    def __init__(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._written: dict[str, list[list[int]]] = {}

    def check(self, cell: Cell, arm: str, played: Played) -> None:
        """Raise VoidError for an answer that is cut short, or that another arm wrote otherwise."""
        for number, length in enumerate(cell.schedule.lengths):
            if (count := len(played.token_ids[number])) != length.output:
                raise VoidError(
                    f"{cell.name}, {arm}: request {number} got {count} tokens of {length.output}"
                )
        written = self._written.setdefault(cell.name, played.token_ids)
        if self._is_exact and written != played.token_ids:
            number = next(n for n, text in enumerate(written) if text != played.token_ids[n])
            raise VoidError(f"{cell.name}: request {number} got other tokens from {arm}")


def playing(engine: Engine, cell: Cell, arm: str, expected: Expected) -> Arm:
    """Play the whole schedule: "makespan" is its time; what each request saw follows from it."""
    prompts = make_prompts(engine, cell.schedule)

    def repetition(watch: Stopwatch) -> None:
        played = watch.time("makespan", lambda: play(engine, cell.schedule, prompts))
        expected.check(cell, arm, played)
        requests = played.times()
        watch.seconds.update(request_seconds(requests))
        watch.seconds.update(gap_seconds(requests))
        watch.seconds |= {
            "latency mean": fmean(map(e2e, requests)),
            "lag mean": fmean(played.lags_s),
            "lag max": max(played.lags_s),
        }

    return repetition


# --- prediction -----------------------------------------------------------------------------------


def predict(engine: Engine, cell: Cell, costs: StepCosts) -> Record:
    """One arm on one schedule, simulated: what its requests would see."""
    requests = simulate_arrivals(twin_scheduler(engine), cell.schedule, costs)
    waits = [ttft(request) for request in requests]
    gaps = [gap for request in requests if (gap := tpot(request)) is not None]
    record: Record = {"makespan_s": duration(requests)}
    for name, values in (("ttft", waits), ("tpot", gaps)):
        for share in SHARES:
            if values and (value := supported_percentile(values, share)) is not None:
                record[f"{name} p{100 * share:g}"] = value
    return record


def cell_record(cell: Cell, predictions: Mapping[str, Record]) -> Record:
    """What the header holds of one cell."""
    return {
        "load": cell.load,
        "trace": cell.trace,
        "is_swept": cell.is_swept,
        "gap_cv": cell.schedule.gap_cv,
        "schedule": cell.schedule.to_json(),
        "predicted": dict(predictions),
    }


# --- the experiment -------------------------------------------------------------------------------


def make_group(engines: Engines, cell: Cell, expected: Expected) -> Group:
    """All arms on one schedule; in the swept cells one of them twice."""
    arms = {arm: playing(engine, cell, arm, expected) for arm, engine in engines.in_order.items()}
    if cell.is_swept:
        arms[AA.same_arm] = playing(engines.made[AA.arm], cell, AA.same_arm, expected)
    labels = {"load": cell.load, "schedule_sha256": cell.schedule.sha256}
    return Group(name=cell.name, arms=arms, labels=labels)


def pass_gate(engines: Engines, parts: Mapping[TraceName, TracePart], gate: Gate) -> None:
    """Raise VoidError unless all arms emit the same tokens for a burst of each trace's requests."""
    for name, part in parts.items():
        slots = engines.made[STATIC_ARM].scheduler.max_num_seqs
        lengths = [
            Length(prompt=length.prompt, output=1 + length.output % MAX_GATE_OUTPUT)
            for length in part.lengths[: slots + slots // 2]
        ]
        written = {
            arm: write_lengths(engine, lengths, gate.num_logprobs)
            for arm, engine in engines.in_order.items()
        }
        for arm, tokens in written.items():
            if arm != WHOLE:
                gate.compare(f"{name} at once", written[WHOLE], tokens, names=(WHOLE, arm))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is measured before the schedules can be made: requests per second by trace.

    `timeout_s` is how long a static batch waits: half the time in which, at saturation, as many
    requests come as it holds.
    """

    saturation: Mapping[TraceName, float]
    timeout_s: float

    def to_json(self) -> Record:
        return {"saturation": dict(self.saturation), "batching_timeout_s": self.timeout_s}


def measure_limits(engines: Engines, parts: Mapping[TraceName, TracePart], scale: Scale) -> Limits:
    """By a burst of each trace's requests, on the continuous arm with whole prompts."""
    saturation = {}
    for name, part in parts.items():
        count = min(scale.saturating_requests, len(part.lengths))
        saturation[name] = measure_saturation(engines.made[WHOLE], part.first(count))
    return Limits(saturation=saturation, timeout_s=round(scale.slots / saturation["conv"] / 2, 4))


def earlier_limits(options: Options, engine: Engine) -> Limits | None:
    """Those of the run that `--resume` continues: the same schedules follow from them."""
    draft = make_trial("arrivals", engine, Gate(is_exact=True), [], Rules(), AA, {})
    path = results_path(options, draft.experiment, draft.full_name)
    if not (options.resume and path.exists()):
        return None
    runs, _ = read_runs(path)
    setup = runs[-1].header["setup"] if runs else {}
    if "saturation" not in setup:
        return None
    return Limits(saturation=setup["saturation"], timeout_s=setup["batching_timeout_s"])


def all_costs(engines: Engines, scale: Scale, window: int, screen: Screen) -> StepCosts:
    """What steps cost, timed for the purpose on the two policies."""
    probes = make_probes(
        max_seqs=scale.slots,
        static_seqs=scale.slots,
        budget=scale.longest,
        window=window,
        longest=scale.longest,
    )
    steppers = {"continuous": engines.made[WHOLE], "static": engines.made[STATIC_ARM]}
    return calibrate(steppers, probes, repetitions=scale.repetitions, screen=screen)  # type: ignore[arg-type]


def plan_pace(cells: Sequence[Cell], predicted: Mapping[str, Mapping[str, Record]]) -> Pace:
    """Every cell once: the requests are what there are many of."""
    costs_s = {}
    for cell in cells:
        arms = predicted[cell.name]
        again_s = arms[AA.arm]["makespan_s"] if cell.is_swept else 0.0
        costs_s[cell.name] = sum(arm["makespan_s"] for arm in arms.values()) + again_s
    once = Rounds(dropped=0, timed=1)
    return Pace(costs_s=costs_s, rounds=dict.fromkeys(costs_s, once))


def write_schedule_file(options: Options, trial: Trial, cells: Sequence[Cell]) -> str:
    """Beside the records, for other senders too; its hash."""
    path = results_path(options, trial.experiment, trial.full_name).with_suffix("")
    schedules = {cell.name: cell.schedule for cell in cells}
    return write_schedules(Path(f"{path}-schedules.json"), schedules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that is known before the first schedule is played."""

    engines: Engines
    gate: Gate
    limits: Limits
    unloaded: Unloaded
    costs: StepCosts
    cells: Sequence[Cell]
    predicted: Mapping[str, Mapping[str, Record]]
    load_s: float
    seed: int

    @property
    def engine(self) -> Engine:
        return self.engines.made[CHUNKED]

    def trial(self, groups: Sequence[Group], header: Record) -> Trial:
        rules = Rules(warmups=0, dropped_rounds=0, min_rounds=1, max_rounds=1)
        return make_trial("arrivals", self.engine, self.gate, groups, rules, AA, header)


def trace_parts(engine: Engine, scale: Scale) -> dict[TraceName, TracePart]:
    """The traces that are used, as far as their requests fit this model."""
    names: list[TraceName] = ["conv", *(name for name in scale.replays if name != "conv")]
    window = engine.spec.max_model_len
    return {name: trace_part(name, window, divisor=scale.divisor) for name in names}


def prepare(options: Options, scale: Scale, screen: Screen) -> Prepared:
    """Load, time single steps, saturate, pass the gate, draw the schedules, simulate them."""
    started_s = now_s()
    engines = Engines(options, scale.slots, screen)
    load_s = now_s() - started_s
    engine = engines.made[CHUNKED]
    parts = trace_parts(engine, scale)
    costs = all_costs(engines, scale, engine.spec.max_model_len, screen)
    screen.say("saturating the engine; then the gate: do all arms emit the same tokens?")
    limits = earlier_limits(options, engine) or measure_limits(engines, parts, scale)
    engines.make_waiting(limits.timeout_s)
    gate = Gate(is_exact=engine.spec.is_exact)
    pass_gate(engines, parts, gate)
    seed = ARRIVAL_SEED if options.seed is None else options.seed
    cells = make_cells(parts, limits.saturation, scale, seed)
    return Prepared(
        engines=engines,
        gate=gate,
        limits=limits,
        unloaded=measure_unloaded(engine, parts["conv"].lengths, scale.repetitions),
        costs=costs,
        cells=cells,
        predicted={
            cell.name: {arm: predict(e, cell, costs) for arm, e in engines.in_order.items()}
            for cell in cells
        },
        load_s=load_s,
        seed=seed,
    )


def make_header(prepared: Prepared, schedule_file_sha256: str) -> Record:
    """Schedules, predictions, and the objectives that follow from an engine without load."""
    unloaded = prepared.unloaded
    return {
        "load_s": prepared.load_s,
        "step_costs": prepared.costs.to_json(),
        "schedule_file_sha256": schedule_file_sha256,
        "cells": {
            cell.name: cell_record(cell, prepared.predicted[cell.name]) for cell in prepared.cells
        },
        "unloaded": {
            "prompt": unloaded.length.prompt,
            "output": unloaded.length.output,
            "ttft_s": unloaded.ttft_s,
            "tpot_s": unloaded.tpot_s,
        },
        "slo": {
            "factor": SLO_FACTOR,
            "ttft_s": SLO_FACTOR * unloaded.ttft_s,
            "tpot_s": SLO_FACTOR * unloaded.tpot_s,
        },
    }


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    prepared = prepare(options, scale, screen)
    sha256 = write_schedule_file(options, prepared.trial([], {}), prepared.cells)
    expected = Expected(is_exact=prepared.engine.spec.is_exact)
    groups = [make_group(prepared.engines, cell, expected) for cell in prepared.cells]
    trial = prepared.trial(groups, make_header(prepared, sha256))
    setup = {
        **trial.setup,
        **prepared.limits.to_json(),
        "slots": scale.slots,
        "arrival_seed": prepared.seed,
        "max_num_batched_tokens": prepared.engine.scheduler.max_num_batched_tokens,
    }
    pace = plan_pace(prepared.cells, prepared.predicted)
    return conduct(replace(trial, setup=setup, pace=pace), options, screen)
