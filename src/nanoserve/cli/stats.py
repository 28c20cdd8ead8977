"""`--stats`: what the tokens cost, from the engine's own log, and how far from the machine's limit.

Metrics are as `bench.metrics` defines them, bytes are the planner's, and the yardstick is the read
bandwidth that `nanoserve bench ceilings` measured on this machine. Nothing is measured here, so no
token waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nanoserve.bench.machine import load_cached_ceilings
from nanoserve.bench.metrics import mbu, median
from nanoserve.engine.audit import summarise
from nanoserve.engine.engine import Engine
from nanoserve.engine.metrics import RequestAccount, StepRecord
from nanoserve.planner.memory import format_bytes
from nanoserve.planner.model import StepShape, kv_bytes_per_token, step_bytes


@dataclass(frozen=True, slots=True)
class Advance:
    """One choice in one step: it went on by `num_new` tokens, up to `context` of them."""

    request_id: str
    num_prompt: int
    context: int
    num_new: int
    is_decode: bool


def advances(account: RequestAccount) -> Iterator[tuple[int, Advance]]:
    """(number of the step, advance) of one choice; decode is whatever follows its first token."""
    num_prompt, has_token = len(account.request.prompt_token_ids), False
    for step, start, size in zip(account.steps, account.starts, account.sizes, strict=True):
        yield step, Advance(account.request.request_id, num_prompt, start + size, size, has_token)
        has_token = has_token or start + size >= num_prompt


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of one choice that has tokens; `tpot_s` None for a single one (see bench.metrics)."""

    arrival_s: float
    first_s: float
    last_s: float
    num_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        gaps = self.num_tokens - 1
        return (self.last_s - self.first_s) / gaps if gaps else None


def latencies(accounts: Iterable[RequestAccount]) -> list[Latency]:
    return [
        Latency(
            a.request.arrival_s, a.first_token_s, a.last_token_s, len(a.request.output_token_ids)
        )
        for a in accounts
        if a.first_token_s is not None and a.last_token_s is not None
    ]


def describe_stats(engine: Engine, first_text_s: float | None) -> list[str]:
    """Lines for people. `first_text_s`: the process's age when the first text was out.

    The engine's log keeps the most recent past only: of many prompts, the last are described.
    """
    steps = {step.number: step for step in engine.log.steps}
    accounts = [a for a in engine.log.finished if all(number in steps for number in a.steps)]
    times = latencies(accounts)
    if not times:
        return ["no token was generated"]
    by_step: dict[int, list[Advance]] = defaultdict(list)
    for account in accounts:
        for number, advance in advances(account):
            by_step[number].append(advance)
    return [
        describe_first(times, first_text_s),
        *describe_prefill(accounts, steps),
        *describe_decode(times),
        describe_cache(engine, by_step.values()),
        describe_bandwidth(engine, by_step, steps),
        *describe_audit(accounts),
    ]


def describe_first(times: Sequence[Latency], first_text_s: float | None) -> str:
    from_start = "" if first_text_s is None else f"{first_text_s * 1e3:,.0f} ms from the start, "
    which = "" if len(times) == 1 else f" (median of {len(times)})"
    first_ms = median([t.ttft_s for t in times]) * 1e3
    return f"first token: {from_start}{first_ms:,.1f} ms from the request{which}"


def describe_prefill(
    accounts: Sequence[RequestAccount], steps: Mapping[int, StepRecord]
) -> Iterator[str]:
    """Steps in which nothing was decoded."""
    decoding = {n for a in accounts for n, advance in advances(a) if advance.is_decode}
    numbers = {n for a in accounts for n in a.steps} - decoding
    if numbers:
        num_tokens = sum(steps[n].num_tokens for n in numbers)
        took_ms = sum(steps[n].ended_s - steps[n].started_s for n in numbers) * 1e3
        yield (
            f"prefill: {num_tokens} tokens in {took_ms:,.1f} ms, "
            f"{took_ms / num_tokens:,.2f} ms/token"
        )


