"""What the server says when it does not answer: each an `ApiError` of its own kind.

Invariant: a client's mistake is never a 5xx, for clients repeat those by themselves; what will pass
by itself carries `retry-after`; nothing here tells a path, a cause or another caller's id.
"""

from __future__ import annotations

import math

from nanoserve.server.engine_thread import Failure, FailureKind
from nanoserve.server.errors import ApiError

MAX_BODY_BYTES = 8 * 2**20
MAX_HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers, about: a piece that was read with them is let through."""
SHUTDOWN_RETRY_S = 5.0
"""By then another instance may have taken over."""


def retry_headers(seconds: float) -> dict[str, str]:
    """Both spellings: whole seconds for everyone, milliseconds for those who read them."""
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000))),
    }


def body_too_large() -> ApiError:
    return ApiError(
        f"the request body is larger than {MAX_BODY_BYTES} bytes",
        status=413,
        code="request_too_large",
    )


def head_too_large() -> ApiError:
    return ApiError(
        f"the request's headers are larger than {MAX_HEAD_BYTES} bytes",
        status=431,
        code="headers_too_large",
    )


def no_http() -> ApiError:
    return ApiError("this is not a valid HTTP request", code="invalid_http")


def wrong_key() -> ApiError:
    return ApiError(
        "a valid API key is needed: Authorization: Bearer KEY (--api-key)",
        status=401,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def unknown_url(method: str, path: str) -> ApiError:
    return ApiError(f"unknown request URL: {method} {path[:200]}", status=404, code="unknown_url")


def wrong_method(method: str, allowed: str | None) -> ApiError:
    return ApiError(
        f"{method} is not allowed here, only {allowed}",
        status=405,
        code="method_not_allowed",
        headers={} if allowed is None else {"allow": allowed},
    )


def queue_full(num_in_flight: int, retry_after_s: float) -> ApiError:
    return ApiError(
        f"{num_in_flight} requests are running or queued, which is all this server takes "
        f"(--max-num-seqs and --max-queue); try again in {retry_after_s:.1f} s",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers=retry_headers(retry_after_s),
    )


def not_serving(reason: str) -> ApiError:
    return ApiError(
        reason,
        status=503,
        type="server_error",
        code="not_serving",
        headers={**retry_headers(SHUTDOWN_RETRY_S), "connection": "close"},
    )


def unforeseen() -> ApiError:
    return ApiError(
        "something went wrong in the server; its log has more, by this request's id",
        status=500,
        type="server_error",
        code="internal_error",
    )


def failed(failure: Failure, name: str) -> ApiError:
    """The answer to request `name`, which the engine refused or lost."""
    message = f"request {name}: {failure.message}"
    if failure.kind is FailureKind.REFUSED:
        return ApiError(failure.message)
    if failure.kind is FailureKind.TIMEOUT:
        return ApiError(
            f"{message} (--request-timeout)",
            status=408,
            type="timeout_error",
            code="timeout",
            headers={"x-should-retry": "false"},
        )
    if failure.kind is FailureKind.SHUTDOWN:
        return not_serving(message)
    return ApiError(message, status=500, type="server_error", code=f"engine_{failure.kind.value}")
