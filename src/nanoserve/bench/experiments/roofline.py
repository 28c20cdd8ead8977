"""How far from the limit?

A decode step must move its weights once, and the keys and values of its sequences; it must do a
known number of operations. Both over what the machine does at best is a limit, and the question is
how far each number format stays from it at batch 1, 8 and 32. The read probe runs in the same
rounds as the steps, so the limit is bytes over the bandwidth of the same minute, not of a better
day. One format runs twice (A/A). Nothing is recorded unless, in every format, each sequence emits
the same tokens alone and in its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanoserve.bench.conduct import AAArms, conduct
from nanoserve.bench.experiments.batch import (
    batch_name,
    format_arms,
    make_trial,
    open_format_engines,
    predict_formats,
)
from nanoserve.bench.experiments.ceilings import make_yardsticks
from nanoserve.bench.experiments.kvcache import Gate, measured_ceilings
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.formats import FORMATS, REFERENCE, refuse_formats
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch
from nanoserve.bench.record import Run
from nanoserve.bench.session import Options, Screen
from nanoserve.engine.engine import Engine

QUESTION = "how far from the limit?"

READ = "read"
"""The arm that reads memory as fast as this machine can; what the others are held against."""

AA = AAArms(arm=REFERENCE, same_arm=f"{REFERENCE} again", part="step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: every format at each batch, all at one context."""

    formats: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    rules: Rules


FULL = Scale(
    formats=(
        REFERENCE,
        "KV int8",
        "bfloat16",
        "bfloat16, KV int8",
        "int8-weight-only",
        "int8-weight-only, KV int8",
        "int8",
        "int8, KV int8",
        "int4",
        "int4, KV int8",
    ),
    batches=(1, 8, 32),
    context=64,
    rules=Rules(budget_s=170.0, min_rounds=12, max_rounds=60),
)
QUICK = Scale(
    formats=(REFERENCE, "bfloat16", "int8", "int8, KV int8", "int4"),
    batches=(1, 8),
    context=32,
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=16, budget_s=8.0),
)


def read_arm(load: Arm) -> Arm:
    """The read probe as an arm among steps: what it takes is a "step", too."""

    def arm(watch: Stopwatch) -> None:
        probe = Stopwatch(lambda: None)
        load(probe)
        watch.seconds["step"] = probe.seconds["run"]

    return arm


def gated_group(
    engines: Mapping[str, Engine],
    gates: Mapping[str, Gate],
    batch: int,
    context: int,
    probe: Group,
) -> Group:
    """All formats at one batch, and the read probe among them."""
    (load,) = probe.arms.values()
    arms = {READ: read_arm(load), **format_arms(engines, gates, batch, context)}
    arms[AA.same_arm] = arms[AA.arm]
    labels = {"batch": batch, "context": context, "read_bytes": probe.labels["amount"]}
    return Group(name=batch_name(batch), arms=arms, labels=labels)


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    refuse_formats(options, "roofline")
    scale = QUICK if options.quick else FULL
    engines, opened = open_format_engines(options, scale.formats, max(scale.batches), screen)
    reference = engines[REFERENCE]
    spec = reference.spec
    yardsticks = make_yardsticks(spec.device, options.threads)
    samples = measured_ceilings(yardsticks, options, screen)
    probe, *ceilings = yardsticks.fastest(samples, spec.dtype)
    predicted = predict_formats(engines, ceilings_of(samples), scale.batches, scale.context)
    gates = {name: Gate(is_exact=engine.spec.is_exact) for name, engine in engines.items()}
    groups = []
    title = "gate: does every sequence emit the same tokens alone and in a batch?"
    with screen.progress(title, float(sum(scale.batches))) as advance:
        for batch in scale.batches:
            groups.append(gated_group(engines, gates, batch, scale.context, probe))
            advance(float(batch))
    header = {
        **opened,
        "formats": {
            name: {"weights": FORMATS[name].weights, "kv": FORMATS[name].cache_dtype}
            for name in engines
        },
        **predicted,
    }
    gate = gates[REFERENCE]
    trial = make_trial("roofline", reference, gate, [*groups, *ceilings], scale.rules, AA, header)
    weights = ", ".join(dict.fromkeys(FORMATS[name].weights for name in engines))
    return conduct(replace(trial, identity={**trial.identity, "dtype": weights}), options, screen)
