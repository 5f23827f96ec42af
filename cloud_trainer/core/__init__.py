"""Pure decisions of the trainer: events in, effects out, no input or output."""
