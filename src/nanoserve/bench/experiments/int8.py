"""Is the dequantise-on-read cost gone?

The attention of a decode step, every layer of it, over caches that hold the same keys and values in
float32, bfloat16, float16 and int8: as the native core computes it, int8 directly on the integers,
and, where PyTorch is installed, the usual way, in which an int8 cache is read back to float32
before it is attended to. Beside it the whole step, whose other costs do not change with the cache.
A last group holds context against step: what a long context costs one sequence. One arm runs twice
(A/A). Nothing is recorded unless every cache gives what it should on known values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from nanoserve.bench.conduct import AAArms, Trial, VoidError, conduct
from nanoserve.bench.experiments.ceilings import make_yardsticks
from nanoserve.bench.experiments.kvcache import measured_ceilings
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.formats import FORMATS, expect_step, open_formats, refuse_formats
from nanoserve.bench.measure import Arm, Group, Rules, Stopwatch, now_s
from nanoserve.bench.record import Record, Run
from nanoserve.bench.session import (
    Options,
    Screen,
    describe_engine,
    describe_weights,
    require_native,
    weights_at_hand,
)
from nanoserve.config import ModelConfig
from nanoserve.engine.batch import PARTS, SAMPLED, RowSampling, StepBatch, pack_batch
from nanoserve.engine.engine import Engine
from nanoserve.engine.native import NativeExecutor
from nanoserve.kernels.dequantised import TorchAttention, dequantise, quantise
from nanoserve.planner.model import StepShape, kv_bytes_per_token
from nanoserve.planner.steptime import Ceilings
from nanoserve.request import SamplingParams

QUESTION = "is the dequantise-on-read cost gone?"

CACHES = {
    "float32": "float32",
    "bfloat16": "KV bfloat16",
    "float16": "KV float16",
    "int8": "KV int8",
}
"""Arms by what the cache is kept in, and the format that is: weights in float32 in all of them."""

FLAT = ("float32", "bfloat16", "int8, KV int8")
"""Formats in which a long context is held against a short one, whole steps."""

READ_BACK, TORCH = "int8, read back", "float32, PyTorch"
AA = AAArms(arm="int8", same_arm="int8 again", part="attention")

MOST_ERROR = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2, "int8": 6e-2}
"""Of attention over a cache, against the same in float32 over what was given to it: drawn from a
normal distribution, so that values are about 1."""

MOST_READ_BACK_ERROR = 2e-3
"""Of int8 directly, against attention over what its integers stand for."""

MAX_TOKENS = 512
"""Of one call that fills a cache."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: attention at each batch and context, steps at the `flat` contexts."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    flat: tuple[int, int]
    rules: Rules


