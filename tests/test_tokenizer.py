"""The tokenizers: GPT-2's own against independent ones, the family's against transformers' and
SentencePiece's, and streaming against decoding everything at once."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AlbertTokenizer, BertTokenizer, GPT2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

import nanoserve
from nanoserve.tokenizer import END_OF_TEXT, StreamDecoder, Tokenizer

DATA = Path(nanoserve.__file__).parent / "data" / "gpt2"
VOCAB_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
END = 50256

TEXTS = [
    "",
    " ",
    "Hello world",
    "O P Q",
    "It's we'll they've I'm you'd",
    "  two  spaces,   three \t tabs\t\t and \r\n\r\n lines\n\n\n",
    "trailing space ",
    "x = [1, 22, 333, 4444] # 3.14159e-10",
    "naïve café, Straße, ÅNGSTRÖM",
    "e\u0301 combining o\u0308\u0323 and \u0915\u094d\u0937",
    "שלום עולם مرحبا بالعالم",
    "你好,世界。日本語のテキスト 한국어",
    "😀🫠👩‍👩‍👧‍👦🏳️‍🌈 flags 🇨🇭",
    "\u00a0\u2003\u3000\ufeff\u200b\u2028\u2029\x85\x0b\x0c\x00\x1f\x7f",
    "<|endoftext|>",
    "a<|endoftext|> b<|endoftext|><|endoftext|>",
    "<|endoftext|x> <|end",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious " * 5,
    "def f(x):\n    return {'a': x**2}\n",
]
ODD = "\t\n\r \u00a0\u200d\ufe0f\u0301\u0327\u05d0\u0627\u202e😀🫠👩🇨你\U0010ffff\x00'sS1²"
any_text = st.one_of(
    st.text(),
    st.text(alphabet=ODD),
    st.text(alphabet=" \n\t'abs"),
    st.lists(st.sampled_from([*TEXTS, *ODD])).map("".join),
)


def random_texts(number: int, seed: int) -> list[str]:
    """Texts of words, spaces, digits, marks and characters from all over Unicode."""
    rng = random.Random(seed)
    parts = ["the", " of", " Berlin", "ing", "  ", "\n", "1984", "...", "'s", "<|endoftext|>"]

    def part() -> str:
        if rng.random() < 0.6:
            return rng.choice(parts)
        return chr(rng.choice((rng.randrange(0x20, 0x250), rng.randrange(0xE000, 0x20000))))

    return ["".join(part() for _ in range(rng.randrange(1, 30))) for _ in range(number)]


@cache
def gpt2() -> Tokenizer:
    return Tokenizer.gpt2()


def read_merges() -> list[tuple[str, str]]:
    lines = (DATA / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


@cache
def gpt2_ids() -> dict[str, int]:
    """The id table, derived with transformers' byte alphabet."""
    names = [*bytes_to_unicode().values(), *("".join(pair) for pair in read_merges()), END_OF_TEXT]
    return {name: token_id for token_id, name in enumerate(names)}


@cache
def transformers_gpt2() -> GPT2Tokenizer:
    return GPT2Tokenizer(vocab=gpt2_ids(), merges=read_merges())


