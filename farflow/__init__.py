"""The front door: one command, everything on one machine, and the live view."""

__project__ = "farflow"
