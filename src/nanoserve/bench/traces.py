"""Lengths of real requests, and workloads made of them by transforms that each table names.

The package ships an extract of the Azure LLM inference traces 2023 (`data/azure-llm-2023`,
CC-BY-4.0, with its README and licence); a file that is not the one it was is refused. A trace has
lengths and arrivals and no text, so prompts are drawn (`workload.prompt_token_ids`) and outputs are
cut at their length, whatever the model would have said.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TraceName = Literal["conv", "code"]

TRACES_DIR = Path(__file__).parent / "data" / "azure-llm-2023"
SOURCE = "Azure LLM inference trace 2023"
SHA256: dict[TraceName, str] = {
    "conv": "97ecebccb26c345ca1f4ed11758db394e20b320ec48b0f79fec3bcf34c80a76b",
    "code": "8d0015daa8a468fdc73237185f1abde54f01d1a3ee5eb2e359212829ad4a830d",
}
COLUMNS = ["arrival_s", "prompt_tokens", "output_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """One request: tokens of its prompt, tokens it is to be given. Both at least 1."""

    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One line of a trace: a request and its arrival, in seconds since the trace began."""

    arrival_s: float
    length: Length


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that arrive in this order. `transform` says in words how they came about."""

    name: str
    transform: str
    lengths: tuple[Length, ...]

    @property
    def pairs(self) -> list[list[int]]:
        """[prompt, output] of each request, as recorded."""
        return [[length.prompt, length.output] for length in self.lengths]

    @property
    def sha256(self) -> str:
        """Of the lengths, in order."""
        return hashlib.sha256(json.dumps(self.pairs).encode()).hexdigest()

    @property
    def num_output_tokens(self) -> int:
        return sum(length.output for length in self.lengths)


def read_trace(name: TraceName) -> list[TraceRow]:
    """The shipped extract. Raises ValueError if the file is not the one that was shipped."""
    path = TRACES_DIR / f"{name}.csv"
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise ValueError(
            f"{path.name} of the {SOURCE} was changed (sha256 {found}, shipped {SHA256[name]}): "
            "install the package again"
        )
    return [
        TraceRow(
            arrival_s=float(row["arrival_s"]),
            length=Length(prompt=int(row["prompt_tokens"]), output=int(row["output_tokens"])),
        )
        for row in csv.DictReader(io.StringIO(content.decode()))
    ]


def from_trace(
    name: TraceName,
    num_requests: int,
    window: int,
    *,
    divisor: int = 1,
    prompt_cut: int | None = None,
) -> Workload:
    """The first `num_requests` of a trace that fit `window`, lengths divided, then prompts cut.

    Raises ValueError if the trace has too few that fit.
    """
    divided = [shorter(row.length, divisor) for row in read_trace(name)]
    fitting = [length for length in divided if length.total <= window][:num_requests]
    if len(fitting) < num_requests:
        raise ValueError(
            f"{num_requests} requests were asked for, {len(fitting)} of trace {name} fit {window} "
            "tokens"
        )
    words = [f"{SOURCE}, {name}"]
    words += [f"lengths / {divisor}"] if divisor > 1 else []
    words += [f"filtered to prompt + output <= {min(window, 1024):,}", f"first {num_requests}"]
    if prompt_cut is not None:
        fitting = [Length(prompt=min(n.prompt, prompt_cut), output=n.output) for n in fitting]
        words.append(f"prompts cut to {prompt_cut}")
    suffix = "full prompts" if prompt_cut is None else f"prompts cut to {prompt_cut}"
    return Workload(name=f"{name}, {suffix}", transform=", ".join(words), lengths=tuple(fitting))


def shorter(length: Length, divisor: int) -> Length:
    """Both lengths divided and rounded up, so that neither becomes 0."""
    return Length(prompt=-(-length.prompt // divisor), output=-(-length.output // divisor))


def equal_lengths(num_requests: int, length: Length) -> Workload:
    """A control: requests that are all alike."""
    return Workload(
        name="equal lengths",
        transform=f"{num_requests} requests of {length.prompt} + {length.output} tokens",
        lengths=(length,) * num_requests,
    )


def static_waste(outputs: Sequence[int], num_slots: int) -> float:
    """Rows that static batching computes per token asked for, by arithmetic alone.

    Batches of `num_slots` in order of arrival, each as long as its longest output: the sum of
    (longest x members) over the sum of outputs; for one batch, its maximum over its mean.
    """
    batches = [outputs[i : i + num_slots] for i in range(0, len(outputs), num_slots)]
    return sum(max(batch) * len(batch) for batch in batches) / sum(outputs)
