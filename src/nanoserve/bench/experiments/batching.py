"""Static or continuous?

Two engines that differ in their policy alone serve the same requests, all there at t = 0, with the
lengths of a real trace: one lets a batch drain before the next starts, the other fills a slot as
soon as it is free. Before that, single steps are timed and a model of their cost is fitted; both
schedules are then simulated without a model, which predicts each makespan. Every real run must take
the steps of its simulation. A control of equal lengths, in which the policies do the same, must
show 1.00; it carries the A/A arm. Nothing is recorded unless both policies emit the same tokens.
Cases that do not fit the time are simulated only, and said to be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from nanoserve.bench.calibrate import add_all, calibrate, make_probes, simulated
from nanoserve.bench.conduct import AAArms, Pace, conduct
from nanoserve.bench.experiments.batch import make_trial
from nanoserve.bench.experiments.kvcache import Gate, Tokens
from nanoserve.bench.measure import Arm, Group, Rounds, Rules, Stopwatch, now_s, rest
from nanoserve.bench.metrics import RequestTimes, e2e, min_samples, supported_percentile, ttft
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import Options, Screen, open_engine, weights_at_hand
from nanoserve.bench.simulate import Schedule
from nanoserve.bench.stepcosts import StepCosts
from nanoserve.bench.traces import Length, Workload, equal_lengths, from_trace, static_waste
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.config import Batching
from nanoserve.engine.engine import Engine
from nanoserve.request import RequestDelta, SamplingParams

QUESTION = "static or continuous batching?"

POLICIES: tuple[Batching, ...] = ("static", "continuous")
AA = AAArms(arm="continuous", same_arm="continuous again", part="makespan")
CUT_PROMPT = 16
MAX_GATE_OUTPUT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured.

    Lengths of the traces are divided by `divisor`. `slots` are measured beside `main_slots` on the
    main workload. `budget_s` is for all repetitions together, `longest` the largest context that is
    timed to predict from.
    """

    num_requests: int
    divisor: int
    control: Length
    main_slots: int
    slots: tuple[int, ...]
    budget_s: float
    max_rounds: int
    repetitions: int
    longest: int


