"""What does a busy neighbour cost?

A process that does nothing but loop takes a fair share of the processor from whoever computes. One
decode step is executed again and again, each execution timed by itself, on a machine that is idle
and beside one such process, in rounds and in several number formats; idle runs twice (A/A). The
loop is started before the clock and ended after it, and a run in which it ended by itself means
nothing. What is predicted is the fair share alone, from threads and cores: threads that wait for
one another while one of them is not running cost more. Nothing is recorded unless every format
emits the same tokens beside the loop as alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from nanoserve.bench.conduct import AAArms, VoidError, conduct
from nanoserve.bench.experiments.batch import (
    LEAD,
    make_trial,
    open_format_engines,
    prompts_of,
    taken_step,
)
from nanoserve.bench.experiments.kvcache import Gate, write
from nanoserve.bench.findings.neighbour import BESIDE, IDLE, STEPS, step_name
from nanoserve.bench.formats import FORMATS, refuse_formats
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch, rest
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import Options, Screen, require_native
from nanoserve.engine.batch import StepBatch
from nanoserve.engine.engine import Engine
from nanoserve.planner.hardware import num_granted_cores

QUESTION = "what does a busy neighbour cost?"

AA = AAArms(arm=IDLE, same_arm=f"{IDLE} again", part=STEPS)

SPIN_UP_S = 0.05
"""Between the start of the neighbour and the first step; the idle arm rests as long."""

MAX_LOOP_S = 60
"""Processor seconds after which the system ends a loop whose parent was killed."""

LOOP = (
    "import resource as r; hard = r.getrlimit(r.RLIMIT_CPU)[1]; "
    f"most = {MAX_LOOP_S} if hard == r.RLIM_INFINITY else min(hard, {MAX_LOOP_S}); "
    "r.setrlimit(r.RLIMIT_CPU, (most, most)); "
    "print('busy', flush=True)\nwhile True: pass"
)
"""A limit that is lower already may not be raised again."""

Surroundings = Callable[[], AbstractContextManager[object]]
"""What the machine does beside the steps, while the context is open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: so many steps in each repetition, of one sequence at `context`."""

    formats: tuple[str, ...]
    num_steps: int
    context: int
    rules: Rules


FULL = Scale(
    formats=("float32", "bfloat16", "int8"),
    num_steps=48,
    context=96,
    rules=Rules(warmups=1, min_rounds=8, max_rounds=16, budget_s=55.0),
)
QUICK = Scale(
    formats=("float32", "int8"),
    num_steps=12,
    context=96,
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=6),
)


# --- the neighbour --------------------------------------------------------------------------------


@contextmanager
def busy_loop() -> Iterator[subprocess.Popen[bytes]]:
    """One process that loops while the context is open; ended and reaped however it is left.

    Raises VoidError if the loop did not begin, or ended before it was told to.
    """
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", LOOP],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_until_busy(process)
            rest(SPIN_UP_S)
            yield process
            check_busy(process)
        finally:
            process.kill()


def wait_until_busy(process: subprocess.Popen[bytes]) -> None:
    """Return once the loop is about to begin. Raises VoidError for a process that ended instead."""
    assert process.stdout is not None, "it was opened with a pipe"
    if not process.stdout.readline():
        raise VoidError(f"the busy loop did not begin: exit code {process.wait()}")


def check_busy(process: subprocess.Popen[bytes]) -> None:
    """Raise VoidError if the loop is over: the steps beside it were not all beside it."""
    code = process.poll()
    if code is not None:
        raise VoidError(
            f"the busy loop ended by itself (exit code {code}; it is ended after {MAX_LOOP_S} s of "
            "processor time): --resume continues, a smaller --model takes less time"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Nobody beside the steps, after the same rest as beside a loop."""
    rest(SPIN_UP_S)
    yield


# --- arms -----------------------------------------------------------------------------------------


def timed_steps(engine: Engine, step: StepBatch, num_steps: int, around: Surroundings) -> Arm:
    """An arm that executes one step `num_steps` times, each timed by itself, and their sum."""

    def arm(watch: Stopwatch) -> None:
        with around():
            engine.executor.execute(step)  # so that the first one timed follows a step, too
            for number in range(num_steps):
                watch.time(step_name(number), lambda: engine.executor.execute(step))
        watch.add(STEPS, sum(watch.seconds.values()))

    return arm


def gated_group(name: str, engine: Engine, scale: Scale, gate: Gate) -> Group:
    """One format's arms, once it emits beside a busy loop what it emits alone."""
    prompts = prompts_of(engine, 1, scale.context)
    step, written = taken_step(engine, prompts, gate.num_logprobs)
    with busy_loop():
        beside = write(engine, prompts, LEAD, num_logprobs=gate.num_logprobs)
    gate.compare(name, written, beside, names=(IDLE, BESIDE))
    idle = timed_steps(engine, step, scale.num_steps, quiet)
    return Group(
        name=name,
        arms={
            IDLE: idle,
            AA.same_arm: idle,
            BESIDE: timed_steps(engine, step, scale.num_steps, busy_loop),
        },
        labels={"context": scale.context, "num_steps": scale.num_steps},
    )


# --- the prediction -------------------------------------------------------------------------------


def fair_share(num_threads: int, num_cores: int) -> float:
    """How many times as long work takes that one more busy thread shares the cores with.

    Every thread has the same share, none more than a core, and no work waits for a thread that is
    not running: with t threads on c cores max(1, (t + 1) / c), over max(1, t / c) without the loop.
    """
    return max(1.0, (num_threads + 1) / num_cores) / max(1.0, num_threads / num_cores)


def predict(engines: Mapping[str, Engine]) -> Record:
    """The fair share for every format, before any of them was timed."""
    num_cores = num_granted_cores()
    return {
        "num_cores": num_cores,
        "predictions": {
            name: {
                "num_threads": (threads := int(engine.executor.describe()["threads"])),
                "slowdown": fair_share(threads, num_cores),
            }
            for name, engine in engines.items()
        },
    }


# --- the experiment -------------------------------------------------------------------------------


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    refuse_formats(options, "neighbour")
    scale = QUICK if options.quick else FULL
    engines, opened = open_format_engines(options, scale.formats, 1, screen)
    reference = engines[scale.formats[0]]
    require_native(reference, "neighbour")  # the formats, and the goals, are its own
    predicted = predict(engines)
    gate = Gate(is_exact=True)
    groups = []
    title = "gate: are the tokens the same beside a busy loop?"
    with screen.progress(title, float(len(engines))) as advance:
        for name, engine in engines.items():
            groups.append(gated_group(name, engine, scale, gate))
            advance(1.0)
    header = {**opened, **predicted}
    trial = make_trial("neighbour", reference, gate, groups, scale.rules, AA, header)
    weights = ", ".join(FORMATS[name].weights for name in engines)
    return conduct(replace(trial, identity={**trial.identity, "dtype": weights}), options, screen)
