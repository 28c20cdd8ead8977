"""What the server writes down: one line an event, `key=value`, each with its request's id.

Values that come from outside are quoted where they hold anything but plain characters, so that no
client can write a line of its own. `configure` is for `nanoserve serve`; under another server the
lines go to the logger `nanoserve.server`, as its owner has set it up.
"""

from __future__ import annotations

import logging
import re
import uuid

from nanoserve.config import LogLevel
from nanoserve.server.errors import dump

PLAIN = re.compile(r"[\w.,:/+@%-]+", re.ASCII)
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
LINE = "%(asctime)s %(levelname)s %(name)s %(message)s"


def describe(event: str, **values: object) -> str:
    """`request id=req-1 status=200`; what is None is left out, numbers keep three decimals."""
    pairs = (f"{name}={_shown(value)}" for name, value in values.items() if value is not None)
    return " ".join((event, *pairs))


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else dump(text)


def request_id_of(given: bytes | None) -> str:
    """The caller's id where it is one that a header and a log can carry, else a new one."""
    text = "" if given is None else given.decode("latin-1")
    return text if REQUEST_ID.fullmatch(text) else f"req-{uuid.uuid4().hex}"


def configure(level: LogLevel) -> None:
    """Lines of ours and of uvicorn's to standard error, with time and level, once each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LINE))
    for name in ("nanoserve.server", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
