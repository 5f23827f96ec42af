"""What the scheduler has learnt about agents, runs and trainers; nothing here is durable.

    peak-sensitive EWMA of a cost (seconds):   x > v:  v += PEAK_GAIN (x - v)
                                               else:   v += (1 - exp(-dt / tau)) (x - v)

bad news counts at once, good news only with time (after Finagle's peak EWMA, which jumps to the
peak; we go half of the way because one group is a noisy sample). ``tau`` is ten group times, at
least ``MIN_TAU_S``: with Finagle's 10 s everything would be forgotten between two groups.
"""

import math

PEAK_GAIN = 0.5
MIN_TAU_S = 30.0
EWMA_GAIN = 0.1
PRIOR_TOKEN_S = 1 / 50
"""Seconds per token of one sequence before anything is known of a kind of hardware."""
PRIOR_LINK_BYTES_S = 12.5e6
"""100 Mbit/s."""
PRIOR_RTT_S = 0.1
PRIOR_BYTES_PER_TOKEN = 8.0


class PeakEwma:
    """A cost that rises fast and falls slowly; None until observed."""

    __slots__ = ("_at_s", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self._at_s = 0.0

    def observe(self, sample: float, now: float, tau_s: float = MIN_TAU_S) -> None:
        if self.value is None:
            self.value = sample
        elif sample > self.value:
            self.value += PEAK_GAIN * (sample - self.value)
        else:
            weight = 1.0 - math.exp(-(now - self._at_s) / max(tau_s, 1e-9))
            self.value += max(weight, 0.02) * (sample - self.value)
        self._at_s = now


class Ewma:
    """An exponentially weighted mean with a constant gain; None until observed."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, sample: float) -> None:
        self.value = (
            sample if self.value is None else self.value + EWMA_GAIN * (sample - self.value)
        )


class AgentEstimate:
    """One agent: seconds per token of a sequence, seconds per byte upwards and downwards, pause
    of a weight swap, round trip."""

    __slots__ = ("down_byte_s", "pause_s", "rtt_s", "token_s", "up_byte_s")

    def __init__(self) -> None:
        self.token_s = PeakEwma()
        self.up_byte_s = PeakEwma()
        self.down_byte_s = PeakEwma()
        self.pause_s = PeakEwma()
        self.rtt_s = PeakEwma()

    def group_done(
        self, *, lengths: tuple[int, ...], slots: int, generating_s: float, now: float
    ) -> float | None:
        """Learn from a group; returns the sample, seconds per token of one sequence.

        Siblings run beside each other on up to ``slots`` slots, so a group takes at least
        max(longest, total / slots) token times.
        """
        tokens = max(max(lengths), sum(lengths) / max(1, min(slots, len(lengths))))
        if tokens <= 0 or generating_s <= 0.0:
            return None
        sample = generating_s / tokens
        self.token_s.observe(sample, now, max(MIN_TAU_S, 10.0 * generating_s))
        return sample

    def uploaded(self, *, size_bytes: int, upload_s: float, now: float) -> None:
        if size_bytes > 0:
            self.up_byte_s.observe(max(upload_s, 0.0) / size_bytes, now)

    def fetched(self, *, fetched_bytes: int, fetch_s: float, pause_s: float, now: float) -> None:
        if fetched_bytes > 0 and fetch_s > 0.0:
            self.down_byte_s.observe(fetch_s / fetched_bytes, now)
        self.pause_s.observe(max(pause_s, 0.0), now)


class RunEstimate:
    """One run's groups: tokens per sequence, tokens of the longest sibling, body size."""

    __slots__ = ("_body_bytes", "_longest", "_mean", "_prior_tokens", "_siblings")

    def __init__(self, max_new_tokens: int, siblings: int) -> None:
        self._prior_tokens = max_new_tokens / 2
        self._siblings = siblings
        self._mean = Ewma()
        self._longest = Ewma()
        self._body_bytes = Ewma()

    def group_done(self, lengths: tuple[int, ...], size_bytes: int) -> None:
        self._mean.observe(sum(lengths) / len(lengths))
        self._longest.observe(float(max(lengths)))
        self._body_bytes.observe(float(size_bytes))

    @property
    def tokens_mean(self) -> float:
        return self._prior_tokens if self._mean.value is None else self._mean.value

    @property
    def tokens_longest(self) -> float:
        return 2 * self._prior_tokens if self._longest.value is None else self._longest.value

    @property
    def body_bytes(self) -> float:
        if self._body_bytes.value is not None:
            return self._body_bytes.value
        return self._prior_tokens * self._siblings * PRIOR_BYTES_PER_TOKEN


class HardwarePriors:
    """Seconds per token by kind of hardware, learnt from all its agents; bounded."""

    _LIMIT = 256

    def __init__(self) -> None:
        self._by_hardware: dict[str, Ewma] = {}
        self._any = Ewma()

    def observe(self, hardware: str, token_s: float) -> None:
        self._any.observe(token_s)
        known = self._by_hardware.get(hardware)
        if known is None:
            if len(self._by_hardware) >= self._LIMIT:
                return
            known = self._by_hardware[hardware] = Ewma()
        known.observe(token_s)

    def token_s(self, hardware: str) -> float:
        known = self._by_hardware.get(hardware)
        if known is not None and known.value is not None:
            return known.value
        return PRIOR_TOKEN_S if self._any.value is None else self._any.value
