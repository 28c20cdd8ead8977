"""The only module that times. A repetition here is never alone and never first.

Compared arms run in one process, in rounds, in an order shuffled by a recorded seed; every arm is
warmed up by rule and nothing but the first rounds is ever dropped. Clocks are read with the device
synchronised and the garbage collector switched off. What is timed is handed in as plain functions,
so the same code measures a kernel, an engine's step or a fake in a test.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns, process_time, sleep, thread_time
from typing import Any, TypeVar

T = TypeVar("T")

FAILED = "failed"
"""The label of a repetition that did not come about, with the reason. It has no seconds."""


class Stopwatch:
    """Times named parts of one repetition: synchronised wall clock, in seconds."""

    def __init__(self, synchronize: Callable[[], object]) -> None:
        self._synchronize = synchronize
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` and add what it took to `seconds[name]`; its result is passed on."""
        self._synchronize()
        started = perf_counter_ns()
        result = work()
        self._synchronize()
        elapsed = perf_counter_ns() - started
        self.add(name, elapsed / 1e9)
        return result

    def add(self, name: str, seconds: float) -> None:
        """Add to `seconds[name]` what was timed elsewhere: in another process, by this module."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


Arm = Callable[[Stopwatch], object]
"""One repetition: set up untimed, time the parts that count through the stopwatch, clean up.

Raises `ArmError` if it cannot, which is recorded and does not end the run.
"""


class ArmError(RuntimeError):
    """An arm that failed, and why: the others go on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Arms that are compared with one another: one shape, such as a context and a batch size."""

    name: str
    arms: Mapping[str, Arm]
    labels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How often. `budget_s` None means every group gets `max_rounds`.

    With a budget, dear groups get fewer rounds (never under `min_rounds`), and where not even the
    dropped rounds are affordable beside those, none are dropped; each record says what it was.
    """

    warmups: int = 3
    dropped_rounds: int = 2
    min_rounds: int = 10
    max_rounds: int = 20
    budget_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How many rounds a group takes part in: the first `dropped` are not counted."""

    dropped: int
    timed: int

    @property
    def total(self) -> int:
        return self.dropped + self.timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One repetition of one arm. `position` is the arm's place in the shuffled order."""

    group: str
    arm: str
    round: int
    position: int
    dropped: bool
    seconds: Mapping[str, float]
    labels: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside; what is alive now is left out of any later one."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def now_s() -> float:
    """Seconds on the clock everything here is timed with; for budgets and load times."""
    return perf_counter_ns() / 1e9


def rest(seconds: float) -> None:
    """Do nothing for so long; not at all for a time that has passed."""
    if seconds > 0:
        sleep(seconds)


def process_cpu_s() -> float:
    """Seconds of processor time that this process, all its threads together, has used."""
    return process_time()


def thread_cpu_s() -> float:
    """Seconds of processor time that the calling thread has used."""
    return thread_time()


def warm_up(
    groups: Sequence[Group], rules: Rules, synchronize: Callable[[], object]
) -> Iterator[tuple[str, float]]:
    """Run each arm `rules.warmups` times untimed; yield each group's name and cost in seconds.

    The cost is that of one round (the last warm-up of each arm). Under a budget an arm stops
    warming up, after at least one run, once it has used its share of a tenth of it.
    """
    num_arms = sum(len(group.arms) for group in groups)
    limit_s = None if rules.budget_s is None else rules.budget_s / 10 / num_arms
    for group in groups:
        yield (
            group.name,
            sum(warm_arm(arm, rules, limit_s, synchronize) for arm in group.arms.values()),
        )


def warm_arm(
    arm: Arm, rules: Rules, limit_s: float | None, synchronize: Callable[[], object]
) -> float:
    """Seconds of the last warm-up of one arm, everything it does included."""
    used_s = cost_s = 0.0
    for _ in range(rules.warmups):
        watch = Stopwatch(synchronize)
        try:
            watch.time("all", lambda: arm(Stopwatch(synchronize)))
        except ArmError:
            return 0.0  # its first round will say so on the record
        cost_s = watch.seconds["all"]
        used_s += cost_s
        if limit_s is not None and used_s >= limit_s:
            break
    return cost_s


