"""A run: one target, one plan, one report; the controller's side of everything.

Architecture
    ``start`` loads the target in child processes and learns what it declares;
    ``run`` executes one planned check under its watchdog; ``report`` assembles
    what is known so far.  This process never imports the backend.

State after failure
    Whatever a backend does to the children, the session goes on: the pair is
    replaced and the next check runs.  A backend that cannot even be opened
    leaves every check ``NOT_RUN`` and the profiles ``failure``.
"""

from __future__ import annotations

import json
import shlex
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Any, Self

from kvtransport.errors import ConfigError
from kvtransport_conformance.context import Settings
from kvtransport_conformance.pair import ChildDied, ChildFailed, ChildHung, Graded, Pair
from kvtransport_conformance.plan import Plan
from kvtransport_conformance.procs import Launch
from kvtransport_conformance.registry import Check
from kvtransport_conformance.results import CheckResult, Waiver
from kvtransport_conformance.statuses import Status, Teardown
from kvtransport_conformance.warmup import WARM_UP

MAX_LOGS = 20


def no_network(fault: str) -> bool | None:
    """Network faults of a run without namespaces of its own: there are none."""
    del fault
    return None


@dataclass(frozen=True, slots=True)
class Options:
    """How a run is done; ``budget_s`` ends it, ``start_s`` bounds loading and opening.

    ``watchdog_scale`` multiplies every check's time limit, for slow machines.
    """

    settings: Settings = field(default_factory=Settings)
    local_prefix: tuple[str, ...] = ()
    peer_prefix: tuple[str, ...] = ()
    peer_python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    budget_s: float = 900.0
    start_s: float = 60.0
    watchdog_scale: float = 1.0
    skips: Mapping[str, str] = field(default_factory=dict)
    waivers: Mapping[str, Waiver] = field(default_factory=dict)
    network: Callable[[str], bool | None] = no_network
    asked: Mapping[str, Any] | None = None
    """The target as a person wrote it, when placing it changed its options."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What became of loading and opening: ``status`` is PASS, NOT_VERIFIED or a failure."""

    status: Status
    why: str = ""


