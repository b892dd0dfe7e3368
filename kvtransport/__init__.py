"""Accelerator-agnostic KV cache transfer: interface, leases, layout and policies."""
