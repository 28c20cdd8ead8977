"""fp32, fp16, bf16, int8 weights, int8 KV: what is the price?

Two halves on two models. Quality needs weights that mean something, so it is measured on `mini`,
which was trained, over held-out text: perplexity, KL, agreement and the error of logits at every
position of whole windows, and how long texts written freely stay the same. Speed and memory need a
size, so they are measured on `--model`, whose weights may be random. Beside every format stands the
noise floor: float32 against itself in another batch, and on another executor. One format runs twice
(A/A). Nothing is recorded unless, in every format, each sequence emits the same tokens alone and in
its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from nanoserve.bench.conduct import AAArms, conduct
from nanoserve.bench.experiments.batch import (
    batch_name,
    format_arms,
    make_trial,
    predict_formats,
)
from nanoserve.bench.experiments.ceilings import make_yardsticks
from nanoserve.bench.experiments.kvcache import Gate, measured_ceilings, write
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.formats import (
    FORMATS,
    REFERENCE,
    check_room,
    open_formats,
    reason,
    refuse_formats,
)
from nanoserve.bench.measure import Group, Rules, now_s
from nanoserve.bench.quality import (
    Positions,
    Quality,
    Reference,
    conclude,
    cut_windows,
    first_differences,
    heldout_text,
    read_logits,
)
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import (
    Options,
    Screen,
    describe_engine,
    describe_weights,
    open_engine,
    weights_at_hand,
)
from nanoserve.engine.engine import Engine
from nanoserve.planner.model import kv_bytes_per_token, read_weight_bytes

QUESTION = "fp32, fp16, bf16, int8 weights, int8 KV: what is the price?"

QUALITY_MODEL = "mini"
ANOTHER_BATCH, EAGER, EAGER_BATCH = (
    "float32, another batch",
    "float32 on eager",
    "float32 on eager, another batch",
)
"""The noise floor: what float32 makes of the same text when nothing but the way of computing it
differs. The last is held against eager's own; everything else against `REFERENCE`."""

ANOTHER_STEP = 16
"""Rows of a step in another batch: matrix products of so many rows, not of a whole window's."""

AA = AAArms(arm=REFERENCE, same_arm=f"{REFERENCE} again", part="step")

PROMPT = 32
"""Tokens of held-out text from which texts are written freely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured. Quality: `num_windows` of `length` tokens, and `num_texts` written
    freely, of `num_written` tokens. Speed: `formats` at each batch, all at one context.
    """

    quality_formats: tuple[str, ...]
    num_windows: int
    length: int
    num_texts: int
    num_written: int
    formats: tuple[str, ...]
    batches: tuple[int, ...]
    context: int
    rules: Rules


QUALITY_FORMATS = (
    "KV bfloat16",
    "KV float16",
    "KV int8",
    "float16",
    "bfloat16",
    "int8-weight-only",
    "int8",
    "int8, KV int8",
    "int4",
    "int4, KV int8",
)
FULL = Scale(
    quality_formats=QUALITY_FORMATS,
    num_windows=8,
    length=1024,
    num_texts=16,
    num_written=256,
    formats=(
        REFERENCE,
        "KV int8",
        "bfloat16",
        "int8-weight-only",
        "int8",
        "int8, KV int8",
        "int4",
    ),
    batches=(1, 8, 32),
    context=64,
    rules=Rules(budget_s=80.0, min_rounds=8, max_rounds=40),
)
"""float16 is read and written, but not timed: a step takes minutes on most CPUs."""

QUICK = Scale(
    quality_formats=("KV int8", "float16", "bfloat16", "int8", "int4"),
    num_windows=1,
    length=1024,
    num_texts=4,
    num_written=48,
    formats=(REFERENCE, "bfloat16", "int8", "int8, KV int8"),
    batches=(1, 8),
    context=32,
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=16, budget_s=5.0),
)


# --- quality --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """The formats of the trained model, the windows of text they read, and why some are missing."""

    engines: Mapping[str, Engine]
    eager: Engine | None
    windows: list[list[int]]
    prompts: list[list[int]]
    gaps: Mapping[str, str]

    @property
    def reference(self) -> Engine:
        return self.engines[REFERENCE]


def open_studied(options: Options, scale: Scale) -> Studied:
    """The trained model in every format, on the given executor, and in float32 on eager."""
    given = replace(options, model=QUALITY_MODEL, load_format=None)
    names = [REFERENCE, *scale.quality_formats]
    engines, gaps = open_formats(given, names, "auto", scale.num_texts)
    reference = engines[REFERENCE]
    eager: Engine | None = None
    if reference.executor.describe()["executor"] != "eager":
        try:
            eager = open_engine(
                replace(FORMATS[REFERENCE].options(given), executor="eager"),
                "auto",
                layout="contiguous",
                max_num_seqs=scale.num_texts,
            )
            check_room(eager, scale.num_texts)
        except ValueError as error:
            gaps[EAGER] = reason(error)
    length = min(scale.length, reference.spec.max_model_len)
    text = heldout_text()
    return Studied(
        engines=engines,
        eager=eager,
        windows=cut_windows(reference.tokenizer, text, scale.num_windows, length),
        prompts=cut_windows(reference.tokenizer, text, scale.num_texts, PROMPT),
        gaps=gaps,
    )


def read_formats(studied: Studied, screen: Screen) -> dict[str, Quality]:
    """Every format against the reference on every window, and the floor; by name."""
    found: dict[str, list[Positions]] = {}
    total = float(len(studied.windows))
    with screen.progress("reading held-out text in every format", total) as advance:
        for window in studied.windows:
            for name, positions in compare_window(studied, window).items():
                found.setdefault(name, []).append(positions)
            advance(1.0)
    return {name: conclude(Positions.join(parts)) for name, parts in found.items()}