class Session:
    """One run of a plan against a target; a context manager that ends all children.

    Not thread-safe.
    """

    def __init__(self, target: Mapping[str, Any], plan: Plan, options: Options) -> None:
        self.target = dict(target)
        self.plan = plan
        self.options = options
        self.facts: dict[str, Any] = {}
        self.setup = Setup(Status.NOT_RUN, "the run did not begin")
        self.results: dict[str, CheckResult] = {}
        self.counters: Counter[str] = Counter()
        self.moved = 0
        self._folder = tempfile.TemporaryDirectory(prefix="kvt-conformance-")
        self._launch = Launch(
            logs=Path(self._folder.name),
            local_prefix=options.local_prefix,
            peer_prefix=options.peer_prefix,
            peer_python=options.peer_python,
            environment=dict(options.environment),
        )
        self._pair: Pair | None = None
        self._began = time.monotonic()

    @property
    def request_settings(self) -> Mapping[str, Any]:
        """Sizes of this run, for the report."""
        return asdict(self.options.settings)

    @property
    def rerun(self) -> str:
        """The command that repeats this run; a file of waivers has to be named again."""
        asked = self.options.asked or self.target
        words = ["kvt", "conformance", "run"]
        ref = asked.get("ref")
        words += ["--target", ref] if ref else ["--backend", asked["backend"]]
        words += self.plan.words
        for key, flag in (("config", "--config"), ("peer_config", "--peer-config")):
            if asked.get(key):
                words += [flag, json.dumps(asked[key], sort_keys=True)]
        if self.options.asked:
            words += ["--netns", *self._settings_words()]
            return shlex.join([*words, "--seed", str(self.plan.seed)])
        for prefix, flag in (
            (self.options.local_prefix, "--local-prefix"),
            (self.options.peer_prefix, "--peer-prefix"),
        ):
            words += [flag, shlex.join(prefix)] if prefix else []
        return shlex.join([*words, *self._settings_words(), "--seed", str(self.plan.seed)])

    def _settings_words(self) -> list[str]:
        """Options of ``kvt conformance run`` that are not at their defaults."""
        options, usual = self.options, Options()
        settings, words = options.settings, []
        for flag, value, default in (
            ("--rounds", settings.rounds, usual.settings.rounds),
            ("--soak-s", settings.soak_s, usual.settings.soak_s),
            ("--max-mib", settings.max_bytes >> 20, usual.settings.max_bytes >> 20),
            ("--budget-s", options.budget_s, usual.budget_s),
            ("--start-s", options.start_s, usual.start_s),
            ("--watchdog", options.watchdog_scale, usual.watchdog_scale),
            ("--peer-python", options.peer_python, usual.peer_python),
        ):
            words += [] if value == default else [flag, str(value)]
        for key, reason in sorted(options.skips.items()):
            words += ["--skip", f"{key}={reason}"]
        return words

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every child process; idempotent."""
        if self._pair is not None:
            self._pair.end()
            self._pair = None
        self._folder.cleanup()

    # Setting up -----------------------------------------------------------------------

    def start(self) -> Setup:
        """Load and open the target once; every later check relies on its facts.

        Raises ``ConfigError`` when there is no such backend, target or option.
        """
        pair = self._new_pair()
        try:
            self.facts = pair.start()
            self.setup = self._open(pair)
        except ChildFailed as error:
            pair.end()
            self.setup = self._refused(error)
        except ChildDied as error:
            self.setup = Setup(Status.CRASH, f"while loading or opening the backend: {error}")
        except ChildHung as error:
            self.setup = Setup(Status.TIMEOUT, f"loading or opening never ended: {error}")
        if self.setup.status is Status.PASS:
            self._pair = pair
        else:
            pair.end()
        return self.setup

    def _new_pair(self) -> Pair:
        return Pair(self._launch, self.target, self.options.start_s, self.options.network)

    def _open(self, pair: Pair) -> Setup:
        probe = self.facts["probe"]
        if not probe["available"]:
            return Setup(Status.NOT_VERIFIED, f"{probe['reason']}. {probe['hint']}".strip())
        self._make_ready(pair)
        return Setup(Status.PASS)

    def _make_ready(self, pair: Pair) -> None:
        """Open, move a few bytes and close once, then take the baseline."""
        pair.on_both("warm_up")
        pair.run(self._request(WARM_UP), WARM_UP.timeout_s * self.options.watchdog_scale)
        pair.grade()
        pair.usable = True
        pair.on_both("baseline")

    @staticmethod
    def _refused(error: ChildFailed) -> Setup:
        kind, message = error.described["type"], error.described["message"]
        if kind == "BackendUnavailableError":
            return Setup(Status.NOT_VERIFIED, message)
        if kind in {"ConfigError", "UnknownBackendError", "UnknownOptionError"}:
            raise ConfigError(message)
        return Setup(Status.FAIL, f"{error}\n{error.traceback}".strip())

    def _ready_pair(self) -> Pair:
        if self._pair is not None and self._pair.usable:
            return self._pair
        if self._pair is not None:
            self._pair.end()
        self._pair = self._new_pair()
        self._pair.start()
        self._make_ready(self._pair)
        return self._pair

    # Running ----------------------------------------------------------------------------

    def run(self, check: Check) -> CheckResult:
        """Run one check of the plan and keep its result."""
        result = self._without_running(check) or self._run(check)
        waiver = self.options.waivers.get(check.id)
        if waiver is not None:
            from datetime import datetime

            result = waiver.apply(result, datetime.now(UTC).date())
        self.results[check.id] = result
        return result

    def _without_running(self, check: Check) -> CheckResult | None:
        if check.id in self.options.skips:
            return CheckResult(Status.SKIPPED, why=self.options.skips[check.id])
        if self.setup.status is Status.NOT_VERIFIED:
            return CheckResult(Status.NOT_VERIFIED, Teardown.UNKNOWN, why=self.setup.why)
        if self.setup.status is not Status.PASS:
            why = f"the backend was never opened: {self.setup.why}"
            return CheckResult(Status.NOT_RUN, Teardown.UNKNOWN, why=why)
        if time.monotonic() - self._began > self.options.budget_s:
            why = f"the run's budget of {self.options.budget_s:g} s was used up"
            return CheckResult(Status.NOT_RUN, Teardown.UNKNOWN, why=why)
        return None

    def _run(self, check: Check) -> CheckResult:
        began = time.monotonic()
        try:
            pair = self._ready_pair()
            verdict = pair.run(self._request(check), check.timeout_s * self.options.watchdog_scale)
        except ChildDied as error:
            return self._lost(Status.CRASH, str(error), began)
        except ChildHung as error:
            why = f"killed after {time.monotonic() - began:.0f} s, {error}"
            return self._lost(Status.TIMEOUT, why, began)
        except ChildFailed as error:
            return self._lost(Status.FAIL, f"opening the backend again: {error}", began)
        if check.fresh:
            pair.usable = False
        return self._graded(check, pair, verdict)

    def _request(self, check: Check) -> dict[str, Any]:
        return {
            "check": check.id,
            "caps": self.facts["capabilities"],
            "seed": (self.plan.seed << 32) ^ zlib.crc32(check.id.encode()),
            "settings": asdict(self.options.settings),
        }

    def _lost(self, status: Status, why: str, began: float) -> CheckResult:
        """The processes are gone: no verdict of the check, no look at what it left."""
        if self._pair is not None:
            self._pair.end()
            self._pair = None
        return CheckResult(status, Teardown.UNKNOWN, time.monotonic() - began, why)

    def _graded(self, check: Check, pair: Pair, verdict: Mapping[str, Any]) -> CheckResult:
        status, why = Status(verdict["status"]), str(verdict["why"])
        if verdict["deaths"]:
            status, why = Status.CRASH, "; ".join([*verdict["deaths"], why]).strip("; ")
        usable = pair.usable
        try:
            graded = pair.grade()
        except (ChildDied, ChildHung, ChildFailed) as error:
            pair.usable = False
            if status is Status.PASS:
                status = Status.TIMEOUT if isinstance(error, ChildHung) else Status.CRASH
                why = f"while cleaning up: {error}"
            return CheckResult(
                status, Teardown.UNKNOWN, verdict["seconds"], why, detail=verdict["detail"]
            )
        pair.usable = pair.usable and usable
        self.counters.update(graded.counters)
        self.moved += graded.moved
        teardown = _teardown(check, graded)
        words = (*graded.complaints, *graded.logs)[:MAX_LOGS]
        return CheckResult(
            status,
            teardown,
            float(verdict["seconds"]),
            why,
            tuple(graded.residue),
            verdict["detail"],
            () if status is Status.PASS and teardown is Teardown.CLEAN else words,
        )


def _teardown(check: Check, graded: Graded) -> Teardown:
    if graded.residue:
        return Teardown.LEAK
    if graded.complaints and not check.noisy:
        return Teardown.UNCLEAN
    return Teardown.CLEAN if check.noisy or not graded.logs else Teardown.UNCLEAN