class SlowBPE:
    """GPT-2's encoding as its paper tells it: split, then join the best-ranked pair, repeatedly."""

    SPLIT = regex.compile(
        r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def __init__(self) -> None:
        self.ranks = {pair: rank for rank, pair in enumerate(read_merges())}
        self.ids = gpt2_ids()
        self.letters = bytes_to_unicode()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for word in self.SPLIT.findall(text):
            pieces = [self.letters[byte] for byte in word.encode()]
            while len(pieces) > 1:
                ranked = [
                    (self.ranks.get(p, 10**9), i) for i, p in enumerate(itertools.pairwise(pieces))
                ]
                rank, at = min(ranked)
                if rank == 10**9:
                    break
                pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
            ids += [self.ids[piece] for piece in pieces]
        return ids


def check_streaming(
    tokenizer: Tokenizer, ids: list[int], *, skip: bool = False, continues: bool = False
) -> None:
    """Streamed text equals decoded text, and lags by no more than one unfinished character."""
    stream = StreamDecoder(tokenizer, skip, continues=continues)
    streamed = ""
    for number, token_id in enumerate(ids, start=1):
        streamed += stream.push(token_id)
        if number > 24:
            continue  # the whole is compared below; comparing every beginning is quadratic
        so_far = tokenizer.decode(ids[:number], skip_special_tokens=skip, continues=continues)
        assert so_far in {streamed, streamed + "\ufffd"}
    streamed += stream.finish()
    assert streamed == tokenizer.decode(ids, skip_special_tokens=skip, continues=continues)


# GPT-2's own vocabulary


def test_the_shipped_vocabulary_is_the_published_one() -> None:
    assert hashlib.sha256((DATA / "vocab.bpe").read_bytes()).hexdigest() == VOCAB_SHA256
    assert VOCAB_SHA256 in (DATA / "README.md").read_text(encoding="utf-8")
    licence = (DATA / "LICENSE").read_text(encoding="utf-8")
    assert licence.startswith("Modified MIT License\n\nSoftware Copyright (c) 2019 OpenAI\n")


@pytest.mark.parametrize(
    "text,ids",
    [
        ("😀", [47249, 222]),
        ("🫠", [8582, 104, 254]),
        ("你好", [19526, 254, 25001, 121]),
        ("O P Q", [46, 350, 1195]),
        ("Hello world", [15496, 995]),
        ("", []),
        ("!", [0]),
        (" the", [262]),
        (" gazed", [50255]),
        (END_OF_TEXT, [END]),
    ],
)
def test_known_ids(text: str, ids: list[int]) -> None:
    assert gpt2().encode(text) == ids
    assert gpt2().decode(ids) == text


def test_the_id_table() -> None:
    tokenizer = gpt2()
    assert tokenizer.num_ids == 50257
    assert {tokenizer.token_bytes(i) for i in range(256)} == {bytes([b]) for b in range(256)}
    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    for name, token_id in gpt2_ids().items():
        assert tokenizer.token_bytes(token_id) == bytes(letters[letter] for letter in name)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == END
    assert tokenizer.special_token_ids == {END}
    assert tokenizer.prefix_token_ids == tokenizer.suffix_token_ids == ()
    assert tokenizer.chat_template is None


def test_gpt2_against_transformers_and_a_slow_bpe() -> None:
    oracle, slow = transformers_gpt2(), SlowBPE()
    for text in [*TEXTS, *random_texts(300, seed=1)]:
        ids = gpt2().encode(text)
        assert ids == oracle.encode(text)
        assert gpt2().decode(ids) == oracle.decode(ids, clean_up_tokenization_spaces=False) == text
        plain = gpt2().encode(text, parse_special=False)
        assert plain == slow.encode(text)
        assert gpt2().decode(plain) == text


@given(any_text, st.booleans(), st.booleans())
def test_every_text_comes_back(text: str, parse_special: bool, add: bool) -> None:
    ids = gpt2().encode(text, parse_special=parse_special, add_special_tokens=add)
    assert gpt2().decode(ids) == text
    assert b"".join(map(gpt2().token_bytes, ids)) == text.encode()
    assert parse_special or END not in ids
    assert gpt2().encode_prompt(text, parse_special=parse_special) == ids


@given(st.text(), st.characters(categories=["Cs"]), st.text())
def test_lone_surrogates_are_refused(before: str, surrogate: str, after: str) -> None:
    code = f"U\\+{ord(surrogate):04X} at position {len(before)}"
    with pytest.raises(ValueError, match=f"lone surrogate, {code}"):
        gpt2().encode(before + surrogate + after)


def test_special_tokens_as_text_or_as_ids() -> None:
    text = "a<|endoftext|>b"
    assert gpt2().encode(text) == [64, END, 65]
    plain = [64, 27, 91, 437, 1659, 5239, 91, 29, 65]
    assert gpt2().encode(text, parse_special=False) == plain
    assert gpt2().decode([64, END, 65]) == gpt2().decode(plain) == text
    assert gpt2().decode([64, END, 65], skip_special_tokens=True) == "ab"
    # The halves of a character find each other across a token that is left out.
    emoji = gpt2().encode("😀")
    assert gpt2().decode([emoji[0], END, emoji[1]], skip_special_tokens=True) == "😀"


def test_both_ways_to_read_special_tokens_from_many_threads() -> None:
    calls = list(itertools.product(["a<|endoftext|>b"] * 200, [True, False]))
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda call: gpt2().encode(call[0], parse_special=call[1]), calls))
    assert got == [gpt2().encode(text, parse_special=parse) for text, parse in calls]


@pytest.mark.parametrize("token_id", [-1, 50257, 2**31, 2**70])
def test_unknown_ids_are_refused(token_id: int) -> None:
    for use in (
        lambda: gpt2().decode([64, token_id]),
        lambda: gpt2().token_bytes(token_id),
        lambda: gpt2().token_text(token_id),
        lambda: StreamDecoder(gpt2()).push(token_id),
    ):
        with pytest.raises(ValueError, match=rf"token id {token_id} .*end at 50256"):
            use()


def test_numpy_ids_are_ids() -> None:
    ids = np.array([15496, 995], dtype=np.int32)
    assert gpt2().decode(ids) == "Hello world"
    assert gpt2().token_text(ids[1]) == " world"


