"""The process of one peer: reads orders as JSON lines, answers each with one line.

    python -m nanoserve.bench.peers.worker openvino

Orders are `load`, `greedy`, `logits`, `prepare` and `repeat`; an answer is an object with what was
asked for, or with `error`. Whatever the engine prints goes to standard error: standard output is
the pipe's alone. When the pipe closes, the process ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from nanoserve.bench.measure import Arm, Stopwatch, quiet_collector
from nanoserve.bench.peers import ctranslate, huggingface, llamacpp, ours, vino
from nanoserve.bench.peers.face import Cell, Peer, Setup, no_device

Order = Mapping[str, Any]
Answer = dict[str, Any]

PEERS: Mapping[str, Callable[[Setup], Peer]] = {
    "nanoserve": ours.OwnPeer,
    "transformers": huggingface.TransformersPeer,
    "llama.cpp": llamacpp.LlamaPeer,
    "ctranslate2": ctranslate.CTranslatePeer,
    "openvino": vino.OpenVINOPeer,
}
"""By the name of the engine; their libraries are imported when one is made."""


class Desk:
    """Carries out orders on one peer, which `load` makes."""

    def __init__(self, make: Callable[[Setup], Peer]) -> None:
        self._make = make
        self._peer: Peer | None = None
        self._arms: dict[str, Arm] = {}

    def answer(self, order: Order) -> Answer:
        """What came of it. An engine's error is an answer as well: the next order may succeed."""
        handlers = {
            "load": self.load,
            "greedy": self.greedy,
            "logits": self.logits,
            "prepare": self.prepare,
            "repeat": self.repeat,
        }
        try:
            return handlers[order["do"]](order)
        except Exception as error:  # noqa: BLE001 - engines raise what they like; the parent judges
            return {"error": f"{type(error).__name__}: {error}"}

    @property
    def peer(self) -> Peer:
        if self._peer is None:
            raise RuntimeError("no model was loaded")
        return self._peer

    def load(self, order: Order) -> Answer:
        setup = Setup(**{**order["setup"], "scratch": Path(order["setup"]["scratch"])})
        watch = Stopwatch(no_device)
        self._peer = watch.time("load", lambda: self._make(setup))
        give_back()
        return {"describe": dict(self._peer.describe()), "load_s": watch.seconds["load"]}

    def greedy(self, order: Order) -> Answer:
        texts = [self.peer.greedy(p, order["num_tokens"]) for p in order["prompts"]]
        return {"tokens": [[int(token) for token in text] for text in texts]}

    def logits(self, order: Order) -> Answer:
        """Written to the file that the order names: they are too many for a line."""
        np.save(order["into"], np.asarray(self.peer.logits(order["prompt"]), dtype=np.float32))
        return {}

    def prepare(self, order: Order) -> Answer:
        cell = Cell(**order["cell"])
        self._arms[cell.name] = self.peer.arm(cell)
        give_back()
        return {}

    def repeat(self, order: Order) -> Answer:
        watch, arm = Stopwatch(no_device), self._arms[order["cell"]]
        if order["rehearse"]:
            arm(Stopwatch(no_device))
        arm(watch)
        return {"seconds": watch.seconds}


def give_back() -> None:
    """What a conversion left behind: two dozen engines lie in one memory, each with a copy."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def serve(desk: Desk, orders: TextIO, answers: TextIO) -> None:
    """Until there are no more orders."""
    for line in orders:
        answers.write(json.dumps(desk.answer(json.loads(line))) + "\n")
        answers.flush()


def main() -> int:
    """One peer, on the pipes this process was born with."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # engines print, from Python and from C
    sys.stdout = sys.stderr
    with quiet_collector():  # for good: a collection would fall into somebody's step
        serve(Desk(PEERS[sys.argv[1]]), sys.stdin, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
