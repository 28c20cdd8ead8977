"""What a checkpoint's files say about its tokenizer beside the vocabulary.

Read with transformers' precedence: tokenizer_config.json; special_tokens_map.json over it where the
checkpoint is old enough to need it; added_tokens.json; chat_template.jinja over the configuration's
template. Every value is checked here, so that a wrong one is a ValueError and not a crash later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from nanoserve.tokenizer.vocabulary import END_OF_TEXT

Around = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids that go before a text, and after it."""

ROLES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Roles of special tokens, in the order in which transformers numbers new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A transformers class: its special tokens by role, and the roles it puts around a text."""

    tokens: dict[str, str]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


BARE = Family(tokens={})
GPT2 = Family(tokens=dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT))
BERT = Family(
    tokens={
        # BERT has no bos and eos, but a GPT-2 trained on such texts begins and stops with these.
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "unk_token": "[UNK]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "mask_token": "[MASK]",
    },
    before=("cls_token",),
    after=("sep_token",),
)
ALBERT = replace(BERT, tokens={**BERT.tokens, "unk_token": "<unk>", "pad_token": "<pad>"})
T5 = Family(
    tokens={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
    after=("eos_token",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A folder's tokenizer settings, merged. `added` are tokens beside the vocabulary, by id."""

    folder: Path
    values: Mapping[str, Any]
    added: Mapping[int, AddedToken]
    chat_template: str | None

    @classmethod
    def read(cls, folder: Path) -> Settings:
        """Raises ValueError, naming the file, for one that cannot be understood."""
        values = read_object(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in values:
            # Old checkpoints. New ones may keep a stale map beside the full configuration.
            values |= read_object(folder / "special_tokens_map.json")
        if values.get("tokenizer_class") is None:
            config = read_object(folder / "config.json")
            values["tokenizer_class"] = config.get("tokenizer_class")
        return cls(
            folder=folder,
            values=values,
            added=_read_added_tokens(folder, values),
            chat_template=_read_chat_template(folder, values),
        )

    def family(self, source: Path, supported: Mapping[str, Family]) -> Family:
        """The family of the class that the files name; "" stands for none in particular.

        Raises ValueError for a class under which `source` would mean other ids: another way to
        split words (MeCab), another numbering (fairseq).
        """
        name = str(self.values["tokenizer_class"] or "").removesuffix("Fast")
        if name in {"PreTrainedTokenizer", "TokenizersBackend"}:
            name = ""
        if name not in supported:
            raise ValueError(
                f"{source}: tokenizer class {name} is not supported with this file, only "
                f"{', '.join(filter(None, supported))}; save the tokenizer as tokenizer.json"
            )
        return supported[name]

    def flag(self, name: str, default: bool) -> bool:
        """A yes or no; absent and null are `default`."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{self.folder}: {name} must be true or false, got {value!r}")
        return default if value is None else value

    def roles(self, family: Family, knows: Callable[[str], bool]) -> dict[str, str]:
        """Special tokens by role: what the files say, else the family's if the vocabulary has it.

        A token that the files name counts even where the vocabulary lacks it: it gets a new id.
        """
        added = {token.content for token in self.added.values()}
        guessed = {
            role: token for role, token in family.tokens.items() if knows(token) or token in added
        }
        named = {role: self._content(self.values[role]) for role in ROLES if role in self.values}
        merged = guessed | named
        return {role: token for role in ROLES if (token := merged.get(role))}

    def further_special_tokens(self) -> list[str]:
        """Special tokens that have no role."""
        newer, older = "extra_special_tokens", "additional_special_tokens"
        listed: object = self.values.get(newer) or self.values.get(older) or []
        tokens = list(listed.values()) if isinstance(listed, dict) else listed
        if not isinstance(tokens, list):
            raise ValueError(f"{self.folder}: {newer} must be a list, got {listed!r}")
        return [content for token in tokens if (content := self._content(token))]

    def around(self, family: Family, role_ids: Mapping[str, int]) -> Around:
        """Ids before and after a text: the family's, and what add_bos_token, add_eos_token say."""
        before = [role for role in family.before if role != "bos_token"]
        after = [role for role in family.after if role != "eos_token"]
        if self.flag("add_bos_token", "bos_token" in family.before):
            before.insert(0, "bos_token")
        if self.flag("add_eos_token", "eos_token" in family.after):
            after.append("eos_token")
        return (
            tuple(role_ids[role] for role in before if role in role_ids),
            tuple(role_ids[role] for role in after if role in role_ids),
        )

    def _content(self, token: object) -> str | None:
        """A special token's text; files write it as a string or as an object."""
        match token:
            case None | str():
                return token
            case {"content": str(content)}:
                return content
        raise ValueError(f"{self.folder}: {token!r} is not a special token")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises ValueError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, {} if there is no such file. Raises ValueError otherwise."""
    if not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_added_tokens(folder: Path, values: Mapping[str, Any]) -> dict[int, AddedToken]:
    """tokenizer_config.json's, which carry their flags, else added_tokens.json's."""
    written = values.get("added_tokens_decoder")
    if written is None:
        written = {
            token_id: {"content": content}
            for content, token_id in read_object(folder / "added_tokens.json").items()
        }
    try:
        return {int(token_id): _added_token(**flags) for token_id, flags in written.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{folder}: the added tokens are not readable: {error}") from error


def _added_token(
    content: str, *, special: bool = False, normalized: bool | None = None, **flags: Any
) -> AddedToken:
    known = {name: flags[name] for name in ("lstrip", "rstrip", "single_word") if name in flags}
    normalized = not special if normalized is None else normalized
    return AddedToken(content, special=special, normalized=normalized, **known)


def as_special(token: AddedToken) -> AddedToken:
    """The same token, marked as special if it is not."""
    if token.special:
        return token
    return _added_token(
        token.content,
        special=True,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


def _read_chat_template(folder: Path, values: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's (of several, the one named "default")."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja")
    match values.get("chat_template"):
        case None | str() as template:
            return template
        case [*entries]:
            for entry in entries:
                match entry:
                    case {"name": "default", "template": str(template)}:
                        return template
            return None
    raise ValueError(f"{folder}: chat_template must be a string or a list of named ones")
