"""Pure decisions of the rollout scheduler: events in, effects out, no input or output."""
