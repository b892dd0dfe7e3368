"""The suite inside pytest: one test per check, one run per class.

A vendor writes three lines::

    from kvtransport_conformance.pytest_plugin import conformance_suite
    from acme_kv.conformance import TARGET

    TestConformance = conformance_suite(TARGET)

or none, and calls ``pytest --pyargs kvtransport_conformance --kvt-backend acme``.
Checks that are not supported or not verified are skipped tests with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtransport_conformance.context import Settings
from kvtransport_conformance.plan import Plan, make_plan
from kvtransport_conformance.render import write_all
from kvtransport_conformance.report import build
from kvtransport_conformance.running import new_seed
from kvtransport_conformance.session import Options, Session
from kvtransport_conformance.statuses import Status
from kvtransport_conformance.target import Target, find_target_reference, target_wire

_SKIPPED = frozenset(
    {Status.NOT_SUPPORTED, Status.NOT_VERIFIED, Status.SKIPPED, Status.WAIVED, Status.NOT_RUN}
)


def conformance_suite(
    target: Target | Callable[[pytest.Config], Mapping[str, Any] | None],
    *,
    profiles: Collection[str] = (),
    checks: Collection[str] = (),
    settings: Settings | None = None,
    name: str = "TestConformance",
) -> type:
    """Return a test class with one test per check of the plan.

    ``target`` is a ``Target``, or a function that makes its description from
    pytest's configuration (None skips the class).  The class has one run: its
    processes live from its first test to its last, and ``--kvt-report`` names a
    folder for its report.
    """
    # The seed of the run itself is chosen when it starts; this plan only names the tests.
    named = make_plan(0, profiles, checks)

    def session(self: object, request: pytest.FixtureRequest) -> Iterator[Session]:
        del self
        wire = target_wire(target) if isinstance(target, Target) else target(request.config)
        if wire is None:
            pytest.skip("no backend named: pass --kvt-backend NAME")
        plan = Plan(named.checks, named.profiles, _seed(request.config))
        with Session(wire, plan, Options(settings=settings or Settings())) as run:
            setup = run.start()
            try:
                if setup.status not in {Status.PASS, Status.NOT_VERIFIED}:
                    why = f"{setup.status} while loading or opening: {setup.why}"
                    pytest.fail(why, pytrace=False)
                yield run
            finally:
                folder = request.config.getoption("--kvt-report", default="")
                if folder:
                    write_all(Path(folder), build(run, complete=True))

    def test_check(self: object, kvt_run: Session, check_id: str) -> None:
        del self
        _judge(kvt_run, check_id)

    body = {
        "__doc__": f"Conformance of {_label(target)}.",
        "kvt_run": pytest.fixture(scope="class", name="kvt_run")(session),
        "test_check": pytest.mark.timeout(0)(
            pytest.mark.parametrize("check_id", sorted(named.checks))(test_check)
        ),
    }
    return type(name, (), body)


def _judge(run: Session, check_id: str) -> None:
    """Run one check; its verdict becomes the test's."""
    result = run.run(run.plan.checks[check_id])
    if result.failed:
        parts = [f"{check_id} {result.status}, teardown {result.teardown}", result.why]
        parts += result.residue
        parts.append(f"repeat: {run.rerun} --check {check_id}")
        pytest.fail("\n".join(filter(None, parts)), pytrace=False)
    if result.status in _SKIPPED:
        pytest.skip(f"{result.status}: {result.why}")


def _label(target: object) -> str:
    return f"backend {target.backend}" if isinstance(target, Target) else "the named backend"


def _seed(config: pytest.Config) -> int:
    seed = config.getoption("--kvt-seed", default=None)
    return new_seed() if seed is None else int(seed)


def named_backend(config: pytest.Config) -> Mapping[str, Any] | None:
    """Describe the backend that the command line names; None without one."""
    backend = config.getoption("--kvt-backend", default="")
    if not backend:
        return None
    options = json.loads(config.getoption("--kvt-config"))
    reference = find_target_reference(backend)
    wire: dict[str, Any] = {"config": options, "peer_config": {}}
    return wire | ({"ref": reference} if reference else {"backend": backend})
