"""What the scheduler has learnt about agents, runs and trainers; nothing here is durable.

    peak-sensitive EWMA of a cost (seconds):   x > v:  v += PEAK_GAIN (x - v)
                                               else:   v += (1 - exp(-dt / tau)) (x - v)

bad news counts at once, good news only with time (after Finagle's peak EWMA, which jumps to the
peak; we go part of the way because one group is a noisy sample). ``tau`` is ten group times, at
least ``MIN_TAU_S``: with Finagle's 10 s everything would be forgotten between two groups. A bad
estimate that nothing confirms is forgotten in favour of the prior (``RECOVER_S``), so that an agent
that looked too slow to be used is tried again.

What always holds: every table is bounded; an estimate that has seen nothing is its prior.
"""

import math
from collections import deque

PEAK_GAIN = 0.3
MIN_TAU_S = 30.0
RECOVER_S = 600.0
"""How long a bad estimate without news keeps 1/e of its distance to the prior."""
EWMA_GAIN = 0.1
LENGTH_GAIN = 0.02
"""Lengths scatter as much as their mean: an average of about fifty groups is wanted."""
LIKELY_DEVIATIONS = 0.6745
"""Of a normal distribution three quarters are below its mean and so many standard deviations. More
refuses more: of aws12-mixed with single sequences, 2 seeds, the wasted share of attempts is 0.39,
0.32, 0.27 at 0, 0.67, 1.04 deviations, and steps per hour fall from 247 to 241 and 234."""
MAX_SEEN = 1_000_000
PRIOR_TOKEN_S = 1 / 50
"""Seconds per token of one sequence before anything is known of a kind of hardware."""
PRIOR_LINK_BYTES_S = 12.5e6
"""100 Mbit/s."""
PRIOR_RTT_S = 0.1
PRIOR_BYTES_PER_TOKEN = 8.0
MAX_KINDS = 64
"""Kinds of work (run and task family) that are told apart, per agent and per run."""
ARRIVALS = 256
MIN_ARRIVALS = 16
MIN_WINDOW_S = 1.0


class PeakEwma:
    """A cost that rises fast and falls slowly; None until observed."""

    __slots__ = ("_at_s", "value")

    def __init__(self) -> None:
        self.value: float | None = None
        self._at_s = 0.0

    def observe(self, sample: float, now: float, tau_s: float = MIN_TAU_S) -> None:
        value = self.value
        if value is None:
            self.value = sample
        elif sample > value:
            self.value = value + PEAK_GAIN * (sample - value)
        else:
            weight = 1.0 - math.exp(-(now - self._at_s) / max(tau_s, 1e-9))
            self.value = value + (weight if weight > 0.02 else 0.02) * (sample - value)
        self._at_s = now

    def recovered(self, prior: float, now: float) -> float:
        """The value, nearer to a better ``prior`` the longer nothing was observed."""
        value = self.value
        if value is None:
            return prior
        age_s = now - self._at_s
        if value <= prior or age_s < RECOVER_S / 10.0:
            return value
        return prior + (value - prior) * math.exp(-age_s / RECOVER_S)


class Ewma:
    """A mean that forgets: plain over the first 1 / gain samples, then exponentially weighted; None
    until observed."""

    __slots__ = ("_gain", "_seen", "value")

    def __init__(self, gain: float = EWMA_GAIN) -> None:
        self.value: float | None = None
        self._gain = gain
        self._seen = 0

    def observe(self, sample: float) -> None:
        if self._seen < MAX_SEEN:
            self._seen += 1
        gain, plain = self._gain, 1.0 / self._seen
        before = 0.0 if self.value is None else self.value
        self.value = before + (plain if plain > gain else gain) * (sample - before)


class ArrivalRate:
    """How often something happens, from the last ``ARRIVALS`` times; it falls by itself when
    nothing comes any more."""

    __slots__ = ("_times",)

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=ARRIVALS)

    def observe(self, now: float) -> None:
        self._times.append(now)

    def per_s(self, now: float) -> float | None:
        """None while too little has come to say."""
        count = len(self._times)
        if count < MIN_ARRIVALS:
            return None
        return (count - 1) / max(now - self._times[0], MIN_WINDOW_S)


