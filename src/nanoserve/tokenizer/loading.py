"""From files to a `Vocabulary`: one loader per kind of file, and GPT-2's own from this package.

A loader names the file in every error. Classes and decoders that would give other ids or other
text than transformers does are refused by name, never guessed at.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from nanoserve.tokenizer.settings import (
    ALBERT,
    BARE,
    BERT,
    GPT2,
    T5,
    Around,
    Family,
    Settings,
    as_special,
    read_text,
)
from nanoserve.tokenizer.vocabulary import (
    BYTE_ALPHABET,
    END_OF_TEXT,
    MARK,
    ByteSpelling,
    LibraryEncoder,
    MarkedSpelling,
    SentencePieceEncoder,
    Vocabulary,
    spelling_of,
)

GPT2_FILE = Path(__file__).parents[1] / "data" / "gpt2" / "vocab.bpe"
GPT2_NUM_MERGES = 50_000
SENTENCEPIECE_FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


def gpt2_vocabulary() -> Vocabulary:
    """GPT-2's vocabulary from vocab.bpe alone.

    The id table needs no file: learning a BPE starts from the 256 bytes, and each merge then makes
    one new token. So ids are the bytes, the merges in the order they were learnt, and last the end
    token, which no text taught.
    """
    halves = read_text(GPT2_FILE).partition("\n")[2].split()
    if len(halves) != 2 * GPT2_NUM_MERGES:
        raise ValueError(
            f"{GPT2_FILE} is damaged: {len(halves) / 2} merges, GPT-2 has {GPT2_NUM_MERGES}"
        )
    merges = list(zip(halves[::2], halves[1::2], strict=True))
    tokens = [*BYTE_ALPHABET, *map("".join, merges), END_OF_TEXT]
    end = len(tokens) - 1
    try:
        model = models.BPE(dict(zip(tokens, range(len(tokens)), strict=True)), merges)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{GPT2_FILE} is damaged: {error}") from error
    library = _byte_level(model, add_prefix_space=False)
    library.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Vocabulary(
        encoder=LibraryEncoder(library),
        spelling=ByteSpelling(),
        num_ids=len(tokens),
        special_token_ids=frozenset({end}),
        literals={end: END_OF_TEXT.encode()},
        role_ids={"bos_token": end, "eos_token": end},
    )


def folder_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary of a checkpoint folder; `Tokenizer.from_folder` says which file wins."""
    if not folder.is_dir():
        raise ValueError(f"tokenizer folder {folder} does not exist, or is not a folder")
    settings = Settings.read(folder)
    if (folder / "tokenizer.json").exists():
        return _load_tokenizer_json(folder / "tokenizer.json", settings)
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _load_byte_level(folder / "vocab.json", folder / "merges.txt", settings)
    if (folder / "vocab.txt").exists():
        return _load_word_piece(folder / "vocab.txt", settings)
    for name in SENTENCEPIECE_FILES:
        if (folder / name).exists():
            return _load_sentencepiece(folder / name, settings)
    raise ValueError(
        f"{folder} holds no tokenizer: looked for tokenizer.json, vocab.json with merges.txt, "
        f"vocab.txt, {', '.join(SENTENCEPIECE_FILES)}"
    )


def _load_tokenizer_json(source: Path, settings: Settings) -> Vocabulary:
    """Complete by itself: pieces, splitting, decoder, and what goes around a text."""
    try:
        library = tokenizers.Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{source} is not a readable tokenizer: {error}") from error
    library.no_truncation()
    library.no_padding()
    families = {"ByteLevel": GPT2, "WordPiece": BERT}
    decoder = _written(library.decoder) or {"type": None}
    family = replace(families.get(decoder["type"], BARE), before=(), after=())
    return _from_library(library, settings, family, source)


def _written(component: Any) -> Any:
    """A part of a library's tokenizer as tokenizer.json writes it, None if there is none.

    The parts cannot be asked what they do, but their pickled state is that very JSON.
    """
    return None if component is None else json.loads(component.__getstate__())


def _byte_level(model: models.BPE, *, add_prefix_space: bool) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    return library


