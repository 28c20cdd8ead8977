"""`LLM`: the Python face. Every call is a configuration of the engine, never a loop of its own.

Arguments are the command line's options with underscores; unknown ones raise TypeError.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, TypeGuard

from nanoserve.chat import ChatFormat, load_chat_template, read_messages
from nanoserve.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoserve.engine.engine import Engine, StepError
from nanoserve.request import (
    RequestDelta,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
"""Messages as OpenAI's API has them: `role`, and `content` as a string or text parts."""

# Options that the dataclasses of `config` keep under a shorter name of their own.
CACHE_OPTIONS = {
    "kv_layout": "layout",
    "kv_cache_dtype": "dtype",
    "block_size": "block_size",
    "kv_cache_memory_bytes": "memory_bytes",
}
SCHEDULER_OPTIONS = {field.name: field.name for field in fields(SchedulerConfig)}
ENGINE_OPTIONS = {
    field.name: field.name
    for field in fields(EngineConfig)
    if field.name not in ("cache", "scheduler")
}


def engine_config(**options: Any) -> EngineConfig:
    """An `EngineConfig` from flat options (the command line's names, underscores for dashes).

    None, "auto" for `kv_cache_dtype` and "none" for `quantization` mean the default.
    Raises TypeError for unknown options.
    """
    unknown = set(options) - set(CACHE_OPTIONS) - set(SCHEDULER_OPTIONS) - set(ENGINE_OPTIONS)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    for name, unset in (("kv_cache_dtype", "auto"), ("quantization", "none")):
        if options.get(name) == unset:
            options[name] = None
    given = {name: value for name, value in options.items() if value is not None}

    def pick(table: dict[str, str]) -> dict[str, Any]:
        return {table[name]: value for name, value in given.items() if name in table}

    return EngineConfig(
        **pick(ENGINE_OPTIONS),
        cache=CacheConfig(**pick(CACHE_OPTIONS)),
        scheduler=SchedulerConfig(**pick(SCHEDULER_OPTIONS)),
    )


