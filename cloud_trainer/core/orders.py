"""What the scheduler wants of us: which run, how far, and whether to go on.

What always holds: the run never changes under a trainer; stopping and leaving are never taken
back; pausing is.
"""

from transport.ids import policy_name
from transport.messages import Welcome
from transport.runs import PolicySpec, RunSpec


class Orders:
    """The run of ``policy`` and its state."""

    def __init__(self, policy: str) -> None:
        self.run: RunSpec | None = None
        self.spec = PolicySpec(model="")
        self.paused = False
        self.stopping = False
        self.leaving = False
        self._policy = policy

    def welcomed(self, message: Welcome) -> tuple[str, str] | None:
        """Take the run of a ``Welcome``; code and text when this trainer is not part of it."""
        run = message.run
        spec = None if run is None else run.policies.get(policy_name(self._policy))
        if run is None or spec is None or not spec.trained:
            return "run.unknown", f"the scheduler has no run that trains {self._policy}"
        if self.run is not None and self.run != run:
            text = f"run {run.name} is now another one under the same name; start a new trainer"
            return "run.changed", text
        self.run, self.spec = run, spec
        # Whether it is paused now is not said here; while it is, nothing is granted anyway.
        self.paused = False
        self.stopping = self.stopping or message.stopping
        return None

    def concerns(self, run: str) -> bool:
        return self.run is not None and self.run.name == run

    def state(self, state: str) -> None:
        """The run was paused, resumed, stopped or is over; then we leave."""
        self.paused = state == "paused"
        self.stopping = self.stopping or state == "stopping"
        self.leaving = self.leaving or state == "finished"

    def ending(self, step: int) -> bool:
        """Whether no step is to be started after ``step``."""
        return self.leaving or self.stopping or step >= self.spec.steps

    def checkpoint_due(self, step: int) -> bool:
        return step % self.spec.checkpoint_every == 0 or step >= self.spec.steps
