"""Where a token's KV lies, and which descriptors move it."""