class LLM:
    """One model, ready to generate.

        llm = LLM("mini", kv_layout="paged")
        for out in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(out.outputs[0].text)

    A prompt is a string or a list of token ids, everywhere. Raises ValueError for a model that
    cannot be found or honoured, TypeError for an unknown option. Not thread-safe: one thread owns
    it and its streams.
    """

    def __init__(self, model: str = "mini", **options: Any) -> None:
        self._drive(Engine(engine_config(model=model, **options)))

    @classmethod
    def of(cls, engine: Engine) -> LLM:
        """The face of an engine that is there already, which nobody else steps meanwhile."""
        made = cls.__new__(cls)
        made._drive(engine)
        return made

    def _drive(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self._ids = (f"llm-{number}" for number in itertools.count())
        # Any consumer's step may bring another's deltas: here they wait for whom they concern.
        self._inboxes: dict[str, deque[RequestDelta | StepError]] = {}
        self._chat_formats: dict[str | None, ChatFormat] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in the prompts' order; all run as one continuous batch.

        Raises ValueError, before anything runs, if any prompt or parameter is refused, and
        StepError if a step of theirs failed; whatever is raised, none of them goes on.
        """
        return self._run([self._encode(prompt) for prompt in as_prompts(prompts)], params)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
    ) -> list[RequestOutput]:
        """The answer to a conversation, or to each of several: what the chat endpoint gives.

        As there, no `params` means no limit but the context. `chat_template` is Jinja source or the
        name of its file; None takes the checkpoint's own, and without one the contents are joined
        by newlines. Each output's `prompt` is the rendered text. Raises ValueError for a message or
        a template that is refused, and as `generate` does.
        """
        conversations = [messages] if is_conversation(messages) else messages
        form = self._chat_format(chat_template)
        prompts = [form.encode(read_messages(conversation)) for conversation in conversations]
        return self._run(
            [(prompt.text, prompt.token_ids) for prompt in prompts],
            SamplingParams(max_tokens=None) if params is None else params,
        )

    def _chat_format(self, chat_template: str | None) -> ChatFormat:
        """Compiled once; the default says only once that it is one."""
        if chat_template not in self._chat_formats:
            source = None if chat_template is None else load_chat_template(chat_template)
            self._chat_formats[chat_template] = ChatFormat(self.tokenizer, source)
        return self._chat_formats[chat_template]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestDelta]:
        """What each step adds, as it comes. Closing the iterator aborts the request.

        Nothing is queued, or refused, before the first delta is asked for. Streams may be read in
        turn: whoever needs a delta steps the engine, and the others' are kept for them.
        """
        request_id = self._add(*self._encode(prompt), params, deque())
        try:
            yield from self._deltas(request_id)
        finally:
            self._drop(request_id)

    def score(self, prompt: Prompt) -> list[TokenLogprob | None]:
        """The log-probability (nats) of every token of a text; the first has none, so None."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (output,) = self.generate([prompt], params)
        assert output.prompt_logprobs is not None
        return list(output.prompt_logprobs)

    def _encode(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        """A prompt's text, None if there is none, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode_prompt(prompt)
        return None, list(prompt)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Sequence[int]]],
        params: SamplingParams | None,
    ) -> list[RequestOutput]:
        request_ids: list[str] = []
        with ExitStack() as drops:
            for text, token_ids in prompts:
                # The last delta holds all: memory must not grow with the texts of a long list.
                request_id = self._add(text, token_ids, params, deque(maxlen=1))
                drops.callback(self._drop, request_id)
                request_ids.append(request_id)
            return [self._output(request_id) for request_id in request_ids]

    def _add(
        self,
        text: str | None,
        token_ids: Sequence[int],
        params: SamplingParams | None,
        inbox: deque[RequestDelta | StepError],
    ) -> str:
        request_id = next(self._ids)
        self.engine.add(request_id, token_ids, params, prompt=text)
        self._inboxes[request_id] = inbox
        return request_id

    def _output(self, request_id: str) -> RequestOutput:
        *_, last = self._deltas(request_id)
        assert last.output is not None
        return last.output

    def _deltas(self, request_id: str) -> Iterator[RequestDelta]:
        """Those of one request, to the one that ends it. Raises StepError if a step lost it."""
        inbox = self._inboxes[request_id]
        while True:
            while not inbox:
                if not self.engine.is_active(request_id):
                    raise StepError([request_id], [])  # lost with a step that was interrupted
                self._step()
            delta = inbox.popleft()
            if isinstance(delta, StepError):
                raise delta
            yield delta
            if delta.output is not None:
                return

    def _step(self) -> None:
        """Step the engine; each delta, or the failure, goes to the requests it concerns."""
        try:
            deltas = self.engine.step()
        except StepError as error:
            deltas = error.deltas
            for request_id in self._inboxes.keys() & error.request_ids:
                self._inboxes[request_id].append(error)
        for delta in deltas:
            if delta.request_id in self._inboxes:  # it may have been dropped during the step
                self._inboxes[delta.request_id].append(delta)

    def _drop(self, request_id: str) -> None:
        self.engine.abort(request_id)
        del self._inboxes[request_id]


def is_conversation(messages: Conversation | Sequence[Conversation]) -> TypeGuard[Conversation]:
    """One list of messages, rather than a list of such lists; an empty one is one, and refused."""
    return not messages or not isinstance(messages[0], Sequence)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string or a sequence of token ids is one prompt; any other sequence is many.

    An array of integers is such a sequence, one of two dimensions a batch of them. Raises TypeError
    where token ids are mixed with prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    listed: list[Any] = list(prompts)
    # Whatever holds nothing is meant as an id: the engine says so if it is none.
    num_ids = sum(not isinstance(item, Iterable) for item in listed)
    if num_ids not in (0, len(listed)):
        raise TypeError("token ids are mixed with prompts: put the ids of one prompt in a list")
    return [listed] if num_ids else listed
