"""The cloud trainer: learns one policy from trajectories and publishes its versions."""

__project__ = "farflow"
