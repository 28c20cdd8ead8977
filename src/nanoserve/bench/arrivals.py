"""When requests come: schedules drawn or replayed beforehand, one for all that are compared.

An open loop sends at the times of its schedule whatever the server does, so a schedule is made, and
hashed, before anything runs. Poisson arrivals have independent exponential gaps; gamma gaps the
coefficient of variation (CV) asked for, and come in bursts where that exceeds 1; a replay takes a
trace's own gaps, and constant ones are all alike. All are then stretched by one factor, so that the
mean gap is just that of the rate: a few dozen irregular gaps, left as drawn, would offer quite
another load. A trace's lengths go with all of them, or any other.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, get_args

from nanoserve.bench.traces import SOURCE, Length, TraceName, read_trace, shorter

Process = Literal["poisson", "gamma", "trace", "constant"]

DEFAULT_CV = 3.0
"""Of gamma gaps: three times as irregular as Poisson's."""

DIGITS = 6
"""Of an arrival, in seconds: microseconds, so that a schedule is the same text everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and when it is sent, in seconds since the schedule began."""

    at_s: float
    length: Length


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Requests in the order in which they come, `rate` of them per second on average.

    `seed` None: nothing was drawn (a replay); `cv` is that of gamma gaps. `transform` says in words
    how the lengths and, in a replay, the gaps came about.
    """

    process: Process
    rate: float
    seed: int | None
    cv: float | None
    transform: str
    arrivals: tuple[Arrival, ...]

    @property
    def rows(self) -> list[list[float]]:
        """[seconds, prompt tokens, output tokens] of each request, as recorded."""
        return [[a.at_s, a.length.prompt, a.length.output] for a in self.arrivals]

    @property
    def sha256(self) -> str:
        """Of the rows, in order."""
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    @property
    def lengths(self) -> list[Length]:
        return [arrival.length for arrival in self.arrivals]

    @property
    def gap_cv(self) -> float:
        """Standard deviation over mean of the gaps as they came out."""
        gaps = self.gaps_s
        return pstdev(gaps) / fmean(gaps) if gaps and fmean(gaps) else 0.0

    @property
    def gaps_s(self) -> list[float]:
        times = [arrival.at_s for arrival in self.arrivals]
        return [after - before for before, after in pairwise(times)]

    def to_json(self) -> dict[str, Any]:
        """Everything, and its hash, in plain values."""
        return {
            "process": self.process,
            "rate": self.rate,
            "seed": self.seed,
            "cv": self.cv,
            "transform": self.transform,
            "sha256": self.sha256,
            "arrivals": self.rows,
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Schedule:
        """Inverse of `to_json`. Raises ValueError for rows that are not those that were hashed."""
        made = cls(
            process=raw["process"],
            rate=raw["rate"],
            seed=raw["seed"],
            cv=raw["cv"],
            transform=raw["transform"],
            arrivals=tuple(
                Arrival(at_s=at_s, length=Length(prompt=prompt, output=output))
                for at_s, prompt, output in raw["arrivals"]
            ),
        )
        if made.sha256 != raw["sha256"]:
            raise ValueError(
                f"the schedule was changed: its sha256 is {made.sha256}, written {raw['sha256']}"
            )
        return made


def stretch(times_s: Sequence[float], rate: float) -> float:
    """What all gaps are multiplied by for their mean to be 1 / `rate`; 0 if they have no length."""
    span_s = times_s[-1] - times_s[0]
    return (len(times_s) - 1) / (rate * span_s) if span_s else 0.0


def scheduled(
    times_s: Iterable[float], lengths: Sequence[Length], rate: float
) -> tuple[Arrival, ...]:
    """Stretched to `rate`. The first is at 0, so that a run does not begin by waiting."""
    times = list(times_s)
    factor = stretch(times, rate)
    return tuple(
        Arrival(at_s=round(factor * (at_s - times[0]), DIGITS), length=length)
        for at_s, length in zip(times, lengths, strict=True)
    )


def check_rate(rate: float) -> None:
    """Raise ValueError unless requests can come so often."""
    if not 0 < rate < float("inf"):
        raise ValueError(f"the rate must be more than 0 requests/s and finite, got {rate:g}")


def poisson(lengths: Sequence[Length], rate: float, *, seed: int, transform: str) -> Schedule:
    """Independent arrivals: exponential gaps."""
    check_rate(rate)
    generator = random.Random(f"poisson:{seed}")
    gaps = [generator.expovariate(rate) for _ in lengths]
    return Schedule(
        process="poisson",
        rate=rate,
        seed=seed,
        cv=None,
        transform=transform,
        arrivals=scheduled(accumulate(gaps), lengths, rate),
    )


def constant(lengths: Sequence[Length], rate: float, *, transform: str) -> Schedule:
    """All gaps alike."""
    check_rate(rate)
    return Schedule(
        process="constant",
        rate=rate,
        seed=None,
        cv=None,
        transform=transform,
        arrivals=scheduled(map(float, range(len(lengths))), lengths, rate),
    )


def gamma(
    lengths: Sequence[Length], rate: float, *, cv: float, seed: int, transform: str
) -> Schedule:
    """Gaps with the coefficient of variation `cv`: gamma of shape 1/cv² and scale cv²/rate.

    A CV of 1 is Poisson, more comes in bursts, less is more regular. Of a finite number of gaps it
    comes out smaller than asked for (`Schedule.gap_cv`).
    """
    check_rate(rate)
    if not 0 < cv < float("inf"):
        raise ValueError(f"--cv must be more than 0 and finite, got {cv:g}")
    generator = random.Random(f"gamma:{seed}:{cv:g}")
    gaps = [generator.gammavariate(1 / cv**2, cv**2 / rate) for _ in lengths]
    return Schedule(
        process="gamma",
        rate=rate,
        seed=seed,
        cv=cv,
        transform=transform,
        arrivals=scheduled(accumulate(gaps), lengths, rate),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePart:
    """The first requests of a trace that fit: their lengths, and when they really came."""

    name: TraceName
    transform: str
    lengths: tuple[Length, ...]
    times_s: tuple[float, ...]

    def first(self, count: int) -> list[Length]:
        """Raises ValueError if there are not so many."""
        if count > len(self.lengths):
            raise ValueError(
                f"{count} requests were asked for, trace {self.name} has {len(self.lengths)} that "
                f"fit: ask for fewer"
            )
        return list(self.lengths[:count])


def trace_part(name: TraceName, window: int, *, divisor: int) -> TracePart:
    """All requests of a trace whose lengths, divided, fit a context of `window` tokens."""
    rows = [(row.arrival_s, shorter(row.length, divisor)) for row in read_trace(name)]
    fitting = [(at_s, length) for at_s, length in rows if length.total <= window]
    how = [f"{SOURCE}, {name}"]
    how += [f"lengths / {divisor}"] if divisor > 1 else []
    how.append(f"filtered to prompt + output <= {min(window, 1024):,}")
    return TracePart(
        name=name,
        transform=", ".join(how),
        lengths=tuple(length for _, length in fitting),
        times_s=tuple(at_s for at_s, _ in fitting),
    )


def replayed(part: TracePart, count: int, rate: float) -> Schedule:
    """The trace's own arrivals; all gaps stretched alike, so that their mean is 1 / `rate`."""
    check_rate(rate)
    lengths, times = part.first(count), part.times_s[:count]
    return Schedule(
        process="trace",
        rate=rate,
        seed=None,
        cv=None,
        transform=f"{part.transform}, gaps x {stretch(times, rate):.3g}",
        arrivals=scheduled(times, lengths, rate),
    )


def make_schedule(
    process: Process, part: TracePart, count: int, rate: float, *, cv: float, seed: int
) -> Schedule:
    """`count` requests of a trace's lengths at `rate`, by one of the processes."""
    if process not in get_args(Process):
        raise ValueError(
            f"--process must be one of {', '.join(get_args(Process))}, got {process!r}"
        )
    if process == "trace":
        return replayed(part, count, rate)
    lengths = part.first(count)
    if process == "constant":
        return constant(lengths, rate, transform=part.transform)
    if process == "gamma":
        return gamma(lengths, rate, cv=cv, seed=seed, transform=part.transform)
    return poisson(lengths, rate, seed=seed, transform=part.transform)


def write_schedules(path: Path, schedules: dict[str, Schedule]) -> str:
    """One file of them all, by name; its sha256. Other tools can send at these times, too."""
    text = json.dumps({name: s.to_json() for name, s in schedules.items()}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def read_schedules(path: Path) -> dict[str, Schedule]:
    """What `write_schedules` wrote. Raises ValueError for a file that is none, or was changed."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {name: Schedule.from_json(value) for name, value in raw.items()}
    except (OSError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of schedules ({error!r})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no file of schedules: it is not JSON ({error})") from error
