"""How long to retain KV, and whether to pull or recompute it."""
