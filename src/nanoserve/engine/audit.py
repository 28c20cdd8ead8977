"""The live meter of a reduced cache: a share of the requests also runs with a full one.

A shadow executor, over the same weights and block ids but with a float32 cache, is fed the tokens
that the real one drew (teacher forcing). Where both have a row of logits, the two distributions are
compared. The answer that callers get is the real one's: an audit watches and never steers. Which
requests are watched depends on their ids alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoserve.engine.batch import (
    SAMPLED,
    LogitRow,
    RowSampling,
    StepBatch,
    StepResult,
    build_batch,
)
from nanoserve.engine.executor import Executor
from nanoserve.request import KVAudit, Request, SamplingParams
from nanoserve.scheduling.plan import ScheduledRequest, StepPlan

Logits = NDArray[np.float32]

_READ = RowSampling(
    params=SamplingParams(temperature=0.0), prompt_token_ids=(), output_token_ids=()
)


class Comparison(NamedTuple):
    """One row of logits of the reduced cache beside the same row of the full one."""

    kl: float  # KL(full || reduced), nats
    agrees: bool  # the same best token
    logit_error: float  # the largest difference of a logit


def compare(reduced: Logits, full: Logits) -> Comparison:
    """Rows [V] of logits, both finite in the sampler's sense: ids at -inf are impossible."""
    possible = full > -np.inf
    p, q = log_softmax(full)[possible], log_softmax(reduced)[possible]
    kl = float((np.exp(p) * (p - q)).sum())
    error = float(np.abs(full[possible] - reduced[possible]).max())
    # A divergence is never negative; its rounding may be.
    return Comparison(max(0.0, kl), bool(full.argmax() == reduced.argmax()), error)


def log_softmax(row: Logits) -> NDArray[np.float64]:
    shifted = row.astype(np.float64) - row.max()
    logs: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logs


def is_chosen(request_id: str, rate: float) -> bool:
    """The same answer for the same id, in every process; true for a share `rate` of ids."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < rate * 2**64


@dataclass(slots=True, eq=False)
class AuditTally:
    """What was found of one choice so far, and how far its full-precision twin has come."""

    num_tokens: int = 0
    num_agreed: int = 0
    sum_kl: float = 0.0
    max_kl: float = 0.0
    max_logit_error: float = 0.0
    num_shadowed: int = 0  # tokens of the window with K and V in the shadow's cache
    generation: tuple[int, int] = (0, 0)  # preemptions and slides: each starts the cache afresh

    def take(self, found: Comparison) -> None:
        self.num_tokens += 1
        self.num_agreed += found.agrees
        self.sum_kl += found.kl
        self.max_kl = max(self.max_kl, found.kl)
        self.max_logit_error = max(self.max_logit_error, found.logit_error)

    def catch_up(self, item: ScheduledRequest) -> ScheduledRequest:
        """`item` for the shadow: from where its cache ends, which a prefix hit may lie beyond.

        Prefixes that others computed have no full-precision K and V, so they are computed.
        """
        generation = (item.request.num_preemptions, item.request.num_slides)
        if generation != self.generation:
            self.generation, self.num_shadowed = generation, 0
        start, stop = min(self.num_shadowed, item.start), item.start + item.num_tokens
        self.num_shadowed = stop
        return replace(item, start=start, num_tokens=stop - start)


def summarise(tallies: Sequence[AuditTally]) -> KVAudit:
    """All choices of one request together."""
    num_tokens = sum(t.num_tokens for t in tallies)
    return KVAudit(
        num_tokens=num_tokens,
        num_agreed=sum(t.num_agreed for t in tallies),
        mean_kl=sum(t.sum_kl for t in tallies) / num_tokens if num_tokens else None,
        max_kl=max((t.max_kl for t in tallies), default=0.0),
        max_logit_error=max((t.max_logit_error for t in tallies), default=0.0),
    )


class CacheAudit:
    """Runs steps of `executor`, and those rows that are watched on `shadow` too."""

    def __init__(self, rate: float, executor: Executor, shadow: Executor) -> None:
        self.rate = rate
        self.executor, self.shadow = executor, shadow

    def tally(self, request: Request) -> AuditTally | None:
        """A new one for a choice of a chosen request; None for the others."""
        return AuditTally() if is_chosen(request.request_id, self.rate) else None

    def execute(
        self, plan: StepPlan, batch: StepBatch, tally_of: Callable[[Request], AuditTally | None]
    ) -> StepResult:
        """`executor.execute(batch)`; rows of requests that have a tally are compared into it."""
        writing = (item for item in plan.scheduled if item.writes)
        tallies = ((item, tally_of(item.request)) for item in writing)
        watched = [(item, tally) for item, tally in tallies if tally is not None]
        if not watched:
            return self.executor.execute(batch)
        result, logits = self.executor.execute_with_logits(batch)
        shadow, twin = self._shadow_rows([tally.catch_up(item) for item, tally in watched])
        rows = sampled_rows(plan, batch)
        sampled = [(rows[item.request], tally) for item, tally in watched if item.samples]
        for number, (row, tally) in enumerate(sampled):
            if result.finite[row] and shadow.finite[number]:
                tally.take(compare(logits[row], twin[number]))
        return result

    def _shadow_rows(self, items: list[ScheduledRequest]) -> tuple[StepResult, Logits]:
        """Run the items on the shadow; one row of logits for each that samples, in order."""
        batch = build_batch(
            StepPlan(scheduled=tuple(items)),
            last_row,
            block_size=self.shadow.spec.block_size,
            scratch_block=self.shadow.spec.num_blocks,
        )
        return self.shadow.execute_with_logits(batch)


def sampled_rows(plan: StepPlan, batch: StepBatch) -> dict[Request, int]:
    """Which of the R rows each request's token is drawn from."""
    number_of = {row: number for number, row in enumerate(batch.logit_rows.tolist())}
    ends = zip(plan.scheduled, batch.query_starts[1:].tolist(), strict=True)
    return {i.request: number_of[end - 1] for i, end in ends if i.samples and i.writes}


def last_row(item: ScheduledRequest) -> list[LogitRow]:
    """The row that a sampling item draws from; nothing is drawn from it here."""
    row = LogitRow(offset=item.num_tokens - 1, target=SAMPLED, sampling=_READ, draw=0.0)
    return [row] if item.samples else []