def test_token_text() -> None:
    assert gpt2().token_text(995) == " world"
    assert gpt2().token_text(END) == END_OF_TEXT
    assert gpt2().token_text(47249) == r"bytes:\xf0\x9f\x98"
    keys = {gpt2().token_text(i) for i in range(gpt2().num_ids)}
    assert len(keys) == gpt2().num_ids


# Streaming


def test_a_stream_holds_a_character_until_it_is_whole_or_none() -> None:
    stream = StreamDecoder(gpt2())
    assert [stream.push(i) for i in [47249, 222]] == ["", "😀"]
    assert [stream.push(i) for i in [8582, 104, 254]] == ["", "", "🫠"]
    assert [stream.push(i) for i in [47249, 64]] == ["", "\ufffda"]
    assert [stream.push(i) for i in [47249, END]] == ["", "\ufffd<|endoftext|>"]
    assert (stream.push(8582), stream.finish(), stream.finish()) == ("", "\ufffd", "")


broken_ids = st.lists(
    st.one_of(
        st.integers(0, END),
        st.integers(0, 255),  # single bytes, most of them no UTF-8 alone
        st.sampled_from([47249, 222, 8582, 104, 254, 19526, 121, END]),
    )
)


@given(broken_ids, st.booleans())
def test_streaming_any_ids_is_decoding_them(ids: list[int], skip: bool) -> None:
    check_streaming(gpt2(), ids, skip=skip)
    kept = [i for i in ids if not (skip and i == END)]
    spelt = b"".join(map(gpt2().token_bytes, kept))
    assert gpt2().decode(ids, skip_special_tokens=skip) == spelt.decode(errors="replace")


@given(any_text)
def test_streaming_a_text_gives_it_back(text: str) -> None:
    check_streaming(gpt2(), gpt2().encode(text))


