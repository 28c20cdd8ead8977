"""What the engine keeps of a request beside the scheduler's bookkeeping: draws, text, account.

`ActiveSequence` is one choice: it turns sampled tokens into text, notices where it ends, and never
reads a token after its end. `RequestGroup` is one request with all its choices: it knows which of
them the caller wants, and makes the final `RequestOutput`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from nanoserve.engine.audit import summarise
from nanoserve.engine.batch import SAMPLED, LogitRow, RowSampling, StepResult
from nanoserve.engine.metrics import RequestAccount
from nanoserve.engine.sampling import DrawStream
from nanoserve.engine.text import TextStream
from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
    RequestStatus,
    TokenLogprob,
)
from nanoserve.scheduling.plan import ScheduledRequest
from nanoserve.tokenizer import Tokenizer


class Token(NamedTuple):
    """One row of a step's result; see `StepResult`."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    finite: bool

    @property
    def scored(self) -> TokenLogprob:
        """What the caller sees of the row, if log-probabilities were asked for."""
        return TokenLogprob(token_id=self.token_id, logprob=self.logprob, top=self.top)


def read_tokens(result: StepResult) -> Iterator[Token]:
    """The R rows of `result`, in order; each array leaves numpy once, not row by row."""
    return map(
        Token,
        result.token_ids.tolist(),
        result.logprobs.tolist(),
        result.top_logprobs,
        result.finite.tolist(),
    )