def describe_decode(times: Sequence[Latency]) -> Iterator[str]:
    num_tokens = sum(t.num_tokens for t in times)
    gaps = [t.tpot_s for t in times if t.tpot_s is not None]
    took_s = max(t.last_s for t in times) - min(t.arrival_s for t in times)
    if gaps:
        yield (
            f"decode: {median(gaps) * 1e3:,.2f} ms/token, {1 / median(gaps):,.1f} tokens/s"
            + ("" if len(times) == 1 else f" for each of {len(times)} (median)")
        )
    yield f"together: {num_tokens} tokens, {num_tokens / took_s:,.1f} tokens/s with the prefill"


def describe_cache(engine: Engine, steps: Iterable[Sequence[Advance]]) -> str:
    """The most that was held at once, and what is set aside for it."""
    spec = engine.spec
    reserved = engine.executor.memory_stats()["cache_bytes"]
    if spec.layout == "recompute":
        return "KV cache: none (recompute keeps nothing)"
    peak = max(num_tokens_held(step) for step in steps)
    used = peak * kv_bytes_per_token(spec.model, spec.cache_dtype)
    return (
        f"KV cache: {format_bytes(used)} used by {peak} tokens, {format_bytes(reserved)} reserved "
        f"({spec.layout}, {spec.cache_dtype})"
    )


def describe_audit(accounts: Sequence[RequestAccount]) -> Iterator[str]:
    """How the cache compared with a full-precision one, where --kv-audit watched."""
    tallies = [account.audit for account in accounts if account.audit is not None]
    found = summarise(tallies)
    if found.mean_kl is not None:
        yield (
            f"KV audit: {found.num_tokens} tokens of {len(tallies)} sequences, KL "
            f"{found.mean_kl:.2e} nats (at most {found.max_kl:.2e}), best token agrees in "
            f"{found.num_agreed / found.num_tokens:.2%}, logits differ by at most "
            f"{found.max_logit_error:.2e}"
        )


def num_tokens_held(step: Sequence[Advance]) -> int:
    """Tokens with K and V after a step; choices of one request share their prompt's."""
    of_requests: dict[str, list[Advance]] = defaultdict(list)
    for advance in step:
        of_requests[advance.request_id].append(advance)
    return sum(
        sum(a.context for a in choices) - (len(choices) - 1) * min(a.num_prompt for a in choices)
        for choices in of_requests.values()
    )


def describe_bandwidth(
    engine: Engine, by_step: Mapping[int, Sequence[Advance]], steps: Mapping[int, StepRecord]
) -> str:
    """Bytes that the decode steps had to move, over what the machine can read in that time."""
    spec = engine.spec
    decoding = {n: rows for n, rows in by_step.items() if all(row.is_decode for row in rows)}
    if not decoding:
        return "read bandwidth: no decode step to compare"
    ceilings = load_cached_ceilings(spec.device, spec.threads)
    if ceilings is None:
        return (
            "read bandwidth: this machine was never measured; `nanoserve bench ceilings "
            f"--device {spec.device}` does it once"
        )
    weights = spec.quantization or spec.dtype
    num_bytes = sum(
        step_bytes(spec.model, mean_shape(rows), dtype=weights, kv_dtype=spec.cache_dtype)
        for rows in decoding.values()
    )
    step_s = sum(steps[n].ended_s - steps[n].started_s for n in decoding)
    rate, share = ceilings.read_bytes_per_s, mbu(num_bytes, step_s, ceilings.read_bytes_per_s)
    if share > 1:
        return (
            f"read bandwidth: more than the {rate / 1e9:,.1f} GB/s of this machine's memory: its "
            f"caches hold a part of the {format_bytes(num_bytes / len(decoding))} that a step reads"
        )
    return (
        f"read bandwidth: {share:.0%} of the {rate / 1e9:,.1f} GB/s that "
        "this machine was measured to reach"
    )


def mean_shape(rows: Sequence[Advance]) -> StepShape:
    """A step of equal rows that moves the same bytes, to half a token: they are linear in both."""
    num_new = round(sum(row.num_new for row in rows) / len(rows))
    context = round(sum(row.context for row in rows) / len(rows))
    return StepShape(num_seqs=len(rows), context=max(context, num_new), num_new=num_new)