def compare_window(studied: Studied, window: list[int]) -> dict[str, Positions]:
    """One window in every way."""
    targets = window[1:]
    reference = Reference(read_logits(studied.reference, window), targets)
    found = {
        name: reference.compare(read_logits(engine, window))
        for name, engine in studied.engines.items()
        if name != REFERENCE
    }
    again = read_logits(studied.reference, window, step_tokens=ANOTHER_STEP)
    found[ANOTHER_BATCH] = reference.compare(again)
    if studied.eager is not None:
        alone = read_logits(studied.eager, window)
        found[EAGER] = reference.compare(alone)
        again = read_logits(studied.eager, window, step_tokens=ANOTHER_STEP)
        found[EAGER_BATCH] = Reference(alone, targets).compare(again)
    return found


def write_freely(studied: Studied, num_tokens: int, screen: Screen) -> Record:
    """Where the texts of each format leave the reference's, all written in one batch."""
    prompts = studied.prompts
    others = {name: engine for name, engine in studied.engines.items() if name != REFERENCE}
    if studied.eager is not None:
        others[EAGER] = studied.eager
    with screen.progress("writing freely in every format", float(len(others) + 2)) as advance:

        def texts(engine: Engine, one_by_one: bool) -> list[list[int]]:
            batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
            written = [text for batch in batches for text in write(engine, batch, num_tokens)]
            advance(1.0)
            return [[token.token_id for token in text] for text in written]

        reference = texts(studied.reference, one_by_one=False)
        ways = {ANOTHER_BATCH: texts(studied.reference, one_by_one=True)}
        ways |= {name: texts(engine, one_by_one=False) for name, engine in others.items()}
    return {name: asdict(first_differences(found, reference)) for name, found in ways.items()}


def study(options: Options, scale: Scale, screen: Screen) -> Record:
    """Everything about quality, as the header keeps it. The engines are closed again."""
    studied = open_studied(options, scale)
    try:
        qualities = read_formats(studied, screen)
        written = write_freely(studied, scale.num_written, screen)
        weights = describe_weights(studied.reference)
    finally:
        for engine in [*studied.engines.values(), *([studied.eager] if studied.eager else [])]:
            engine.executor.close()
    return {
        "model": weights["model"],
        "weights_id": weights["weights_id"],
        "executors": {
            name: engine.executor.describe()["executor"] for name, engine in studied.engines.items()
        },
        "num_windows": len(studied.windows),
        "length": len(studied.windows[0]),
        "gaps": dict(studied.gaps),
        "formats": {name: quality.to_json() for name, quality in qualities.items()},
        "written": written,
    }


# --- speed and memory -----------------------------------------------------------------------------


def gated_group(
    engines: Mapping[str, Engine], gates: Mapping[str, Gate], batch: int, context: int
) -> Group:
    """All formats at one batch."""
    arms = format_arms(engines, gates, batch, context)
    arms[AA.same_arm] = arms[AA.arm]
    return Group(name=batch_name(batch), arms=arms, labels={"batch": batch, "context": context})


def memory_of(name: str, engine: Engine) -> Record:
    """Bytes of the weights, as held and as they must be read each step; of a token's K and V."""
    model, form = engine.model_config, FORMATS[name]
    return {
        "weights_bytes": engine.executor.memory_stats()["weights_bytes"],
        "read_weight_bytes": read_weight_bytes(model, form.weights),
        "kv_bytes_per_token": kv_bytes_per_token(model, form.cache_dtype),
    }


def gated_groups(
    engines: Mapping[str, Engine], gates: Mapping[str, Gate], scale: Scale, screen: Screen
) -> list[Group]:
    """A group for each batch; progress counts their sequences."""
    groups = []
    title = "gate: does every sequence emit the same tokens alone and in a batch?"
    with screen.progress(title, float(sum(scale.batches))) as advance:
        for batch in scale.batches:
            groups.append(gated_group(engines, gates, batch, scale.context))
            advance(float(batch))
    return groups


def say_gaps(gaps: Sequence[tuple[str, str]], screen: Screen) -> None:
    for name, why in dict.fromkeys(gaps):
        screen.say(f"No arm {name}: {why}")


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    refuse_formats(options, "precision")
    scale = QUICK if options.quick else FULL
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    quality = study(options, scale, screen)
    started_s = now_s()
    engines, gaps = open_formats(options, scale.formats, load_format, max(scale.batches))
    load_s = now_s() - started_s
    say_gaps([*quality["gaps"].items(), *gaps.items()], screen)
    reference = engines[REFERENCE]
    spec = reference.spec
    yardsticks = make_yardsticks(spec.device, options.threads)
    samples = measured_ceilings(yardsticks, options, screen)
    predicted = predict_formats(engines, ceilings_of(samples), scale.batches, scale.context)
    gates = {name: Gate(is_exact=engine.spec.is_exact) for name, engine in engines.items()}
    groups = gated_groups(engines, gates, scale, screen)
    groups += yardsticks.fastest(samples, spec.dtype)
    header = {
        "load_s": load_s,
        "gaps": gaps,
        "quality": quality,
        "memory": {name: memory_of(name, engine) for name, engine in engines.items()},
        "arms_run": {name: describe_engine(engine) for name, engine in engines.items()},
        **predicted,
    }
    gate = gates[REFERENCE]
    trial = make_trial("precision", reference, gate, groups, scale.rules, AA, header)
    weights = ", ".join(dict.fromkeys(FORMATS[name].weights for name in engines))
    return conduct(replace(trial, identity={**trial.identity, "dtype": weights}), options, screen)
