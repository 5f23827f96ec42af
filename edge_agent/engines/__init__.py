"""Generation engines behind one protocol."""
