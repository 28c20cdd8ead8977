"""An engine under an open loop: each request is handed over when its time has come, ready or not.

One thread sends and steps, as a server's engine thread does, so a request that comes in the middle
of a step waits for its end; that is part of serving, and counts. Only what the sender adds is
its lag, kept beside the times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoserve.bench.arrivals import Schedule
from nanoserve.bench.calibrate import greedy
from nanoserve.bench.measure import rest
from nanoserve.bench.metrics import RequestTimes, itl, supported_percentile
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.engine.engine import Engine
from nanoserve.request import RequestDelta

SHARES = (0.5, 0.9, 0.95, 0.99)
"""The percentiles that are given, where there are enough samples."""


@dataclass(slots=True, kw_only=True)
class Played:
    """What happened to each request of one run, on the engine's clock.

    `lags_s`: how long after its time, or after the step it came in the middle of, each was handed
    to the engine. That wait for the step is part of serving, this is the sender's own.
    """

    schedule: Schedule
    started_s: float
    first_scheduled_s: list[float]
    token_s: list[list[float]]
    token_ids: list[list[int]]
    lags_s: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, schedule: Schedule, now: float) -> Played:
        count = len(schedule.arrivals)
        return cls(
            schedule=schedule,
            started_s=now,
            first_scheduled_s=[0.0] * count,
            token_s=[[] for _ in range(count)],
            token_ids=[[] for _ in range(count)],
        )

    def due_s(self, number: int) -> float:
        return self.started_s + self.schedule.arrivals[number].at_s

    def note(self, deltas: Sequence[RequestDelta], now: float) -> None:
        for delta in deltas:
            number = int(delta.request_id)
            self.token_ids[number] += delta.token_ids
            self.token_s[number] += [now] * len(delta.token_ids)
            if delta.output is not None and delta.output.metrics.first_scheduled_s is not None:
                self.first_scheduled_s[number] = delta.output.metrics.first_scheduled_s

    def times(self) -> list[RequestTimes]:
        """In seconds since the schedule began."""
        return [
            RequestTimes(
                arrival_s=arrival.at_s,
                first_scheduled_s=first_s - self.started_s,
                token_s=tuple(at_s - self.started_s for at_s in tokens),
            )
            for arrival, first_s, tokens in zip(
                self.schedule.arrivals, self.first_scheduled_s, self.token_s, strict=True
            )
        ]


def make_prompts(engine: Engine, schedule: Schedule) -> list[list[int]]:
    """One of its own for each request."""
    vocab_size = engine.model_config.vocab_size
    return [
        prompt_token_ids(length.prompt, vocab_size, number)
        for number, length in enumerate(schedule.lengths)
    ]


def play(engine: Engine, schedule: Schedule, prompts: Sequence[Sequence[int]]) -> Played:
    """Hand each request to the engine when its time has come, and step as long as there is work."""
    played = Played.begin(schedule, engine.clock())
    coming = deque(range(len(schedule.arrivals)))
    looked_s = played.started_s
    while coming or engine.has_unfinished:
        while coming and played.due_s(coming[0]) <= engine.clock():
            number = coming.popleft()
            due_s = played.due_s(number)
            params = greedy(schedule.arrivals[number].length.output)
            engine.add(str(number), prompts[number], params, arrival_s=due_s)
            played.lags_s.append(engine.clock() - max(due_s, looked_s))
        if engine.has_unfinished and engine.idle_s == 0:
            deltas = engine.step()
            looked_s = engine.clock()
            played.note(deltas, looked_s)
        else:
            rest(pause_s(engine, played, coming))
    return played


def pause_s(engine: Engine, played: Played, coming: Sequence[int]) -> float:
    """Until the next request comes, or a batch has waited long enough."""
    pauses = [played.due_s(coming[0]) - engine.clock()] if coming else []
    pauses += [engine.idle_s] if engine.has_unfinished else []
    return min(pauses)


def request_seconds(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """ "start N", "first N" and "end N" of each request N: first step, first and last token."""
    found = {}
    for number, request in enumerate(requests):
        found[f"start {number}"] = request.first_scheduled_s
        found[f"first {number}"] = request.token_s[0]
        found[f"end {number}"] = request.token_s[-1]
    return found


def gap_seconds(requests: Sequence[RequestTimes]) -> dict[str, float]:
    """Percentiles of every gap between two tokens, as far as there are enough of them."""
    gaps = itl(requests)
    return {
        f"itl p{100 * share:g}": value
        for share in SHARES
        if gaps and (value := supported_percentile(gaps, share)) is not None
    }
