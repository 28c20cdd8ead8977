"""What one running server is made of, put together once and handed to whatever answers requests.

Nothing here is global: two apps over two engines live side by side in one process.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from nanoserve import __version__
from nanoserve.chat import load_chat_template
from nanoserve.config import ServerConfig
from nanoserve.engine.engine import Engine
from nanoserve.server.bridge import Bridge
from nanoserve.server.metrics import ServerMetrics
from nanoserve.server.protocol import Served
from nanoserve.server.visits import Visits
from nanoserve.tokenizer import Tokenizer

T = TypeVar("T")

MAX_WORKERS = 2
"""Threads that tokenise and write long answers, beside the engine's and the loop's."""
SHORT_BODY_BYTES = 4096
"""A body up to here is read and tokenised in less time than another thread takes to begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An engine and everything between it and the wire."""

    engine: Engine
    config: ServerConfig
    served: Served
    fingerprint: str
    metrics: ServerMetrics
    bridge: Bridge
    visits: Visits = field(default_factory=Visits)
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(MAX_WORKERS, thread_name_prefix="nanoserve")
    )

    @property
    def model_name(self) -> str:
        return self.metrics.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    async def off_loop(self, work: Callable[[], T], *, is_short: bool) -> T:
        """`work()`, in a worker thread unless it is short."""
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.workers, work)


def make_service(engine: Engine, config: ServerConfig) -> Service:
    """Raises ValueError for a chat template that cannot be read or does not compile."""
    template = config.chat_template
    model_name = config.served_model_name or public_name(engine.parts.checkpoint.name)
    served = Served.of(
        engine.config,
        engine.spec,
        engine.tokenizer,
        model_names=(model_name,),
        chat_template=None if template is None else load_chat_template(template),
    )
    metrics = ServerMetrics(model_name)
    return Service(
        engine=engine,
        config=config,
        served=served,
        fingerprint=fingerprint(engine),
        metrics=metrics,
        bridge=Bridge(
            engine,
            max_in_flight=engine.config.scheduler.max_num_seqs + config.max_queue,
            metrics=metrics,
        ),
    )


def public_name(model: str) -> str:
    """What clients call a model: a hub's name as it is, of a folder its last part only."""
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not model.startswith(".")
    return model if is_hub_name else model.rstrip("/").rpartition("/")[2] or "model"


def fingerprint(engine: Engine) -> str:
    """`system_fingerprint`: another one wherever equal seeds may give other tokens."""
    really_runs = {**engine.describe(), "version": __version__}
    digest = hashlib.sha256(json.dumps(really_runs, sort_keys=True).encode()).hexdigest()
    return f"fp_{digest[:12]}"