def _load_byte_level(source: Path, merges: Path, settings: Settings) -> Vocabulary:
    family = settings.family(source, {"": GPT2, "GPT2Tokenizer": GPT2})
    try:
        model = models.BPE.from_file(str(source), str(merges))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{source} and {merges.name} make no BPE: {error}") from error
    library = _byte_level(model, add_prefix_space=settings.flag("add_prefix_space", False))
    return _from_library(library, settings, family, source)


def _load_word_piece(source: Path, settings: Settings) -> Vocabulary:
    """BERT's: a token per line, its id the line's number; text is cleaned, split and lowered."""
    family = settings.family(source, {"": BERT, "BertTokenizer": BERT})
    lines = read_text(source).removesuffix("\n").split("\n")
    vocabulary = {token: token_id for token_id, token in enumerate(lines)}
    unknown = settings.roles(family, vocabulary.__contains__).get("unk_token", "[UNK]")
    if unknown not in vocabulary:
        raise ValueError(f"{source} lacks {unknown}, its token for unknown words")
    library = tokenizers.Tokenizer(
        models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100)
    )
    lowercase = settings.flag("do_lower_case", True)
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.flag("tokenize_chinese_chars", True),
        strip_accents=settings.flag("strip_accents", lowercase),
        lowercase=lowercase,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return _from_library(library, settings, family, source)


def _from_library(
    library: tokenizers.Tokenizer, settings: Settings, family: Family, source: Path
) -> Vocabulary:
    """Adds the folder's special tokens to the library's tokenizer, and reads the rest off it."""
    roles = settings.roles(family, lambda token: library.token_to_id(token) is not None)
    _add_tokens(library, settings, [*roles.values(), *settings.further_special_tokens()], source)
    ids = library.get_vocab()
    role_ids = {role: ids[token] for role, token in roles.items()}
    spelling = spelling_of(_written(library.decoder), source)
    added = library.get_added_tokens_decoder()
    # Tokens beside the model are plain text even where its pieces are in the byte alphabet.
    beside = [i for i, token in added.items() if library.model.token_to_id(token.content) is None]
    literals = {i: added[i].content.encode("utf-8") for i in beside}
    processor = _written(library.post_processor)
    if processor is None:
        prefix, suffix = settings.around(family, role_ids)
    else:
        prefix, suffix = _around_of(processor, source)
    return Vocabulary(
        encoder=LibraryEncoder(library),
        spelling=spelling,
        num_ids=max(ids.values(), default=-1) + 1,
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        literals=literals if isinstance(spelling, ByteSpelling) else {},
        role_ids=role_ids,
        prefix_token_ids=prefix,
        suffix_token_ids=suffix,
        chat_template=settings.chat_template,
    )


def _add_tokens(
    library: tokenizers.Tokenizer, settings: Settings, special: list[str], source: Path
) -> None:
    """Adds the tokens whose ids the folder declares, then the special ones, under new ids."""
    present = {token.content: token for token in library.get_added_tokens_decoder().values()}
    declared = sorted(settings.added.items(), key=lambda item: item[0])
    new = [(token_id, token) for token_id, token in declared if token.content not in present]
    library.add_tokens([token for _, token in new])
    for token_id, token in new:
        got = library.token_to_id(token.content)
        if got != token_id:
            raise ValueError(
                f"{settings.folder}: the added token {token.content!r} is declared as id "
                f"{token_id}, but after {source.name} it would get {got}"
            )
        present[token.content] = token
    library.add_special_tokens(
        [as_special(present.get(content) or AddedToken(content)) for content in special]
    )