class ActiveSequence:
    """One choice of one request, from its arrival to its end."""

    def __init__(
        self, account: RequestAccount, tokenizer: Tokenizer, eos_ids: tuple[int, ...]
    ) -> None:
        request, params = account.request, account.request.params
        self.account = account
        self.request = request
        self.end_ids = set(params.stop_token_ids)
        self.eos_ids = set() if params.ignore_eos else set(eos_ids)
        self.draws = DrawStream(request.seed, request.choice)
        self.text = TextStream(
            tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            continues=True,
        )
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.stop_reason: str | int | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.has_shown_prompt = False  # a delta carried `scored_prompt`
        self.is_broken = False  # a row of its prompt's logits was not finite
        self.scores_prompt = params.prompt_logprobs is not None and request.choice == 0
        self.shows_logprobs = params.logprobs is not None
        self.wants_logprobs = self.shows_logprobs or params.num_choices > params.n
        self.row_sampling = RowSampling(
            params=params,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            num_logprobs=(params.logprobs or 0) if self.wants_logprobs else None,
        )
        self.prompt_sampling = replace(self.row_sampling, num_logprobs=params.prompt_logprobs)

    def logit_rows(self, item: ScheduledRequest) -> list[LogitRow]:
        """The rows of `item` that need logits: prompt tokens to score, then the one to draw."""
        positions = self._scored_positions(item) if self.scores_prompt else ()
        rows = [self._prompt_row(item, position) for position in positions]
        if item.samples:
            num_output = len(self.request.output_token_ids)
            sampling = self.row_sampling
            if num_output < sampling.params.min_tokens:
                masked = tuple(self.end_ids | self.eos_ids)
                sampling = replace(sampling, masked_token_ids=masked)
            rows.append(LogitRow(item.num_tokens - 1, SAMPLED, sampling, self.draws.at(num_output)))
        return rows

    @property
    def scored_prompt(self) -> tuple[TokenLogprob | None, ...] | None:
        """Log-probabilities of the prompt, of whose first token none is known; None: not asked."""
        return (None, *self.prompt_logprobs) if self.scores_prompt else None

    def _scored_positions(self, item: ScheduledRequest) -> range:
        """Positions of `item` whose rows score a prompt token, the next one, that none has yet."""
        last = len(self.request.prompt_token_ids) - 1
        first = max(item.start, len(self.prompt_logprobs))
        return range(first, min(item.start + item.num_tokens, last))

    def _prompt_row(self, item: ScheduledRequest, position: int) -> LogitRow:
        return LogitRow(
            offset=position - item.start,
            target=self.request.prompt_token_ids[position + 1],
            sampling=self.prompt_sampling,
            draw=0.0,
        )

    def read_prompt_rows(self, item: ScheduledRequest, rows: Iterator[Token]) -> None:
        """Take the scored prompt tokens of `item` from the step's `rows`, and no more of them."""
        for token in islice(rows, len(self._scored_positions(item))):
            self.is_broken |= not token.finite
            self.prompt_logprobs.append(token.scored)

    def read(self, token: Token, now: float) -> RequestDelta:
        """Take the sampled token; the delta says what it added and whether the choice ended."""
        request = self.request
        if self.is_broken or not token.finite:
            return self.end(FinishReason.ERROR)
        if request.max_tokens == 0:
            return self.end(FinishReason.LENGTH)
        if self.account.first_token_s is None:
            self.account.first_token_s = now
        self.account.last_token_s = now
        if self.wants_logprobs:
            self.logprobs.append(token.scored)
        if token.token_id in self.eos_ids:
            return self.end(FinishReason.STOP, token)
        if token.token_id in self.end_ids:
            self.stop_reason = token.token_id
            return self.end(FinishReason.STOP, token)
        text, stop = self.text.push(token.token_id)
        self.pieces.append(text)
        if stop is not None:
            self.stop_reason = stop
            return self._delta(text, token, FinishReason.STOP)
        if len(request.output_token_ids) + 1 >= request.max_tokens:
            return self.end(FinishReason.LENGTH, token, text)
        return self._delta(text, token, None)

    def end(self, reason: FinishReason, token: Token | None = None, text: str = "") -> RequestDelta:
        """The last delta: text that was held back comes out now, and may complete a stop string."""
        held = self.text.finish()
        self.pieces.append(held)
        if reason is FinishReason.LENGTH and self.text.stop is not None:
            self.stop_reason, reason = self.text.stop, FinishReason.STOP
        return self._delta(text + held, token, reason)

    def _delta(self, text: str, token: Token | None, reason: FinishReason | None) -> RequestDelta:
        request, wanted = self.request, self.shows_logprobs
        shown, self.has_shown_prompt = self.has_shown_prompt, True
        return RequestDelta(
            request_id=request.request_id,
            index=request.choice,
            token_ids=() if token is None else (token.token_id,),
            text=text,
            logprobs=(token.scored,) if wanted and token is not None else None,
            finish_reason=reason,
            stop_reason=self.stop_reason if reason is not None else None,
            prompt_logprobs=None if shown else self.scored_prompt,
        )

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the output, None where log-probabilities were not computed."""
        return sum(lp.logprob for lp in self.logprobs) if self.wants_logprobs else None

    @property
    def mean_logprob(self) -> float:
        """What `best_of` ranks by; an empty output ranks last."""
        return (self.cumulative_logprob or 0.0) / len(self.logprobs) if self.logprobs else -1e30

    def output(self, index: int, reason: FinishReason | None) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self.pieces),
            token_ids=tuple(self.request.output_token_ids),
            finish_reason=reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.shows_logprobs else None,
            cumulative_logprob=self.cumulative_logprob,
        )


class RequestGroup:
    """All choices of one request. With `best_of` > `n` nothing is released before the last ends."""

    def __init__(
        self,
        accounts: list[RequestAccount],
        prompt: str | None,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
    ) -> None:
        self.sequences = [ActiveSequence(account, tokenizer, eos_ids) for account in accounts]
        self.prompt = prompt
        self.params = accounts[0].request.params
        self.finish_reasons: dict[int, FinishReason] = {}
        self.holds_back = self.params.num_choices > self.params.n

    @property
    def is_finished(self) -> bool:
        return len(self.finish_reasons) == len(self.sequences)

    @property
    def only_waits(self) -> bool:
        """Whether every choice that has not ended is queued, and some is."""
        reasons = self.finish_reasons
        left = [s.request for s in self.sequences if s.request.choice not in reasons]
        return bool(left) and all(request.status is RequestStatus.WAITING for request in left)

    def release(self, delta: RequestDelta) -> list[RequestDelta]:
        """What the caller may see now that `delta` happened.

        Called after the scheduler committed the step, so outputs are complete.
        """
        if delta.finish_reason is not None:
            self.finish_reasons[delta.index] = delta.finish_reason
        if self.holds_back:
            deltas = self._best() if self.is_finished else []
        else:
            deltas = [delta]
        if self.is_finished:
            deltas[-1] = replace(deltas[-1], output=self.output())
        return deltas

    def _chosen(self) -> list[ActiveSequence]:
        """The n choices the caller gets: the best by mean log-probability, ties by index.

        One that broke is taken only where there are too few others.
        """
        if not self.holds_back:
            return self.sequences

        def rank(sequence: ActiveSequence) -> tuple[bool, float, int]:
            choice = sequence.request.choice
            broke = self.finish_reasons.get(choice) is FinishReason.ERROR
            return broke, -sequence.mean_logprob, choice

        return sorted(self.sequences, key=rank)[: self.params.n]

    def _best(self) -> list[RequestDelta]:
        output = self.output()
        return [
            RequestDelta(
                request_id=self.sequences[0].request.request_id,
                index=choice.index,
                token_ids=choice.token_ids,
                text=choice.text,
                logprobs=choice.logprobs,
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=output.prompt_logprobs if choice.index == 0 else None,
            )
            for choice in output.outputs
        ]

    def output(self) -> RequestOutput:
        first = self.sequences[0]
        return RequestOutput(
            request_id=first.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.request.prompt_token_ids,
            outputs=tuple(
                sequence.output(index, self.finish_reasons.get(sequence.request.choice))
                for index, sequence in enumerate(self._chosen())
            ),
            seed=first.request.seed,
            prompt_logprobs=first.scored_prompt,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        accounts = [s.account for s in self.sequences]
        requests = [a.request for a in accounts]
        scheduled = [a.first_scheduled_s for a in accounts if a.first_scheduled_s is not None]
        first = [a.first_token_s for a in accounts if a.first_token_s is not None]
        last = [a.last_token_s for a in accounts if a.last_token_s is not None]
        tallies = [a.audit for a in accounts if a.audit is not None]
        return RequestMetrics(
            arrival_s=requests[0].arrival_s,
            first_scheduled_s=min(scheduled, default=None),
            first_token_s=min(first, default=None),
            last_token_s=max(last, default=None),
            num_cached_tokens=requests[0].num_cached_tokens,
            num_preemptions=sum(r.num_preemptions for r in requests),
            num_slides=sum(r.num_slides for r in requests),
            kv_audit=summarise(tallies) if tallies else None,
        )