# Folders: byte-level BPE


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """A checkpoint folder with GPT-2's vocabulary as vocab.json and merges.txt."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    write_json(folder / "vocab.json", gpt2_ids())
    shutil.copy(DATA / "vocab.bpe", folder / "merges.txt")
    return folder


def toy_library(**added: bool) -> tokenizers.Tokenizer:
    """A byte-level tokenizer of the 256 bytes, " t", and the `added` tokens (special or not)."""
    names = [*bytes_to_unicode().values(), "Ġt"]
    library = tokenizers.Tokenizer(
        models.BPE({name: i for i, name in enumerate(names)}, [("Ġ", "t")])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    for content, special in added.items():
        library.add_tokens([AddedToken(content, special=special, normalized=False)])
    return library


def save_toy(folder: Path, library: tokenizers.Tokenizer | None = None, **config: object) -> Path:
    (library or toy_library()).save(str(folder / "tokenizer.json"))
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


def test_vocab_json_with_merges_is_gpt2(gpt2_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(gpt2_folder)
    assert (tokenizer.num_ids, tokenizer.eos_token_id, tokenizer.bos_token_id) == (50257, END, END)
    for text in [*TEXTS, *random_texts(20, seed=2)]:
        for parse in (True, False):
            ids = tokenizer.encode(text, parse_special=parse)
            assert ids == gpt2().encode(text, parse_special=parse)
            check_streaming(tokenizer, ids)


def test_tokenizer_json_is_gpt2(gpt2_folder: Path) -> None:
    transformers_gpt2().save_pretrained(str(gpt2_folder))
    (gpt2_folder / "vocab.json").write_text("never read: tokenizer.json comes first")
    tokenizer = Tokenizer.from_folder(str(gpt2_folder))
    assert (tokenizer.num_ids, tokenizer.eos_token_id, tokenizer.bos_token_id) == (50257, END, END)
    assert tokenizer.special_token_ids == {END}
    for text in TEXTS:
        for parse in (True, False):
            ids = tokenizer.encode(text, parse_special=parse)
            assert ids == gpt2().encode(text, parse_special=parse)
            assert tokenizer.decode(ids) == text


def test_tokenizer_json_alone_knows_its_end_of_text(tmp_path: Path) -> None:
    library = toy_library(**{END_OF_TEXT: True})
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 257)


def test_no_end_of_text_is_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.special_token_ids == frozenset()
    assert tokenizer.encode("a the", parse_special=False) == tokenizer.encode("a the")


def test_add_prefix_space_and_add_bos_token(gpt2_folder: Path) -> None:
    config = {"add_prefix_space": True, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    write_json(gpt2_folder / "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_folder(gpt2_folder)
    assert tokenizer.encode("world") == [END, 995]
    assert tokenizer.encode("world", add_special_tokens=False) == [995]
    assert (tokenizer.prefix_token_ids, tokenizer.suffix_token_ids) == ((END,), ())


@pytest.mark.parametrize("written", ["</s>", {"content": "</s>", "lstrip": False}])
def test_named_tokens_get_new_ids_as_in_transformers(gpt2_folder: Path, written: object) -> None:
    config = {
        "eos_token": written,
        "pad_token": "<pad>",
        "bos_token": None,
        "additional_special_tokens": ["<user>", {"content": "<bot>"}],
    }
    write_json(gpt2_folder / "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_folder(gpt2_folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 50257)
    assert tokenizer.num_ids == 50261
    assert tokenizer.encode("</s><pad><user>x<bot>") == [50257, 50258, 50259, 87, 50260]
    assert set(range(50256, 50261)) == tokenizer.special_token_ids
    assert 50257 not in tokenizer.encode("</s>", parse_special=False)
    assert tokenizer.decode([64, 50258, 64], skip_special_tokens=True) == "aa"


def test_precedence_of_the_settings(tmp_path: Path) -> None:
    names = {"<a>": True, "<b>": True, "<c>": True}
    save_toy(tmp_path, toy_library(**names), eos_token="<a>", bos_token="<a>")
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": {"content": "<b>"}})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
    # A configuration that lists its added tokens is complete: the map beside it does not count.
    listed = {"259": {"content": "<c>", "special": True}}
    save_toy(tmp_path, toy_library(**names), eos_token="<c>", added_tokens_decoder=listed)
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 259


def test_added_tokens_of_both_kinds(tmp_path: Path) -> None:
    listed = {
        "257": {"content": "<|tool|>", "special": False},
        "258": {"content": "éé", "special": False, "normalized": False},
        "259": {"content": "<|end|>", "special": True, "some_new_flag": 1},
    }
    save_toy(tmp_path, added_tokens_decoder=listed)
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = [64, 257, 258, 259]
    assert tokenizer.encode("a<|tool|>éé<|end|>") == ids
    # An added token means its text, even where its letters are in the byte alphabet.
    assert tokenizer.decode(ids) == "a<|tool|>éé<|end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|tool|>éé"
    assert tokenizer.encode("<|tool|>éé<|end|>", parse_special=False)[:2] == [257, 258]
    assert tokenizer.special_token_ids == {259}
    check_streaming(tokenizer, ids)


def test_added_tokens_json_and_its_specials(tmp_path: Path) -> None:
    save_toy(tmp_path, eos_token="<e>")
    write_json(tmp_path / "added_tokens.json", {"<e>": 258, "<x>": 257})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("<x><e>") == [257, 258]
    assert (tokenizer.eos_token_id, tokenizer.special_token_ids) == (258, {258})


def test_ids_that_nobody_assigned_spell_nothing(tmp_path: Path) -> None:
    ids = {name: token_id for name, token_id in gpt2_ids().items() if token_id < 256}
    write_json(tmp_path / "vocab.json", ids | {"Ġt": 300})
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ t\n", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.num_ids == 301
    assert tokenizer.encode("a t") == [64, 300]
    assert (tokenizer.token_bytes(280), tokenizer.token_text(280)) == (b"", "")
    check_streaming(tokenizer, [64, 280, 300, 299])


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    library = toy_library()
    library.enable_truncation(4)
    library.enable_padding(length=16)
    assert len(library.encode("a" * 40).ids) == 16
    assert len(Tokenizer.from_folder(save_toy(tmp_path, library)).encode("a" * 40)) == 40
    assert len(Tokenizer.from_folder(tmp_path).encode("a")) == 1


def test_what_the_post_processor_puts_around(tmp_path: Path) -> None:
    library = toy_library(**{"<s>": True, "</s>": True})
    library.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 258)]
    )
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    assert (tokenizer.prefix_token_ids, tokenizer.suffix_token_ids) == ((257, 257), (258,))
    assert tokenizer.encode("a<s>") == library.encode("a<s>").ids == [257, 257, 64, 257, 258]
    assert tokenizer.encode("a", add_special_tokens=False) == [64]
    assert tokenizer.encode_prompt("a") == [257, 257, 64]


@pytest.mark.parametrize(
    "processor",
    [
        processors.ByteLevel(trim_offsets=False),
        processors.BertProcessing(("</s>", 258), ("<s>", 257)),
        processors.RobertaProcessing(("</s>", 258), ("<s>", 257)),
        processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 257)]),
            ]
        ),
        processors.TemplateProcessing("$A:0 </s>", special_tokens=[("</s>", 258)]),
        processors.TemplateProcessing("$A"),
    ],
)
def test_post_processors(tmp_path: Path, processor: processors.PostProcessor) -> None:
    library = toy_library(**{"<s>": True, "</s>": True})
    library.post_processor = processor
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    for text in ["a the", "</s> a"]:
        assert tokenizer.encode(text) == library.encode(text).ids


def test_a_template_that_repeats_the_text_is_refused(tmp_path: Path) -> None:
    library = toy_library()
    library.post_processor = processors.TemplateProcessing("$A $A")
    with pytest.raises(ValueError, match=r"tokenizer\.json: post-processor .* not supported"):
        Tokenizer.from_folder(save_toy(tmp_path, library))


# Folders: WordPiece

WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *("hello", "world", "un", "##aff", "##able", "the", "##s", "cafe", "Cafe", "##é", "##ing"),
    *("你", "好", "世", "界", "!", ",", ".", "-", "'", "s", "2", "##0"),
]


def save_words(folder: Path, **config: object) -> Path:
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False, "tokenizer_class": "BertTokenizerFast"},
        {"tokenize_chinese_chars": False, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
    ],
)
def test_word_piece_against_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_folder(save_words(tmp_path, **config))
    options = {name: value for name, value in config.items() if name != "tokenizer_class"}
    fast = BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, **options)
    slow = BertTokenizerLegacy(str(tmp_path / "vocab.txt"), **options)
    fast._tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    texts = [
        "Hello worlds!",
        "unaffable",
        "你好, 世界。",
        "Cafés CAFÉ",
        "zzz 20-20's",
        "a\u0000\tthe",
    ]
    for text in [*texts, "hello[SEP]world", *TEXTS]:
        ids = tokenizer.encode(text)
        assert ids == fast.encode(text)
        if END_OF_TEXT not in text:
            assert ids == slow.encode(text)
        for part in (ids, ids[1:-1], ids[2:]):
            assert tokenizer.decode(part) == fast.decode(part)
            skipped = fast.decode(part, skip_special_tokens=True)
            assert tokenizer.decode(part, skip_special_tokens=True) == skipped
            check_streaming(tokenizer, part)


def test_word_piece_begins_with_cls_and_stops_at_sep(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_words(tmp_path))
    assert tokenizer.encode("hello") == [2, 5, 3]
    assert tokenizer.encode_prompt("hello") == [2, 5]
    assert (tokenizer.prefix_token_ids, tokenizer.suffix_token_ids) == ((2,), (3,))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, 3)
    assert tokenizer.special_token_ids == {0, 1, 2, 3, 4}
    assert tokenizer.encode("[SEP]", parse_special=False, add_special_tokens=False) == [1, 1, 1]
    assert tokenizer.token_text(6) == " world"
    assert tokenizer.token_text(9) == "able"


@given(st.lists(st.integers(0, len(WORDS) - 1)), st.booleans())
def test_word_piece_streams(ids: list[int], skip: bool) -> None:
    tokenizer = word_piece()
    check_streaming(tokenizer, ids, skip=skip)
    check_streaming(tokenizer, ids, skip=skip, continues=True)
    for cut in range(1, len(ids)):
        first, rest = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:], continues=True)
        assert first + rest == tokenizer.decode(ids)


@cache
def word_piece() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(save_words(Path(folder)))


def test_renamed_special_tokens_of_word_piece(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("<unk>\n<s>\n</s>\nhello", encoding="utf-8")
    config = {"unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    write_json(tmp_path / "tokenizer_config.json", config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hello you") == [1, 3, 0, 2]
    assert tokenizer.eos_token_id == 2


# Folders: SentencePiece

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "she sells sea shells by the sea shore, and 42 more",
    "Wie schön ist es, über die Brücke zu gehen!",
    "すもももももももものうち 日本語の文章です",
    "it was the best of times, it was the worst of times",
]


@cache
def trained(kind: str, **options: Any) -> bytes:
    """A SentencePiece model of a few hundred pieces."""
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type=kind,
        vocab_size=options.pop("vocab_size", 150),
        hard_vocab_limit=False,
        minloglevel=3,
        num_threads=1,
        **options,
    )
    return model.getvalue()


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "unigram": ("unigram", {}),
    "bpe": ("bpe", {}),
    "bytes": ("bpe", {"byte_fallback": True, "vocab_size": 420}),
    "spaces": ("unigram", {"remove_extra_whitespaces": False, "add_dummy_prefix": False}),
    "albert": (
        "unigram",
        {
            "pad_id": 0,
            "unk_id": 1,
            "bos_id": 2,
            "eos_id": 3,
            "bos_piece": "[CLS]",
            "eos_piece": "[SEP]",
            "control_symbols": "[MASK]",
        },
    ),
    "symbols": ("unigram", {"user_defined_symbols": "<sep>,<br>", "control_symbols": "<ctl>"}),
}


def save_pieces(folder: Path, kind: str, **config: object) -> Path:
    algorithm, options = KINDS[kind]
    (folder / "spiece.model").write_bytes(trained(algorithm, **options))
    if config:
        write_json(folder / "tokenizer_config.json", config)
    return folder


def processor_of(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))


PIECE_TEXTS = [
    *CORPUS,
    "",
    " ",
    "  leading and   inner  spaces ",
    "line\nbreaks\tand tabs",
    "ﾊﾟﾋﾟ half-width か\u3099 and Ⅷ ½ ﬁ",
    "unseen: Привет 😀",
    "<sep>x<br> <ctl>",
]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "bytes", "spaces", "symbols"])
def test_sentencepiece_against_its_own_library(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_folder(save_pieces(tmp_path, kind))
    oracle = processor_of(tmp_path)
    assert tokenizer.num_ids == oracle.get_piece_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    for text in [*PIECE_TEXTS, *random_texts(40, seed=3)]:
        ids = oracle.encode(text)
        assert tokenizer.encode(text, parse_special=False) == ids
        check_streaming(tokenizer, ids)
        if oracle.unk_id() not in ids:
            assert tokenizer.decode(ids) == oracle.decode(ids)


@cache
def pieces(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_folder(save_pieces(Path(folder), kind))


@given(st.sampled_from(["unigram", "bytes", "spaces"]), st.data(), st.booleans())
def test_sentencepiece_streams(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = pieces(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_ids - 1)))
    check_streaming(tokenizer, ids, skip=skip)
    check_streaming(tokenizer, ids, skip=skip, continues=True)


@given(any_text)
def test_byte_fallback_brings_every_normal_text_back(text: str) -> None:
    tokenizer = pieces("bytes")
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.encode(tokenizer.decode(ids), parse_special=False) == ids


def test_settings_speak_before_the_sentencepiece_model(tmp_path: Path) -> None:
    save_pieces(tmp_path, "unigram", bos_token=None, eos_token="<end>", add_eos_token=True)
    tokenizer = Tokenizer.from_folder(tmp_path)
    end = processor_of(tmp_path).get_piece_size()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, end)
    assert tokenizer.encode("dog")[-1] == end == tokenizer.num_ids - 1


def test_a_continued_text_keeps_its_first_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_pieces(tmp_path, "unigram"))
    ids = tokenizer.encode("the lazy dog")
    assert tokenizer.decode(ids) == "the lazy dog"
    assert tokenizer.decode(ids, continues=True) == " the lazy dog"
    assert tokenizer.token_bytes(ids[0]).startswith(b" ")


def test_control_pieces_are_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_pieces(tmp_path, "symbols"))
    oracle = processor_of(tmp_path)
    control = oracle.piece_to_id("<ctl>")
    assert tokenizer.special_token_ids == {0, 1, 2, control}
    assert tokenizer.encode("fox<ctl> dog</s>") == [
        *oracle.encode("fox"),
        control,
        *oracle.encode(" dog"),
        2,
    ]
    user = oracle.piece_to_id("<sep>")
    assert user in tokenizer.encode("a<sep>b", parse_special=False)


def test_goldfish(tmp_path: Path) -> None:
    """AlbertTokenizer over a bare model: its special tokens and the padding ones come after."""
    save_pieces(
        tmp_path,
        "unigram",
        tokenizer_class="AlbertTokenizer",
        do_lower_case=False,
        keep_accents=True,
    )
    oracle = processor_of(tmp_path)
    size = oracle.get_piece_size()
    names = ["[CLS]", "[SEP]", "<pad>", "[MASK]", *(f"[XXXXX{i}]" for i in range(2000))]
    write_json(tmp_path / "added_tokens.json", {name: size + i for i, name in enumerate(names)})
    special = {
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": names[4:],
        "mask_token": {"content": "[MASK]", "lstrip": True, "rstrip": False},
    }
    write_json(tmp_path / "special_tokens_map.json", special)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.num_ids == size + 2004
    assert (tokenizer.prefix_token_ids, tokenizer.suffix_token_ids) == ((size,), (size + 1,))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (size, size + 1)
    body = oracle.encode("the quick brown fox")
    assert tokenizer.encode("the  quick\nbrown fox") == [size, *body, size + 1]
    assert tokenizer.encode_prompt("the quick brown fox") == [size, *body]
    assert tokenizer.encode("fox [MASK][XXXXX17]", add_special_tokens=False) == [
        *oracle.encode("fox"),
        size + 3,
        size + 4 + 17,
    ]
    ids = tokenizer.encode("über die Brücke")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "über die Brücke"
    assert tokenizer.decode(ids) == "[CLS] über die Brücke[SEP]"


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("accents", [True, False])
def test_albert_against_transformers(tmp_path: Path, lower: bool, accents: bool) -> None:
    """ALBERT's own layout: its special tokens are pieces of the model."""
    config = {"do_lower_case": lower, "keep_accents": accents}
    save_pieces(tmp_path, "albert", tokenizer_class="AlbertTokenizer", **config)
    processor = processor_of(tmp_path)
    num_pieces = processor.get_piece_size()
    scores = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(num_pieces)]
    oracle = AlbertTokenizer(vocab=scores, **config)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.num_ids == num_pieces
    assert tokenizer.special_token_ids == {0, 1, 2, 3, 4}
    for text in ["The QUICK brown fox", "Wie schön, über die Brücke", "``it was'' the  best"]:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text)
        skipped = oracle.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped


def test_rinna(tmp_path: Path) -> None:
    """T5Tokenizer: the end token is appended, and lower case is what the configuration says."""
    save_pieces(tmp_path, "unigram", tokenizer_class="T5Tokenizer", do_lower_case=True)
    tokenizer = Tokenizer.from_folder(tmp_path)
    body = processor_of(tmp_path).encode("the lazy dog")
    assert tokenizer.encode("The LAZY dog") == [*body, 2]
    assert tokenizer.encode_prompt("The LAZY dog") == body
    assert (tokenizer.eos_token_id, tokenizer.suffix_token_ids) == (2, (2,))


def test_sentencepiece_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pieces(tmp_path, "unigram")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"spiece\.model needs .*: pip install sentencepiece$"):
        Tokenizer.from_folder(tmp_path)


# Folders: tokenizer.json of other kinds


def unigram_library() -> tokenizers.Tokenizer:
    vocabulary = [
        ("<unk>", 0.0),
        ("▁", -1.0),
        ("▁the", -1.0),
        ("▁fox", -1.5),
        ("es", -2.0),
        ("a", -3.0),
    ]
    vocabulary += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    library = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, True))
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return library


LLAMA = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(LLAMA),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
    ],
)
def test_decoders_of_marked_pieces(tmp_path: Path, decoder: decoders.Decoder) -> None:
    library = unigram_library()
    library.decoder = decoder
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    for text in ["the foxes a", "aaa", "the 😀 é\n fox"]:
        ids = library.encode(text).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)
        check_streaming(tokenizer, ids)


