"""Conversations to prompts: one rendering for `LLM.chat` and for the server's chat endpoint.

With a template (the operator's, or the checkpoint's own) messages become what its Jinja says, in a
sandbox. A model without one was never taught turns: there the contents are joined by newlines, with
no role names, and the model goes on writing.

Invariant: only the template makes control tokens. What a message says is plain text even where it
spells one, or completes one that the template's text began.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from nanoserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, str]
"""`role` and `content`; `name` where one was given."""


class MessageError(ValueError):
    """A message that cannot be read. `where` is its place: "messages[0].content"."""

    def __init__(self, where: str, problem: str, *, is_unsupported: bool = False) -> None:
        super().__init__(f"{where} {problem}")
        self.where = where
        self.is_unsupported = is_unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation as the model gets it; `token_ids` are at least one."""

    text: str
    token_ids: tuple[int, ...]


class ChatFormat:
    """How one model's conversations are written. Safe in threads.

    `template` is Jinja source; None takes the tokenizer's own, and without one the default above.
    Raises ValueError for a template that does not compile, or where Jinja is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        source = tokenizer.chat_template if template is None else template
        self._tokenizer = tokenizer
        self._render = None if source is None else compile_template(source)
        self._special_ids = special_texts(tokenizer)
        self._end_id = start_token_id(tokenizer)
        roles = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        self._role_texts = {
            role: written(tokenizer, token_id)
            for role, token_id in roles.items()
            if token_id is not None
        }
        self._has_told = False

    @property
    def has_template(self) -> bool:
        """False where the contents are merely joined."""
        return self._render is not None

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation, from messages that `read_messages` gave.

        `add_generation_prompt` lets the template begin the answer's turn. `add_special_tokens` puts
        the tokenizer's prefix before the prompt; None does so unless a template writes its own
        beginning. A conversation that says nothing is continued from the end of text, as an empty
        prompt is. Raises ValueError where the template refuses the messages or fails.
        """
        if self._render is None:
            self._tell_default()
            text = "\n".join(message["content"] for message in messages)
            token_ids = self._plain(text)
        else:
            text, token_ids = self._from_template(messages, add_generation_prompt)
        if add_special_tokens or (add_special_tokens is None and self._render is None):
            token_ids = [*self._tokenizer.prefix_token_ids, *token_ids]
        if not token_ids:
            token_ids = [self._start_id()]
        return ChatPrompt(text=text, token_ids=tuple(token_ids))

    def _tell_default(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "the model has no chat template: message contents are joined by newlines, without "
                "role names (--chat-template gives one)"
            )

    def _start_id(self) -> int:
        if self._end_id is None:
            raise ValueError("the conversation is empty, and the tokenizer has no end of text")
        return self._end_id

    def _from_template(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[str, list[int]]:
        assert self._render is not None
        marker = unused_marker(value for message in messages for value in message.values())
        guarded = [
            {
                key: value if key == "role" else guard(value, self._special_ids, marker)
                for key, value in message.items()
            }
            for message in messages
        ]
        text = self._render(
            messages=guarded, add_generation_prompt=add_generation_prompt, **self._role_texts
        )
        if marker not in text:
            return text, self._tokenizer.encode(text, add_special_tokens=False)
        return text.replace(marker, ""), self._encode_guarded(text, marker)

    def _encode_guarded(self, text: str, marker: str) -> list[int]:
        """Ids of a text in which the marker keeps plain text from reading as a control token."""
        any_special = "|".join(map(re.escape, self._special_ids))  # longest first
        token_ids: list[int] = []
        for piece in re.split(f"({any_special})", text):
            special_id = self._special_ids.get(piece)
            if special_id is not None:
                token_ids.append(special_id)
            else:
                token_ids += self._plain(piece.replace(marker, ""))
        return token_ids

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=False, add_special_tokens=False)


def start_token_id(tokenizer: Tokenizer) -> int | None:
    """What an empty prompt is continued from: `<|endoftext|>`, or the vocabulary's like of it."""
    bos = tokenizer.bos_token_id
    return tokenizer.eos_token_id if bos is None else bos


def written(tokenizer: Tokenizer, token_id: int) -> str:
    """How a token is written by itself."""
    data = tokenizer.spell(token_id, at_start=True, skip_special_tokens=False)
    return data.decode("utf-8", errors="replace")


def special_texts(tokenizer: Tokenizer) -> dict[str, int]:
    """The writing of each special token, longest first, with its id."""
    texts = {written(tokenizer, token_id): token_id for token_id in tokenizer.special_token_ids}
    return {text: texts[text] for text in sorted(texts, key=len, reverse=True) if text}


def unused_marker(texts: Iterable[str]) -> str:
    """One character that none of `texts` holds. Raises ValueError if they leave none.

    Unicode has set 32 code points apart that are no characters and never will be.
    """
    used = set().union(*texts)
    free = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in used]
    if not free:
        raise ValueError("the messages hold every noncharacter from U+FDD0 to U+FDEF")
    return free[0]