class AgentEstimate:
    """One agent: seconds per token of a sequence, of any work and of each kind of it, seconds per
    byte upwards and downwards, pause of a weight swap, round trip, slot time of a sequence, and how
    many times as long as the mean the longest sibling of a group is."""

    __slots__ = (
        "by_kind",
        "down_byte_s",
        "pause_s",
        "rtt_s",
        "sequence_s",
        "spread",
        "token_s",
        "up_byte_s",
    )

    def __init__(self) -> None:
        self.token_s = PeakEwma()
        self.by_kind: dict[str, PeakEwma] = {}
        self.up_byte_s = PeakEwma()
        self.down_byte_s = PeakEwma()
        self.pause_s = PeakEwma()
        self.rtt_s = PeakEwma()
        self.sequence_s = Ewma()
        self.spread = Ewma()

    def group_done(
        self,
        *,
        lengths: tuple[int, ...],
        slots: int,
        generating_s: float,
        now: float,
        kind: str = "",
    ) -> float | None:
        """Learn from a group; returns the sample, seconds per token of one sequence.

        Siblings run beside each other on up to ``slots`` slots, so a group takes at least
        max(longest, total / slots) token times.
        """
        longest, total, count = max(lengths), sum(lengths), len(lengths)
        tokens = max(longest, total / max(1, min(slots, count)))
        if tokens <= 0 or generating_s <= 0.0:
            return None
        sample = generating_s / tokens
        tau_s = max(MIN_TAU_S, 10.0 * generating_s)
        self.token_s.observe(sample, now, tau_s)
        if kind:
            known = self.by_kind.pop(kind, None) or PeakEwma()
            self.by_kind[kind] = known  # the one that was used longest ago goes first
            if len(self.by_kind) > MAX_KINDS:
                del self.by_kind[next(iter(self.by_kind))]
            known.observe(sample, now, tau_s)
        mean = total / count
        self.sequence_s.observe(sample * mean)
        self.spread.observe(longest / mean)
        return sample

    def token_time_s(self, kind: str, prior: float, now: float) -> float:
        """Seconds per token that a sequence of this kind of work will take."""
        known = self.by_kind.get(kind)
        return (self.token_s if known is None else known).recovered(prior, now)

    def uploaded(self, *, size_bytes: int, upload_s: float, now: float) -> None:
        if size_bytes > 0:
            self.up_byte_s.observe(max(upload_s, 0.0) / size_bytes, now)

    def fetched(self, *, fetched_bytes: int, fetch_s: float, pause_s: float, now: float) -> None:
        if fetched_bytes > 0 and fetch_s > 0.0:
            self.down_byte_s.observe(fetch_s / fetched_bytes, now)
        self.pause_s.observe(max(pause_s, 0.0), now)


class RunEstimate:
    """A run's groups: tokens per sequence, tokens of the longest sibling on average and at most in
    three of four cases (of the log-normal lengths that answers have), body size."""

    __slots__ = (
        "_body_bytes",
        "_log_longest",
        "_log_squared",
        "_longest",
        "_mean",
        "_prior_tokens",
        "_siblings",
    )

    def __init__(self, max_new_tokens: int, siblings: int) -> None:
        self._prior_tokens = max_new_tokens / 2
        self._siblings = siblings
        self._mean = Ewma(LENGTH_GAIN)
        self._longest = Ewma(LENGTH_GAIN)
        self._log_longest = Ewma(LENGTH_GAIN)
        self._log_squared = Ewma(LENGTH_GAIN)
        self._body_bytes = Ewma(LENGTH_GAIN)

    def group_done(self, lengths: tuple[int, ...], size_bytes: int) -> None:
        self._mean.observe(sum(lengths) / len(lengths))
        self._longest.observe(float(max(lengths)))
        log = math.log(max(1, *lengths))
        self._log_longest.observe(log)
        self._log_squared.observe(log * log)
        self._body_bytes.observe(float(size_bytes))

    @property
    def tokens_mean(self) -> float:
        return self._prior_tokens if self._mean.value is None else self._mean.value

    @property
    def tokens_longest(self) -> float:
        return 2 * self._prior_tokens if self._longest.value is None else self._longest.value

    @property
    def tokens_likely(self) -> float:
        """Three quarters of all groups have a longest sibling of no more."""
        log, squared = self._log_longest.value, self._log_squared.value
        if log is None or squared is None:
            return 2 * self._prior_tokens
        deviation = math.sqrt(max(0.0, squared - log * log))
        return math.exp(log + LIKELY_DEVIATIONS * deviation)

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
