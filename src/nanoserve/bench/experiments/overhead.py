"""What does the engine itself cost, beside the model?

With n requests in steady decode and an executor that answers at once, two loops are timed: planning
alone (schedule, build the batch, commit), and whole steps of the engine, which also draws uniforms,
decodes text and keeps its log. Then the real executor is put back and timed from inside the same
steps: the share of the wall time in which the model works. And where the executor is native, one
request through `LLM.generate` against its bare steps, in each format of the weights: what a token
costs a user beside the step, greedy and drawn; and rows of logits through the native sampler alone,
on one thread, for each way of sampling and instruction set. One loop runs twice (A/A).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nanoserve.bench.calibrate import add_all, greedy
from nanoserve.bench.conduct import AAArms, conduct
from nanoserve.bench.experiments.batch import make_trial
from nanoserve.bench.experiments.kvcache import Gate, write
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch, now_s
from nanoserve.bench.proxies import BatchRecorder, SilentExecutor, TimedExecutor
from nanoserve.bench.record import Run
from nanoserve.bench.sampler import (
    load_core,
    make_rows,
    native_tokens,
    prepare_rows,
    reference_tokens,
    rows_arm,
    sampling_modes,
    vector_isas,
)
from nanoserve.bench.session import Options, Screen, open_engine, weights_at_hand
from nanoserve.bench.traces import Length
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.config import Dtype, LoadFormat, Quantization
from nanoserve.engine.batch import SAMPLED, LogitRow, RowSampling, StepBatch, build_batch
from nanoserve.engine.engine import Engine
from nanoserve.llm import LLM
from nanoserve.request import SamplingParams
from nanoserve.scheduling.plan import ScheduledRequest

QUESTION = "what does the engine cost beside the model?"

AA = AAArms(arm="planning", same_arm="planning again", part="steps")
NUM_STEPS = 32
"""Steps of one loop; a repetition is the whole loop, so that reading the clock costs nothing."""

WARM_STEPS = 3

FORMATS: Mapping[str, tuple[Dtype, Quantization | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", "int8"),
}
"""Weights that `LLM.generate` is timed with, where the executor is native."""

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9, seed=0, ignore_eos=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """`running` requests with the silent executor, `with_model` of them with the real one.

    `context` is where the decodes begin: block tables grow with it, and the batch with them.
    `num_tokens` are what one repetition of `LLM.generate` writes.
    """

    running: tuple[int, ...]
    with_model: int
    model_steps: int
    context: int
    num_tokens: int
    rules: Rules


FULL = Scale(
    running=(1, 8, 64, 256),
    with_model=64,
    model_steps=16,
    context=128,
    num_tokens=64,
    rules=Rules(budget_s=120.0),
)
QUICK = Scale(
    running=(1, 8, 64),
    with_model=64,
    model_steps=4,
    context=64,
    num_tokens=16,
    rules=Rules(warmups=1, min_rounds=3, max_rounds=12, budget_s=10.0),
)


def start_decoding(engine: Engine, num_requests: int, context: int, num_steps: int) -> None:
    """Bring `num_requests` to steady decode, with enough left to write for `num_steps` more."""
    length = Length(prompt=context, output=WARM_STEPS + num_steps + 1)
    add_all(engine, [length] * num_requests)
    for _ in range(WARM_STEPS):
        engine.step()


def abort_all(engine: Engine, num_requests: int) -> None:
    for number in range(num_requests):
        engine.abort(str(number))


def planning_loop(engine: Engine, num_requests: int) -> None:
    """Steps in which nothing is computed or read: the scheduler, and the batch as arrays."""
    scheduler, spec = engine.scheduler, engine.spec
    sampling = RowSampling(params=greedy(1), prompt_token_ids=(), output_token_ids=())
    rows = [LogitRow(offset=0, target=SAMPLED, sampling=sampling, draw=0.0)]
    tokens = [0] * num_requests

    def logit_rows(_: ScheduledRequest) -> list[LogitRow]:
        return rows

    for _ in range(NUM_STEPS):
        plan = scheduler.schedule(0.0)
        build_batch(plan, logit_rows, block_size=spec.block_size, scratch_block=spec.num_blocks)
        scheduler.commit(plan, tokens, {})


def engine_loop(engine: Engine) -> None:
    """Whole steps, whatever the executor."""
    for _ in range(NUM_STEPS):
        engine.step()


def silent_arm(engine: Engine, num_requests: int, context: int, *, whole_steps: bool) -> Arm:
    """Either loop with the executor silenced; "steps" are `NUM_STEPS` of them."""

    def arm(watch: Stopwatch) -> None:
        real = engine.executor
        engine.executor = SilentExecutor(real)
        try:
            start_decoding(engine, num_requests, context, NUM_STEPS)
            if whole_steps:
                watch.time("steps", lambda: engine_loop(engine))
            else:
                watch.time("steps", lambda: planning_loop(engine, num_requests))
        finally:
            abort_all(engine, num_requests)
            engine.executor = real

    return arm


def busy_arm(engine: Engine, scale: Scale) -> Arm:
    """Real steps: "steps" is their wall time, "model" what of it was inside the executor."""

    def arm(watch: Stopwatch) -> None:
        real = engine.executor
        try:
            start_decoding(engine, scale.with_model, scale.context, scale.model_steps)
            engine.executor = TimedExecutor(real, watch)
            for _ in range(scale.model_steps):
                watch.time("steps", engine.step)
        finally:
            engine.executor = real
            abort_all(engine, scale.with_model)

    return arm


def make_groups(engine: Engine, scale: Scale) -> list[Group]:
    """Both loops for each number of running requests, and the steps with the model."""
    groups = []
    for count in scale.running:
        planning = silent_arm(engine, count, scale.context, whole_steps=False)
        arms = {
            AA.arm: planning,
            "engine": silent_arm(engine, count, scale.context, whole_steps=True),
        }
        if count == scale.with_model:
            arms[AA.same_arm] = planning
        labels = {"running": count, "num_steps": NUM_STEPS, "context": scale.context}
        groups.append(Group(name=f"{count} running", arms=arms, labels=labels))
    labels = {
        "running": scale.with_model,
        "num_steps": scale.model_steps,
        "context": scale.context,
        "with_model": True,
    }
    name = f"{scale.with_model} running, with the model"
    return [*groups, Group(name=name, arms={"engine": busy_arm(engine, scale)}, labels=labels)]


def bare_arm(engine: Engine, step: StepBatch, num_tokens: int) -> Arm:
    """One step, `num_tokens` times: "tokens" are all of them."""

    def steps() -> None:
        for _ in range(num_tokens):
            engine.executor.execute(step)

    return lambda watch: watch.time("tokens", steps)


def generate_arm(llm: LLM, params: SamplingParams) -> Arm:
    """`LLM.generate` after a prompt of one token, so that every token is one step of one row."""
    prompt = prompt_token_ids(1, llm.engine.model_config.vocab_size, 0)
    return lambda watch: watch.time("tokens", lambda: llm.generate([prompt], params))


def middle_step(llm: LLM, params: SamplingParams, num_tokens: int) -> StepBatch:
    """The step of the middle token: its context is the mean one of all of them."""
    engine = llm.engine
    recorder = BatchRecorder(engine.executor)
    engine.executor = recorder
    try:
        generate_arm(llm, replace(params, max_tokens=num_tokens // 2))(Stopwatch(lambda: None))
    finally:
        engine.executor = recorder.inner
    assert recorder.last is not None, "a token takes a step"
    return recorder.last


def end_to_end_group(engine: Engine, weights: str, num_tokens: int) -> Group:
    """`LLM.generate` beside the bare step, for each way of sampling."""
    llm = LLM.of(engine)
    arms: dict[str, Arm] = {}
    for name, params in SAMPLINGS.items():
        step = middle_step(llm, params, num_tokens)
        arms[f"bare step, {name}"] = bare_arm(engine, step, num_tokens)
        arms[f"LLM.generate, {name}"] = generate_arm(llm, replace(params, max_tokens=num_tokens))
    return Group(
        name=f"one request, {weights}",
        arms=arms,
        labels={"weights": weights, "num_tokens": num_tokens, "samplings": list(SAMPLINGS)},
    )


def engines_by_weights(
    engine: Engine, options: Options, load_format: LoadFormat
) -> dict[str, Engine]:
    """`engine` itself, and where it is native one for each other format of `FORMATS`."""
    ours: str = engine.spec.quantization or engine.spec.dtype
    if engine.spec.executor != "native":
        return {}
    engines = {ours: engine}
    for name, (dtype, quantization) in FORMATS.items():
        if name != ours:
            wanted = replace(options, dtype=dtype, quantization=quantization)
            engines[name] = open_engine(wanted, load_format, layout="paged", max_num_seqs=1)
    return engines


def sampler_groups(vocab_size: int, gate: Gate) -> list[Group]:
    """The native sampler on each vector instruction set of this machine, one arm for each mode.

    Each must draw what the reference sampler draws, and name the same alternatives: VoidError else.
    """
    logits, draws = make_rows(vocab_size)
    modes = sampling_modes(vocab_size)
    wanted = {name: reference_tokens(logits, draws, mode) for name, mode in modes.items()}
    groups = []
    for isa in vector_isas():
        core = load_core(isa)
        arms: dict[str, Arm] = {}
        for name, mode in modes.items():
            prepared = prepare_rows(core, logits, draws, mode)
            names = ("the native sampler", "the reference")
            gate.compare(f"{isa}, {name}", native_tokens(prepared), wanted[name], names=names)
            arms[name] = rows_arm(prepared)
        labels = {"isa": isa, "vocab_size": vocab_size}
        groups.append(Group(name=f"native sampler, {isa}", arms=arms, labels=labels))
    return groups


def pass_gate(engine: Engine, gate: Gate, prompts: Sequence[Sequence[int]]) -> None:
    """The engine must emit the same tokens with and without the stopwatch in its executor."""
    written = write(engine, prompts, 4, num_logprobs=gate.num_logprobs)
    real = engine.executor
    engine.executor = TimedExecutor(real, Stopwatch(real.synchronize))
    try:
        timed = write(engine, prompts, 4, num_logprobs=gate.num_logprobs)
    finally:
        engine.executor = real
    gate.compare("a stopwatch in the executor", written, timed, names=("without it", "with it"))


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    started_s = now_s()
    engine = open_engine(options, load_format, layout="paged", max_num_seqs=max(scale.running))
    engines = engines_by_weights(engine, options, load_format)
    load_s = now_s() - started_s
    gate = Gate(is_exact=all(e.spec.is_exact for e in (engine, *engines.values())))
    vocab_size = engine.model_config.vocab_size
    for one in dict.fromkeys((engine, *engines.values())):
        pass_gate(one, gate, [prompt_token_ids(16, vocab_size, i) for i in range(4)])
    groups = make_groups(engine, scale)
    groups += [end_to_end_group(e, name, scale.num_tokens) for name, e in engines.items()]
    if engine.spec.executor == "native":
        groups += sampler_groups(vocab_size, gate)
    trial = make_trial("overhead", engine, gate, groups, scale.rules, AA, {"load_s": load_s})
    return conduct(trial, options, screen)
