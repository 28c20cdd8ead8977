"""Results of `generate` for programs: one JSON object a prompt, one line each.

A file of results is only ever appended to, whole lines at a time; what a kill or a full disk tore
off is cut before the next line is written. Each line says which prompt of which request it
answers, so that a file is never continued with another.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from nanoserve.bench.record import cut_torn_line
from nanoserve.cli.prompts import Prompt
from nanoserve.request import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob

Json = dict[str, Any]

LINE_START = b'{"index": '
"""How every line begins: what is torn off and begins otherwise was not written here."""


def result_json(prompt: Prompt, output: RequestOutput, settings: Mapping[str, Any]) -> Json:
    """The object of one prompt. `settings` are the options that decide what is generated."""
    given_id = {} if prompt.given_id is None else {"id": prompt.given_id}
    return {
        "index": prompt.index,
        **given_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_choice_json(choice) for choice in output.outputs],
        "seed": output.seed,
        "metrics": _metrics_json(output.metrics),
        "settings": settings,
    }


def _choice_json(choice: CompletionOutput) -> Json:
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "cumulative_logprob": _finite(choice.cumulative_logprob),
        "logprobs": None
        if choice.logprobs is None
        else [_logprob_json(logprob) for logprob in choice.logprobs],
    }


def _logprob_json(logprob: TokenLogprob) -> Json:
    return {
        "token_id": logprob.token_id,
        "logprob": _finite(logprob.logprob),
        "top": [{"token_id": i, "logprob": _finite(value)} for i, value in logprob.top],
    }


def _metrics_json(metrics: RequestMetrics) -> Json:
    """Times in seconds since the request arrived: the engine's clock means nothing elsewhere."""
    times = {
        "first_scheduled_s": metrics.first_scheduled_s,
        "first_token_s": metrics.first_token_s,
        "last_token_s": metrics.last_token_s,
    }
    since = {n: None if t is None else t - metrics.arrival_s for n, t in times.items()}
    return {
        **since,
        "num_cached_tokens": metrics.num_cached_tokens,
        "num_preemptions": metrics.num_preemptions,
        "num_slides": metrics.num_slides,
        **({} if metrics.kv_audit is None else {"kv_audit": asdict(metrics.kv_audit)}),
    }


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: an impossible token has no log-probability there."""
    return value if value is None or math.isfinite(value) else None


def as_line(result: Mapping[str, Any]) -> str:
    """One line of ASCII, which every terminal and every reader of lines takes as it is."""
    return json.dumps(result, allow_nan=False) + "\n"


class ResultsFile:
    """Results on their way into a file. Raises ValueError if it cannot be opened for writing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ValueError(f"--out {path} cannot be written: {error.strerror}") from error
        self._is_regular = stat.S_ISREG(os.fstat(self._file).st_mode)
        if self._is_regular:
            cut_torn_line(self._file)

    def append(self, line: str) -> None:
        """Write one whole line. Raises OSError, and leaves no part of the line, if it fails."""
        data, written = line.encode(), 0
        before = os.fstat(self._file).st_size
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            if written and self._is_regular:
                os.ftruncate(self._file, before)
            raise OSError(
                error.errno,
                f"{error.strerror} while writing {self._path}; its complete lines are kept: make "
                "room, then go on with --resume",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close, once the lines are on the disk: some file systems find it full only then."""
        try:
            if self._is_regular:
                os.fsync(self._file)
        finally:
            os.close(self._file)


def check_new(path: Path) -> None:
    """Raise ValueError if `path` holds something: results are neither mixed nor overwritten."""
    if path.is_file() and path.stat().st_size:
        raise ValueError(
            f"--out {path} exists: go on with it (--resume), name another file, or remove it"
        )


def finished_indices(
    path: Path, prompts: Sequence[Prompt], settings: Mapping[str, Any]
) -> set[int]:
    """Prompts that the file at `path` has results of; none if there is no such file.

    A torn last line does not count. Raises ValueError if the file holds anything but results of
    these prompts with these settings.
    """
    if not path.is_file():
        return set()
    *lines, torn = path.read_bytes().split(b"\n")
    if torn[: len(LINE_START)] != LINE_START[: len(torn)]:
        raise not_a_result(f"the last line of {path}")
    wanted = json.loads(json.dumps(settings))
    return {
        _checked_index(line, f"line {number} of {path}", prompts, wanted)
        for number, line in enumerate(lines, start=1)
    }


def _checked_index(line: bytes, where: str, prompts: Sequence[Prompt], settings: Json) -> int:
    try:
        result = json.loads(line)
        index, found = int(result["index"]), dict(result["settings"])
        contents = (result["prompt"], tuple(result["prompt_token_ids"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise not_a_result(where) from error
    if not 0 <= index < len(prompts) or prompts[index].content not in contents:
        raise ValueError(f"{where} is the result of another prompt: name another file with --out")
    differing = sorted(n for n in found | settings if found.get(n) != settings.get(n))
    if differing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
        raise ValueError(f"{where} was made with another {options}: name another file with --out")
    return index


def not_a_result(where: str) -> ValueError:
    return ValueError(
        f"{where} is no result of `nanoserve generate`: --resume needs a file of them"
    )
