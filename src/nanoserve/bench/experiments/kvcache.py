"""What does the cache buy, and where does it lose?

Three arms, one engine with one part exchanged: `naive` keeps nothing and computes every position
again at each step, `cached` keeps keys and values in a contiguous cache, `cached again` is the same
once more (A/A). A repetition is one step at an exact context: for the naive arm a request whose
prompt is that long; for the cached arm one that starts two tokens earlier, so that its prefill
(timed under its own name) and a first, untimed decode step come before. Nothing is recorded unless
the arms emit the same tokens, on prompts of their own and at every shape that is timed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from nanoserve.bench import machine
from nanoserve.bench.conduct import AAArms, Trial, VoidError, conduct
from nanoserve.bench.experiments.ceilings import Yardsticks, make_yardsticks, measure_quickly
from nanoserve.bench.findings import ceilings_of
from nanoserve.bench.measure import Group, Rules, Sample, Stopwatch, now_s
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
from nanoserve.config import Layout, ModelConfig
from nanoserve.engine.engine import Engine
from nanoserve.planner.model import StepShape, kv_bytes_per_token, step_bytes, step_flops
from nanoserve.planner.steptime import (
    Ceilings,
    num_eager_operations,
    predict_crossover,
    predict_step_s,
)
from nanoserve.request import SamplingParams, TokenLogprob

QUESTION = "what does the cache buy, and where does it lose?"

AA = AAArms(arm="cached", same_arm="cached again", part="step")
MAX_LEAD = 2
"""Tokens that the cached arm writes before the timed step: prefill's own, and one steady step."""

HALF_PRECISION_BOUND = 0.1
"""Nats: arms in half precision may part where both think the other's token this close to theirs."""

