"""A conformance suite that every kvtransport backend passes."""
