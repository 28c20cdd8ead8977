"""Stop strings and released text: the same whatever the tokens, nothing twice, nothing lost."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.engine.text import StopAutomaton, TextDelta, TextStream
from nanoserve.tokenizer import Tokenizer

END = 50256


@cache
def gpt2() -> Tokenizer:
    return Tokenizer.gpt2()


def letters(text: str) -> list[int]:
    """Ids of `text`, one for each of its bytes."""
    return [single_bytes()[byte] for byte in text.encode()]


@cache
def single_bytes() -> dict[int, int]:
    return {gpt2().token_bytes(token_id)[0]: token_id for token_id in range(256)}


def run(
    ids: list[int], stop: tuple[str, ...], *, include: bool = False, **options: int | bool
) -> tuple[str, str | None, int]:
    """The released text, the stop string that matched, and how many tokens were read."""
    stream = TextStream(gpt2(), stop, include, **options)  # type: ignore[arg-type]
    pieces: list[str] = []
    for number, token_id in enumerate(ids, start=1):
        delta = stream.push(token_id)
        pieces.append(delta.text)
        if delta.stop is not None:
            assert delta.stop == stream.stop
            assert stream.finish() == ""
            return "".join(pieces), delta.stop, number
    pieces.append(stream.finish())
    assert stream.finish() == ""
    return "".join(pieces), stream.stop, len(ids)


def cut(text: str, stop: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    """The rule, slowly: the first character to complete a stop string, the longest it completes."""
    for end in range(1, len(text) + 1):
        ended = [string for string in stop if text[:end].endswith(string)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_a_stop_string_over_several_tokens() -> None:
    ids = [46, 350, 1195]
    assert gpt2().encode("O P Q") == ids
    stream = TextStream(gpt2(), ("O P Q",), False, True)
    assert [stream.push(i) for i in ids] == [
        TextDelta(text=""),
        TextDelta(text=""),
        TextDelta(text="", stop="O P Q"),
    ]
    assert (stream.stop, stream.finish()) == ("O P Q", "")
    assert run([64, *ids], ("O P Q",)) == ("a", "O P Q", 4)
    assert run([64, *ids], ("O P Q",), include=True) == ("aO P Q", "O P Q", 4)


def test_held_text_is_released_once_it_cannot_match() -> None:
    stream = TextStream(gpt2(), stop=("O P Q",))
    assert [stream.push(i).text for i in gpt2().encode("O P R")] == ["", "", "O P R"]
    # "O P O": the end may begin the stop string anew.
    assert [stream.push(i).text for i in gpt2().encode("O P O")] == ["", "", "O P "]
    assert stream.finish() == "O"


def test_text_leaves_at_once_where_nothing_can_match() -> None:
    ids = gpt2().encode("The quick brown fox jumps, 😀 over")
    for stop in [(), ("###",), ("zzz", "\n\nUser:")]:
        stream = TextStream(gpt2(), stop=stop)
        for token_id in ids:
            whole = gpt2().token_bytes(token_id).decode(errors="ignore")
            assert whole in stream.push(token_id).text
        assert stream.finish() == ""


def test_text_after_the_stop_string_in_the_same_token_is_dropped() -> None:
    (token,) = gpt2().encode(" generation")
    assert run([token], ("era",)) == (" gen", "era", 1)
    assert run([token], ("era",), include=True) == (" genera", "era", 1)


@pytest.mark.parametrize(
    "text,stop,kept,matched",
    [
        ("xabcd", ("bc", "abcd"), "xa", "bc"),  # completed first, though the other begins first
        ("xabcd", ("abcd", "d"), "x", "abcd"),  # completed together: the longer
        ("xabcd", ("d", "abcd"), "x", "abcd"),
        ("aab", ("ab", "ab"), "a", "ab"),
        ("aaab", ("aab",), "a", "aab"),
        ("ababac", ("abac",), "ab", "abac"),
        ("ab", ("abc", "b"), "a", "b"),
        ("abd", ("abc", "d"), "ab", "d"),
        ("\n\n", ("\n",), "", "\n"),
        ("done.", (".",), "done", "."),
        ("a😀b", ("😀",), "a", "😀"),
        ("e\u0301", ("\u0301",), "e", "\u0301"),
    ],
)
def test_which_stop_string(text: str, stop: tuple[str, ...], kept: str, matched: str) -> None:
    assert cut(text, stop) == (kept, matched)
    assert run(letters(text), stop)[:2] == (kept, matched)
    assert run(gpt2().encode(text), stop)[:2] == (kept, matched)


small = st.text(alphabet="ab \n", max_size=30)
stops = st.lists(st.text(alphabet="ab \n", min_size=1, max_size=5), max_size=4).map(tuple)


@given(small, stops, st.booleans(), st.randoms(use_true_random=False))
def test_tokens_do_not_matter(
    text: str, stop: tuple[str, ...], include: bool, rng: random.Random
) -> None:
    """However the text is cut into tokens, the same characters are kept."""
    expected = cut(text, stop, include=include)
    borders = sorted(rng.sample(range(len(text) + 1), rng.randrange(len(text) + 1)))
    chunks = [text[a:b] for a, b in itertools.pairwise([0, *borders, len(text)])]
    random_cut = [token_id for chunk in chunks for token_id in gpt2().encode(chunk)]
    for ids in (letters(text), gpt2().encode(text), random_cut):
        assert run(ids, stop, include=include)[:2] == expected


@given(
    st.lists(st.one_of(st.integers(0, END), st.integers(0, 255))),
    st.data(),
    st.booleans(),
    st.booleans(),
)
def test_any_ids(ids: list[int], data: st.DataObject, include: bool, skip: bool) -> None:
    """For any ids the text is what decoding them gives, cut; also with halves of characters."""
    text = gpt2().decode(ids, skip_special_tokens=skip)
    from_text = st.builds(
        lambda start, size: text[start : start + size] or "\ufffd",
        st.integers(0, max(len(text) - 1, 0)),
        st.integers(1, 4),
    )
    stop = tuple(data.draw(st.lists(st.one_of(from_text, st.text(min_size=1)), max_size=3)))
    kept, matched, _ = run(ids, stop, include=include, skip_special_tokens=skip)
    assert (kept, matched) == cut(text, stop, include=include)


@given(small, stops)
def test_no_more_is_held_than_may_begin_a_stop_string(text: str, stop: tuple[str, ...]) -> None:
    stream = TextStream(gpt2(), stop=stop)
    released = ""
    for number, token_id in enumerate(letters(text), start=1):
        delta = stream.push(token_id)
        released += delta.text
        if delta.stop is not None:
            return
        held = text[len(released) : number]
        beginnings = {string[:size] for string in stop for size in range(len(string))}
        assert text.startswith(released + held)
        assert held == max(
            (b for b in beginnings if text[:number].endswith(b)), key=len, default=""
        )
    assert released + stream.finish() == text


def test_an_unfinished_character_can_complete_a_stop_string() -> None:
    assert run([47249], ()) == ("\ufffd", None, 1)
    assert run([64, 47249], ("a\ufffd",)) == ("", "a\ufffd", 2)
    assert run([64, 47249], ("\ufffd",), include=True) == ("a\ufffd", "\ufffd", 2)


def test_special_tokens_are_skipped_or_matched() -> None:
    ids = [64, END, 65]
    assert run(ids, ()) == ("ab", None, 3)
    assert run(ids, ("ab",)) == ("", "ab", 3)
    assert run(ids, ("<|endoftext|>",)) == ("ab", None, 3)
    shown = run(ids, ("<|endoftext|>",), skip_special_tokens=False)
    assert shown == ("a", "<|endoftext|>", 2)


def test_stop_strings_count_only_after_min_tokens() -> None:
    ids = letters("x.y.z")
    assert run(ids, (".",), min_tokens=0) == ("x", ".", 2)
    assert run(ids, (".",), min_tokens=1) == ("x", ".", 2)
    assert run(ids, (".",), min_tokens=2) == ("x.y", ".", 4)
    assert run(ids, (".",), min_tokens=9) == ("x.y.z", None, 5)
    # What the first tokens said is out already: a stop string cannot begin in it.
    assert run(letters("abab"), ("ab",), min_tokens=1) == ("ab", "ab", 4)
    stream = TextStream(gpt2(), stop=("ab",), min_tokens=1)
    assert [stream.push(i).text for i in letters("aa")] == ["a", ""]


def test_a_continued_text_of_other_vocabularies(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("words")
    (folder / "vocab.txt").write_text("[UNK]\n[SEP]\nthe\nfox\n##es\n", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    for continues, text in [(False, "the foxes fox"), (True, " the foxes fox")]:
        stream = TextStream(tokenizer, stop=("es t",), continues=continues)
        assert "".join(stream.push(i).text for i in [2, 3, 4, 3]) + stream.finish() == text


def test_the_cost_of_a_token_is_that_of_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 stop strings, one of 10,000 characters that keeps nearly matching, and a long text."""
    long = "ab" * 4999 + "aX"
    stop = (long, *(f"{'ab' * n}c{n}" for n in range(63)))
    text = "ab" * 30_000
    steps = 0

    class Counting(dict[str, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal steps
            steps += 1
            return super().__contains__(key)

    stream = TextStream(gpt2(), stop=stop)
    automaton = stream._automaton
    monkeypatch.setattr(automaton, "_children", [Counting(c) for c in automaton._children])
    ids = gpt2().encode(text)
    released = "".join(stream.push(token_id).text for token_id in ids)
    assert len(text) - len(long) < len(released) < len(text)
    assert released + stream.finish() == text
    assert 0 < steps <= 2 * len(text)
    assert len(automaton.depths) <= sum(map(len, stop)) + 1


@given(stops, small)
def test_the_automaton_is_the_longest_beginning(stop: tuple[str, ...], text: str) -> None:
    automaton = StopAutomaton(stop)
    state = 0
    for number, character in enumerate(text, start=1):
        state = automaton.step(state, character)
        seen = text[:number]
        fits = [s[:n] for s in stop for n in range(len(s) + 1) if seen.endswith(s[:n])]
        assert automaton.depths[state] == max(map(len, fits), default=0)
        ended = [s for s in stop if seen.endswith(s)]
        assert automaton.completes[state] == (max(ended, key=len) if ended else None)
