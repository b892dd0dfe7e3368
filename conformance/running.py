"""One run from start to report, for whoever watches it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from kvtransport_conformance.registry import Check
from kvtransport_conformance.render import write_all
from kvtransport_conformance.report import Report, build, write
from kvtransport_conformance.results import CheckResult
from kvtransport_conformance.session import Session

SEEDS = 100_000


def new_seed() -> int:
    """A seed that a person can type again."""
    return random.SystemRandom().randrange(SEEDS)


def run_all(
    session: Session,
    folder: Path | None,
    begin: Callable[[Check], None],
    end: Callable[[Check, CheckResult], None],
) -> Report:
    """Run the whole plan; write the report after every check when ``folder`` is given.

    Until the last write the report says that it is incomplete, so that a run
    which is killed leaves an honest one.
    """
    session.start()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for check in session.plan.order:
        if folder is not None:
            write(folder / "report.json", build(session, complete=False))
        begin(check)
        end(check, session.run(check))
    report = build(session, complete=True)
    if folder is not None:
        write_all(folder, report)
    return report