def _around_of(processor: Any, source: Path) -> Around:
    """What a tokenizer.json's "post_processor" puts before and after a text.

    Raises ValueError for one that is not known here.
    """
    match processor:
        case {"type": "ByteLevel"}:
            return (), ()
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, cls], "sep": [_, sep]}:
            return (cls,), (sep,)
        case {"type": "Sequence", "processors": [*parts]}:
            # Each works on what the one before it made.
            rings = [_around_of(part, source) for part in parts]
            before = tuple(chain(*(ring[0] for ring in reversed(rings))))
            return before, tuple(chain(*(ring[1] for ring in rings)))
        case {"type": "TemplateProcessing", "single": [*items], "special_tokens": tokens}:
            names = [item.get("SpecialToken", {}).get("id") for item in items]
            if names.count(None) == 1:  # the text itself, once
                at = names.index(None)
                before = tuple(i for name in names[:at] for i in tokens[name]["ids"])
                after = tuple(i for name in names[at + 1 :] for i in tokens[name]["ids"])
                return before, after
    raise ValueError(f"{source}: post-processor {json.dumps(processor)} is not supported")


def _load_sentencepiece(source: Path, settings: Settings) -> Vocabulary:
    """SentencePiece through its own library, an optional extra, with added tokens around it."""
    family = settings.family(source, {"": BARE, "AlbertTokenizer": ALBERT, "T5Tokenizer": T5})
    processor = _sentencepiece_processor(source)
    num_pieces = processor.get_piece_size()
    pieces = {processor.id_to_piece(i): i for i in range(num_pieces)}
    named = replace(family, tokens=_processor_roles(processor) | family.tokens)
    roles = settings.roles(named, pieces.__contains__)
    special = [*roles.values(), *settings.further_special_tokens()]
    special += [processor.id_to_piece(i) for i in range(num_pieces) if processor.is_control(i)]
    added = _number_added_tokens(settings.added, special, pieces)
    ids = pieces | {token.content: token_id for token_id, token in added.items()}
    role_ids = {role: ids[token] for role, token in roles.items()}
    prefix, suffix = settings.around(family, role_ids)
    return Vocabulary(
        encoder=SentencePieceEncoder(processor, added, _preparation(settings, family)),
        spelling=MarkedSpelling(
            mark=MARK,
            # The model's add_dummy_prefix has no getter, but it shows.
            strip_first="".join(processor.encode("a", out_type=str)).startswith(MARK),
            byte_fallback=any(processor.is_byte(i) for i in range(num_pieces)),
        ),
        num_ids=max(ids.values()) + 1,
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        literals={},
        role_ids=role_ids,
        prefix_token_ids=prefix,
        suffix_token_ids=suffix,
        chat_template=settings.chat_template,
    )


def _sentencepiece_processor(source: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            f"{source} needs the sentencepiece library: pip install sentencepiece"
        ) from error
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(source))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{source} is not a readable SentencePiece model: {error}") from error


def _processor_roles(processor: Any) -> dict[str, str]:
    """The special pieces that a model itself names; the library's "none" is a negative id."""
    ids = {
        "bos_token": processor.bos_id(),
        "eos_token": processor.eos_id(),
        "unk_token": processor.unk_id(),
        "pad_token": processor.pad_id(),
    }
    return {role: processor.id_to_piece(i) for role, i in ids.items() if i >= 0}


def _number_added_tokens(
    declared: Mapping[int, AddedToken], special: list[str], pieces: dict[str, int]
) -> dict[int, AddedToken]:
    """Declared tokens under their ids, special ones under their piece's or the next free id."""
    added = dict(declared)
    ids = pieces | {token.content: token_id for token_id, token in declared.items()}
    next_free = max(ids.values()) + 1
    for content in special:
        token_id = ids.setdefault(content, next_free)
        next_free = max(next_free, token_id + 1)
        added[token_id] = as_special(added.get(token_id) or AddedToken(content))
    return added


def _preparation(settings: Settings, family: Family) -> Callable[[str], str]:
    """What a family does to text before SentencePiece sees it."""
    is_albert = family is ALBERT
    lower = settings.flag("do_lower_case", is_albert)
    strip_accents = is_albert and not settings.flag("keep_accents", False)

    def prepare(text: str) -> str:
        if is_albert:
            text = " ".join(text.split()).replace("``", '"').replace("''", '"')
        if strip_accents:
            decomposed = unicodedata.normalize("NFKD", text)
            text = "".join(c for c in decomposed if not unicodedata.combining(c))
        return text.lower() if lower else text

    return prepare
