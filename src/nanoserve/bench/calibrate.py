"""Times steps of an engine for no other purpose than to fit `StepCosts`.

Small workloads, each there to tell one term from the others: decodes of every batch size, prompts
of every chunk size, long contexts, and a static batch whose members finish one after another, so
that rows are computed which need no logits. Each runs several times in interleaved rounds; a step
counts with the median of its times, and what it computed is known from the simulated schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoserve.bench.findings import counted
from nanoserve.bench.measure import Arm, Group, Rounds, Stopwatch, run_rounds
from nanoserve.bench.metrics import median
from nanoserve.bench.session import Screen
from nanoserve.bench.simulate import Schedule, simulate
from nanoserve.bench.stepcosts import StepCosts, fit_step_costs
from nanoserve.bench.traces import Length
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.config import Batching
from nanoserve.engine.build import make_scheduler
from nanoserve.engine.engine import Engine
from nanoserve.request import SamplingParams
from nanoserve.scheduling.scheduler import Scheduler

SHORT_PROMPT = 8
OUTPUTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A small workload and the policy that runs it."""

    name: str
    batching: Batching
    lengths: tuple[Length, ...]


def powers_of_two(first: int, last: int) -> list[int]:
    """`first`, twice that, and so on; `last` itself at the end."""
    found = [first << i for i in range(last.bit_length()) if first << i < last]
    return [*found, last]


def make_probes(
    *, max_seqs: int, static_seqs: int | None, budget: int, window: int, longest: int
) -> list[Probe]:
    """Decodes of 1 to `max_seqs`, chunks of up to `budget`, contexts of up to `longest`.

    Everything fits `window`. `static_seqs` is the size of the static batch, None for no such.
    """
    longest = min(longest, window - OUTPUTS)
    short = Length(prompt=min(SHORT_PROMPT, longest), output=OUTPUTS)
    several = min(8, max_seqs)
    probes = [
        Probe(name=f"{n} decode", batching="continuous", lengths=(short,) * n)
        for n in powers_of_two(1, max_seqs)
    ]
    probes += [
        Probe(name=f"a prompt of {n}", batching="continuous", lengths=(Length(prompt=n, output=2),))
        for n in powers_of_two(16, min(budget, longest))
    ]
    half = Length(prompt=max(1, longest // 3), output=OUTPUTS)
    whole = Length(prompt=longest, output=OUTPUTS)
    probes += [
        Probe(name="a long context", batching="continuous", lengths=(whole,)),
        Probe(name="longer contexts", batching="continuous", lengths=(half,) * several),
    ]
    if static_seqs is not None:
        staggered = [Length(prompt=short.prompt, output=2 * n + 1) for n in range(static_seqs)]
        probes.append(Probe(name="a static batch", batching="static", lengths=tuple(staggered)))
    return probes


def simulated(engine: Engine, lengths: Sequence[Length]) -> Schedule:
    """What `engine` will do with these requests, by its own scheduler's rules."""
    return simulate(twin_scheduler(engine), lengths)


def twin_scheduler(engine: Engine) -> Scheduler:
    """A fresh scheduler with the limits of the engine's own, automatic ones as they came out."""
    return make_scheduler(engine.config, engine.spec, track_freed=False)


def add_all(engine: Engine, lengths: Sequence[Length]) -> None:
    """Queue greedy requests of these lengths, each with a prompt of its own, in order."""
    vocab_size = engine.model_config.vocab_size
    for number, length in enumerate(lengths):
        prompt = prompt_token_ids(length.prompt, vocab_size, number)
        engine.add(str(number), prompt, greedy(length.output))


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly `num_tokens`, whatever they are."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def stepping(engine: Engine, probe: Probe) -> Arm:
    """An arm that times every step of a probe as a part of its own, named by its number."""

    def arm(watch: Stopwatch) -> None:
        add_all(engine, probe.lengths)
        number = 0
        while engine.has_unfinished:
            watch.time(str(number), engine.step)
            number += 1

    return arm


def calibrate(
    engines: Mapping[Batching, Engine],
    probes: Sequence[Probe],
    *,
    repetitions: int,
    screen: Screen,
) -> StepCosts:
    """Fitted costs. Every probe runs once more, first, without being counted.

    Raises RuntimeError if an engine took other steps than its scheduler does alone.
    """
    schedules = {p.name: simulated(engines[p.batching], p.lengths) for p in probes}
    groups = [
        Group(name=p.name, arms={p.batching: stepping(engines[p.batching], p)}) for p in probes
    ]
    rounds = {p.name: Rounds(dropped=1, timed=repetitions) for p in probes}
    synchronize = next(iter(engines.values())).executor.synchronize
    works, seconds = [], []
    samples = []
    total = float(len(probes) * (repetitions + 1))
    with screen.progress("timing single steps, to predict from", total) as advance:
        for fresh in run_rounds(groups, rounds, seed=0, synchronize=synchronize):
            samples += fresh
            advance(1.0)
    for probe in probes:
        steps = schedules[probe.name].works
        for number, work in enumerate(steps):
            times = counted(samples, str(number)).get((probe.name, probe.batching), [])
            works.append(work)
            seconds.append(median(times))
        if counted(samples, str(len(steps))).get((probe.name, probe.batching)):
            raise RuntimeError(f"probe {probe.name} took more than the {len(steps)} steps planned")
    return fit_step_costs(works, seconds, knots_of(probes, engines))


def knots_of(probes: Sequence[Probe], engines: Mapping[Batching, Engine]) -> list[int]:
    """Row counts that were timed on purpose: every batch of decodes, every chunk."""
    budget = max(engine.scheduler.max_num_batched_tokens for engine in engines.values())
    decodes = {len(p.lengths) for p in probes}
    chunks = {p.lengths[0].prompt for p in probes if len(p.lengths) == 1}
    return sorted({min(n, budget) for n in decodes | chunks})
