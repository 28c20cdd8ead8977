"""Sampled ids to released text: decoding, stop strings, and what must be held back for them.

Where a text stops depends on its characters alone, never on how tokens cut it: at the first
character that completes a stop string. Of several completed by the same character the longest
counts, so that no part of it is left standing. Text that may still turn out to begin a stop string
is held back; everything else leaves at once. Nothing is released twice, nothing is lost.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple

from nanoserve.tokenizer import StreamDecoder, Tokenizer


class TextDelta(NamedTuple):
    """What one token released. `stop` is the stop string it completed, which ends the text."""

    text: str
    stop: str | None = None


class TextStream:
    """The text of one choice, from the ids it samples.

    `stop` holds non-empty strings; the text ends before the one that matches, or after it with
    `include_stop_str_in_output`. Text that the first `min_tokens` tokens make certain is released
    unseen: a stop string neither matches in it nor begins in it. `continues` says that the text
    goes on from a prompt, see `Tokenizer.decode`.

    Every character is read once: the cost of a token does not grow with the text before it, nor
    with the number of stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        *,
        min_tokens: int = 0,
        continues: bool = False,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens, continues=continues)
        self._automaton = _automaton(stop)
        self._never_stops = not stop
        self._state = 0
        self._held = ""
        self._includes_stop = include_stop_str_in_output
        self._num_unseen_tokens = min_tokens
        self._stop: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, None so far."""
        return self._stop

    def push(self, token_id: int) -> TextDelta:
        """The text that this token releases. Not to be called once a stop string has matched.

        Raises ValueError for an id that the tokenizer does not know.
        """
        assert self._stop is None, "no token follows the one that completed a stop string"
        text = self._decoder.push(token_id)
        if self._num_unseen_tokens > 0:
            self._num_unseen_tokens -= 1
            return TextDelta(text)
        return TextDelta(self._release(text), self._stop)

    def finish(self) -> str:
        """The text held back, when no token follows. After a match there is none.

        A character left unfinished shows as U+FFFD, and can be what completes a stop string.
        """
        if self._stop is not None:
            return ""
        released = self._release(self._decoder.finish())
        held, self._held = self._held, ""
        return released if self._stop is not None else released + held

    def _release(self, text: str) -> str:
        """Reads `text` into the automaton; what it makes certain, with what was held before."""
        if self._never_stops:
            return text
        for index, character in enumerate(text):
            self._state = self._automaton.step(self._state, character)
            self._stop = self._automaton.completes[self._state]
            if self._stop is not None:
                seen = self._held + text[: index + 1]
                return seen if self._includes_stop else seen.removesuffix(self._stop)
        seen = self._held + text
        certain = len(seen) - self._automaton.depths[self._state]
        self._held = seen[certain:]
        return seen[:certain]


class StopAutomaton:
    """Finds stop strings in a text that arrives in pieces; immutable once built.

    Aho and Corasick, "Efficient string matching" (1975). A state is the longest end of the text
    that begins a stop string: `depths[state]` is its length, and so how much must be held back.
    `completes[state]` is the longest stop string that ends there.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.depths = [0]
        self.completes: list[str | None] = [None]
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]
        assert all(stop), "SamplingParams refuses an empty stop string"
        for string in stop:
            self._insert(string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._children[state]:
            state = self._fallbacks[state]
        return self._children[state].get(character, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            child = self._children[state].setdefault(character, len(self.depths))
            if child == len(self.depths):
                self.depths.append(depth)
                self.completes.append(None)
                self._children.append({})
                self._fallbacks.append(0)
            state = child
        self.completes[state] = string

    def _link(self) -> None:
        """Where to go on when a state cannot: its longest proper end that is a state, too.

        Breadth first, because that end is always shorter.
        """
        states = deque(self._children[0].values())
        while states:
            state = states.popleft()
            for character, child in self._children[state].items():
                self._fallbacks[child] = self.step(self._fallbacks[state], character)
                if self.completes[child] is None:
                    self.completes[child] = self.completes[self._fallbacks[child]]
                states.append(child)


@lru_cache(maxsize=1)
def _automaton(stop: tuple[str, ...]) -> StopAutomaton:
    """One for all choices of a request, whose streams are made one after another."""
    return StopAutomaton(stop)
