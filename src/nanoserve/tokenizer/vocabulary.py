"""A vocabulary as a value: what turns text into ids, and what every id spells.

`Encoder` is one of two libraries behind one face. `Spelling` is one rule per kind of vocabulary,
from the writing of a piece ("Ġthe", "##ing", "▁the") to bytes; it needs to know nothing of a
token's neighbours but whether one stands before it, which is what makes streaming exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken

END_OF_TEXT = "<|endoftext|>"
MARK = "\u2581"
"""What SentencePiece writes for a space, ▁."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What `Tokenizer` is made of. `literals` spell themselves, whatever the spelling.

    `role_ids` has "eos_token" and the like, for the roles that exist. `prefix_token_ids` and
    `suffix_token_ids` go around a text.
    """

    encoder: Encoder
    spelling: Spelling
    num_ids: int
    special_token_ids: frozenset[int]
    literals: Mapping[int, bytes]
    role_ids: Mapping[str, int]
    prefix_token_ids: tuple[int, ...] = ()
    suffix_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    def spell(self, token_id: int, *, at_start: bool) -> bytes:
        """The bytes of a token; none for an id that nobody assigned."""
        literal = self.literals.get(token_id)
        if literal is not None:
            return literal
        piece = self.encoder.piece(token_id)
        return b"" if piece is None else self.spelling.spell(piece, at_start=at_start)


class Spelling(Protocol):
    """How a vocabulary's pieces spell bytes."""

    def spell(self, piece: str, *, at_start: bool) -> bytes:
        """The bytes of `piece`, as the first of a text or after others."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies, in GPT-2's id order.

    Bytes that are visible Latin-1 characters stand for themselves and come first; the others
    (control characters, spaces, the soft hyphen) follow, written as U+0100 and on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    alphabet = {chr(byte): byte for byte in visible}
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class ByteSpelling:
    """Byte-level BPE: every character of a piece is one byte, wherever the token stands."""

    def spell(self, piece: str, *, at_start: bool) -> bytes:
        try:
            return bytes(map(BYTE_ALPHABET.__getitem__, piece))
        except KeyError:  # not written in the alphabet, so it can only mean itself
            return piece.encode("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class WordSpelling:
    """WordPiece and lists of words: words stand apart, `continuation` ("##") glues a piece on."""

    continuation: str | None

    def spell(self, piece: str, *, at_start: bool) -> bytes:
        if at_start:
            return piece.encode("utf-8")
        if self.continuation and piece.startswith(self.continuation):
            return piece.removeprefix(self.continuation).encode("utf-8")
        return b" " + piece.encode("utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedSpelling:
    """SentencePiece: `mark` stands for a space, and with `byte_fallback` <0x0A> for a byte.

    `strip_first`: encoding put a space before the text, so decoding takes one away again.
    """

    mark: str | None = None
    strip_first: bool = False
    byte_fallback: bool = False

    def spell(self, piece: str, *, at_start: bool) -> bytes:
        if self.byte_fallback and re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        text = piece.replace(self.mark, " ") if self.mark else piece
        return (text.removeprefix(" ") if at_start and self.strip_first else text).encode("utf-8")


def spelling_of(decoder: object, source: Path) -> Spelling:
    """The spelling that the "decoder" of a tokenizer.json asks for.

    Raises ValueError for a decoder that is not known here.
    """
    match decoder:
        case None:
            return WordSpelling(continuation=None)
        case {"type": "WordPiece", "prefix": str(prefix)}:
            return WordSpelling(continuation=prefix)
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return ByteSpelling()
        case {"type": "Sequence", "decoders": [*parts]}:
            return _marked_spelling(parts, source)
    return _marked_spelling([decoder], source)


def _marked_spelling(parts: Sequence[object], source: Path) -> MarkedSpelling:
    mark: str | None = None
    strip_first = byte_fallback = False
    for part in parts:
        match part:
            case {"type": "Metaspace", "replacement": str(written), "prepend_scheme": scheme}:
                mark, strip_first = written, scheme != "never"
            case {"type": "Replace", "pattern": {"String": str(written)}, "content": " "}:
                mark = written
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strip_first = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass  # joins the pieces, which happens here anyway
            case _:
                raise ValueError(f"{source}: decoder {json.dumps(part)} is not supported")
    return MarkedSpelling(mark=mark, strip_first=strip_first, byte_fallback=byte_fallback)


class Encoder(Protocol):
    """What splits text into pieces."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of `text` alone, nothing added around it."""
        ...

    def piece(self, token_id: int) -> str | None:
        """The vocabulary's own writing of an id, None if nobody assigned it."""
        ...


class LibraryEncoder:
    """The `tokenizers` library, twice over one model: reading special tokens' text, and not.

    The library keeps that choice as a setting of the object, and flipping a setting per call would
    race between threads.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._plain = tokenizers.Tokenizer(library.model)
        self._plain.normalizer = library.normalizer
        self._plain.pre_tokenizer = library.pre_tokenizer
        added = sorted(library.get_added_tokens_decoder().items(), key=lambda item: item[0])
        self._plain.add_tokens([token for _, token in added])
        self._plain.encode_special_tokens = True

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        library = self._library if parse_special else self._plain
        try:
            return list(library.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"the tokenizer cannot encode this text: {error}") from error

    def piece(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id)


class SentencePieceEncoder:
    """A SentencePiece model; added tokens are cut out of the text before it sees the rest.

    `prepare` is what the tokenizer's class does to text before SentencePiece.
    """

    def __init__(
        self, processor: Any, added: Mapping[int, AddedToken], prepare: Callable[[str], str]
    ) -> None:
        self._processor = processor
        self._num_pieces: int = processor.get_piece_size()
        self._added = added
        self._prepare = prepare
        self._id_of = {token.content: token_id for token_id, token in added.items()}
        self._cutters = {
            True: _any_of(self._id_of),
            False: _any_of(t.content for t in added.values() if not t.special),
        }

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        rest = text
        while match := self._cutters[parse_special].search(rest):
            token_id = self._id_of[match.group()]
            token = self._added[token_id]
            before, rest = rest[: match.start()], rest[match.end() :]
            ids += self._encode_plain(before.rstrip() if token.lstrip else before)
            ids.append(token_id)
            rest = rest.lstrip() if token.rstrip else rest
        return ids + self._encode_plain(rest)

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._processor.encode(self._prepare(text)))

    def piece(self, token_id: int) -> str | None:
        token = self._added.get(token_id)
        if token is not None:
            return token.content
        return self._processor.id_to_piece(token_id) if token_id < self._num_pieces else None


def _any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of `contents` at a place; with none of them, nothing."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