FULL = Scale(
    batches=(1, 8, 32),
    contexts=(64, 256, 1000),
    flat=(96, 1000),
    rules=Rules(budget_s=110.0, min_rounds=8, max_rounds=40),
)
QUICK = Scale(
    batches=(1, 8),
    contexts=(64, 1000),
    flat=(96, 1000),
    rules=Rules(warmups=1, dropped_rounds=1, min_rounds=6, max_rounds=16, budget_s=5.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Known queries [S, H, D], keys and values [S, H, N, D]."""

    q: Float32
    k: Float32
    v: Float32

    @classmethod
    def draw(cls, model: ModelConfig, num_seqs: int, context: int) -> Given:
        """Always the same. Queries are larger, so that a few keys stand out, as in real heads."""
        rng = np.random.default_rng(8)
        shape = (num_seqs, model.n_head, context, model.head_size)
        k, v = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        return cls(q=3 * rng.standard_normal(k[:, :, 0].shape, dtype=np.float32), k=k, v=v)

    def rows(self, values: Float32) -> Float32:
        """[S, H, N, D] as rows of a step, one position a row: [S * N, C]."""
        width = values.shape[1] * values.shape[3]
        return np.ascontiguousarray(values.transpose(0, 2, 1, 3)).reshape(-1, width)


def softmax_attention(q: Float32, k: Float32, v: Float32, scale: float) -> Float32:
    """q [S, H, D] over k, v [S, H, N, D], written out -> [S, H, D]."""
    scores = np.einsum("shd,shnd->shn", q, k) * np.float32(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Float32 = np.einsum("shn,shnd->shd", weights, v)
    return mixed


# --- steps over a contiguous cache: sequence s lies in block s ------------------------------------


def step_batch(
    slots: list[int], contexts: list[int], blocks: list[int], num_rows: int
) -> StepBatch:
    """One token a sequence, at the end of its context; logits of the first `num_rows`."""
    drawn = RowSampling(
        params=SamplingParams(temperature=0.0), prompt_token_ids=(), output_token_ids=()
    )
    num_seqs, rows = len(slots), list(range(num_rows))
    parts = {
        "token_ids": [1] * num_seqs,
        "positions": [context - 1 for context in contexts],
        "slot_mapping": slots,
        "query_starts": list(range(num_seqs + 1)),
        "context_lens": contexts,
        "logit_rows": rows,
        "targets": [SAMPLED] * num_rows,
        "block_copies": [],
        "block_tables": blocks,
    }
    return pack_batch(
        [parts[name] for name in PARTS],
        table_width=1,
        sampling=(drawn,) * num_rows,
        draws=[0.0] * num_rows,
    )


def decode_batch(block_size: int, num_seqs: int, context: int, num_rows: int) -> StepBatch:
    """The decode step of `num_seqs` sequences, each at `context`."""
    blocks = list(range(num_seqs))
    slots = [block * block_size + context - 1 for block in blocks]
    return step_batch(slots, [context] * num_seqs, blocks, num_rows)


def fill(executor: NativeExecutor, given: Given, num_seqs: int) -> None:
    """Store the first `num_seqs` sequences, from position 0 on, in every layer.

    Each position goes in as a sequence of one token, which attends to nothing but a first key.
    """
    context = given.k.shape[2]
    k, v = given.rows(given.k[:num_seqs]), given.rows(given.v[:num_seqs])
    size = executor.spec.block_size
    slots = [block * size + offset for block in range(num_seqs) for offset in range(context)]
    for start in range(0, len(slots), MAX_TOKENS):
        part = slice(start, start + MAX_TOKENS)
        num_tokens = len(slots[part])
        batch = step_batch(slots[part], [1] * num_tokens, [0] * num_tokens, 0)
        executor.attend(batch, k[part], k[part], v[part], np.empty_like(k[part]))


class Attention:
    """The attention of one decode step over a filled cache, and the whole step, to be called."""

    def __init__(self, engine: Engine, given: Given, num_seqs: int, context: int) -> None:
        self.executor = native(engine)
        size, last = self.executor.spec.block_size, slice(context - 1, context)
        self.alone = decode_batch(size, num_seqs, context, 0)
        self.whole = decode_batch(size, num_seqs, context, num_seqs)
        self.q = given.rows(given.q[:num_seqs, :, None])
        self.k, self.v = (given.rows(x[:num_seqs, :, last]) for x in (given.k, given.v))
        self.out = np.empty_like(self.q)

    def attend(self) -> None:
        self.executor.attend(self.alone, self.q, self.k, self.v, self.out)

    def step(self) -> None:
        self.executor.execute(self.whole)

    def arm(self, watch: Stopwatch) -> None:
        """The step first: it leaves the processor's caches as steps leave them."""
        watch.time("step", self.step)
        watch.time("attention", self.attend)


def native(engine: Engine) -> NativeExecutor:
    """Its executor, which alone attends to int8 by itself."""
    assert isinstance(engine.executor, NativeExecutor), "others were refused"
    return engine.executor


# --- the gate -------------------------------------------------------------------------------------


def check_attention(name: str, found: Float32, given: Given, context: int, scale: float) -> Record:
    """The largest errors of one cache at one shape. Raises VoidError beyond the bounds."""
    num_seqs = found.shape[0]
    q = given.q[:num_seqs]
    k, v = (x[:num_seqs, :, :context] for x in (given.k, given.v))
    values = found.reshape(q.shape)
    errors = {"against_float32": largest_error(values, softmax_attention(q, k, v, scale))}
    bounds = {"against_float32": MOST_ERROR[name]}
    if name == "int8":
        k, v = (dequantise(*quantise(x)) for x in (k, v))
        errors["against_read_back"] = largest_error(values, softmax_attention(q, k, v, scale))
        bounds["against_read_back"] = MOST_READ_BACK_ERROR
    for against, error in errors.items():
        if not error <= bounds[against]:
            raise VoidError(
                f"the gate failed, nothing is recorded: attention over a {name} cache, batch "
                f"{num_seqs}, context {context}: {error:.2g} {against.replace('_', ' ')}, "
                f"at most {bounds[against]:g}"
            )
    return errors


def largest_error(found: Float32, wanted: Float32) -> float:
    return float(np.abs(found - wanted).max())


# --- the arms -------------------------------------------------------------------------------------


def group_name(batch: int, context: int) -> str:
    return f"batch {batch}, context {context}"


def gated_group(
    engines: Mapping[str, Engine],
    given: Given,
    library: TorchAttention | None,
    batch: int,
    context: int,
) -> Group:
    """Every cache at one shape, once each has given what it should there."""
    arms: dict[str, Arm] = {}
    errors: Record = {}
    for name, engine in engines.items():
        attention = Attention(engine, given, batch, context)
        attention.attend()
        scale = engine.model_config.attention_scale(engine.model_config.n_layer - 1)
        errors[name] = check_attention(name, attention.out, given, context, scale)
        arms[name] = attention.arm
    arms[AA.same_arm] = arms[AA.arm]
    if library is not None:
        arms[READ_BACK] = library_arm(library.over_int8, batch, context)
        arms[TORCH] = library_arm(library.over_float32, batch, context)
    labels = {"batch": batch, "context": context, "errors": errors}
    return Group(name=group_name(batch, context), arms=arms, labels=labels)


def library_arm(attend: Callable[[int, int], Float32], batch: int, context: int) -> Arm:
    """The library's attention as an arm."""
    return lambda watch: watch.time("attention", lambda: attend(batch, context))


def flat_name(name: str, context: int) -> str:
    return f"{name} at {context}"


def flat_group(engines: Mapping[str, Engine], given: Given, contexts: Sequence[int]) -> Group:
    """Whole steps of one sequence, at a short context and at a long one."""
    arms: dict[str, Arm] = {}
    for name, engine in engines.items():
        for context in contexts:
            attention = Attention(engine, given, 1, context)
            arms[flat_name(name, context)] = step_arm(attention)
    labels = {"batch": 1, "contexts": list(contexts), "formats": list(engines)}
    return Group(name="batch 1, whole steps", arms=arms, labels=labels)


def step_arm(attention: Attention) -> Arm:
    return lambda watch: watch.time("step", attention.step)


def predict(
    caches: Mapping[str, Engine],
    flat: Mapping[str, Engine],
    ceilings: Ceilings,
    shapes: Sequence[tuple[int, int]],
    flat_contexts: Sequence[int],
) -> Record:
    """Attention takes the time of its bytes; reading back moves float32 twice more."""
    model = next(iter(caches.values())).model_config

    def expect(kv_dtype: str, batch: int, context: int, *, reads_back: bool = False) -> Record:
        per_token = kv_bytes_per_token(model, kv_dtype)
        if reads_back:
            per_token += 2 * kv_bytes_per_token(model, "float32")
        num_bytes = batch * (context + 1) * per_token
        return {"attention_s": num_bytes / ceilings.read_bytes_per_s, "num_bytes": num_bytes}

    predictions = {
        group_name(batch, context): {
            **{name: expect(name, batch, context) for name in caches},
            READ_BACK: expect("int8", batch, context, reads_back=True),
            TORCH: expect("float32", batch, context),
        }
        for batch, context in shapes
    }
    flatness = {
        flat_name(name, context): expect_step(ceilings, model, StepShape(context=context), engine)
        for name, engine in flat.items()
        for context in flat_contexts
    }
    return {
        "ceilings": ceilings.to_json(),
        "predictions": predictions,
        "flat_predictions": flatness,
    }


def open_engines(
    options: Options, scale: Scale, screen: Screen
) -> tuple[dict[str, Engine], dict[str, Engine]]:
    """(an engine for each cache, one for each format of `FLAT`), those of one format shared."""
    refuse_formats(options, "int8")
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    names = list(dict.fromkeys([*CACHES.values(), *FLAT]))
    engines, gaps = open_formats(options, names, load_format, max(scale.batches))
    require_native(engines[CACHES["float32"]], "int8")
    for why in gaps.values():
        raise ValueError(why)
    return (
        {name: engines[wanted] for name, wanted in CACHES.items()},
        {name: engines[name] for name in FLAT},
    )


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    started_s = now_s()
    caches, flat = open_engines(options, scale, screen)
    load_s = now_s() - started_s
    reference = caches["float32"]
    model, window = reference.model_config, reference.spec.max_model_len
    yardsticks = make_yardsticks("cpu", options.threads)
    samples = measured_ceilings(yardsticks, options, screen)
    contexts = [context for context in scale.contexts if context < window]
    flat_contexts = [min(context, window - 1) for context in scale.flat]
    shapes = [(batch, context) for context in contexts for batch in scale.batches]
    predicted = predict(caches, flat, ceilings_of(samples), shapes, flat_contexts)
    given = Given.draw(model, max(scale.batches), max(*contexts, *flat_contexts))
    groups = prepare(caches, flat, given, shapes, flat_contexts, screen)
    groups += yardsticks.fastest(samples, "float32")
    header = {"load_s": load_s, "gaps": library_gaps(), **predicted}
    return conduct(make_trial(caches, groups, scale.rules, header), options, screen)


def library_gaps() -> dict[str, str]:
    """Why there are no arms of the usual way, where there are none."""
    if find_spec("torch") is not None:
        return {}
    return dict.fromkeys(
        (READ_BACK, TORCH), "PyTorch is not installed (pip install 'nanoserve[torch]')"
    )


def prepare(
    caches: Mapping[str, Engine],
    flat: Mapping[str, Engine],
    given: Given,
    shapes: Sequence[tuple[int, int]],
    flat_contexts: Sequence[int],
    screen: Screen,
) -> list[Group]:
    """Fill every cache, let the gate pass at every shape; the groups."""
    model = next(iter(caches.values())).model_config
    num_seqs = {id(engine): (engine, 1) for engine in flat.values()}
    num_seqs |= {id(engine): (engine, len(given.q)) for engine in caches.values()}
    library = None
    with screen.progress("filling the caches", float(len(num_seqs) + 1)) as advance:
        for engine, count in num_seqs.values():
            fill(native(engine), given, count)
            advance(1.0)
        if not library_gaps():
            scale = model.attention_scale(model.n_layer - 1)
            library = TorchAttention(
                given.q, given.k, given.v, num_layers=model.n_layer, scale=scale
            )
        advance(1.0)
    groups = [gated_group(caches, given, library, *shape) for shape in shapes]
    return [*groups, flat_group(flat, given, flat_contexts)]


def make_trial(
    caches: Mapping[str, Engine], groups: Sequence[Group], rules: Rules, header: Record
) -> Trial:
    """The measurement with the names of what really runs."""
    engine = caches["float32"]
    described, weights = describe_engine(engine), describe_weights(engine)
    formats = {name: FORMATS[CACHES[name]].cache_dtype for name in caches}
    return Trial(
        experiment="int8",
        name=f"{weights['model']}-{described['device']}",
        groups=groups,
        rules=rules,
        aa=AA,
        synchronize=engine.executor.synchronize,
        identity={
            "model": weights["model"],
            "weights": weights["weights"],
            "weights_id": weights["weights_id"],
            **{name: described[name] for name in ("executor", "kernels", "device", "dtype")},
        },
        setup={"engine": described, "model_config": weights["config"], "caches": formats},
        header=header,
    )
