"""`LLM`: the Python face. Every call is a configuration of the engine, never a loop of its own.

Arguments are the command line's options with underscores; unknown ones raise TypeError.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from nanoserve.config import CacheConfig, EngineConfig, SchedulerConfig
from nanoserve.engine.engine import Engine
from nanoserve.request import (
    RequestDelta,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

Prompt = str | Sequence[int]

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

    None and, for `kv_cache_dtype`, "auto" mean the default. Raises TypeError for unknown options.
    """
    unknown = set(options) - set(CACHE_OPTIONS) - set(SCHEDULER_OPTIONS) - set(ENGINE_OPTIONS)
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    if options.get("kv_cache_dtype") == "auto":
        options["kv_cache_dtype"] = None
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
    cannot be found or honoured, TypeError for an unknown option.
    """

    def __init__(self, model: str = "mini", **options: Any) -> None:
        self.engine = Engine(engine_config(model=model, **options))
        self.tokenizer = self.engine.tokenizer
        self._ids = (f"llm-{number}" for number in itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in the prompts' order; all run as one continuous batch.

        Raises ValueError, before anything runs, if any prompt or parameter is refused.
        """
        order = [self._add(prompt, params) for prompt in as_prompts(prompts)]
        outputs: dict[str, RequestOutput] = {}
        try:
            while len(outputs) < len(order):
                for delta in self.engine.step():
                    if delta.output is not None:
                        outputs[delta.request_id] = delta.output
        finally:
            self._drop(set(order) - outputs.keys())
        return [outputs[request_id] for request_id in order]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """What each step adds, as it comes. Closing the iterator aborts the request."""
        request_id = self._add(prompt, params)
        try:
            while self.engine.has_unfinished:
                for delta in self.engine.step():
                    yield delta
        finally:
            self._drop({request_id})

    def score(self, prompt: Prompt) -> list[TokenLogprob | None]:
        """The log-probability (nats) of every token of a text; the first has none, so None."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        (output,) = self.generate([prompt], params)
        assert output.prompt_logprobs is not None
        return list(output.prompt_logprobs)

    def _add(self, prompt: Prompt, params: SamplingParams | None) -> str:
        request_id = next(self._ids)
        if isinstance(prompt, str):
            self.engine.add(request_id, self.tokenizer.encode(prompt), params, prompt=prompt)
        else:
            self.engine.add(request_id, list(prompt), params)
        return request_id

    def _drop(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string or a list of token ids is one prompt; any other sequence is many."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed
