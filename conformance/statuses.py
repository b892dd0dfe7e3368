"""Outcomes of checks and profiles: one word each, used in every artefact.

The words are part of the report format (``schemas/report-1.json``); adding one
is a new schema version.
"""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """What became of one planned check."""

    PASS = "PASS"  # noqa: S105  # a verdict, not a password
    FAIL = "FAIL"
    ERROR = "ERROR"
    """The suite or its harness broke; says nothing about the backend."""
    TIMEOUT = "TIMEOUT"
    """Killed by the watchdog."""
    CRASH = "CRASH"
    """A process died unasked."""
    NOT_SUPPORTED = "NOT_SUPPORTED"
    """Declared absent, and the refusal was verified where one is possible."""
    NOT_VERIFIED = "NOT_VERIFIED"
    """Needs hardware, a hook or rights that are not here."""
    SKIPPED = "SKIPPED"
    """A person asked for it and gave a reason."""
    WAIVED = "WAIVED"
    """Fails, with a known issue and an expiry date."""
    NOT_RUN = "NOT_RUN"
    """In the plan, but no result exists."""


class Teardown(StrEnum):
    """Second grade of a check: what was left behind afterwards."""

    CLEAN = "CLEAN"
    LEAK = "LEAK"
    """Descriptors, threads, mappings, shared memory or regions stayed."""
    UNCLEAN = "UNCLEAN"
    """Nothing leaked, but closing complained or a warning was logged."""
    UNKNOWN = "UNKNOWN"
    """The processes were gone before anybody could look."""


class Outcome(StrEnum):
    """Result of a profile."""

    SUCCESS = "success"
    FAILURE = "failure"
    PARTIAL = "partial"
    NOT_VERIFIED = "not_verified"
    REFUSED = "refused"
    """The profile's capability is declared absent and its use was refused cleanly."""


FAILING = frozenset({Status.FAIL, Status.ERROR, Status.TIMEOUT, Status.CRASH})
"""Statuses that make a profile ``failure``."""
