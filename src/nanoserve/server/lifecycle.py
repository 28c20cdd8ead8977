"""How a server ends: nobody new is let in, those inside finish, and then the process goes, with 0.

SIGTERM gives them `shutdown_timeout`; SIGINT (Ctrl-C) and any second signal give them nothing.
Whoever is left gets an error (503, or an event where a stream has begun), and only then the HTTP
server is told to stop: it would close its port at once, and new callers would hear nothing at all.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from nanoserve.server.bridge import Bridge
from nanoserve.server.logs import describe

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FLUSH_S = 2.0
"""For the last errors to leave."""

Stop = Callable[[int], None]


def interrupt(_signum: int) -> None:
    """Stop the HTTP server around this app in the one way that all have in common."""
    signal.raise_signal(signal.SIGINT)


def settle_heap() -> None:
    """Leave everything that is loaded by now out of later garbage collections.

    Going through the objects of all libraries would hold up every stream for several steps. For a
    process that does nothing but serve.
    """
    gc.collect()
    gc.freeze()


class Lifecycle:
    """Takes over the process's signals from `listen` to `deafen`, and ends `bridge` by them.

    `stop` is called with the signal when nothing is in flight any more; the signals have their
    earlier handlers by then, so the default `interrupt` reaches the HTTP server's own.
    """

    def __init__(self, bridge: Bridge, *, shutdown_timeout_s: float, stop: Stop | None) -> None:
        self._bridge = bridge
        self._timeout_s = shutdown_timeout_s
        self._stop = stop or interrupt
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[int, Any] = {}
        self._ending: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """On the running loop. Elsewhere than in the main thread there are no signals to take."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._loop = asyncio.get_running_loop()
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def deafen(self) -> None:
        """Put the earlier handlers back, where ours are still there."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before = {}

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin, signum)

    def _begin(self, signum: int) -> None:
        if self._ending is not None:
            self._cut_short()
            return
        grace_s = self._timeout_s if signum == signal.SIGTERM else 0.0
        self._ending = asyncio.get_running_loop().create_task(self._end(signum, grace_s))

    async def _end(self, signum: int, grace_s: float) -> None:
        logger.info(
            "%s", describe("ending", in_flight=self._bridge.num_in_flight, grace_s=float(grace_s))
        )
        self._bridge.drain()
        if not await self._bridge.wait_idle(grace_s):
            self._cut_short()
            await self._bridge.wait_idle(FLUSH_S)
        self.deafen()
        self._stop(signum)

    def _cut_short(self) -> None:
        logger.info("%s", describe("cut_short", in_flight=self._bridge.num_in_flight))
        self._bridge.end_all("the server is shutting down before it was finished")