def test_a_list_of_words_has_no_decoder(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "e4": 1, "Nf3": 2}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    assert tokenizer.encode("e4 e9 Nf3") == [1, 0, 2]
    assert tokenizer.decode([1, 0, 2]) == library.decode([1, 0, 2]) == "e4 [UNK] Nf3"
    check_streaming(tokenizer, [1, 0, 2])


def test_fused_letters(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordLevel({"A": 0, "C": 1, "G": 2}, "A"))
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    library.decoder = decoders.Fuse()
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    assert tokenizer.decode(tokenizer.encode("GACG")) == "GACG"


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder(), decoders.CTC()])
def test_other_decoders_are_refused_by_name(tmp_path: Path, decoder: decoders.Decoder) -> None:
    library = toy_library()
    library.decoder = decoder
    name = type(decoder).__name__
    with pytest.raises(ValueError, match=rf"tokenizer\.json: decoder .*{name}.* not supported"):
        Tokenizer.from_folder(save_toy(tmp_path, library))


# Chat templates


def test_chat_template_of_the_configuration(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(save_toy(tmp_path)).chat_template is None
    assert (
        Tokenizer.from_folder(save_toy(tmp_path, chat_template="{{ x }}")).chat_template
        == "{{ x }}"
    )
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert Tokenizer.from_folder(save_toy(tmp_path, chat_template=several)).chat_template == "d"
    assert (
        Tokenizer.from_folder(save_toy(tmp_path, chat_template=several[:1])).chat_template is None
    )
    with pytest.raises(ValueError, match="chat_template must be a string"):
        Tokenizer.from_folder(save_toy(tmp_path, chat_template=7))


def test_chat_template_file_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file: é", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, chat_template="configuration"))
    assert tokenizer.chat_template == "file: é"


# What is wrong is said in one line that names the file


def corrupt(name: str, content: bytes | str) -> Callable[[Path], None]:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def save_bpe(folder: Path) -> None:
    write_json(folder / "vocab.json", {"a": 0, "b": 1, "ab": 2})
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


WRONG: dict[str, tuple[list[Callable[[Path], object]], str]] = {
    "empty folder": ([], r"holds no tokenizer: looked for tokenizer\.json, .*spiece\.model"),
    "merges missing": ([corrupt("vocab.json", "{}")], "holds no tokenizer"),
    "tokenizer.json is no JSON": ([corrupt("tokenizer.json", "{")], r"tokenizer\.json"),
    "tokenizer.json is empty": ([corrupt("tokenizer.json", "")], r"tokenizer\.json"),
    "tokenizer.json is bytes": ([corrupt("tokenizer.json", b"\xff\xfe\x00")], r"tokenizer\.json"),
    "tokenizer.json is something else": ([corrupt("tokenizer.json", "[1]")], r"tokenizer\.json"),
    "tokenizer.json is a folder": ([lambda f: (f / "tokenizer.json").mkdir()], r"tokenizer\.json"),
    "vocab.json is no JSON": ([save_bpe, corrupt("vocab.json", "{")], r"vocab\.json"),
    "vocab.json is a list": ([save_bpe, corrupt("vocab.json", "[]")], r"vocab\.json"),
    "merges of unknown pieces": ([save_bpe, corrupt("merges.txt", "x y\n")], r"merges\.txt"),
    "merges with one half": ([save_bpe, corrupt("merges.txt", "ab\n")], r"merges\.txt"),
    "vocab.txt is no text": ([corrupt("vocab.txt", b"\xff\xff")], r"vocab\.txt is not UTF-8"),
    "vocab.txt without unknown": ([corrupt("vocab.txt", "a\nb\n")], r"vocab\.txt lacks \[UNK\]"),
    "vocab.txt is empty": ([corrupt("vocab.txt", "")], r"vocab\.txt lacks \[UNK\]"),
    "spiece.model is garbage": ([corrupt("spiece.model", b"garbage" * 9)], r"spiece\.model is not"),
    "spiece.model is empty": ([corrupt("spiece.model", b"")], r"spiece\.model is not"),
    "config is no JSON": (
        [save_toy, corrupt("tokenizer_config.json", "{]")],
        r"config\.json is not",
    ),
    "config is a list": ([save_toy, corrupt("tokenizer_config.json", "[]")], "must hold a JSON"),
    "config nests too deep": (
        [save_toy, corrupt("tokenizer_config.json", '{"a":' * 99_999)],
        r"config\.json is not valid",
    ),
    "map is no JSON": ([save_toy, corrupt("special_tokens_map.json", "x")], r"tokens_map\.json"),
    "token is a number": ([lambda f: save_toy(f, eos_token=5)], "5 is not a special token"),
    "specials are a number": ([lambda f: save_toy(f, extra_special_tokens=5)], "must be a list"),
    "added tokens are a list": ([lambda f: save_toy(f, added_tokens_decoder=[1])], "added tokens"),
    "added token is a number": (
        [lambda f: save_toy(f, added_tokens_decoder={"257": 1})],
        "added tokens are not readable",
    ),
    "added id is a word": (
        [lambda f: save_toy(f, added_tokens_decoder={"x": {"content": "y"}})],
        "added tokens",
    ),
    "added id leaves a gap": (
        [save_toy, corrupt("added_tokens.json", '{"<x>": 999}')],
        r"'<x>' is declared as id 999, but after tokenizer\.json it would get 257",
    ),
    "flag is a word": (
        [save_words, corrupt("tokenizer_config.json", '{"do_lower_case": "yes"}')],
        "do_lower_case must be true or false, got 'yes'",
    ),
    "MeCab before WordPiece": (
        [lambda f: save_words(f, tokenizer_class="BertJapaneseTokenizer")],
        r"vocab\.txt: tokenizer class BertJapaneseTokenizer is not supported",
    ),
    "fairseq's numbering": (
        [lambda f: save_pieces(f, "unigram", tokenizer_class="XLMRobertaTokenizer")],
        r"spiece\.model: tokenizer class XLMRobertaTokenizer is not supported",
    ),
    "class in config.json": (
        [save_bpe, corrupt("config.json", '{"tokenizer_class": "CLIPTokenizer"}')],
        r"vocab\.json: tokenizer class CLIPTokenizer is not supported",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files(tmp_path: Path, case: str) -> None:
    steps, complaint = WRONG[case]
    for step in steps:
        step(tmp_path)
    with pytest.raises(ValueError, match=complaint) as caught:
        Tokenizer.from_folder(tmp_path)
    assert type(caught.value) is ValueError
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "file")


@pytest.mark.parametrize("keep", [0, 1000, 200_000])
def test_a_damaged_install_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    damaged = tmp_path / "vocab.bpe"
    damaged.write_bytes((DATA / "vocab.bpe").read_bytes()[:keep])
    monkeypatch.setattr("nanoserve.tokenizer.loading.GPT2_FILE", damaged)
    with pytest.raises(ValueError, match=r"vocab\.bpe is (damaged|not UTF-8)"):
        Tokenizer.gpt2()
    damaged.write_text("#version\n" + "a b\n" * 49_999 + "zz zz\n")
    with pytest.raises(ValueError, match=r"vocab\.bpe is damaged"):
        Tokenizer.gpt2()
    damaged.unlink()
    with pytest.raises(ValueError, match=r"vocab\.bpe cannot be read"):
        Tokenizer.gpt2()


def test_a_text_the_library_cannot_encode_is_a_value_error(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer.from_folder(save_toy(tmp_path, library))
    assert tokenizer.encode("a a") == [0, 0]
    with pytest.raises(ValueError, match=r"cannot encode this text: .*UNK"):
        tokenizer.encode("b")
