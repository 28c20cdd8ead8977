"""Prompts as people give them: as arguments, on standard input, one a line in a file.

Everything is read and checked before a model is loaded. What cannot be read raises ValueError in
one line that names the file and the line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoserve.request import check_range

STDIN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One thing to continue. `content` is text or token ids, `where` names it in an error.

    `given_id` is the caller's own name for it, from a line of JSON; None elsewhere.
    """

    index: int
    content: str | tuple[int, ...]
    where: str
    given_id: str | int | None = None


def read_prompts(arguments: Sequence[str], path: str | None) -> list[Prompt]:
    """The prompts of a command line: its arguments, or the lines of `--prompts-file`.

    Raises ValueError if there is none, or if both were given.
    """
    if arguments and path is not None:
        raise ValueError("give prompts as arguments or with --prompts-file, not both")
    if path is not None:
        prompts = list(_prompts_of_file(path))
        if not prompts:
            raise ValueError(f"--prompts-file {path} holds no prompt")
        return prompts
    if not arguments:
        raise ValueError(
            "a prompt is missing: give one or several, - for standard input, or --prompts-file"
        )
    if list(arguments).count(STDIN) > 1:
        raise ValueError("standard input (-) can be a prompt only once")
    return [
        Prompt(index=index, content=_argument(text), where=f"prompt {index + 1}")
        for index, text in enumerate(arguments)
    ]


def _argument(text: str) -> str:
    """An argument; `-` stands for standard input without the newline that ends its last line."""
    return _read(STDIN).removesuffix("\n") if text == STDIN else text


def _prompts_of_file(path: str) -> Iterator[Prompt]:
    """A prompt for each line that is not empty: JSON where the name ends in .jsonl, else text."""
    is_json = path.endswith(".jsonl")
    lines = _read(path).split("\n")  # not splitlines: that also parts text at U+2028 and others
    index = 0
    for number, line in enumerate(lines, start=1):
        text = line.removesuffix("\r")
        if text:
            where = f"line {number} of {path}"
            yield (
                _parse(text, index, where)
                if is_json
                else Prompt(index=index, content=text, where=where)
            )
            index += 1


def _parse(line: str, index: int, where: str) -> Prompt:
    """`{"prompt": "text" or [ids], "id": ...}`; nothing else is read, so nothing else may stand."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict) or "prompt" not in value:
        raise ValueError(f'{where} must be an object with a "prompt"')
    if further := sorted(set(value) - {"prompt", "id"}):
        raise ValueError(
            f"{where} has {', '.join(further)}: only prompt and id are read there, everything "
            "else is an option of the command"
        )
    given_id = value.get("id")
    if isinstance(given_id, bool) or not isinstance(given_id, str | int | None):
        raise ValueError(f"{where}: id must be a string or an integer, got {given_id!r}")
    return Prompt(
        index=index, content=_content(value["prompt"], where), where=where, given_id=given_id
    )


def _content(value: object, where: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: prompt must be a string or a list of token ids, got {value!r}")
    for token_id in value:
        if token_id is None:
            raise ValueError(f"{where}: a token id must be an integer, got null")
        check_range(f"{where}: a token id", token_id, 0, float("inf"), integer=True)
    return tuple(value)


def _read(path: str) -> str:
    """UTF-8 text of a file or of standard input; a byte-order mark is dropped."""
    name = "standard input" if path == STDIN else path
    try:
        data = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"prompts cannot be read from {name}: {error.strerror}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}"
        ) from error
