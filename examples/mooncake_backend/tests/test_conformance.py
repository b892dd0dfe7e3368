"""The whole conformance suite: ``pytest examples/mooncake_backend``."""

from kvtransport_conformance import Target
from kvtransport_conformance.pytest_plugin import conformance_suite

TARGET = Target(backend="mooncake")

TestConformance = conformance_suite(TARGET, profiles=["KVT-BASE", "KVT-READ"])