def plan_rounds(costs_s: Mapping[str, float], rules: Rules) -> dict[str, Rounds]:
    """Rounds per group from the cost of one round of each.

    Under a budget every group has `min_rounds`, whatever they cost; the rest is shared out evenly,
    cheapest group first, so that what it does not need goes to the dearer ones.
    """
    if rules.budget_s is None:
        full = Rounds(dropped=rules.dropped_rounds, timed=rules.max_rounds)
        return dict.fromkeys(costs_s, full)
    plan: dict[str, Rounds] = {}
    spare_s = max(0.0, rules.budget_s - rules.min_rounds * sum(costs_s.values()))
    for index, (name, cost_s) in enumerate(sorted(costs_s.items(), key=lambda item: item[1])):
        share_s = spare_s / (len(costs_s) - index)
        plan[name] = affordable_rounds(share_s, cost_s, rules)
        spare_s -= (plan[name].total - rules.min_rounds) * cost_s
    return {name: plan[name] for name in costs_s}


def affordable_rounds(share_s: float, cost_s: float, rules: Rules) -> Rounds:
    """`min_rounds`, and as many more as `share_s` pays for, within the rules."""
    most = rules.dropped_rounds + rules.max_rounds
    total = min(most, rules.min_rounds + int(share_s / max(cost_s, 1e-9)))
    dropped = rules.dropped_rounds if total >= rules.min_rounds + rules.dropped_rounds else 0
    return Rounds(dropped=dropped, timed=min(total - dropped, rules.max_rounds))


def run_rounds(
    groups: Sequence[Group],
    rounds: Mapping[str, Rounds],
    *,
    seed: int,
    synchronize: Callable[[], object],
    done: Collection[tuple[int, str]] = (),
) -> Iterator[list[Sample]]:
    """Measure; yield the samples of one group in one round at a time, ready to be recorded.

    `done` are the (round, group) pairs that an earlier, interrupted run has recorded. They are
    skipped, but the order of the rest is what it would have been: it depends on the seed alone.
    """
    with quiet_collector():
        for number in range(max(rounds[group.name].total for group in groups)):
            order = random.Random(f"{seed}:{number}")
            for group in order.sample(groups, len(groups)):
                arms = order.sample(list(group.arms), len(group.arms))
                if number < rounds[group.name].total and (number, group.name) not in done:
                    dropped = number < rounds[group.name].dropped
                    yield run_group(group, arms, number, dropped, synchronize)
            gc.collect()  # between rounds, where nobody is timed


def run_group(
    group: Group,
    arms: Sequence[str],
    number: int,
    dropped: bool,
    synchronize: Callable[[], object],
) -> list[Sample]:
    """One repetition of each arm, in the order given."""
    samples = []
    for position, arm in enumerate(arms):
        watch, labels = Stopwatch(synchronize), group.labels
        try:
            group.arms[arm](watch)
        except ArmError as error:
            watch, labels = Stopwatch(synchronize), {**labels, FAILED: str(error)}
        samples.append(
            Sample(
                group=group.name,
                arm=arm,
                round=number,
                position=position,
                dropped=dropped,
                seconds=watch.seconds,
                labels=labels,
            )
        )
    return samples


def paired_ratios(
    samples: Sequence[Sample], numerator: str, denominator: str, part: str
) -> list[float]:
    """seconds(numerator) / seconds(denominator) inside each round of each group, pooled.

    Dropped rounds, and groups in which one of the two did not run, contribute nothing.
    """
    pairs: dict[tuple[str, int], dict[str, float]] = {}
    for sample in samples:
        if not sample.dropped and part in sample.seconds:
            pairs.setdefault((sample.group, sample.round), {})[sample.arm] = sample.seconds[part]
    return [
        pair[numerator] / pair[denominator]
        for pair in pairs.values()
        if numerator in pair and denominator in pair
    ]