Tokens = list[TokenLogprob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured: contexts at batch 1, (batch, context) beside them, rules, gate.

    The model's last position is always among the contexts. `gate` is (prompt tokens, new tokens).
    """

    contexts: tuple[int, ...]
    batched: tuple[tuple[int, int], ...]
    max_aa_context: int | None
    rules: Rules
    gate: tuple[tuple[int, int], ...]


FULL = Scale(
    contexts=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768),
    batched=tuple((batch, context) for batch in (4, 8) for context in (16, 64, 256)),
    max_aa_context=None,
    rules=Rules(max_rounds=10),
    gate=((1, 16), (5, 16), (37, 16), (200, 16), (900, 4)),
)
QUICK = Scale(
    contexts=(1, 4, 16, 64, 256),
    batched=(),
    max_aa_context=256,
    rules=Rules(warmups=1, min_rounds=3, max_rounds=12, budget_s=12.0),
    gate=((1, 8), (40, 8)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """The three engines. They share one copy of the weights."""

    naive: Engine
    cached: Engine
    again: Engine

    @property
    def model(self) -> ModelConfig:
        return self.cached.model_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One shape to measure: `batch` sequences, each at `context` tokens, this step's included."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"batch {self.batch}, context {self.context}"

    @property
    def lead(self) -> int:
        """Tokens the cached arm writes before the timed step."""
        return min(MAX_LEAD, self.context - 1)


def cells(scale: Scale, num_positions: int) -> list[Cell]:
    """The shapes of `scale` that fit the model, and its last position. A full window ends there."""
    last = num_positions - 1
    single = sorted({context for context in scale.contexts if context < last} | {last})
    beside = [Cell(batch=b, context=n) for b, n in scale.batched if n <= last]
    return [Cell(batch=1, context=context) for context in single] + beside


def open_arms(options: Options, scale: Scale, screen: Screen) -> Arms:
    """Load the weights once and build the three engines on them."""
    load_format, remark = weights_at_hand(options)
    if remark:
        screen.say(remark)
    max_num_seqs = max((batch for batch, _ in scale.batched), default=1)

    def engine(layout: Layout, donor: Engine | None = None) -> Engine:
        return open_engine(
            options, load_format, layout=layout, max_num_seqs=max_num_seqs, donor=donor
        )

    cached = engine("contiguous")
    return Arms(
        naive=engine("recompute", cached), cached=cached, again=engine("contiguous", cached)
    )


def write(
    engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, *, num_logprobs: int = 0
) -> list[Tokens]:
    """Greedy continuations of all prompts in one batch, `num_tokens` each, whatever they are."""
    queue(engine, prompts, num_tokens, num_logprobs=num_logprobs)
    written: list[Tokens] = [[] for _ in prompts]
    while engine.has_unfinished:
        for delta in engine.step():
            written[int(delta.request_id)] += delta.logprobs or ()
    return written


def queue(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    num_logprobs: int | None = None,
) -> None:
    """Add one greedy request per prompt, with its place as its id."""
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=num_logprobs
    )
    for place, prompt in enumerate(prompts):
        engine.add(str(place), prompt, params)


# --- the gate -------------------------------------------------------------------------------------


class Gate:
    """Compares what arms emit and keeps a hash of it; raises VoidError at the first difference.

    In fp32 tokens must be equal. In half precision, where rounding differs with the shape of a
    product, two arms may part at a near tie; what follows is another text and not compared.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._tokens: list[list[int]] = []

    @property
    def num_logprobs(self) -> int:
        """Alternatives to ask for, so that a near tie can be told."""
        return 0 if self._is_exact else 5

    def compare(
        self,
        where: str,
        ours: Sequence[Tokens],
        theirs: Sequence[Tokens],
        names: tuple[str, str] = ("cached", "naive"),
    ) -> None:
        """`names` are those of the two arms; the hash is of what the first one emits."""
        for mine, yours in zip(ours, theirs, strict=True):
            self._tokens.append([token.token_id for token in mine])
            for position, (one, other) in enumerate(zip(mine, yours, strict=True)):
                if one.token_id == other.token_id:
                    continue
                if self._is_exact or not (is_near(one, other) and is_near(other, one)):
                    raise VoidError(
                        f"the gate failed, nothing is recorded: {where}, token {position}: "
                        f"{names[0]} emits {one.token_id}, {names[1]} {other.token_id}"
                    )
                break

    @property
    def sha256(self) -> str:
        """Of every token the cached arm emitted, in order."""
        return hashlib.sha256(json.dumps(self._tokens).encode()).hexdigest()


def is_near(one: TokenLogprob, other: TokenLogprob) -> bool:
    """Whether `one`'s model thought `other`'s token as good as its own, within the bound."""
    alternatives = dict(one.top)
    rated = alternatives.get(other.token_id)
    return rated is not None and one.logprob - rated <= HALF_PRECISION_BOUND


def pass_gate(arms: Arms, gate: Gate, scale: Scale) -> None:
    """All arms on the fixed prompts of `scale`, each continued alone."""
    for wanted, num_tokens in scale.gate:
        num_prompt = min(wanted, arms.model.n_positions - num_tokens)
        prompts = [prompt_token_ids(num_prompt, arms.model.vocab_size)]
        written = write(arms.cached, prompts, num_tokens, num_logprobs=gate.num_logprobs)
        for name, engine in (("naive", arms.naive), ("cached again", arms.again)):
            other = write(engine, prompts, num_tokens, num_logprobs=gate.num_logprobs)
            where = f"a prompt of {num_prompt}"
            gate.compare(where, written, other, names=("cached", name))


# --- the arms -------------------------------------------------------------------------------------


def gated_group(arms: Arms, cell: Cell, gate: Gate, *, with_again: bool) -> Group:
    """The arms of one shape, once the cached and the naive step there emit the same tokens.

    The naive arm is given the cached arm's own text: the same tokens at the same positions.
    """
    vocab_size = arms.model.vocab_size
    length = cell.context - cell.lead
    prompts = [prompt_token_ids(length, vocab_size, sequence) for sequence in range(cell.batch)]
    written = write(arms.cached, prompts, cell.lead + 1, num_logprobs=gate.num_logprobs)
    texts = [
        prompt + [token.token_id for token in tokens[: cell.lead]]
        for prompt, tokens in zip(prompts, written, strict=True)
    ]
    naive = write(arms.naive, texts, 1, num_logprobs=gate.num_logprobs)
    gate.compare(cell.name, [tokens[-1:] for tokens in written], naive)
    group = {
        "naive": lambda watch: timed_step(arms.naive, texts, 0, watch),
        "cached": lambda watch: timed_step(arms.cached, prompts, cell.lead, watch),
    }
    if with_again:
        group["cached again"] = lambda watch: timed_step(arms.again, prompts, cell.lead, watch)
    per_token = kv_bytes_per_token(arms.model, arms.cached.spec.cache_dtype)
    labels = {
        "batch": cell.batch,
        "context": cell.context,
        "prefill_tokens": length,
        "kv_bytes": cell.batch * cell.context * per_token,
    }
    return Group(name=cell.name, arms=group, labels=labels)


def timed_step(
    engine: Engine, prompts: Sequence[Sequence[int]], lead: int, watch: Stopwatch
) -> None:
    """Time the step after `lead` others: "prefill" is the first of them, "step" the last."""
    queue(engine, prompts, lead + 1)
    for number in range(lead):
        if number == 0:
            watch.time("prefill", engine.step)
        else:
            engine.step()
    watch.time("step", engine.step)
    if engine.has_unfinished:
        raise RuntimeError("a step did not advance every sequence: its token budget is too small")


def predict(arms: Arms, ceilings: Ceilings, shapes: Sequence[Cell]) -> Record:
    """What the planner expects of each shape, by group and arm, before any of them was run."""
    model, dtype = arms.model, arms.cached.spec.dtype
    operations = num_operations(arms)

    def expect(step: StepShape) -> Record:
        seconds = predict_step_s(ceilings, model, step, dtype=dtype, num_operations=operations)
        return {
            "step_s": seconds,
            "num_bytes": step_bytes(model, step, dtype=dtype),
            "flops": step_flops(model, step),
        }

    predictions = {
        cell.name: {
            "naive": expect(
                StepShape(num_seqs=cell.batch, context=cell.context, num_new=cell.context)
            ),
            "cached": expect(StepShape(num_seqs=cell.batch, context=cell.context)),
        }
        for cell in shapes
    }
    wins_from = predict_crossover(ceilings, model, dtype=dtype, num_operations=operations)
    return {
        "ceilings": ceilings.to_json(),
        "predictions": predictions,
        "predicted_wins_from": wins_from,
    }


def num_operations(arms: Arms) -> int:
    """Operations dispatched one by one in a step: only the eager executor does that."""
    is_eager = arms.cached.executor.describe()["executor"] == "eager"
    return num_eager_operations(arms.model) if is_eager else 0


def gated_groups(
    arms: Arms, gate: Gate, scale: Scale, shapes: Sequence[Cell], screen: Screen
) -> list[Group]:
    """Every shape as a group; what the gate computes counts as progress by its tokens."""
    limit = scale.max_aa_context
    groups = []
    num_tokens = sum(cell.batch * cell.context for cell in shapes)
    with screen.progress("gate: do all arms emit the same tokens?", float(num_tokens)) as advance:
        pass_gate(arms, gate, scale)
        for cell in shapes:
            with_again = cell.batch == 1 and (limit is None or cell.context <= limit)
            groups.append(gated_group(arms, cell, gate, with_again=with_again))
            advance(float(cell.batch * cell.context))
    return groups


def measured_ceilings(yardsticks: Yardsticks, options: Options, screen: Screen) -> list[Sample]:
    """What the predictions are made from; kept for this machine if nothing was before."""
    samples = measure_quickly(yardsticks, screen)
    device = yardsticks.device
    if machine.load_cached_ceilings(device, options.threads) is None:
        machine.save_ceilings(ceilings_of(samples), device, options.threads)
    return samples


def measure(options: Options, screen: Screen) -> Run:
    """The whole experiment; its complete run. Raises VoidError for a failed gate or A/A check."""
    scale = QUICK if options.quick else FULL
    started_s = now_s()
    arms = open_arms(options, scale, screen)
    load_s = now_s() - started_s
    spec = arms.cached.spec
    yardsticks = make_yardsticks(spec.device, options.threads, also_dtype=spec.dtype)
    samples = measured_ceilings(yardsticks, options, screen)
    shapes = cells(scale, arms.model.n_positions)
    predicted = predict(arms, ceilings_of(samples), shapes)
    gate = Gate(is_exact=spec.is_exact)
    groups = gated_groups(arms, gate, scale, shapes, screen)
    groups += yardsticks.fastest(samples, spec.dtype)
    trial = make_trial(arms, gate, groups, scale.rules, {"load_s": load_s, **predicted})
    return conduct(trial, options, screen)


def make_trial(
    arms: Arms, gate: Gate, groups: Sequence[Group], rules: Rules, header: Record
) -> Trial:
    """The measurement with the names of what really runs."""
    engine, weights = describe_engine(arms.cached), describe_weights(arms.cached)
    return Trial(
        experiment="kvcache",
        name=f"{weights['model']}-{engine['device']}",
        groups=groups,
        rules=rules,
        aa=AA,
        synchronize=arms.cached.executor.synchronize,
        identity={
            "model": weights["model"],
            "weights": weights["weights"],
            "weights_id": weights["weights_id"],
            "tokens_sha256": gate.sha256,
            **{name: engine[name] for name in ("executor", "kernels", "device", "dtype")},
        },
        setup={"engine": engine, "model_config": weights["config"]},
        header=header,
    )
