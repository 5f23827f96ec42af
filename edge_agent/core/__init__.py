"""Pure decisions of the edge agent: events in, effects out, no input or output."""
