"""The submitters of the lease bench: jobs go in at a rate or by a window, results come out.

What always holds: a job counts as done when its result was read here, and every result is confirmed
by the next request for more; nothing is submitted twice.
"""

import time
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from bench.leases_world import RUN
from transport.envelope import encode
from transport.keys import KeyPair
from transport.messages import (
    KINDS,
    ExternalJob,
    Item,
    JobReceipts,
    JobSubmit,
    Message,
    Results,
    ResultsRequest,
)

TURN_S: Final = 0.002
JOBS_PER_MESSAGE: Final = 256
RESULTS_PER_REQUEST: Final = 256
WAIT_S: Final = 5.0
PILED_UP: Final = 16 * JOBS_PER_MESSAGE
"""Jobs without a receipt yet."""
PROMPT: Final = "How many of the following numbers are prime? " * 8
"""360 characters."""


class Served(NamedTuple):
    """Of one phase: jobs confirmed per second in its measured part, jobs that were refused, and
    the longest time without any result."""

    jobs_s: float
    done: int
    refused: int
    open_jobs: int


class _Result(msgspec.Struct):
    number: int
    state: str


class _Results(msgspec.Struct):
    results: list[_Result]


_RESULTS = msgspec.msgpack.Decoder(_Results).decode


class _Submitter:
    def __init__(
        self, context: "zmq.Context[Any]", endpoint: str, server_key: str, key: KeyPair
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public_key.encode())
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret_key.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)
        self.after = 0
        self.submitted = 0
        self.done = 0
        self.refused = 0
        self.received = 0
        self.states: dict[str, int] = {}

    def say(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def submit(self, count: int) -> None:
        """``count`` new jobs, stamped with the time."""
        while count > 0:
            some = min(count, JOBS_PER_MESSAGE)
            now_ns = time.monotonic_ns()
            jobs = tuple(
                ExternalJob(
                    id=f"{now_ns}-{number}",
                    items=(Item(index=number, prompt=PROMPT, answer="5"),),
                )
                for number in range(self.submitted, self.submitted + some)
            )
            self.say(JobSubmit(run=RUN, jobs=jobs))
            self.submitted += some
            count -= some

    def ask(self) -> None:
        self.say(ResultsRequest(after=self.after, limit=RESULTS_PER_REQUEST, wait_s=WAIT_S))

    def hear(self) -> None:
        """Take what is there; asking for more confirms what came."""
        while True:
            try:
                prefix, header = self.socket.recv_multipart(zmq.NOBLOCK)[:2]
            except zmq.Again:
                return
            kind = KINDS[prefix[1]]
            if kind is Results:
                results = _RESULTS(header).results
                if results:
                    self.after = results[-1].number
                self.done += len(results)
                for result in results:
                    self.states[result.state] = self.states.get(result.state, 0) + 1
                self.ask()
            elif kind is JobReceipts:
                receipts = msgspec.msgpack.decode(header, type=JobReceipts).receipts
                self.received += len(receipts)
                self.refused += sum(receipt.state == "refused" for receipt in receipts)


class Load:
    """All submitters."""

    def __init__(self, endpoint: str, server_key: str, keys: list[KeyPair]) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._submitters = [_Submitter(self._context, endpoint, server_key, key) for key in keys]
        for submitter in self._submitters:
            submitter.ask()
        self._turn = 0

    @property
    def done(self) -> int:
        return sum(submitter.done for submitter in self._submitters)

    @property
    def open_jobs(self) -> int:
        return sum(s.submitted - s.done - s.refused for s in self._submitters)

    @property
    def received(self) -> int:
        return sum(submitter.received for submitter in self._submitters)

    @property
    def refused(self) -> int:
        return sum(submitter.refused for submitter in self._submitters)

    def at_rate(self, jobs_s: float, seconds: float) -> Served:
        """Submit evenly, whatever comes back."""
        began = time.monotonic()
        submitted = 0

        def wanted() -> int:
            nonlocal submitted
            due = int(jobs_s * (time.monotonic() - began)) - submitted
            submitted += due
            return due

        return self._serve(wanted, seconds)

    def by_window(self, window: int, seconds: float) -> Served:
        """Keep so many jobs open."""
        return self._serve(lambda: window - self.open_jobs, seconds)

    def pile_up(self, count: int, seconds: float) -> int:
        """Submit ``count`` jobs as fast as they are taken; how many were within ``seconds``."""
        until = time.monotonic() + seconds
        left = count
        while self.received < count and time.monotonic() < until:
            unanswered = count - left - self.received
            some = min(left, PILED_UP - unanswered)
            if some >= min(left, JOBS_PER_MESSAGE) > 0:
                self._submitters[self._turn % len(self._submitters)].submit(some)
                self._turn += 1
                left -= some
            self._once()
        return self.received - self.refused

    def drain(self, seconds: float) -> int:
        """Submit nothing; how many are open after at most so long."""
        until = time.monotonic() + seconds
        while self.open_jobs and time.monotonic() < until:
            self._once()
        return self.open_jobs

    def close(self) -> None:
        self._context.destroy(0)

    def _serve(self, wanted: Any, seconds: float) -> Served:
        done, refused = self.done, self.refused
        began = time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            count = wanted()
            if count > 0:
                self._submitters[self._turn % len(self._submitters)].submit(count)
                self._turn += 1
            self._once()
        took_s = now - began
        served = self.done - done
        return Served(served / took_s, served, self.refused - refused, self.open_jobs)

    def _once(self) -> None:
        for submitter in self._submitters:
            submitter.hear()
        time.sleep(TURN_S)
