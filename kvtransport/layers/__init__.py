"""Backends that wrap a backend: faults, checksums, staging."""
