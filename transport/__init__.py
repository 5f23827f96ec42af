"""What both ends of a wire share: identifiers, messages, frames, codecs and links."""

__project__ = "farflow"
