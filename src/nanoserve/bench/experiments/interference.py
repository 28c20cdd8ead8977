"""What does a long prompt cost those who are being served, and what does a shared one save?

Eight streams decode; a long prompt arrives. It is computed in chunks beside them, as the step's
token budget allows, and every stream waits for each chunk: the longest gap between two tokens, over
the plain decode step, for several budgets. The gaps are predicted by simulating the same steps with
costs fitted on others, and so is the largest budget that keeps the promised ratio. Beside it: the
time to the first token of a prompt whose beginning is cached already, over one that is all new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nanoserve.bench.calibrate import calibrate, greedy, make_probes, simulated, twin_scheduler
from nanoserve.bench.conduct import AAArms, conduct
from nanoserve.bench.experiments.batch import make_trial
from nanoserve.bench.experiments.kvcache import Gate, Tokens, write
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch, now_s
from nanoserve.bench.metrics import median
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import Options, Screen, open_engine, weights_at_hand
from nanoserve.bench.simulate import simulate
from nanoserve.bench.stepcosts import StepCosts, StepWork
from nanoserve.bench.traces import Length
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.engine.build import spec_budget_key
from nanoserve.engine.engine import Engine
from nanoserve.planner.budget import MAX_GAP_RATIO, NUM_STREAMS, auto_budget
from nanoserve.planner.measured import save_budget

QUESTION = "what does a long prompt cost the others, and what does a shared one save?"

LATE = "late"
STREAM_PROMPT = 16
BASELINE_STEPS = 12
FIT_MARGIN = 1.1
"""How much longer than the typical step of a kind the longest one may be."""

SUFFIX = 16
"""Tokens that follow the shared prefix, different in every request."""


def arm_name(budget: int) -> str:
    return f"budget {budget}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. The first budget runs twice (A/A). Lengths are cut to the window."""

    budgets: tuple[int, ...]
    long_prompt: int
    prefix: int
    repetitions: int
    rules: Rules


