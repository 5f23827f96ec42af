"""The edge agent: generates rollouts on a remote box and streams them back."""

__project__ = "farflow"
