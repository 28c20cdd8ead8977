"""`LLM`: prompts in, texts out, and nothing lost when several consumers share one engine."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from functools import cache

import oracle
import pytest
from helpers import assert_nothing_left, fail_once, greedy, prompt_of, tiny_model

from nanoserve.engine.engine import StepError
from nanoserve.llm import LLM, Prompt, as_prompts
from nanoserve.request import RequestDelta, RequestOutput, SamplingParams


def tiny_llm(**options: object) -> LLM:
    return LLM(str(tiny_model().folder), device="cpu", executor="eager", **options)


@cache
def expected(length: int, num_tokens: int = 12) -> RequestOutput:
    """What one prompt gives alone."""
    (output,) = tiny_llm().generate(prompt_of(length), greedy(num_tokens))
    return output


def tokens(deltas: list[RequestDelta]) -> tuple[int, ...]:
    return tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas))


def test_prompts_are_texts_or_token_ids_one_or_many() -> None:
    llm = tiny_llm()
    ids = llm.tokenizer.encode("a bird in the sea")
    (text,) = llm.generate("a bird in the sea", greedy(6))
    (same,) = llm.generate(ids, greedy(6))
    assert text.prompt == "a bird in the sea"
    assert same.prompt is None
    assert text.prompt_token_ids == same.prompt_token_ids == tuple(ids)
    assert text.outputs[0].token_ids == same.outputs[0].token_ids
    prompts: list[Prompt] = ["a bird in the sea", ids, tuple(ids), prompt_of(5)]
    many = llm.generate(prompts, greedy(6))
    assert [output.outputs[0].token_ids for output in many[:3]] == [text.outputs[0].token_ids] * 3
    assert many[3].prompt_token_ids == tuple(prompt_of(5))
    assert llm.generate([], greedy(6)) == []
    assert as_prompts((1, 2)) == [[1, 2]]
    assert_nothing_left(llm.engine)


def test_the_defaults_are_the_python_apis() -> None:
    (output,) = tiny_llm().generate("a bird")
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    assert output.seed is not None


@pytest.mark.parametrize("options", [{"layout": "paged"}, {"kv_layuot": "paged"}, {"cache": None}])
def test_unknown_options_raise(options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=f"unknown option {next(iter(options))}"):
        LLM("mini", **options)


def test_every_option_reaches_its_place() -> None:
    llm = tiny_llm(
        kv_layout="slots",
        kv_cache_dtype="float16",
        max_num_seqs=2,
        max_model_len=64,
        block_size=None,
    )
    assert (llm.engine.spec.layout, llm.engine.spec.cache_dtype) == ("slots", "float16")
    assert llm.engine.config.scheduler.max_num_seqs == 2
    assert llm.engine.config.cache.block_size == 16
    assert tiny_llm(kv_cache_dtype="auto").engine.spec.cache_dtype == "float32"


@pytest.mark.parametrize(
    "prompts,error,words",
    [
        ("", ValueError, "empty"),
        ([[]], ValueError, "empty"),
        (["fine", ""], ValueError, "empty"),
        (["fine", [1, 9999]], ValueError, "9999 is outside"),
        (["fine", [1] * 256], ValueError, "256 tokens"),
        ([1, "a"], TypeError, "mixed"),
        (["a", 1], TypeError, "mixed"),
    ],
)
def test_a_refused_prompt_leaves_nothing_of_its_list_behind(
    prompts: list[list[int]], error: type[Exception], words: str
) -> None:
    llm = tiny_llm()
    with pytest.raises(error, match=words):
        llm.generate(prompts, greedy(4))
    assert llm.engine.log.num_steps == 0
    assert not llm._inboxes
    assert_nothing_left(llm.engine)


def test_outputs_come_in_the_order_of_the_prompts_whoever_ends_first() -> None:
    """Who waits for the first prompt keeps one delta of each of the others, not their texts."""
    llm = tiny_llm(max_num_seqs=2)
    lengths = (34, 3, 22, 8, 13)
    step, kept = llm._step, []

    def step_and_count() -> None:
        step()
        kept.append(max(len(inbox) for inbox in llm._inboxes.values()))

    llm._step = step_and_count  # type: ignore[method-assign]
    outputs = llm.generate([prompt_of(length) for length in lengths], greedy(12))
    assert max(kept) == 1
    assert [output.prompt_token_ids for output in outputs] == [
        tuple(prompt_of(length)) for length in lengths
    ]
    for length, output in zip(lengths, outputs, strict=True):
        assert output.outputs == expected(length).outputs
    assert_nothing_left(llm.engine)


def test_a_stream_is_the_whole_text_in_pieces() -> None:
    llm = tiny_llm()
    deltas = list(llm.stream(prompt_of(22), greedy(12)))
    assert len(deltas) == 12
    assert tokens(deltas) == expected(22).outputs[0].token_ids
    assert "".join(delta.text for delta in deltas) == expected(22).outputs[0].text
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
    assert deltas[-1].output is not None
    assert deltas[-1].output.outputs == expected(22).outputs
    assert_nothing_left(llm.engine)


def test_every_choice_of_a_stream_ends_once() -> None:
    llm = tiny_llm()
    params = SamplingParams(max_tokens=30, n=3, seed=16)
    deltas = list(llm.stream(prompt_of(12), params))
    (whole,) = llm.generate(prompt_of(12), params)
    ends = [delta.index for delta in deltas if delta.finish_reason is not None]
    assert sorted(ends) == [0, 1, 2]
    assert ends != [0, 1, 2], "they ended in order: another seed would prove more"
    for choice in whole.outputs:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert tokens(mine) == choice.token_ids
        assert "".join(delta.text for delta in mine) == choice.text
        assert mine[-1].finish_reason is choice.finish_reason


def test_a_stream_that_is_closed_frees_its_request_in_one_step() -> None:
    llm = tiny_llm()
    stream = llm.stream(prompt_of(22), greedy(200))
    assert tokens([next(stream), next(stream)]) == expected(22).outputs[0].token_ids[:2]
    num_steps = llm.engine.log.num_steps
    assert isinstance(stream, Generator)
    stream.close()
    assert llm.engine.log.num_steps == num_steps
    assert not llm._inboxes
    assert_nothing_left(llm.engine)
    unread = llm.stream(prompt_of(22), greedy(200))
    del unread  # was never begun: nothing was queued
    assert llm.engine.log.num_arrivals == 1


def test_interleaved_streams_lose_nothing_of_each_other() -> None:
    llm = tiny_llm()
    streams = {length: llm.stream(prompt_of(length), greedy(12)) for length in (8, 22, 34)}
    seen: dict[int, list[RequestDelta]] = {length: [] for length in streams}
    for turn in range(7):
        for place, (length, stream) in enumerate(streams.items()):
            for _ in range((turn + place) % 3):  # sometimes none, sometimes two
                seen[length] += itertools.islice(stream, 1)
    (between,) = llm.generate(prompt_of(13), greedy(12))
    assert between.outputs == expected(13).outputs
    for length, stream in streams.items():
        seen[length] += stream
        assert tokens(seen[length]) == expected(length).outputs[0].token_ids
        assert "".join(d.text for d in seen[length]) == expected(length).outputs[0].text
        assert seen[length][-1].output is not None
    assert max(record.num_seqs for record in llm.engine.log.steps) == 4
    assert llm.engine.log.num_steps < 3 * 12, "each stepped for itself alone"
    assert not llm._inboxes
    assert_nothing_left(llm.engine)


def test_whoever_loses_its_request_in_a_failed_step_is_told() -> None:
    llm = tiny_llm(max_num_seqs=2)
    first, second = (llm.stream(prompt_of(length), greedy(12)) for length in (8, 22))
    third = llm.stream(prompt_of(34), greedy(12))
    next(first)
    next(second)
    fail_once(llm.engine)
    with pytest.raises(StepError):
        list(first)
    assert len(list(third)) == 12
    with pytest.raises(StepError, match="llm-1"):
        list(second)
    with pytest.raises(StopIteration):
        next(first)
    fail_once(llm.engine)
    with pytest.raises(StepError):
        llm.generate([prompt_of(8), prompt_of(22), prompt_of(34)], greedy(4))
    (after,) = llm.generate(prompt_of(22), greedy(12))
    assert after.outputs == expected(22).outputs
    assert not llm._inboxes
    assert_nothing_left(llm.engine)


def test_an_interrupted_call_leaves_an_llm_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()

    def interrupt(batch: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt_of(8), prompt_of(22)], greedy(4))
    assert not llm._inboxes
    (after,) = llm.generate(prompt_of(22), greedy(12))
    assert after.outputs == expected(22).outputs


def test_a_stream_whose_step_another_interrupted_says_that_it_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = tiny_llm()
    first, second = llm.stream(prompt_of(8), greedy(4)), llm.stream(prompt_of(22), greedy(4))
    next(first)
    next(second)

    def interrupt(batch: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "execute", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(first)
    with pytest.raises(StepError, match="llm-1"):
        list(second)
    assert not llm._inboxes
    assert_nothing_left(llm.engine)


def test_a_score_is_the_log_probability_of_every_token() -> None:
    llm, model = tiny_llm(), tiny_model()
    text = "a bird in the sea, and a fire"
    ids = llm.tokenizer.encode(text)
    scores = llm.score(text)
    assert len(scores) == len(ids)
    assert scores[0] is None
    rows = oracle.log_softmax(oracle.logits(model.config, model.weights, ids))
    for place, entry in enumerate(scores[1:], start=1):
        assert entry is not None
        assert entry.token_id == ids[place]
        assert abs(entry.logprob - rows[place - 1, ids[place]]) < 1e-4
    assert llm.score(ids) == scores
    assert llm.score([5]) == [None]
    assert len(llm.score(prompt_of(256))) == 256  # the whole context may be scored
    with pytest.raises(ValueError, match="257 tokens"):
        llm.score(prompt_of(257))
    assert_nothing_left(llm.engine)


def test_a_tokenizers_suffix_does_not_end_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    monkeypatch.setattr(llm.tokenizer, "prefix_token_ids", (7,))
    monkeypatch.setattr(llm.tokenizer, "suffix_token_ids", (8,))
    (output,) = llm.generate("a bird", greedy(2))
    assert output.prompt_token_ids[0] == 7
    assert output.prompt_token_ids[-1] != 8
