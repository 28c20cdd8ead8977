"""Exactness, proved on the user's machine, with the user's model and options.

The same prompts are generated naively (everything recomputed, one request at a time) and in every
other way an engine can take: cached, batched, chunked, preempted, from a shared prefix, streamed.
Each way must give the same tokens, must show that it really happened, and states how far its
log-probabilities (which depend on every logit of a row) are from the naive ones: not a bit, or the
bound found. Of the native executor, exact by definition, equal bits are demanded in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from nanoserve.config import EngineConfig
from nanoserve.engine.engine import Engine
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

PASSAGE = (
    "There was once a lighthouse keeper who kept a ledger of the sea. Every night, when the lamp "
    "was lit and the gulls were silent, he wrote down what the waves had brought: a plank, a glass "
    "bottle, the name of a ship that nobody remembered. \u201cThe sea forgets nothing,\u201d he "
    "said to the wind; \u201cit only takes its time.\u201d In the morning the page was wet again. "
)
NUM_LOGPROBS = 8
CHUNK = 16
"""Token rows of a step in the chunked way."""
BOUNDS = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.15, "int8": 0.15}
"""Largest difference of a log-probability (nats) that a dtype's rounding may explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of generating, compared with the naive one.

    `evidence` says what shows that it took place; None: it did not, and nothing was proved.
    `max_error` is the largest difference of a log-probability after texts that agree, infinite if a
    request ended too early.
    """

    name: str
    evidence: str | None
    num_tokens: int
    num_different: int
    max_error: float

    @property
    def bit_equal(self) -> bool:
        """Same tokens, and log-probabilities without a bit of difference."""
        return self.num_different == 0 and self.max_error == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was run, and how each way compares.

    `bound` is what log-probabilities may differ by, 0 of the native executor. Of others, in fp32
    the tokens must be equal as well; where weights or cache are half precision, a step of another
    shape rounds differently and a close call may fall the other way, so there only the bound is
    held (and the differences are reported).
    """

    model: str
    setting: dict[str, str]
    exact_tokens: bool
    bound: float
    distinct_share: float
    ways: tuple[Way, ...]

    def passed(self, way: Way) -> bool:
        """Did it happen, and does it agree?"""
        agrees = way.num_different == 0 or not self.exact_tokens
        return way.evidence is not None and agrees and way.max_error <= self.bound

    @property
    def ok(self) -> bool:
        """Did every way pass?"""
        return all(self.passed(way) for way in self.ways)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts and how to sample each; half greedy, half drawn with fixed seeds."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def max_length(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(
            length + (s.max_tokens or 0)
            for length, s in zip(self.lengths, self.params, strict=True)
        )


def verify(
    config: EngineConfig,
    *,
    num_tokens: int = 24,
    progress: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run every way and compare. `progress` is told each way's name before it runs.

    Raises ValueError for options that no engine can be built with, for fewer than two tokens, and
    for a model whose logits are not finite in this dtype: such a model has no tokens to compare.
    """
    progress("naive")
    naive = Engine(with_cache(config, layout="recompute"))
    work = make_workload(naive, num_tokens)
    expected = run(naive, work, together=False)
    if any(first(output).finish_reason is FinishReason.ERROR for output in expected):
        raise ValueError(f"{config.model}: logits are not finite in {naive.spec.dtype} (--dtype)")
    ways = []
    for name, way in WAYS.items():
        progress(name)
        outputs, evidence = way(config, naive, work)
        ways.append(compare(name, evidence, expected, outputs))
    dtypes = (naive.spec.dtype, naive.spec.cache_dtype)
    texts = [first(output).token_ids for output in expected]
    return Report(
        model=config.model,
        setting=naive.describe() | {"kv_layout": config.cache.layout},
        exact_tokens=naive.spec.is_exact,
        bound=0.0 if naive.spec.has_equal_bits else max(BOUNDS[dtype] for dtype in dtypes),
        distinct_share=min(len(set(ids)) / len(ids) for ids in texts),
        ways=tuple(ways),
    )


def make_workload(engine: Engine, num_tokens: int) -> Workload:
    """Prompts of very different lengths out of one passage, as long as the context allows."""
    if num_tokens < 2:
        raise ValueError(f"verifying needs at least 2 new tokens, got {num_tokens}")
    passage = engine.tokenizer.encode(PASSAGE * 4)
    room = engine.spec.max_model_len - num_tokens
    if room < 8:
        raise ValueError(
            f"the context holds {engine.spec.max_model_len} tokens (--max-model-len): verifying "
            f"{num_tokens} new ones needs at least {num_tokens + 8}"
        )
    lengths = [min(length, room) for length in (1, 7, 17, 48, 120, 121)]
    prompts = [
        passage[start : start + n] for start, n in zip((0, 3, 9, 2, 5, 11), lengths, strict=True)
    ]
    params = [
        SamplingParams(
            max_tokens=num_tokens,
            temperature=float(i % 2),
            seed=i,
            logprobs=NUM_LOGPROBS,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    return Workload(prompts, params)


def with_cache(config: EngineConfig, **changes: object) -> EngineConfig:
    """`config` with another cache; `recompute` takes no budget that could cut a prompt, and nothing
    that needs a cache: no graphs, no audit.
    """
    cache = replace(config.cache, **changes)  # type: ignore[arg-type]
    if cache.layout != "recompute":
        return replace(config, cache=cache)
    scheduler = replace(config.scheduler, max_num_batched_tokens=None)
    executor = "eager" if config.executor == "graph" else config.executor
    return replace(config, cache=cache, scheduler=scheduler, executor=executor, kv_audit=0.0)


def run(engine: Engine, work: Workload, *, together: bool) -> list[RequestOutput]:
    """All requests as one batch, or one after the other; outputs in the prompts' order."""
    outputs: dict[str, RequestOutput] = {}

    def drain() -> None:
        while engine.has_unfinished:
            for delta in engine.step():
                if delta.output is not None:
                    outputs[delta.request_id] = delta.output

    for number, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
        engine.add(str(number), prompt, params)
        if not together:
            drain()
    drain()
    return [outputs[str(number)] for number in range(len(work.prompts))]


Proof = tuple[list[RequestOutput], str | None]
"""The outputs of a way, and what shows that it took place (None: it did not)."""


def with_mates(config: EngineConfig, work: Workload, **changes: object) -> EngineConfig:
    """`config` with room for all of `work` at once, whatever it allows; `changes` to scheduling."""
    max_num_seqs = max(config.scheduler.max_num_seqs, len(work.prompts))
    scheduler = replace(config.scheduler, max_num_seqs=max_num_seqs, **changes)  # type: ignore[arg-type]
    return replace(config, scheduler=scheduler)


def run_cached(config: EngineConfig, donor: Engine, work: Workload) -> Proof:
    """One request at a time; the last token of each is never computed."""
    engine = Engine(with_cache(config, layout="contiguous"), donor=donor)
    outputs = run(engine, work, together=False)
    rows = sum(sum(a.sizes) for a in engine.log.finished)
    asked = sum(
        length + (s.max_tokens or 0) - 1
        for length, s in zip(work.lengths, work.params, strict=True)
    )
    return outputs, f"each token computed once ({rows} rows)" if rows == asked else None


def run_batched(config: EngineConfig, donor: Engine, work: Workload) -> Proof:
    """All requests share the steps."""
    engine = Engine(with_mates(config, work), donor=donor)
    outputs = run(engine, work, together=True)
    widest = max(step.num_seqs for step in engine.log.steps)
    return outputs, f"up to {widest} requests in a step" if widest > 1 else None


def run_chunked(config: EngineConfig, donor: Engine, work: Workload) -> Proof:
    """A budget that the longest prompt exceeds, beside the decodes of others."""
    layout = config.cache.layout if config.cache.layout != "recompute" else "paged"
    budget = min(CHUNK, max(work.lengths) // 2)
    chunked = with_mates(with_cache(config, layout=layout), work, max_num_batched_tokens=budget)
    engine = Engine(chunked, donor=donor)
    outputs = run(engine, work, together=True)
    chunks = max(sum(size > 1 for size in account.sizes) for account in engine.log.finished)
    return outputs, f"a prompt in {chunks} chunks of at most {budget}" if chunks > 1 else None


def run_preempted(config: EngineConfig, donor: Engine, work: Workload) -> Proof:
    """A paged pool that the prompts fill, if not the longest request alone would outgrow it.

    All prompts start in one step, and blocks are small enough that each request needs one more
    before it ends: whoever came last has to give way. Nothing is found again by its content.
    """
    max_tokens = work.max_length - max(work.lengths)
    block_size = min(config.cache.block_size, max_tokens - 1)
    blocks = max(
        sum(-(-length // block_size) for length in work.lengths), -(-work.max_length // block_size)
    )
    block_bytes = block_size * kv_bytes_per_token(donor.model_config, donor.spec.cache_dtype)
    tight = with_mates(
        with_cache(
            config, layout="paged", block_size=block_size, memory_bytes=blocks * block_bytes
        ),
        work,
        batching="continuous",
        batching_timeout=None,
        max_model_len=work.max_length,
        max_num_batched_tokens=sum(work.lengths),
        enable_prefix_caching=False,
        context_overflow="error",
        slide_window=None,
    )
    engine = Engine(tight, donor=donor)
    outputs = run(engine, work, together=True)
    count = engine.scheduler.counters.num_preemptions
    word = "preemption, recomputed" if count == 1 else "preemptions, each recomputed"
    return outputs, f"{count} {word}" if count else None


def run_prefix_hit(config: EngineConfig, donor: Engine, work: Workload) -> Proof:
    """The second run of the same prompts finds the first one's blocks."""
    layout = config.cache.layout if config.cache.layout in ("slots", "paged") else "paged"
    block_size = min(config.cache.block_size, max(work.lengths) // 2)
    shared = with_mates(
        with_cache(config, layout=layout, block_size=block_size), work, enable_prefix_caching=True
    )
    engine = Engine(shared, donor=donor)
    run(engine, work, together=True)
    outputs = run(engine, work, together=False)
    hits = sum(output.metrics.num_cached_tokens for output in outputs)
    return outputs, f"{hits} prompt tokens from the cache" if hits else None


def run_streamed(config: EngineConfig, donor: Engine, work: Workload) -> Proof:
    """What the deltas say, put together, is the output."""
    engine = Engine(config, donor=donor)
    tokens: dict[str, list[int]] = {}
    texts: dict[str, list[str]] = {}
    outputs: list[RequestOutput] = []
    for number, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
        engine.add(str(number), prompt, params)
        while engine.has_unfinished:
            for delta in engine.step():
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                texts.setdefault(delta.request_id, []).append(delta.text)
                if delta.output is not None:
                    outputs.append(delta.output)
    whole = all(
        tokens[o.request_id] == list(first(o).token_ids)
        and "".join(texts[o.request_id]) == first(o).text
        for o in outputs
    )
    num_deltas = sum(map(len, texts.values()))
    return outputs, f"{num_deltas} deltas join to the whole text" if whole else None


WAYS: dict[str, Callable[[EngineConfig, Engine, Workload], Proof]] = {
    "cached": run_cached,
    "batched": run_batched,
    "chunked": run_chunked,
    "preempted": run_preempted,
    "prefix hit": run_prefix_hit,
    "streamed": run_streamed,
}


def first(output: RequestOutput) -> CompletionOutput:
    """The only choice of a request of this workload."""
    return output.outputs[0]


def compare(
    name: str,
    evidence: str | None,
    expected: Sequence[RequestOutput],
    outputs: Sequence[RequestOutput],
) -> Way:
    """Tokens position by position; log-probabilities as long as the texts before them agree.

    A token that only one of the two has counts as different.
    """
    num_different, max_error = 0, 0.0
    for wanted, got in zip(map(first, expected), map(first, outputs), strict=True):
        pairs = list(zip_longest(wanted.token_ids, got.token_ids))
        agreed = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        num_different += sum(a != b for a, b in pairs)
        assert wanted.logprobs is not None
        assert got.logprobs is not None
        # One row more than tokens agree: what first differs was drawn after the same text.
        rows = zip(wanted.logprobs[: agreed + 1], got.logprobs[: agreed + 1], strict=False)
        max_error = max([max_error, *(row_error(a, b) for a, b in rows)])
        if len(got.token_ids) != len(wanted.token_ids):
            max_error = math.inf
    return Way(
        name=name,
        evidence=evidence,
        num_tokens=sum(len(first(output).token_ids) for output in expected),
        num_different=num_different,
        max_error=max_error,
    )


def row_error(one: TokenLogprob, other: TokenLogprob) -> float:
    """Nats that two reports of one row differ by, at least, over all tokens that either names.

    A token that is not among the best of a report is no better there than the last of them.
    """
    ours, theirs = (dict(r.top) | {r.token_id: r.logprob} for r in (one, other))
    both = [abs(ours[i] - theirs[i]) for i in ours.keys() & theirs.keys()]
    missed = [ours[i] - other.top[-1][1] for i in ours.keys() - theirs.keys()]
    extra = [theirs[i] - one.top[-1][1] for i in theirs.keys() - ours.keys()]
    return max([0.0, *both, *missed, *extra])
