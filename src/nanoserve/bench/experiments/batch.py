"""When does batching stop being free?

One engine, and one decode step of B sequences at an exact context for each B: taken from the engine
as it serves them, then executed again and again, so that nothing but B differs between the arms of
a context. Engine and scheduler are not in these times (`overhead` measures those). One batch size
runs twice (A/A). Nothing is recorded unless every sequence emits the same tokens alone and in each
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanoserve.bench.conduct import AAArms, Trial, conduct
from nanoserve.bench.experiments.ceilings import make_yardsticks
from nanoserve.bench.experiments.kvcache import Gate, Tokens, measured_ceilings, write
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.formats import check_room, expect_step, format_suffix, open_formats
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch, now_s
from nanoserve.bench.proxies import BatchRecorder
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import (
    Options,
    Screen,
    describe_engine,
    describe_weights,
    open_engine,
    weights_at_hand,
)
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.engine.batch import StepBatch
from nanoserve.engine.engine import Engine
from nanoserve.planner.model import StepShape, kv_bytes_per_token
from nanoserve.planner.steptime import Ceilings

QUESTION = "when does batching stop being free?"

AA_BATCH = 8
LEAD = 2
"""Tokens each sequence emits: prefill's, and that of the step which is timed."""


def batch_name(batch: int) -> str:
    return f"batch {batch}"


