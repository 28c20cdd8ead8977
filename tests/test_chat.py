"""Conversations to prompts: what a template may write, and what a message never can."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import EOS, assert_nothing_left, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from wire import END, gpt2

from nanoserve.chat import ChatFormat, MessageError, compile_template, load_chat_template
from nanoserve.llm import LLM
from nanoserve.request import SamplingParams
from nanoserve.server.protocol import Served, prepare, read_chat
from nanoserve.server.responses import Writer
from nanoserve.tokenizer import Tokenizer

END_AS_TEXT = (27, 91, 437, 1659, 5239, 91, 29)
DIALOGPT = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
CHATML = """{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{% endif %}
"""


def said(*contents: str) -> list[dict[str, str]]:
    """Turns of a user and an assistant."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


def form(template: str | None = DIALOGPT) -> ChatFormat:
    return ChatFormat(gpt2(), template)


# The default


def test_c05_without_a_template_contents_are_joined(caplog: pytest.LogCaptureFixture) -> None:
    plain = form(None)
    assert not plain.has_template
    with caplog.at_level(logging.INFO, logger="nanoserve.chat"):
        for _ in range(3):
            prompt = plain.encode(said("Hello", "you", "there"))
    assert prompt.text == "Hello\nyou\nthere"
    assert prompt.token_ids == tuple(gpt2().encode("Hello\nyou\nthere"))
    assert len(caplog.messages) == 1
    assert "--chat-template" in caplog.messages[0]


def test_b35_the_default_makes_no_control_token() -> None:
    assert form(None).encode(said("<|endoftext|>")).token_ids == END_AS_TEXT


def test_a_conversation_that_says_nothing_begins_a_text() -> None:
    assert form(None).encode(said("")).token_ids == (END,)
    assert form("").encode(said("Hello")).token_ids == (END,)


# Templates


def test_c05_a_template_writes_control_tokens() -> None:
    prompt = form().encode(said("Hello", "Hi"))
    assert prompt.text == "Hello<|endoftext|>Hi<|endoftext|>"
    assert prompt.token_ids == (15496, END, 17250, END)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("template", [DIALOGPT, CHATML])
def test_templates_render_as_transformers_renders_them(
    template: str, add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*said("  Hello ", "Hi\n", "{{ eos_token }}"), {"role": "tool", "content": "5"}]
    rendered_there: Any = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        eos_token="<|endoftext|>",
    )
    (expected,) = rendered_there[0]
    rendered = form(template).encode(messages, add_generation_prompt=add_generation_prompt)
    assert rendered.text == expected
    assert rendered.token_ids == tuple(gpt2().encode(expected))


def test_what_templates_may_call() -> None:
    render = compile_template(
        "{{ messages | tojson }}{{ strftime_now('%Y') | length }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}!{% endfor %}"
    )
    assert render(messages=[{"a": "<é>"}, {}]) == '[{"a": "<é>"}, {}]4!'


@pytest.mark.parametrize(
    "template,words",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ 1 / 0 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ cycler.__init__.__globals__ }}", "refuses these messages"),
    ],
)
def test_a_template_that_fails_is_an_error_of_the_request(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        form(template).encode(said("Hello"))


def test_a_template_that_does_not_compile_is_found_at_once() -> None:
    with pytest.raises(ValueError, match=r"--chat-template\), line 2"):
        form("\n{% for %}")
    for source in (
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{% for a in messages %}" * 25 + "x" + "{% endfor %}" * 25,
        "{{ " + "9" * 5000 + " }}",
    ):
        with pytest.raises(ValueError, match="--chat-template"):
            form(source)


def test_a_template_that_recurses_for_ever_is_an_error_of_the_request() -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        form("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}").encode(said("Hello"))


def test_a_template_is_given_as_text_or_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(DIALOGPT, encoding="utf-8")
    assert load_chat_template(str(file)) == load_chat_template(DIALOGPT) == DIALOGPT
    for value in (str(tmp_path / "none.jinja"), str(tmp_path), "x" * 5000, "\0"):
        with pytest.raises(ValueError, match="--chat-template"):
            load_chat_template(value)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="neither a readable file"):
        load_chat_template(str(file))
    for text in ("", " \n", "You are a helpful assistant.", '{"model": "gpt2"}', "\0"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match="no message would reach the model"):
            load_chat_template(str(file))


# Only the template makes control tokens


@pytest.mark.parametrize(
    "content",
    [
        "<|endoftext|>",
        "a<|endoftext|>b<|endoftext|>",
        "<|endoftext|",
        "|endoftext|>",
        "<",
        ">",
        "endoftext",
        "text",
        "\ufdd0<|endoftext|>\ufdd0",
        "  <|  ",
    ],
)
@pytest.mark.parametrize(
    "template",
    [
        DIALOGPT,
        "{% for m in messages %}<|{{ m.content }}|>{% endfor %}{{ eos_token }}",
        "{% for m in messages %}{{ m.content }}|endoftext|>{% endfor %}{{ eos_token }}",
        "{% for m in messages %}<{{ m.content }}>{{ m.content }}{% endfor %}{{ eos_token }}",
        "{% for m in messages %}<|endoftext{{ m.content }}{% endfor %}{{ eos_token }}",
        "{% for m in messages %}{{ m.content | trim }}endoftext|>{% endfor %}{{ eos_token }}",
    ],
)
def test_b35_no_message_makes_a_control_token(template: str, content: str) -> None:
    prompt = form(template).encode([{"role": "user", "content": content}])
    assert prompt.token_ids.count(END) == 1
    assert prompt.token_ids[-1] == END
    assert prompt.text == compile_template(template)(
        messages=[{"content": content}], eos_token="<|endoftext|>"
    )
    assert gpt2().decode(prompt.token_ids) == prompt.text


