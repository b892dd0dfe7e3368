"""Who may read which KV, and until when."""