AA = AAArms(arm=batch_name(AA_BATCH), same_arm=f"{batch_name(AA_BATCH)} again", part="step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. `AA_BATCH` is always among the batches, 1 as well."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    rules: Rules


FULL = Scale(
    batches=(1, 2, 4, 8, 16, 32, 64), contexts=(64, 256), rules=Rules(budget_s=240.0, min_rounds=10)
)
QUICK = Scale(
    batches=(1, 2, 4, 8, 16),
    contexts=(32,),
    rules=Rules(warmups=1, min_rounds=3, max_rounds=12, budget_s=8.0),
)


def prompts_of(engine: Engine, num_seqs: int, context: int) -> list[list[int]]:
    """Prompts after which the second token is drawn at exactly `context`."""
    vocab_size = engine.model_config.vocab_size
    return [prompt_token_ids(context - LEAD + 1, vocab_size, i) for i in range(num_seqs)]


def taken_step(
    engine: Engine, prompts: Sequence[Sequence[int]], num_logprobs: int
) -> tuple[StepBatch, list[Tokens]]:
    """The decode step of all `prompts` together, and what they emitted until then.

    Raises RuntimeError if the engine did not take them all into one step.
    """
    recorder = BatchRecorder(engine.executor)
    engine.executor = recorder
    try:
        written = write(engine, prompts, LEAD, num_logprobs=num_logprobs)
    finally:
        engine.executor = recorder.inner
    step = recorder.last
    if step is None or len(step.context_lens) != len(prompts):
        raise RuntimeError(f"the last step did not hold all {len(prompts)} sequences")
    return step, written


def repeated(engine: Engine, step: StepBatch) -> Arm:
    """An arm that executes one step again."""

    def arm(watch: Stopwatch) -> None:
        watch.time("step", lambda: engine.executor.execute(step))

    return arm


def gated_group(engine: Engine, batches: Sequence[int], context: int, gate: Gate) -> Group:
    """All batch sizes at one context, once their tokens are those of each sequence alone."""
    prompts = prompts_of(engine, max(batches), context)
    alone = [write(engine, [prompt], LEAD, num_logprobs=gate.num_logprobs)[0] for prompt in prompts]
    arms: dict[str, Arm] = {}
    for batch in batches:
        step, written = taken_step(engine, prompts[:batch], gate.num_logprobs)
        where = f"batch {batch}, context {context}"
        gate.compare(where, written, alone[:batch], names=("the batch", "the sequence alone"))
        arms[batch_name(batch)] = repeated(engine, step)
        if batch == AA_BATCH:
            arms[AA.same_arm] = repeated(engine, step)
    per_token = kv_bytes_per_token(engine.model_config, engine.spec.cache_dtype)
    return Group(
        name=f"context {context}",
        arms=arms,
        labels={
            "context": context,
            "batches": {batch_name(batch): batch for batch in batches},
            "kv_bytes_per_sequence": context * per_token,
        },
    )


def predict(engine: Engine, ceilings: Ceilings, contexts: Sequence[int], scale: Scale) -> Record:
    """What the planner expects of each context and batch, before any of them was run."""

    def expect(shape: StepShape) -> Record:
        return expect_step(ceilings, engine.model_config, shape, engine)

    return {
        "ceilings": ceilings.to_json(),
        "predictions": {
            f"context {context}": {
                batch_name(batch): expect(StepShape(num_seqs=batch, context=context))
                for batch in scale.batches
            }
            for context in contexts
        },
    }


def format_arms(
    engines: Mapping[str, Engine], gates: Mapping[str, Gate], batch: int, context: int
) -> dict[str, Arm]:
    """The decode step of every format, once each emits in it what its last sequence emits alone."""
    arms: dict[str, Arm] = {}
    for name, engine in engines.items():
        gate, prompts = gates[name], prompts_of(engine, batch, context)
        step, written = taken_step(engine, prompts, gate.num_logprobs)
        alone = write(engine, prompts[-1:], LEAD, num_logprobs=gate.num_logprobs)
        where = f"{name}, {batch_name(batch)}"
        gate.compare(where, written[-1:], alone, names=("the batch", "the sequence alone"))
        arms[name] = repeated(engine, step)
    return arms


def predict_formats(
    engines: Mapping[str, Engine], ceilings: Ceilings, batches: Sequence[int], context: int
) -> Record:
    """What the planner expects of every format at each batch, before any of them was run."""
    return {
        "ceilings": ceilings.to_json(),
        "predictions": {
            batch_name(batch): {
                name: expect_step(
                    ceilings,
                    engine.model_config,
                    StepShape(num_seqs=batch, context=context),
                    engine,
                )
                for name, engine in engines.items()
            }
            for batch in batches
        },
    }


def open_format_engines(
    options: Options, names: Sequence[str], max_num_seqs: int, screen: Screen
) -> tuple[dict[str, Engine], Record]:
    """An engine for each format that can run, and what a header says of that: how long it took, and
    why the others are missing.

    Raises ValueError if the first cannot run.
    """
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    started_s = now_s()
    engines, gaps = open_formats(options, names, load_format, max_num_seqs)
    load_s = now_s() - started_s
    for name, why in gaps.items():
        screen.say(f"No arms for {name}: {why}")
    return engines, {"load_s": load_s, "gaps": gaps}


def open_batch_engine(options: Options, scale: Scale, screen: Screen) -> Engine:
    """The one engine, with room for the largest batch."""
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    engine = open_engine(options, load_format, layout="contiguous", max_num_seqs=max(scale.batches))
    check_room(engine, max(scale.batches))
    return engine


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    started_s = now_s()
    engine = open_batch_engine(options, scale, screen)
    load_s = now_s() - started_s
    spec = engine.spec
    yardsticks = make_yardsticks(spec.device, options.threads, also_dtype=spec.dtype)
    samples = measured_ceilings(yardsticks, options, screen)
    contexts = [context for context in scale.contexts if context < spec.max_model_len]
    predicted = predict(engine, ceilings_of(samples), contexts, scale)
    gate = Gate(is_exact=spec.is_exact)
    groups = []
    title = "gate: does every sequence emit the same tokens alone and in a batch?"
    with screen.progress(title, float(sum(contexts))) as advance:
        for context in contexts:
            groups.append(gated_group(engine, scale.batches, context, gate))
            advance(float(context))
    groups += yardsticks.fastest(samples, spec.dtype)
    header = {"load_s": load_s, **predicted}
    return conduct(
        make_trial("batch", engine, gate, groups, scale.rules, AA, header), options, screen
    )


def make_trial(
    experiment: str,
    engine: Engine,
    gate: Gate,
    groups: Sequence[Group],
    rules: Rules,
    aa: AAArms,
    header: Record,
) -> Trial:
    """The measurement with the names of what really runs."""
    described, weights = describe_engine(engine), describe_weights(engine)
    return Trial(
        experiment=experiment,
        name=f"{weights['model']}-{described['device']}{format_suffix(engine)}",
        groups=groups,
        rules=rules,
        aa=aa,
        synchronize=engine.executor.synchronize,
        identity={
            "model": weights["model"],
            "weights": weights["weights"],
            "weights_id": weights["weights_id"],
            "tokens_sha256": gate.sha256,
            **{name: described[name] for name in ("executor", "kernels", "device")},
            "dtype": engine.spec.quantization or engine.spec.dtype,
        },
        setup={"engine": described, "model_config": weights["config"]},
        header=header,
    )
