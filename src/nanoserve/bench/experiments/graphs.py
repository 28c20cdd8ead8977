"""How much of decode is dispatch?

The same decode step, with the same weights and caches, on executors that differ in who launches
its operations. On a CPU: `eager`, where PyTorch dispatches each of them from Python, against
`native`, where the step is one call. On CUDA: `eager` against a captured graph, whose operations
the device launches by itself. A prediction, stored before, says how long dispatch should take: the
operations that eager counts, times the measured cost of one with nothing to do. One arm runs twice
(A/A). Nothing is recorded unless all arms emit the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from nanoserve.bench.conduct import AAArms, Trial, conduct
from nanoserve.bench.experiments.batch import (
    LEAD,
    make_trial,
    prompts_of,
    repeated,
    taken_step,
)
from nanoserve.bench.experiments.ceilings import make_yardsticks
from nanoserve.bench.experiments.kvcache import Gate, measured_ceilings
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.formats import expect_step, refuse_formats
from nanoserve.bench.measure import Arm, Group, Rules, now_s
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import (
    NotHereError,
    Options,
    Screen,
    describe_engine,
    open_engine,
    weights_at_hand,
)
from nanoserve.config import ExecutorName
from nanoserve.engine.build import resolve_device
from nanoserve.engine.engine import Engine
from nanoserve.planner.model import StepShape
from nanoserve.planner.steptime import Ceilings

QUESTION = "how much of decode is dispatch?"

EAGER, ONE_WINDOW = "eager", "graph, one window"
ARMS: dict[str, dict[str, ExecutorName]] = {
    "cpu": {EAGER: "eager", "native": "native"},
    "cuda": {EAGER: "eager", ONE_WINDOW: "graph", "graph, bucketed windows": "graph"},
}
"""Executor by arm, by device; the last arm is the one that all others are held against."""


class Bucket(Protocol):
    """A captured shape: positions that each sequence may attend to."""

    window: int


class Graphs(Protocol):
    """The captured steps of an executor."""

    buckets: Sequence[Bucket]


class Captures(Protocol):
    """An executor whose decode steps are captured, bucket by bucket, when it warms up."""

    graphs: Graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: each batch at each context that the model has."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rules: Rules


FULL = Scale(
    batches=(1, 4, 16),
    contexts=(64, 512),
    rules=Rules(budget_s=120.0, min_rounds=10, max_rounds=40),
)
QUICK = Scale(
    batches=(1, 4),
    contexts=(64,),
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=16, budget_s=6.0),
)


def group_name(batch: int, context: int) -> str:
    return f"batch {batch}, context {context}"


def open_arms(options: Options, scale: Scale, screen: Screen) -> dict[str, Engine]:
    """An engine for each arm of the device. Raises ValueError if one of them cannot run."""
    refuse_formats(options, "graphs")
    device = resolve_device(options.device)
    if device not in ARMS:
        raise NotHereError(f"graphs compares executors of {', '.join(ARMS)}, got --device {device}")
    if options.executor != "auto":
        raise ValueError("graphs compares executors with one another: leave out --executor")
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    engines: dict[str, Engine] = {}
    for arm, executor in ARMS[device].items():
        engines[arm] = open_engine(
            replace(options, executor=executor),
            load_format,
            layout="contiguous",
            max_num_seqs=max(scale.batches),
            donor=next(iter(engines.values()), None),
        )
        if arm == ONE_WINDOW:
            keep_widest(engines[arm])
        engines[arm].executor.warm_up()
    return engines


def keep_widest(engine: Engine) -> None:
    """Of an engine that has not warmed up: capture one window only, the whole one."""
    graphs = cast(Captures, engine.executor).graphs
    widest = max(bucket.window for bucket in graphs.buckets)
    graphs.buckets = tuple(bucket for bucket in graphs.buckets if bucket.window == widest)


def gated_group(engines: Mapping[str, Engine], batch: int, context: int, gate: Gate) -> Group:
    """All arms at one shape, once they have emitted the same tokens there."""
    first, *others = engines
    arms: dict[str, Arm] = {}
    written = None
    for name, engine in engines.items():
        prompts = prompts_of(engine, batch, context)
        step, tokens = taken_step(engine, prompts, gate.num_logprobs)
        if written is not None:
            gate.compare(group_name(batch, context), tokens, written, names=(name, first))
        written = written or tokens
        arms[name] = repeated(engine, step)
    baseline = others[-1]
    arms[f"{baseline} again"] = arms[baseline]
    return Group(
        name=group_name(batch, context),
        arms=arms,
        labels={"batch": batch, "context": context, "eager": first, "baseline": baseline},
    )


def predict(
    engines: Mapping[str, Engine], ceilings: Ceilings, shapes: Sequence[tuple[int, int]]
) -> Record:
    """What the planner expects of every arm and shape; of eager, how much of it is dispatch."""
    return {
        "ceilings": ceilings.to_json(),
        "predictions": {
            group_name(batch, context): {
                name: expect_step(
                    ceilings,
                    engine.model_config,
                    StepShape(num_seqs=batch, context=context),
                    engine,
                )
                for name, engine in engines.items()
            }
            for batch, context in shapes
        },
    }


def captures(engines: Mapping[str, Engine]) -> Record:
    """What capturing took, of each arm whose executor says so."""
    found: dict[str, Record] = {}
    for name, engine in engines.items():
        stats, described = engine.executor.memory_stats(), engine.executor.describe()
        if "graph_pool_bytes" in stats:
            found[name] = {
                "graph_pool_bytes": stats["graph_pool_bytes"],
                "capture_s": float(described["capture_s"]),
                "num_graphs": int(described["graphs"]),
            }
    return found


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    started_s = now_s()
    engines = open_arms(options, scale, screen)
    load_s = now_s() - started_s
    *_, baseline = engines.values()
    spec = baseline.spec
    yardsticks = make_yardsticks(spec.device, options.threads, also_dtype=spec.dtype)
    samples = measured_ceilings(yardsticks, options, screen)
    contexts = [n for n in scale.contexts if LEAD <= n < spec.max_model_len]
    shapes = [(batch, context) for context in contexts for batch in scale.batches]
    predicted = predict(engines, ceilings_of(samples), shapes)
    gate = Gate(is_exact=spec.dtype == "float32")
    groups = []
    num_tokens = float(sum(batch * context for batch, context in shapes))
    title = "gate: do all executors emit the same tokens?"
    with screen.progress(title, num_tokens) as advance:
        for batch, context in shapes:
            groups.append(gated_group(engines, batch, context, gate))
            advance(float(batch * context))
    groups += yardsticks.fastest(samples, spec.dtype)
    header = {"load_s": load_s, "captures": captures(engines), **predicted}
    trial = make_trial("graphs", baseline, gate, groups, scale.rules, aa_of(engines), header)
    return conduct(name_executors(trial, engines), options, screen)


def aa_of(engines: Mapping[str, Engine]) -> AAArms:
    """The last arm, twice."""
    *_, name = engines
    return AAArms(arm=name, same_arm=f"{name} again", part="step")


def name_executors(trial: Trial, engines: Mapping[str, Engine]) -> Trial:
    """The trial under all of its executors: none of them alone is what ran."""
    described = {name: describe_engine(engine) for name, engine in engines.items()}
    both = " and ".join(str(value["executor"]) for value in described.values())
    kernels = "; ".join(f"{name}: {value['kernels']}" for name, value in described.items())
    return replace(
        trial,
        identity={**trial.identity, "executor": both, "kernels": kernels},
        setup={**trial.setup, "arms_run": described},
    )
