"""The result of one check, as the controller keeps it and the report shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Any

from kvtransport_conformance.statuses import FAILING, Status, Teardown


@dataclass(frozen=True, slots=True)
class CheckResult:
    """``why`` points at the cause of anything but PASS; ``detail`` holds numbers."""

    status: Status
    teardown: Teardown = Teardown.CLEAN
    seconds: float = 0.0
    why: str = ""
    residue: tuple[str, ...] = ()
    detail: dict[str, Any] = field(default_factory=dict)
    logs: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.status in FAILING or self.teardown is Teardown.LEAK

    def wire(self, level: str, revision: int) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "status": self.status.value,
            "teardown": self.teardown.value,
            "seconds": round(self.seconds, 3),
            "level": level,
            "revision": revision,
        }
        optional = {
            "why": self.why,
            "residue": list(self.residue),
            "detail": self.detail,
            "logs": list(self.logs),
        }
        return entry | {key: value for key, value in optional.items() if value}


@dataclass(frozen=True, slots=True)
class Waiver:
    """A known issue: ``url`` describes it, ``until`` ends the excuse."""

    url: str
    until: date

    def apply(self, result: CheckResult, today: date) -> CheckResult:
        """Excuse a failure; turn an unexpected pass into one."""
        if today > self.until:
            return result
        if not result.failed and result.status is Status.PASS:
            return CheckResult(
                Status.FAIL,
                result.teardown,
                result.seconds,
                f"passes although waived ({self.url}): remove the waiver",
            )
        if result.failed:
            why = result.why or f"{result.teardown}: {', '.join(result.residue)}"
            why = f"{self.url} until {self.until.isoformat()}: {why}"
            # A known leak is excused like a known failure; ``why`` keeps what it was.
            return CheckResult(Status.WAIVED, Teardown.UNKNOWN, result.seconds, why)
        return result
