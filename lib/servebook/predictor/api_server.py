"""vLLM's API server: how long its event loop delays the tokens of a step and new requests."""

from __future__ import annotations

from collections import deque

LEAST_SHARE = 0.25  # share of the loop's time for new requests when saturated: it accepts one between two turns


class ApiLoop:
    """The API server's event loop (one core). Each token of a step is one event and takes event_s. The loop is
    saturated if the next step's tokens arrive before it has sent those of the last. A new request needs PASSES turns of
    the loop; in a saturated loop it waits for one step's events at each. Steps of up to CHUNK tokens are processed as
    one batch: a saturated loop merges a request's two tokens into one event, so its backlog does not grow. Larger ones
    are processed in chunks (VLLM_V1_OUTPUT_PROC_CHUNK_SIZE): nothing is merged and the backlog grows. Measured on an
    H200 with vLLM 0.26: above 100 running requests events carried 1.1 to 1.3 tokens; at 256 and 512 they carried 1.00,
    clients received 18,000 and 15,000 tokens/s, and the engine was idle part of the time.
    """

    PASSES, CHUNK = 4, 128

    def __init__(self, event_s: float) -> None:
        self.event_s = event_s
        self.unmerged = 0.0  # when the last step of over CHUNK tokens is sent; later tokens do not overtake it
        self.turns: deque[tuple[float, float, float, bool]] = deque(maxlen=16)  # (start, end, length, saturated)

    def events(self, tokens: int, at: float) -> float:
        """The mean time at which clients receive a step's tokens, which are ready at `at`."""
        turn, free = tokens * self.event_s, self.turns[-1][1] if self.turns else 0.0
        begun = max(free, at)
        if tokens <= self.CHUNK:
            begun = max(min(begun, at + turn), self.unmerged)
        else:
            self.unmerged = begun + turn
        self.turns.append((at, begun + turn, turn, free > at))
        return begun + turn / 2

    def behind(self, steps: int, tokens: int, since: float) -> None:
        """Add the backlog of `steps` consecutive steps of `tokens` tokens each, the first at `since`."""
        turn = tokens * self.event_s
        if steps > 0 and tokens > self.CHUNK:
            free = max(self.turns[-1][1] if self.turns else 0.0, since)
            self.unmerged = free + steps * turn
            self.turns.append((since, self.unmerged, turn, free > since))

    def share(self, at: float) -> float:
        """Share of the loop's recent time that token events leave free. One core parses requests, tokenizes and sends
        events."""
        if len(self.turns) < 2 or self.event_s <= 0:
            return 1.0
        since, last = self.turns[-2][0], self.turns[-1]
        every = max(last[0] - since, at - last[0])
        return max(1.0 - last[2] / every, LEAST_SHARE) if every > last[2] else LEAST_SHARE

    def wait(self, sent: float) -> float:
        """Seconds that a request waits for the loop."""
        for at, over, turn, saturated in reversed(self.turns):
            if at <= sent:
                return self.PASSES * turn if saturated else max(0.0, over - sent)
        return 0.0
