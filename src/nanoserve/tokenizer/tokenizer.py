"""`Tokenizer` and `StreamDecoder`: what the rest of the house sees of a vocabulary.

Both directions over one immutable `Vocabulary`. Decoding keeps one invariant: pushing ids one at a
time gives exactly the text of all of them at once, for any ids at all.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from pathlib import Path

from nanoserve.tokenizer.loading import folder_vocabulary, gpt2_vocabulary
from nanoserve.tokenizer.vocabulary import Vocabulary


class Tokenizer:
    """Encodes text and decodes ids. Made by `gpt2` or `from_folder`; immutable, safe in threads.

    num_ids: one more than the highest id it knows; the model's vocabulary may be larger or smaller.
    special_token_ids: what `skip_special_tokens` leaves out.
    bos_token_id, eos_token_id: None where the vocabulary has none.
    prefix_token_ids, suffix_token_ids: what the tokenizer's own post-processing puts around a text
    (goldfish: [CLS] and [SEP]; GPT-2: nothing).
    chat_template: Jinja source, or None.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.num_ids = vocabulary.num_ids
        self.special_token_ids = vocabulary.special_token_ids
        self.bos_token_id = vocabulary.role_ids.get("bos_token")
        self.eos_token_id = vocabulary.role_ids.get("eos_token")
        self.prefix_token_ids = vocabulary.prefix_token_ids
        self.suffix_token_ids = vocabulary.suffix_token_ids
        self.chat_template = vocabulary.chat_template
        # Of the tokens seen so far that are whole characters between whole characters.
        self.whole_texts: dict[int, str] = {}

    @classmethod
    def gpt2(cls) -> Tokenizer:
        """GPT-2's own tokenizer, from the vocabulary in this package: 50,257 ids, no network."""
        return cls(gpt2_vocabulary())

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder, from the first of these that is there.

        tokenizer.json; vocab.json with merges.txt (byte-level BPE); vocab.txt (WordPiece);
        spiece.model, sentencepiece.bpe.model or tokenizer.model (SentencePiece). Special tokens and
        the chat template come from tokenizer_config.json, special_tokens_map.json,
        added_tokens.json and chat_template.jinja where present, with transformers' precedence.
        Raises ValueError, naming the file, where one is missing, corrupt or not supported.
        """
        return cls(folder_vocabulary(Path(path)))

    def encode(
        self, text: str, *, parse_special: bool = True, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        `parse_special`: the text of a special token ("<|endoftext|>") becomes its id; False takes
        it for ordinary characters. `add_special_tokens` puts prefix and suffix around the ids.
        Raises ValueError if `text` holds a lone surrogate: no UTF-8, so no token, can spell it.
        """
        _refuse_surrogates(text)
        ids = self._vocabulary.encoder.encode(text, parse_special=parse_special)
        if add_special_tokens:
            return [*self.prefix_token_ids, *ids, *self.suffix_token_ids]
        return ids

    def encode_prompt(self, text: str, *, parse_special: bool = True) -> list[int]:
        """Ids of a text that will be continued: prefix, but not the suffix that would end it."""
        ids = self.encode(text, parse_special=parse_special, add_special_tokens=False)
        return [*self.prefix_token_ids, *ids]

    def decode(
        self, ids: Iterable[int], *, skip_special_tokens: bool = False, continues: bool = False
    ) -> str:
        """Text of `ids`, with no clean-up of spaces; bytes that are not UTF-8 become U+FFFD.

        `continues`: other text stands before, so the first token keeps the space it begins with.
        Then `decode(a) + decode(b, continues=True)` is `decode(a + b)`, unless a character
        straddles the two. Byte-level vocabularies give the same either way. Raises ValueError for
        an id outside [0, num_ids).
        """
        at_start = not continues
        spelt: list[bytes] = []
        for token_id in ids:
            data = self.spell(token_id, at_start=at_start, skip_special_tokens=skip_special_tokens)
            at_start = at_start and not data
            spelt.append(data)
        return b"".join(spelt).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text that has begun; none for an id that nobody assigned.

        Raises ValueError for an id outside [0, num_ids).
        """
        return self.spell(token_id, at_start=False, skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        r"""One token as a key for log-probabilities: its text, or `bytes:\xf0\x9f` if not UTF-8.

        Raises ValueError for an id outside [0, num_ids).
        """
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def spell(self, token_id: int, *, at_start: bool, skip_special_tokens: bool) -> bytes:
        """The bytes of one token, first of a text (`at_start`) or not; all decoding goes by here.

        Raises ValueError for an id outside [0, num_ids).
        """
        if not 0 <= token_id < self.num_ids:
            raise ValueError(
                f"token id {token_id} is unknown to the tokenizer, whose ids end at "
                f"{self.num_ids - 1}"
            )
        if skip_special_tokens and token_id in self.special_token_ids:
            return b""
        return self._vocabulary.spell(token_id, at_start=at_start)


class StreamDecoder:
    """Decodes ids one at a time; the texts in a row are exactly `Tokenizer.decode` of all ids.

    Text leaves as early as it can, but a character whose bytes have begun is held until it is whole
    or proven to be none. The work per token is constant, whatever came before; most tokens are
    whole characters, and are spelt once for all streams.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = False, *, continues: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._at_start = not continues
        self._is_between = continues  # whole characters, and the text has begun
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token makes certain. Raises ValueError for an unknown id."""
        if self._is_between:
            known = self._tokenizer.whole_texts.get(token_id)
            if known is not None:
                return known
        return self._spell(token_id)

    def _spell(self, token_id: int) -> str:
        tokenizer, was_between = self._tokenizer, self._is_between
        data = tokenizer.spell(
            token_id, at_start=self._at_start, skip_special_tokens=self._skip_special_tokens
        )
        self._at_start = self._at_start and not data
        text = self._utf8.decode(data)
        self._is_between = not self._at_start and not self._utf8.getstate()[0]
        if was_between and self._is_between and token_id not in tokenizer.special_token_ids:
            tokenizer.whole_texts[token_id] = text
        return text

    def finish(self) -> str:
        """The rest, when no token follows: U+FFFD for a character left unfinished, else ""."""
        return self._utf8.decode(b"", final=True)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds a lone surrogate, U+{ord(text[error.start]):04X} at position "
            f"{error.start}: it is no character, so no token can spell it"
        ) from None
