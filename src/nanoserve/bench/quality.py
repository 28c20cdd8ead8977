"""What a number format costs in quality: perplexity on held-out text, agreement with a reference.

Teacher-forced: every window of the text is scored as one prompt by the engine itself, so all
formats read the same tokens, through the same steps and the cache that would serve them. Windows
are compared token by token, which makes differences far smaller than the text's own spread visible.

    python -m nanoserve.bench.quality --model mini --windows 128
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rich.console import Console
from rich.table import Table

from nanoserve.llm import LLM
from nanoserve.request import SamplingParams
from nanoserve.tokenizer import Tokenizer

REFERENCE = "float32"

FORMATS: dict[str, dict[str, Any]] = {
    REFERENCE: {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "KV bfloat16": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "KV float16": {"dtype": "float32", "kv_cache_dtype": "float16"},
    "KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8-weight-only": {"quantization": "int8-weight-only"},
    "int8": {"quantization": "int8"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "int4, KV int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
"""Options of `LLM` for each format that the native executor has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a model made of a text, token by token: nats for each token, and its own first choice.

    The first token of each window has no prediction and is left out.
    """

    logprobs: tuple[float, ...]
    choices: tuple[int, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a token."""
        return exponential(-statistics.fmean(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One format against the reference.

    `increase` is how much higher its perplexity is, as a share (0.005: half a per cent), and
    `uncertainty` the standard error of that, from the differences of single tokens. `agreement` is
    the share of positions at which both choose the same next token.
    """

    num_tokens: int
    perplexity: float
    increase: float
    uncertainty: float
    agreement: float


def exponential(nats: float) -> float:
    """exp, infinite where a float cannot hold it: a broken model's perplexity is no error."""
    return math.exp(nats) if nats < 709.0 else math.inf


def heldout_text() -> str:
    """Text that `mini` was never trained on; see `models/mini/README.md`."""
    return (files("nanoserve.bench") / "data" / "heldout.txt").read_text(encoding="utf-8")


def cut_windows(tokenizer: Tokenizer, text: str, num_windows: int, length: int) -> list[list[int]]:
    """`num_windows` windows of `length` tokens, evenly spaced over `text`, none overlapping.

    Raises ValueError if the text is too short for them, or a window for a prediction.
    """
    if num_windows < 1 or length < 2:
        raise ValueError(
            f"at least 1 window of at least 2 tokens is needed, got {num_windows} of {length}"
        )
    ids = tokenizer.encode(text)
    stride = len(ids) // num_windows
    if stride < length:
        raise ValueError(
            f"{num_windows} windows of {length} tokens do not fit into a text of {len(ids)}: "
            "use fewer (--windows) or shorter ones (--length)"
        )
    return [ids[start : start + length] for start in range(0, stride * num_windows, stride)]


def read(llm: LLM, windows: Sequence[Sequence[int]]) -> Reading:
    """Score every window. Raises ValueError for one longer than the model's context."""
    scored = [
        token
        for output in llm.generate(list(windows), SamplingParams(max_tokens=0, prompt_logprobs=1))
        for token in (output.prompt_logprobs or ())
        if token is not None
    ]
    return Reading(
        logprobs=tuple(token.logprob for token in scored),
        choices=tuple(token.top[0][0] for token in scored),
    )


def compare(reference: Reading, reading: Reading) -> Quality:
    """`reading` against `reference`, which must be of the same text.

    Raises ValueError for fewer than two tokens each, or not as many.
    """
    num_read = (len(reference.logprobs), len(reading.logprobs))
    if min(num_read) < 2 or len(set(num_read)) > 1:
        raise ValueError(
            f"two readings of the same 2 tokens or more are compared, got {num_read[0]} and "
            f"{num_read[1]} tokens (--windows, --length; a logit that is not finite ends a reading)"
        )
    differences = [
        before - after for before, after in zip(reference.logprobs, reading.logprobs, strict=True)
    ]
    ratio = exponential(statistics.fmean(differences))
    same = sum(a == b for a, b in zip(reference.choices, reading.choices, strict=True))
    return Quality(
        num_tokens=len(differences),
        perplexity=reading.perplexity,
        increase=ratio - 1.0,
        uncertainty=ratio * statistics.stdev(differences) / math.sqrt(len(differences)),
        agreement=same / len(differences),
    )


def measure(
    model: str,
    formats: Mapping[str, Mapping[str, Any]],
    *,
    num_windows: int,
    length: int,
    **options: Any,
) -> dict[str, Quality]:
    """The quality of each format by its name; the first is the reference of all.

    `options` are of `LLM` and the same for every format. Raises ValueError as `LLM` and
    `cut_windows` do.
    """
    qualities: dict[str, Quality] = {}
    reference: Reading | None = None
    windows: list[list[int]] | None = None
    for name, chosen in formats.items():
        llm = LLM(model, **options, **chosen)
        try:
            windows = windows or cut_windows(llm.tokenizer, heldout_text(), num_windows, length)
            reading = read(llm, windows)
        finally:
            llm.engine.executor.close()
        reference = reference or reading
        qualities[name] = compare(reference, reading)
    return qualities


def quality_table(qualities: Mapping[str, Quality]) -> Table:
    """One line a format."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for head in ("format", "perplexity", "against the first", "same next token"):
        table.add_column(head, justify="left" if head == "format" else "right")
    for name, quality in qualities.items():
        increase, uncertainty = 100 * quality.increase, 100 * quality.uncertainty
        table.add_row(
            name,
            f"{quality.perplexity:.3f}",
            f"{increase:+.3f} % ± {uncertainty:.3f}",
            f"{100 * quality.agreement:.2f} %",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Every format on the held-out text; 2 for a request that cannot be honoured."""
    parser = argparse.ArgumentParser(prog="python -m nanoserve.bench.quality")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--windows", type=int, default=128, help="how many pieces of the text")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--threads", type=int, default=None)
    given = parser.parse_args(arguments)
    try:
        qualities = measure(
            given.model,
            FORMATS,
            num_windows=given.windows,
            length=given.length,
            executor="native",
            threads=given.threads,
        )
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    Console(highlight=False).print(quality_table(qualities))
    return 0


if __name__ == "__main__":
    sys.exit(main())