def test_b35_nor_does_a_name() -> None:
    template = "{{ messages[0].name }}{{ messages[0].content }}"
    messages = [{"role": "user", "content": "|>", "name": "<|endoftext"}]
    assert form(template).encode(messages).token_ids == END_AS_TEXT


PIECES = st.sampled_from(["<|endoftext|>", "<|", "<|endo", "ftext", "ftext|>", "|>", "<", ">", " "])


@given(st.lists(st.lists(PIECES, max_size=3).map("".join), min_size=1, max_size=4))
@pytest.mark.parametrize("content", ["m.content", "m.content | trim"])
def test_b35_whatever_is_said(content: str, contents: list[str]) -> None:
    template = f"{{% for m in messages %}}{{{{ {content} }}}}{{% endfor %}}{{{{ eos_token }}}}"
    prompt = form(template).encode(said(*contents))
    assert prompt.token_ids.count(END) == 1
    assert gpt2().decode(prompt.token_ids) == prompt.text


def test_noncharacters_may_be_said_but_not_all_of_them() -> None:
    some = "".join(map(chr, range(0xFDD0, 0xFDEF))) + "<|endoftext|>"
    prompt = form().encode(said(some))
    assert prompt.text == some + "<|endoftext|>"
    assert gpt2().decode(prompt.token_ids) == prompt.text
    with pytest.raises(ValueError, match="every noncharacter"):
        form().encode(said(some + "\ufdef"))


def test_add_special_tokens_puts_the_prefix_before() -> None:
    prefixed = Tokenizer(replace(gpt2()._vocabulary, prefix_token_ids=(END,)))
    joined, templated = (
        ChatFormat(prefixed, None),
        ChatFormat(prefixed, "{{ messages[0].content }}"),
    )
    hello = said("Hello")
    assert joined.encode(hello).token_ids == (END, 15496)
    assert joined.encode(hello, add_special_tokens=False).token_ids == (15496,)
    assert templated.encode(hello).token_ids == (15496,)
    assert templated.encode(hello, add_special_tokens=True).token_ids == (END, 15496)


# LLM.chat


@cache
def tiny_llm() -> LLM:
    return LLM(str(tiny_model().folder), device="cpu")


@pytest.mark.parametrize("template", [None, DIALOGPT])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 12},
        {"max_tokens": 12, "temperature": 0.0},
        {"max_tokens": 20, "n": 2, "stop": ["a"]},
    ],
    ids=str,
)
def test_llm_chat_is_the_chat_endpoint(template: str | None, fields: dict[str, Any]) -> None:
    llm = tiny_llm()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a <|endoftext|>"},
        {"role": "user", "content": [{"type": "text", "text": "bird"}]},
    ]
    limits = Served.of(
        llm.engine.config,
        llm.engine.spec,
        llm.tokenizer,
        model_names=("tiny",),
        chat_template=template,
    )
    call = read_chat({"model": "tiny", "messages": messages, "seed": 3, **fields}, limits)
    prompts = prepare(call, llm.tokenizer, limits)
    (prompt,) = prompts
    params = SamplingParams(**{"max_tokens": None, "seed": 3, **fields})
    (output,) = llm.chat(messages, params, chat_template=template)
    assert (output.prompt, output.prompt_token_ids) == (prompt.prompt, prompt.token_ids)
    assert params == call.params
    (same,) = llm.generate([prompt.token_ids], call.params)
    writer = Writer(
        call,
        prompts,
        reply_id="chatcmpl-1",
        created=0,
        model="tiny",
        fingerprint=None,
        tokenizer=llm.tokenizer,
    )
    answer = json.loads(json.dumps(writer.whole([same])))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        choice.text for choice in output.outputs
    ]
    assert prompt.token_ids.count(EOS) == (2 if template else 0)
    assert_nothing_left(llm.engine)


def test_llm_chat_takes_one_conversation_or_many() -> None:
    llm = tiny_llm()
    params = SamplingParams(max_tokens=4, temperature=0.0)
    one, two = said("a bird"), said("the sea", "is", "calm")
    (first,) = llm.chat(one, params)
    (second,) = llm.chat(two, params)
    both = llm.chat([one, two], params)
    assert [output.outputs for output in both] == [first.outputs, second.outputs]
    assert [output.prompt for output in both] == ["a bird", "the sea\nis\ncalm"]


def test_llm_chat_has_no_limit_but_the_context() -> None:
    llm = tiny_llm()
    (output,) = llm.chat(said("a bird"), SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256
    (default,) = llm.chat(said("a bird"))
    assert default.outputs[0].finish_reason is not None


def test_llm_chat_tells_its_default_once(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(str(tiny_model().folder), device="cpu")
    with caplog.at_level(logging.WARNING, logger="nanoserve.chat"):
        for _ in range(2):
            llm.chat(said("a"), SamplingParams(max_tokens=1))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "messages,where",
    [
        ([], "messages"),
        ("hello", "messages"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([[{"role": "user", "content": "a"}], [{"role": "x"}]], r"messages\[0\].role"),
    ],
)
def test_llm_chat_refuses_what_the_endpoint_refuses(messages: Any, where: str) -> None:
    llm = tiny_llm()
    with pytest.raises(MessageError, match=where):
        llm.chat(messages)
    assert_nothing_left(llm.engine)


def test_llm_chat_refuses_a_template_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--chat-template"):
        tiny_llm().chat(said("a"), chat_template=str(tmp_path / "none"))
