"""Collected by ``pytest --pyargs kvtransport_conformance --kvt-backend NAME``."""

from __future__ import annotations

from kvtransport_conformance.pytest_plugin import conformance_suite, named_backend

TestConformance = conformance_suite(named_backend)