FULL = Scale(
    budgets=(64, 32, 128, 256, 512),
    long_prompt=900,
    prefix=512,
    repetitions=3,
    rules=Rules(warmups=1, min_rounds=6, budget_s=240.0),
)
QUICK = Scale(
    budgets=(64, 128),
    long_prompt=256,
    prefix=128,
    repetitions=1,
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=2, max_rounds=8, budget_s=10.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What `scale` asks for, cut to a model's window."""

    stream: Length
    late: Length
    prefix: int


def fit_lengths(scale: Scale, window: int, smallest_budget: int) -> Lengths:
    """Streams write until the prompt is through at the smallest budget, and a few tokens more."""
    prompt = min(scale.long_prompt, window - 2 * SUFFIX)
    num_chunks = -(-prompt // (smallest_budget - NUM_STREAMS))
    num_first = -(-NUM_STREAMS * STREAM_PROMPT // smallest_budget)
    output = num_first + BASELINE_STEPS + num_chunks + 8
    return Lengths(
        stream=Length(prompt=STREAM_PROMPT, output=min(output, window - STREAM_PROMPT)),
        late=Length(prompt=prompt, output=2),
        prefix=min(scale.prefix, window // 2),
    )


# --- a long prompt among streams ------------------------------------------------------------------


def start_streams(engine: Engine, length: Length) -> None:
    """`NUM_STREAMS` requests, stepped until each has emitted a token."""
    vocab_size = engine.model_config.vocab_size
    for number in range(NUM_STREAMS):
        prompt = prompt_token_ids(length.prompt, vocab_size, number)
        engine.add(str(number), prompt, greedy(length.output))
    waiting = {str(number) for number in range(NUM_STREAMS)}
    while waiting:
        waiting -= {delta.request_id for delta in engine.step()}


def timed_steps(
    engine: Engine, synchronize: Callable[[], object], is_last: Callable[[int, set[str]], bool]
) -> list[float]:
    """Seconds of each step until `is_last` (steps done, ids that emitted a token) says so.

    Raises RuntimeError if a stream was left out of one: then its gap would be longer than a step.
    """
    streams = {str(number) for number in range(NUM_STREAMS)}
    seconds: list[float] = []
    while True:
        watch = Stopwatch(synchronize)
        emitted = {delta.request_id for delta in watch.time("step", engine.step)}
        seconds.append(watch.seconds["step"])
        if not streams <= emitted:
            raise RuntimeError(f"streams {sorted(streams - emitted)} were left out of a step")
        if is_last(len(seconds), emitted):
            return seconds


def gap_arm(engine: Engine, lengths: Lengths) -> Arm:
    """ "decode": the median plain step; "gap": the longest while the prompt is computed; "ttft"."""

    def arm(watch: Stopwatch) -> None:
        sync = engine.executor.synchronize
        try:
            start_streams(engine, lengths.stream)
            plain = timed_steps(engine, sync, lambda done, _: done == BASELINE_STEPS)
            prompt = prompt_token_ids(
                lengths.late.prompt, engine.model_config.vocab_size, NUM_STREAMS
            )
            engine.add(LATE, prompt, greedy(lengths.late.output))
            mixed = timed_steps(engine, sync, lambda _, emitted: LATE in emitted)
        finally:
            for request_id in (LATE, *map(str, range(NUM_STREAMS))):
                engine.abort(request_id)
        watch.seconds |= {"decode": median(plain), "gap": max(mixed), "ttft": sum(mixed)}

    return arm


def predict_gap(engine: Engine, lengths: Lengths, costs: StepCosts) -> Record:
    """The same steps, simulated: what the plain step and the longest mixed one should take."""
    streams = [lengths.stream] * NUM_STREAMS
    first_tokens = simulated(engine, streams).first_token_steps
    joins_after = max(first_tokens) + 1 + BASELINE_STEPS
    schedule = simulate(
        twin_scheduler(engine),
        [*streams, lengths.late],
        joins_after={NUM_STREAMS: joins_after},
    )
    plain = schedule.works[joins_after - BASELINE_STEPS : joins_after]
    mixed = schedule.works[joins_after : schedule.first_token_steps[NUM_STREAMS] + 1]
    return {
        "decode_s": median([costs(work) for work in plain]),
        "gap_s": max(costs(work) for work in mixed),
        "ttft_s": sum(costs(work) for work in mixed),
        "num_chunks": len(mixed),
    }


def budget_by_costs(costs: StepCosts, lengths: Lengths) -> int:
    """The largest budget that keeps the ratio, by the fitted costs; no larger than was timed.

    The promise is about the longest of many gaps, the fit about the typical one: hence a margin.
    """
    context = lengths.stream.prompt + BASELINE_STEPS

    def step_time(num_decode: int, num_prompt: int) -> float:
        is_chunk = num_prompt > 0
        end = max(num_prompt, lengths.late.prompt)
        pairs = num_prompt * (end - num_prompt) + num_prompt * (num_prompt + 1) // 2
        return costs(
            StepWork(
                num_rows=num_decode + num_prompt,
                num_seqs=num_decode + is_chunk,
                num_logit_rows=num_decode,
                context_tokens=num_decode * context + end * is_chunk,
                attended_pairs=num_decode * context + pairs,
            )
        )

    return auto_budget(
        step_time,
        max_ratio=MAX_GAP_RATIO / FIT_MARGIN,
        largest=max(costs.knots[-1], 2 * STREAM_PROMPT),
    )


# --- a shared prefix ------------------------------------------------------------------------------


def first_token(engine: Engine, prompt: Sequence[int]) -> None:
    """One request to its first token, which is also its last."""
    engine.add("0", prompt, greedy(1))
    while engine.has_unfinished:
        engine.step()


def prefix_arm(engine: Engine, lengths: Lengths, fresh: itertools.count[int], *, warm: bool) -> Arm:
    """ "ttft" of prefix and suffix; `warm`: after a request with that prefix and another suffix."""
    vocab_size = engine.model_config.vocab_size

    def prompt(prefix: int) -> list[int]:
        suffix = prompt_token_ids(SUFFIX, vocab_size, next(fresh))
        return [*prompt_token_ids(lengths.prefix, vocab_size, prefix), *suffix]

    def arm(watch: Stopwatch) -> None:
        prefix = next(fresh)
        if warm:
            first_token(engine, prompt(prefix))
        wanted = prompt(prefix)
        watch.time("ttft", lambda: first_token(engine, wanted))

    return arm


# --- the gate -------------------------------------------------------------------------------------


def pass_gate(engines: Mapping[int, Engine], sharing: Engine, lengths: Lengths, gate: Gate) -> None:
    """Streams emit the same with the prompt among them, whatever the budget; so do shared ones.

    Raises VoidError, or RuntimeError if no prefix was shared where one should have been.
    """
    first, *others = engines.values()
    vocab_size = first.model_config.vocab_size
    streams = [prompt_token_ids(STREAM_PROMPT, vocab_size, i) for i in range(NUM_STREAMS)]
    late = prompt_token_ids(lengths.late.prompt, vocab_size, NUM_STREAMS)
    alone = write(first, streams, 6, num_logprobs=gate.num_logprobs)
    for engine in (first, *others):
        among = write(engine, [*streams, late], 6, num_logprobs=gate.num_logprobs)
        budget = engine.scheduler.max_num_batched_tokens
        names = ("streams alone", "beside a long prompt")
        gate.compare(arm_name(budget), alone, among[:NUM_STREAMS], names=names)
    prefix = prompt_token_ids(lengths.prefix, vocab_size)
    prompts = [[*prefix, *prompt_token_ids(SUFFIX, vocab_size, i)] for i in (1, 2)]
    cold = write(first, prompts[1:], 4, num_logprobs=gate.num_logprobs)
    gate.compare("a shared prefix", cold, share(sharing, prompts, gate), names=("cold", "warm"))


def share(sharing: Engine, prompts: Sequence[Sequence[int]], gate: Gate) -> list[Tokens]:
    """What the second of two prompts emits after the first; RuntimeError if nothing was shared."""
    before = sharing.scheduler.counters.prefix_hit_tokens
    write(sharing, prompts[:1], 1, num_logprobs=gate.num_logprobs)
    written = write(sharing, prompts[1:], 4, num_logprobs=gate.num_logprobs)
    if sharing.scheduler.counters.prefix_hit_tokens == before:
        raise RuntimeError("no prefix was found in the cache, though one was just computed")
    return written


# --- the experiment -------------------------------------------------------------------------------


class Engines:
    """One engine for each budget, on one set of weights; the first is what the others share."""

    def __init__(self, options: Options, scale: Scale, screen: Screen) -> None:
        self._options = options
        self._load_format, remark = weights_at_hand(options)
        if remark:
            screen.say(remark)
        self.by_budget: dict[int, Engine] = {}
        for budget in scale.budgets:
            self.add(budget)

    @property
    def widest(self) -> Engine:
        return self.by_budget[max(self.by_budget)]

    def add(self, budget: int) -> None:
        if budget not in self.by_budget:
            self.by_budget[budget] = self._open(budget, sharing=False)

    def open_sharing(self) -> Engine:
        """One that shares prefixes and has the automatic budget, which is then measured, too."""
        sharing = self._open(None, sharing=True)
        self.add(sharing.scheduler.max_num_batched_tokens)
        return sharing

    def _open(self, budget: int | None, *, sharing: bool) -> Engine:
        return open_engine(
            self._options,
            self._load_format,
            layout="paged",
            max_num_seqs=2 * NUM_STREAMS,
            max_num_batched_tokens=budget,
            enable_prefix_caching=sharing,
            donor=next(iter(self.by_budget.values()), None),
        )


def keep_budget(engine: Engine, budget: int) -> None:
    """Make `budget` the automatic one of engines like this on this machine, from now on."""
    save_budget(spec_budget_key(engine.spec), budget)


def make_groups(
    engines: Mapping[int, Engine], sharing: Engine, lengths: Lengths, aa: AAArms
) -> list[Group]:
    """One group of all budgets, one of a prefix that is new and one that is known."""
    arms = {arm_name(budget): gap_arm(engine, lengths) for budget, engine in engines.items()}
    arms[aa.same_arm] = arms[aa.arm]
    fresh = itertools.count(1000)
    gaps = {
        "streams": NUM_STREAMS,
        "long_prompt": lengths.late.prompt,
        "budgets": {arm_name(budget): budget for budget in engines},
    }
    shared = {
        "prefix": lengths.prefix,
        "suffix": SUFFIX,
        "budget": sharing.scheduler.max_num_batched_tokens,
    }
    return [
        Group(name="a long prompt", arms=arms, labels=gaps),
        Group(
            name="a shared prefix",
            arms={
                "cold": prefix_arm(sharing, lengths, fresh, warm=False),
                "warm": prefix_arm(sharing, lengths, fresh, warm=True),
            },
            labels=shared,
        ),
    ]


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    started_s = now_s()
    opened = Engines(options, scale, screen)
    load_s = now_s() - started_s
    widest, engines = opened.widest, opened.by_budget
    lengths = fit_lengths(scale, widest.spec.max_model_len, min(engines))
    probes = make_probes(
        max_seqs=2 * NUM_STREAMS,
        static_seqs=None,
        budget=max(engines),
        window=widest.spec.max_model_len,
        longest=lengths.late.prompt,
    )
    costs = calibrate({"continuous": widest}, probes, repetitions=scale.repetitions, screen=screen)
    fitted_budget = budget_by_costs(costs, lengths)
    if not options.quick:
        keep_budget(widest, fitted_budget)
    sharing = opened.open_sharing()  # perhaps with the smallest budget of all
    lengths = fit_lengths(scale, widest.spec.max_model_len, min(engines))
    gate = Gate(is_exact=widest.spec.is_exact)
    pass_gate(engines, sharing, lengths, gate)
    first = arm_name(scale.budgets[0])
    aa = AAArms(arm=first, same_arm=f"{first} again", part="decode")
    header = {
        "load_s": load_s,
        "step_costs": costs.to_json(),
        "predictions": {
            arm_name(budget): predict_gap(engine, lengths, costs)
            for budget, engine in engines.items()
        },
        "fitted_budget": fitted_budget,
    }
    groups = make_groups(engines, sharing, lengths, aa)
    trial = make_trial("interference", widest, gate, groups, scale.rules, aa, header)
    return conduct(trial, options, screen)
