"""Weight deltas and snapshots: codec, digest, file format and manifest."""
