"""`nanoserve generate`: one prompt, printed as it comes; or many, run as one batch.

Into a pipe goes exactly the continuation, without the prompt and without a newline of our own. A
terminal sees the prompt first, in bold, and gets its cursor back on a new line. Several choices
follow one another, each under a line that counts them. Results of a batch go to `--out` as each is
finished, and to standard output in the order of the prompts.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import typer

from nanoserve.bench.trace_events import Recorder
from nanoserve.cli.options import EngineOptions, SamplingOptions
from nanoserve.cli.prompts import Prompt
from nanoserve.cli.results import ResultsFile, as_line, check_new, finished_indices, result_json
from nanoserve.cli.terminal import (
    LateProgress,
    let_interrupts_raise,
    printable,
    process_age_s,
    remark,
)
from nanoserve.engine.engine import Engine
from nanoserve.llm import LLM
from nanoserve.model.generation import generation_defaults
from nanoserve.request import FinishReason, RequestDelta, RequestOutput, SamplingParams

DECIDING_OPTIONS = (
    "model",
    "revision",
    "load_format",
    "dummy_seed",
    "tokenizer",
    "device",
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "context_overflow",
    "slide_window",
    "strict_context",
)
"""Engine options that decide which tokens come; the others only decide how they are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What was done: the engine that did it, and when the first text was out (see process_age_s).

    `num_broken`: prompts with a choice that ended because the model's logits were not finite.
    `is_mid_line`: the text ended without a newline, and none was added.
    """

    engine: Engine | None
    first_text_s: float | None
    num_broken: int
    is_mid_line: bool = False


def keep_trace(path: Path, done: Generated) -> None:
    """Steps, slots and requests of the engine for Perfetto; of none, where nothing was left to do.

    Raises ValueError if the file cannot be written.
    """
    recorder = Recorder()
    if done.engine is not None:
        recorder.watch(done.engine)
    recorder.write(path)
    remark(f"trace: {path} (open it in ui.perfetto.dev)")


def load(engine: EngineOptions, sampling: SamplingOptions) -> tuple[LLM, SamplingParams]:
    """The model, and its own sampling defaults under what was typed. From here Ctrl-C raises.

    Says on standard error that the weights are random, where they are.
    """
    sampling.check()
    with LateProgress(f"loading {engine.model}"):
        llm = LLM(**engine.values())
    checkpoint = llm.engine.parts.checkpoint
    if checkpoint.kind == "dummy":
        remark(f"random weights (--load-format dummy, seed {engine.dummy_seed}): the text is noise")
    params = sampling.params(generation_defaults(checkpoint))
    let_interrupts_raise()
    return llm, params


def settings(engine: EngineOptions, sampling: SamplingOptions) -> dict[str, Any]:
    """What was typed, or left alone, of the options that decide which tokens come."""
    values = engine.values()
    return {name: values[name] for name in DECIDING_OPTIONS} | sampling.typed()


class ChoicePrinter:
    """Writes choices one after the other, however their tokens interleave."""

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices
        self._is_terminal = sys.stdout.isatty()
        self._held: dict[int, list[str]] = defaultdict(list)
        self._ended: set[int] = set()
        self._current = 0
        self._last = "\n"

    def begin(self, prompt: str) -> None:
        """The prompt, where a person watches, and the first label."""
        if self._is_terminal:
            typer.secho(printable(prompt), bold=True, nl=False)
            self._last = prompt[-1:]
        self._label()

    def add(self, delta: RequestDelta) -> None:
        self._held[delta.index].append(delta.text)
        if delta.finish_reason is not None:
            self._ended.add(delta.index)
        self._write("".join(self._held.pop(self._current, [])))
        while self._current in self._ended and self._current + 1 < self._num_choices:
            self._current += 1
            self._label()
            self._write("".join(self._held.pop(self._current, [])))

    def end(self) -> None:
        if self._is_terminal and self.is_mid_line:
            self._write("\n")

    @property
    def is_mid_line(self) -> bool:
        return self._last != "\n"

    def _label(self) -> None:
        if self._num_choices > 1:
            newline = "" if self._last == "\n" else "\n"
            self._write(f"{newline}--- choice {self._current + 1} of {self._num_choices}\n")

    def _write(self, text: str) -> None:
        if text:
            typer.echo(printable(text) if self._is_terminal else text, nl=False)  # flushes
            self._last = text[-1]


def generate_one(prompt: Prompt, engine: EngineOptions, sampling: SamplingOptions) -> Generated:
    """Continue one prompt, each token printed as it comes."""
    llm, params = load(engine, sampling)
    printer = ChoicePrinter(params.n)
    first_text_s: float | None = None
    num_broken = 0
    try:
        for delta in llm.stream(prompt.content, params):
            if first_text_s is None:
                printer.begin(text_of(prompt, llm.engine))
            printer.add(delta)
            first_text_s = first_text_s or process_age_s()
            if delta.output is not None:
                num_broken += is_broken(delta.output)
    finally:
        printer.end()
    return Generated(
        engine=llm.engine,
        first_text_s=first_text_s,
        num_broken=num_broken,
        is_mid_line=printer.is_mid_line,
    )


def text_of(prompt: Prompt, engine: Engine) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    return engine.tokenizer.decode(prompt.content)


def is_broken(output: RequestOutput) -> bool:
    return any(c.finish_reason is FinishReason.ERROR for c in output.outputs)


def generate_many(
    prompts: Sequence[Prompt],
    engine: EngineOptions,
    sampling: SamplingOptions,
    *,
    out: Path | None,
    resume: bool,
    as_json: bool,
) -> Generated:
    """Continue all prompts as one batch; nothing is written before every one was accepted.

    With `resume`, prompts that `out` has results of are left out. Raises ValueError for a prompt
    that is refused, naming it, and for a file that is not new or cannot be continued.
    """
    deciding = settings(engine, sampling)
    wanted = unfinished(prompts, deciding, out, resume=resume)
    if not wanted:
        remark(f"{out} has a result of every prompt: nothing is left to do")
        return Generated(engine=None, first_text_s=None, num_broken=0)
    llm, params = load(engine, sampling)
    for prompt in wanted:
        add(llm.engine, prompt, params)
    screen = Screen(wanted) if as_json or out is None else None
    progress = TokenProgress(llm.engine, wanted=screen is None or not sys.stdout.isatty())
    num_broken = 0
    with progress, ResultsFile(out) if out else nullcontext() as file:
        for output in run(llm.engine, progress):
            prompt = prompts[int(output.request_id)]
            line = as_line(result_json(prompt, output, deciding))
            if file:
                file.append(line)
            if screen:
                screen.put(prompt, line if as_json else as_text(prompt, output, len(prompts)))
            num_broken += is_broken(output)
    return Generated(engine=llm.engine, first_text_s=progress.first_text_s, num_broken=num_broken)


def unfinished(
    prompts: Sequence[Prompt], deciding: Mapping[str, Any], out: Path | None, *, resume: bool
) -> list[Prompt]:
    """The prompts that are still to be run."""
    if out is None:
        if resume:
            raise ValueError("--resume needs --out: the file to go on with")
        return list(prompts)
    if not resume:
        check_new(out)
        return list(prompts)
    done = finished_indices(out, prompts, deciding)
    return [prompt for prompt in prompts if prompt.index not in done]


def add(engine: Engine, prompt: Prompt, params: SamplingParams) -> None:
    """Queue one prompt under its index. Raises ValueError that says which one was refused."""
    try:
        if isinstance(prompt.content, str):
            token_ids = engine.tokenizer.encode_prompt(prompt.content)
            engine.add(str(prompt.index), token_ids, params, prompt=prompt.content)
        else:
            engine.add(str(prompt.index), prompt.content, params)
    except ValueError as error:
        raise ValueError(f"{prompt.where}: {error}") from error


def run(engine: Engine, progress: TokenProgress) -> Iterator[RequestOutput]:
    """Step until all that was added is done; each output as its request ends."""
    while engine.has_unfinished:
        for delta in engine.step():
            progress.count(delta)
            if delta.output is not None:
                yield delta.output


class TokenProgress:
    """How many of the tokens that may come have come; a request that ends early counts whole."""

    def __init__(self, engine: Engine, *, wanted: bool) -> None:
        self._left: Counter[str] = Counter()
        for request in engine.log.active:
            self._left[request.request_id] += request.max_tokens
        self._bar = LateProgress("generating", self._left.total(), wanted=wanted)
        self.first_text_s: float | None = None

    def count(self, delta: RequestDelta) -> None:
        self.first_text_s = self.first_text_s or process_age_s()
        num_tokens = len(delta.token_ids)
        self._left[delta.request_id] -= num_tokens
        if delta.output is not None:
            num_tokens += self._left.pop(delta.request_id)
        self._bar.advance(num_tokens)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.__exit__(*details)


class Screen:
    """Results on standard output in the order of the prompts, each as soon as those before it."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._order = deque(prompt.index for prompt in prompts)
        self._held: dict[int, str] = {}

    def put(self, prompt: Prompt, text: str) -> None:
        self._held[prompt.index] = text
        while self._order and self._order[0] in self._held:
            typer.echo(self._held.pop(self._order.popleft()), nl=False)


def as_text(prompt: Prompt, output: RequestOutput, num_prompts: int) -> str:
    """A result for people: each choice under a line that says of which prompt it is."""
    of_prompt = f"--- prompt {prompt.index + 1} of {num_prompts}"
    blocks = []
    for choice in output.outputs:
        which = f", choice {choice.index + 1}" if len(output.outputs) > 1 else ""
        text = printable(choice.text) if sys.stdout.isatty() else choice.text
        blocks.append(f"{of_prompt}{which}\n{text}\n")
    return "".join(blocks)
