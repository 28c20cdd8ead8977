"""Executors put around another one: the engine under test goes on as if nothing had happened.

`BatchRecorder` keeps what the engine asked for, `TimedExecutor` the seconds its model took, and
`SilentExecutor` answers at once without any model, so that what is left is the engine's own work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanoserve.bench.measure import Stopwatch
from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.executor import Executor


class ExecutorProxy:
    """Passes everything on to `inner`. See `Executor`."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.spec = inner.spec

    def execute(self, batch: StepBatch) -> StepResult:
        return self.inner.execute(batch)

    def execute_with_logits(self, batch: StepBatch) -> tuple[StepResult, NDArray[np.float32]]:
        return self.inner.execute_with_logits(batch)

    def warm_up(self) -> None:
        self.inner.warm_up()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def memory_stats(self) -> dict[str, int]:
        return self.inner.memory_stats()

    def describe(self) -> dict[str, str]:
        return self.inner.describe()

    def poison(self, blocks: list[int]) -> None:
        self.inner.poison(blocks)

    def close(self) -> None:
        self.inner.close()


class BatchRecorder(ExecutorProxy):
    """Keeps the last step's batch, which can then be executed again: the same step, any number of
    times, since it writes the same K and V to the same slots.
    """

    last: StepBatch | None = None

    def execute(self, batch: StepBatch) -> StepResult:
        self.last = batch
        return self.inner.execute(batch)


class TimedExecutor(ExecutorProxy):
    """Adds what the model took, sampling included, to the part "model" of `watch`."""

    def __init__(self, inner: Executor, watch: Stopwatch) -> None:
        super().__init__(inner)
        self.watch = watch

    def execute(self, batch: StepBatch) -> StepResult:
        return self.watch.time("model", lambda: self.inner.execute(batch))


class SilentExecutor(ExecutorProxy):
    """Draws token 0 for every row and computes nothing; results are made once per row count."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self._results: dict[int, StepResult] = {}

    def execute(self, batch: StepBatch) -> StepResult:
        num_rows = len(batch.targets)
        if num_rows not in self._results:
            self._results[num_rows] = StepResult(
                token_ids=np.zeros(num_rows, dtype=np.int32),
                logprobs=np.full(num_rows, np.nan),
                top_logprobs=((),) * num_rows,
                finite=np.ones(num_rows, dtype=np.bool_),
            )
        return self._results[num_rows]
