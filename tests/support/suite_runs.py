"""Small runs of the conformance suite, for its own tests."""

from __future__ import annotations

from pathlib import Path

from kvtransport_conformance.context import Settings
from kvtransport_conformance.plan import make_plan
from kvtransport_conformance.report import build
from kvtransport_conformance.session import Options, Session

BROKEN = Path(__file__).parent / "broken_backends.py"
SMALL = Settings(soak_s=0.5, rounds=500, max_bytes=8 << 20, watch_s=0.3)
HOST = {"backend": "host", "config": {}, "peer_config": {}}


def run_checks(wire, ids=(), profiles=(), **options):
    """Run a plan; return its report."""
    plan = make_plan(7, profiles=profiles, ids=ids)
    with Session(wire, plan, Options(settings=SMALL, **options)) as session:
        session.start()
        for check in plan.order:
            session.run(check)
        return build(session, complete=True)


def broken(name):
    """The wire form of a backend of ``broken_backends.py``."""
    return {"backend": f"{BROKEN}:{name}", "config": {}, "peer_config": {}}
