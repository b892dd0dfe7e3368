"""Backends that ship with kvtransport, one folder each."""
