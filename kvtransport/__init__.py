"""KV cache transfer for any accelerator: interface, leases, layout and policies."""
