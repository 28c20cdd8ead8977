"""What `/debug/requests/{id}` tells: one request's whole account, as the engine's log has it.

Times are milliseconds since the request arrived; of each choice the list of its steps says which
step of the engine computed which of its tokens. To be called in the engine's thread.
"""

from __future__ import annotations

import itertools
from typing import Any

from nanoserve.engine.engine import Engine
from nanoserve.engine.metrics import RequestAccount
from nanoserve.server.visits import Visit


def describe_visit(visit: Visit, engine: Engine) -> dict[str, Any]:
    """The HTTP side, and every choice that the engine's log still holds."""
    accounts = accounts_of(engine, frozenset(visit.engine_ids))
    return {
        "id": visit.reply_id,
        "request_id": visit.request_id,
        "path": visit.path,
        "stream": visit.is_stream,
        "status": visit.status,
        "outcome": visit.outcome,  # None while it runs
        "num_prompt_tokens": visit.num_prompt_tokens,
        "first_byte_ms": _since(visit.received_s, visit.first_byte_s),
        "ended_ms": _since(visit.received_s, visit.ended_s),
        "choices": [describe_account(account) for account in accounts],
    }


def accounts_of(engine: Engine, request_ids: frozenset[str]) -> list[RequestAccount]:
    """In order of arrival; the oldest finished ones may have been dropped."""
    log = engine.log
    found = [
        account
        for account in itertools.chain(log.finished, log.active.values())
        if account.request.request_id in request_ids
    ]
    return sorted(found, key=lambda account: account.number)


def describe_account(account: RequestAccount) -> dict[str, Any]:
    request = account.request
    arrival_s, reason = request.arrival_s, account.finish_reason
    return {
        "engine_id": request.request_id,
        "choice": request.choice,
        "status": request.status.value,
        "finish_reason": None if reason is None else reason.value,
        "priority": request.priority,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "num_output_tokens": len(request.output_token_ids),
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_preemptions": request.num_preemptions,
        "num_slides": request.num_slides,
        "first_scheduled_ms": _since(arrival_s, account.first_scheduled_s),
        "first_token_ms": _since(arrival_s, account.first_token_s),
        "last_token_ms": _since(arrival_s, account.last_token_s),
        "steps": [
            {"step": step, "start": start, "num_tokens": size}
            for step, start, size in zip(account.steps, account.starts, account.sizes, strict=True)
        ],
    }


def _since(start_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round((at_s - start_s) * 1e3, 3)
