"""kvtransport inside vLLM: connector, router and launch helpers."""