FULL = Scale(
    num_requests=128,
    divisor=1,
    control=Length(prompt=CUT_PROMPT, output=8),
    main_slots=8,
    slots=(16, 32, 64, 128),
    budget_s=720.0,
    max_rounds=12,
    repetitions=3,
    longest=700,
)
QUICK = Scale(
    num_requests=24,
    divisor=8,
    control=Length(prompt=8, output=2),
    main_slots=8,
    slots=(16,),
    budget_s=16.0,
    max_rounds=8,
    repetitions=1,
    longest=96,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload over a number of slots. Only the main one's slots are drawn."""

    workload: Workload
    slots: int
    is_main: bool = False
    is_control: bool = False

    @property
    def name(self) -> str:
        return f"{self.workload.name}, {self.slots} slots"


def make_cases(scale: Scale, window: int, budget: int) -> list[Case]:
    """Every case in the order in which time is given to it: main, control, then the rest.

    A model whose window is shorter than GPT-2's gets the requests that fit it. The control's
    prompts are short enough for a whole batch of them to fit one step: only then do both policies
    take the same steps.
    """
    count, divisor, slots = scale.num_requests, scale.divisor, scale.main_slots
    equal = replace(scale.control, prompt=min(scale.control.prompt, max(1, budget // slots)))
    main = from_trace("conv", count, window, divisor=divisor, prompt_cut=CUT_PROMPT)
    others = [from_trace(name, count, window, divisor=divisor) for name in ("code", "conv")]
    return [
        Case(workload=main, slots=slots, is_main=True),
        Case(workload=equal_lengths(count, equal), slots=slots, is_control=True),
        *(Case(workload=workload, slots=slots) for workload in others),
        *(Case(workload=main, slots=more) for more in scale.slots),
    ]


class Engines:
    """One engine per policy and number of slots, made when first asked for, on one set of weights.

    The token budget of a step is the engine's own choice, as a user would have it.
    """

    def __init__(self, options: Options, screen: Screen) -> None:
        self._options = options
        self._load_format, remark = weights_at_hand(options)
        if remark:
            screen.say(remark)
        self._made: dict[tuple[Batching, int], Engine] = {}

    def get(self, batching: Batching, slots: int) -> Engine:
        key = (batching, slots)
        if key not in self._made:
            self._made[key] = open_engine(
                self._options,
                self._load_format,
                layout="paged",
                max_num_seqs=slots,
                batching=batching,
                max_num_batched_tokens=None,
                donor=next(iter(self._made.values()), None),
            )
        return self._made[key]

    def of(self, case: Case) -> dict[Batching, Engine]:
        return {policy: self.get(policy, case.slots) for policy in POLICIES}


# --- prediction -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Both schedules of one case, and when each of their steps should end."""

    schedules: Mapping[Batching, Schedule]
    ends_s: Mapping[Batching, Sequence[float]]

    def makespan_s(self, policy: Batching) -> float:
        return self.ends_s[policy][-1]


def forecast(engines: Engines, case: Case, costs: StepCosts) -> Forecast:
    """Simulate one case under both policies."""
    schedules = {
        policy: simulated(engine, case.workload.lengths)
        for policy, engine in engines.of(case).items()
    }
    return Forecast(
        schedules=schedules,
        ends_s={policy: schedule.ends_s(costs) for policy, schedule in schedules.items()},
    )


def round_cost_s(case: Case, predicted: Forecast) -> float:
    """Seconds that one round of a case should take, its A/A arm included."""
    arms: tuple[Batching, ...] = (*POLICIES, "continuous") if case.is_control else POLICIES
    return sum(predicted.makespan_s(policy) for policy in arms)


def plan_pace(cases: Sequence[Case], costs_s: Mapping[str, float], scale: Scale) -> Pace:
    """Which cases are measured, and how often.

    The main case at least once and the control often enough for an interval, whatever they cost;
    then each case that still fits the budget once; then as many as an interval takes, case by case;
    then more, fewest first. Where there are rounds to spare the first two are dropped.
    """
    enough, dropped = min_samples(0.5), Rules().dropped_rounds
    control = next(case.name for case in cases if case.is_control)
    main = next(case.name for case in cases if case.is_main)
    counts = {main: 1, control: enough}
    spare_s = scale.budget_s - sum(costs_s[name] * count for name, count in counts.items())
    for name in (case.name for case in cases):
        if name not in counts and costs_s[name] <= spare_s:
            counts[name] = 1
            spare_s -= costs_s[name]
    while affordable := [
        name for name in counts if counts[name] < scale.max_rounds and costs_s[name] <= spare_s
    ]:
        short = [name for name in affordable if counts[name] < enough]
        name = short[0] if short else min(affordable, key=counts.__getitem__)
        counts[name] += 1
        spare_s -= costs_s[name]
    rounds = {
        name: Rounds(dropped=dropped, timed=count - dropped)
        if count >= enough + dropped
        else Rounds(dropped=0, timed=count)
        for name, count in counts.items()
    }
    return Pace(costs_s={name: costs_s[name] for name in rounds}, rounds=rounds)


def case_record(case: Case, predicted: Forecast, *, is_measured: bool) -> Record:
    """What the header holds of one case: its workload, and what was predicted before any run."""
    outputs = [length.output for length in case.workload.lengths]
    return {
        "workload": case.workload.name,
        "transform": case.workload.transform,
        "workload_sha256": case.workload.sha256,
        "num_requests": len(outputs),
        "num_output_tokens": sum(outputs),
        "slots": case.slots,
        "is_main": case.is_main,
        "is_control": case.is_control,
        "is_measured": is_measured,
        "arithmetic_waste": static_waste(outputs, case.slots),
        "predicted": {
            policy: {
                "makespan_s": predicted.makespan_s(policy),
                "num_steps": schedule.num_steps,
                "computed_rows": schedule.computed_rows,
                "asked_rows": schedule.asked_rows,
            }
            for policy, schedule in predicted.schedules.items()
        },
    }


def span_record(predicted: Forecast) -> Record:
    """Who holds which slot in which steps: [request, slot, first, last, freed] by policy."""
    return {
        policy: [
            [span.request, span.slot, span.first_step, span.last_step, span.freed_step]
            for span in schedule.spans
        ]
        for policy, schedule in predicted.schedules.items()
    }


# --- serving --------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Serving:
    """What happened to each request of one run, on the engine's clock. Everyone arrived at once."""

    arrival_s: float
    token_s: list[list[float]]
    first_scheduled_s: list[float]
    num_steps: int = 0

    def note(self, deltas: Sequence[RequestDelta], now: float) -> None:
        for delta in deltas:
            number = int(delta.request_id)
            if delta.token_ids:
                self.token_s[number].append(now)
            if delta.output is not None and delta.output.metrics.first_scheduled_s is not None:
                self.first_scheduled_s[number] = delta.output.metrics.first_scheduled_s

    def times(self) -> list[RequestTimes]:
        return [
            RequestTimes(
                arrival_s=self.arrival_s, first_scheduled_s=scheduled, token_s=tuple(tokens)
            )
            for scheduled, tokens in zip(self.first_scheduled_s, self.token_s, strict=True)
        ]


def serve(engine: Engine, lengths: Sequence[Length]) -> Serving:
    """Serve a burst to its end."""
    count = len(lengths)
    serving = Serving(
        arrival_s=engine.clock(),
        token_s=[[] for _ in range(count)],
        first_scheduled_s=[0.0] * count,
    )
    add_all(engine, lengths)
    while engine.has_unfinished:
        deltas = engine.step()
        serving.note(deltas, engine.clock())
        serving.num_steps += 1
    return serving


def serving_arm(engine: Engine, case: Case, schedule: Schedule) -> Arm:
    """Serve the whole workload: "makespan" is its time, latencies follow from it.

    The main case also says when each request was first scheduled and when it ended, for the
    picture. Raises RuntimeError if the engine departed from its simulation.
    """

    def arm(watch: Stopwatch) -> None:
        counters = engine.scheduler.counters
        before = (counters.computed_rows, counters.asked_rows)
        serving = watch.time("makespan", lambda: serve(engine, case.workload.lengths))
        computed, asked = (
            counters.computed_rows - before[0],
            counters.asked_rows - before[1],
        )
        wanted = (schedule.num_steps, schedule.computed_rows, schedule.asked_rows)
        if (serving.num_steps, computed, asked) != wanted:
            raise RuntimeError(
                f"{case.name}: {(serving.num_steps, computed, asked)} steps, rows computed and "
                f"asked for, simulated {wanted}"
            )
        requests = serving.times()
        watch.seconds.update(latency_seconds(requests))
        if case.is_main:
            watch.seconds.update(request_seconds(requests))

    return arm


def latency_seconds(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """Mean latency and time to first token, and their p95 where there are enough requests."""
    found = {}
    for name, values in (("latency", [*map(e2e, requests)]), ("ttft", [*map(ttft, requests)])):
        found[f"{name} mean"] = fmean(values)
        if (p95 := supported_percentile(values, 0.95)) is not None:
            found[f"{name} p95"] = p95
    return found


def request_seconds(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """ "start N" and "end N" of each request N, in seconds since the burst."""
    found = {}
    for number, request in enumerate(requests):
        found[f"start {number}"] = request.first_scheduled_s - request.arrival_s
        found[f"end {number}"] = e2e(request)
    return found


def make_group(engines: Engines, case: Case, predicted: Forecast) -> Group:
    """Both policies, and in the control one of them twice."""
    arms: dict[str, Arm] = {
        policy: serving_arm(engine, case, predicted.schedules[policy])
        for policy, engine in engines.of(case).items()
    }
    if case.is_control:
        arms[AA.same_arm] = arms[AA.arm]
    labels = {"slots": case.slots, "workload_sha256": case.workload.sha256}
    return Group(name=case.name, arms=arms, labels=labels)


# --- the gate -------------------------------------------------------------------------------------


def gate_lengths(case: Case) -> list[Length]:
    """The first requests of a case, half as many again as slots, with short outputs that differ."""
    return [
        Length(prompt=length.prompt, output=1 + length.output % MAX_GATE_OUTPUT)
        for length in case.workload.lengths[: case.slots + case.slots // 2]
    ]


def write_lengths(engine: Engine, lengths: Sequence[Length], num_logprobs: int) -> list[Tokens]:
    """What each of a burst of greedy requests emits."""
    for number, length in enumerate(lengths):
        prompt = prompt_token_ids(length.prompt, engine.model_config.vocab_size, number)
        params = SamplingParams(
            max_tokens=length.output, temperature=0.0, ignore_eos=True, logprobs=num_logprobs
        )
        engine.add(str(number), prompt, params)
    written: list[Tokens] = [[] for _ in lengths]
    while engine.has_unfinished:
        rest(engine.idle_s)  # a batch that waits for company
        for delta in engine.step():
            written[int(delta.request_id)] += delta.logprobs or ()
    return written


def pass_gate(engines: Engines, cases: Sequence[Case], gate: Gate, screen: Screen) -> None:
    """Raise VoidError unless both policies emit the same tokens, in every case to be measured."""
    title = "gate: do both policies emit the same tokens?"
    with screen.progress(title, float(len(cases))) as advance:
        for case in cases:
            written = [
                write_lengths(engine, gate_lengths(case), gate.num_logprobs)
                for engine in engines.of(case).values()
            ]
            gate.compare(case.name, written[0], written[1], names=("static", "continuous"))
            advance(1.0)


# --- the experiment -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything that is known before the first arm runs."""

    engines: Engines
    cases: Sequence[Case]
    forecasts: Mapping[str, Forecast]
    costs: StepCosts
    pace: Pace
    load_s: float
    measured: Sequence[Case]


def prepare(options: Options, scale: Scale, screen: Screen) -> Prepared:
    """Load, time single steps, simulate every case, and decide which are run for real."""
    started_s = now_s()
    engines = Engines(options, screen)
    largest = engines.get("continuous", max((scale.main_slots, *scale.slots)))
    load_s = now_s() - started_s
    window, budget = largest.spec.max_model_len, largest.scheduler.max_num_batched_tokens
    cases = make_cases(scale, window, budget)
    probes = make_probes(
        max_seqs=max((scale.main_slots, *scale.slots)),
        static_seqs=scale.main_slots,
        budget=budget,
        window=window,
        longest=scale.longest,
    )
    steppers: dict[Batching, Engine] = {
        "continuous": largest,
        "static": engines.get("static", scale.main_slots),
    }
    costs = calibrate(steppers, probes, repetitions=scale.repetitions, screen=screen)
    forecasts = {case.name: forecast(engines, case, costs) for case in cases}
    costs_s = {case.name: round_cost_s(case, forecasts[case.name]) for case in cases}
    pace = plan_pace(cases, costs_s, scale)
    return Prepared(
        engines=engines,
        cases=cases,
        forecasts=forecasts,
        costs=costs,
        pace=pace,
        load_s=load_s,
        measured=[case for case in cases if case.name in pace.rounds],
    )


def make_header(prepared: Prepared) -> Record:
    """What is predicted, of which workloads, by which step costs; and the main case's slots."""
    names = {case.name for case in prepared.measured}
    main = next(case for case in prepared.cases if case.is_main)
    return {
        "load_s": prepared.load_s,
        "step_costs": prepared.costs.to_json(),
        "cases": {
            case.name: case_record(
                case, prepared.forecasts[case.name], is_measured=case.name in names
            )
            for case in prepared.cases
        },
        "lengths": {case.workload.sha256: case.workload.pairs for case in prepared.cases},
        "spans": span_record(prepared.forecasts[main.name]),
    }


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    prepared = prepare(options, scale, screen)
    engine = prepared.engines.get("continuous", scale.main_slots)
    gate = Gate(is_exact=engine.spec.is_exact)
    pass_gate(prepared.engines, prepared.measured, gate, screen)
    groups = [
        make_group(prepared.engines, case, prepared.forecasts[case.name])
        for case in prepared.measured
    ]
    rules = Rules(warmups=0, min_rounds=1, max_rounds=scale.max_rounds, budget_s=scale.budget_s)
    trial = make_trial("batching", engine, gate, groups, rules, AA, make_header(prepared))
    setup = {**trial.setup, "max_num_batched_tokens": engine.scheduler.max_num_batched_tokens}
    return conduct(replace(trial, setup=setup, pace=prepared.pace), options, screen)
