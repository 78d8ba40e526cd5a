"""vLLM's engine core loop, counted in iterations, for tests that compare the simulated scheduler with vLLM's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def drive(
    requests: Sequence[Sequence[Any]],
    schedule: Callable[[], tuple[Any, Any]],
    update: Callable[[Any], Iterable[int] | None],
    add: Callable[[Any], None],
    has_work: Callable[[], bool],
    depth: int,
    ended: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    """The tokens of every step, as `step` (depth 1) and `step_with_batch_queue` schedule them.

    requests: each with the iteration of its arrival in second place, ascending. update: returns the ids of requests
    that ended, for `ended`.
    """
    arrivals, queue, trace = deque(requests), deque(), []
    for iteration in range(200_000):
        while arrivals and arrivals[0][1] <= iteration:
            add(arrivals.popleft())
        if has_work():
            step, tokens = schedule()
            if tokens:
                trace.append(tokens)
            queue.append(step)
            if len(queue) < depth:
                continue
        if queue:
            for i in sorted(update(queue.popleft()) or ()):
                ended(i)
        elif not arrivals:
            return trace
    raise AssertionError("never finished")
