"""Settings, clocks, logs and shutdown: what any daemon needs to start."""
