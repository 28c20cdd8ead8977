"""Configuration by environment variables, for servers that are started without our command line.

Every option of `nanoserve serve` has a variable NANOSERVE_<OPTION>, read here by the types of the
dataclasses in `config`, so a new field is a new variable. `uvicorn nanoserve.server:app` has no
other way to be configured; the command line reads the same names by itself, and a test holds that
both understand them alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from nanoserve.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from nanoserve.llm import CACHE_OPTIONS, ENGINE_OPTIONS, SCHEDULER_OPTIONS, engine_config
from nanoserve.planner.memory import parse_bytes

__all__ = ["ServerConfig", "read_engine_config", "read_server_config"]

logger = logging.getLogger(__name__)

PREFIX = "NANOSERVE_"
YES = frozenset({"1", "true", "t", "yes", "y", "on"})
NO = frozenset({"0", "false", "f", "no", "n", "off"})
SERVER_OPTIONS = {field.name: field.name for field in fields(ServerConfig)}


def read_engine_config(environ: Mapping[str, str]) -> EngineConfig:
    """The engine that the environment asks for. Raises ValueError naming the variable or option."""
    values: dict[str, Any] = {}
    for table, config in (
        (CACHE_OPTIONS, CacheConfig),
        (SCHEDULER_OPTIONS, SchedulerConfig),
        (ENGINE_OPTIONS, EngineConfig),
    ):
        values |= read_options(environ, table, config)
    return engine_config(**values)


def read_server_config(environ: Mapping[str, str]) -> ServerConfig:
    """How it is served. Raises ValueError naming the variable or option; warns of unknown ones."""
    known = {*SERVER_OPTIONS, *CACHE_OPTIONS, *SCHEDULER_OPTIONS, *ENGINE_OPTIONS}
    unknown = {name for name in environ if name.startswith(PREFIX)} - set(map(variable, known))
    if unknown:
        logger.warning("ignored, for no option has this name: %s", ", ".join(sorted(unknown)))
    return ServerConfig(**read_options(environ, SERVER_OPTIONS, ServerConfig))


def variable(option: str) -> str:
    """`NANOSERVE_MAX_QUEUE` for `max_queue`."""
    return PREFIX + option.upper()


def read_options(
    environ: Mapping[str, str], table: Mapping[str, str], config: type
) -> dict[str, Any]:
    """The options of `table` (option to field of `config`) that are set; an empty one is not."""
    hints = get_type_hints(config)
    given = {option: environ.get(variable(option), "") for option in table}
    return {
        option: read_value(option, text, hints[table[option]])
        for option, text in given.items()
        if text
    }


def read_value(option: str, text: str, hint: Any) -> Any:
    """`text` as the type that the field has. Raises ValueError naming the variable."""
    if option == "kv_cache_memory_bytes":
        return parse_bytes(text, option=variable(option))
    reader = READERS.get(plain_type(hint))
    return text if reader is None else reader(variable(option), text)


def plain_type(hint: Any) -> Any:
    """`int` for `int | None`, `tuple` for `tuple[str, ...]`; choices are strings, checked later."""
    if get_origin(hint) in (UnionType, Union):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    return get_origin(hint) or hint


def read_integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, got {text!r}") from None


def read_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None


def read_switch(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in YES | NO:
        raise ValueError(f"{name} must be true or false, got {text!r}")
    return word in YES


def read_list(_name: str, text: str) -> tuple[str, ...]:
    """Parts between commas; empty ones are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


READERS: dict[Any, Callable[[str, str], Any]] = {
    int: read_integer,
    float: read_number,
    bool: read_switch,
    tuple: read_list,
}