def guard(text: str, specials: Mapping[str, int], marker: str) -> str:
    """`text` with `marker` wherever it could be, or become, part of a control token.

    Inside those that it spells; at an end where it could go on from, or into, the template's text;
    and behind a text that is itself the middle of one. Most texts come back as they are. Space
    around the text stays outside the marks, since templates trim it.
    """
    for special in specials:
        text = text.replace(special, f"{special[:1]}{marker}{special[1:]}")
    core = text.strip()
    before = any(core.startswith(end) for special in specials for end in _ends(special))
    after = any(core.endswith(start) for special in specials for start in _starts(special))
    within = core != "" and any(core in special[1:-1] for special in specials)
    marked = f"{marker if before else ''}{core}{marker if after or within else ''}"
    return text.replace(core, marked, 1) if core else text


def _starts(special: str) -> Iterator[str]:
    return (special[:length] for length in range(1, len(special)))


def _ends(special: str) -> Iterator[str]:
    return (special[start:] for start in range(1, len(special)))


def compile_template(source: str) -> Callable[..., str]:
    """A function from template variables to text. Raises ValueError, then and when it is called.

    The environment is the one that transformers gives a template: blocks leave no blank lines,
    loops have break and continue, `tojson` escapes nothing, `raise_exception` and `strftime_now`
    are there. Templates come with checkpoints, so they run in Jinja's sandbox.
    """
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ValueError(
            "a chat template needs Jinja: pip install 'nanoserve[server]', or pip install jinja2"
        ) from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        template = environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not valid Jinja (--chat-template), line {error.lineno}: {error}"
        ) from error
    except (RecursionError, SyntaxError, ValueError) as error:  # of Python, beneath Jinja
        raise ValueError(
            f"the chat template is too deeply nested, or else not to be compiled "
            f"(--chat-template): {error}"
        ) from error

    def render(**variables: Any) -> str:
        try:
            return template.render(**variables)
        except Exception as error:  # an expression in a template may raise anything
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    return render


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def load_chat_template(value: str) -> str:
    """The Jinja source that `--chat-template` means: itself, or the file it names.

    Raises ValueError for a file that cannot be read, or that holds no Jinja: it would say the same
    to the model whatever the messages are.
    """
    if is_jinja(value):
        return value
    try:
        source = Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # unreadable, no UTF-8, nobody's home
        raise ValueError(
            f"--chat-template {value}: neither a readable file nor a Jinja template ({error})"
        ) from error
    if not is_jinja(source):
        raise ValueError(
            f"--chat-template {value}: there is no {{{{ and no {{% in this file, so it is no Jinja "
            f"template, and no message would reach the model"
        )
    return source


def is_jinja(text: str) -> bool:
    """Whether anything in it is more than plain text."""
    return "{{" in text or "{%" in text


def read_messages(value: object) -> tuple[Message, ...]:
    """A conversation in OpenAI's shape. Raises MessageError, which names the place.

    A content is a string or a list of text parts, which are joined by newlines. Of an assistant's
    message it may be missing.
    """
    if not isinstance(value, list | tuple):
        raise MessageError("messages", f"must be a list of messages, got {_kind(value)}")
    if not value:
        raise MessageError("messages", "is empty: at least one message is needed")
    return tuple(_message(f"messages[{place}]", item) for place, item in enumerate(value))


def _message(where: str, value: object) -> Message:
    if not isinstance(value, Mapping):
        raise MessageError(where, f"must be an object, got {_kind(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        shown = repr(role[:40]) if isinstance(role, str) else _kind(role)
        raise MessageError(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown}")
    for field in ("tool_calls", "function_call", "audio"):
        if value.get(field):
            raise MessageError(f"{where}.{field}", "is not supported", is_unsupported=True)
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    message = {"role": role, "content": _content(f"{where}.content", content)}
    if value.get("name") is not None:
        message["name"] = _text(f"{where}.name", value["name"])
    return message


def _content(where: str, value: object) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(_part(f"{where}[{place}]", part) for place, part in enumerate(value))
    return _text(where, value, "a string or a list of text parts")


def _part(where: str, value: object) -> str:
    if not isinstance(value, Mapping):
        raise MessageError(where, f"must be an object, got {_kind(value)}")
    kind = value.get("type")
    if kind != "text":
        shown = repr(kind[:40]) if isinstance(kind, str) else _kind(kind)
        raise MessageError(f"{where}.type", f"must be 'text', all this model reads, got {shown}")
    return _text(f"{where}.text", value.get("text"))


def _text(where: str, value: object, expected: str = "a string") -> str:
    if not isinstance(value, str):
        raise MessageError(where, f"must be {expected}, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise MessageError(where, "holds a lone surrogate, which is no character") from None
    return value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
