"""The rollout scheduler: decides which edge agent works on what, and keeps the books."""

__project__ = "farflow"
