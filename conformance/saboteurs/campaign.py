"""Runs saboteurs and says whether each was caught by exactly the checks it names.

The quick campaign runs, per saboteur, the checks that it names and a control
sample that must stay green.  The full one runs every check and compares the sets
exactly; it takes about 100 minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from kvtransport.errors import ConfigError
from kvtransport_conformance.context import Settings
from kvtransport_conformance.plan import make_plan
from kvtransport_conformance.registry import all_checks
from kvtransport_conformance.results import CheckResult
from kvtransport_conformance.saboteurs.base import Saboteur, all_saboteurs
from kvtransport_conformance.session import Options, Session
from kvtransport_conformance.statuses import Status

CONTROL = ("REG-02", "DSC-01", "DSC-06", "WR-03", "CMP-08", "MD-01", "MD-04", "ORD-02", "TD-06")
"""Cheap checks of many groups; whichever a saboteur names are left out of its sample."""

CANNOT_FAIL: Mapping[str, str] = {
    "DEV-02": "not written yet",
    "KVX-01": "needs engines",
    "KVX-02": "needs engines",
    "KVX-03": "needs engines",
    "KVX-04": "needs engines",
    "KVX-05": "needs engines",
}
"""Checks that no saboteur can fail here, because they can only be NOT_VERIFIED here."""

SMALL = Settings(soak_s=1.0, rounds=1000, max_bytes=16 << 20, watch_s=0.4)
"""Enough for every fault; the figures of real runs need real sizes."""

_GROUPS = ("REG", "DSC", "WR", "RD", "CMP", "NTF", "MD", "ORD", "CON", "CAN", "PD", "TD", "SEC",
           "INT")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of one saboteur."""

    saboteur: Saboteur
    results: Mapping[str, CheckResult]

    @property
    def failed(self) -> set[str]:
        return {key for key, result in self.results.items() if result.failed}

    @property
    def missed(self) -> set[str]:
        """Named checks that did not fail."""
        return set(self.saboteur.caught_by) - self.failed

    @property
    def surprising(self) -> set[str]:
        """Checks that failed without being named."""
        return self.failed - set(self.saboteur.caught_by) - set(self.saboteur.perhaps)


def face(saboteur: Saboteur, *, full: bool, seed: int = 1) -> Caught:
    """Run one saboteur against its checks and the control sample, or against all."""
    sample = set(make_plan(seed).checks) if full else set(CONTROL) - set(saboteur.perhaps)
    plan = make_plan(seed, ids=sorted(sample | set(saboteur.caught_by)))
    options = Options(settings=SMALL, budget_s=3600.0)
    with Session(saboteur.wire(), plan, options) as session:
        session.start()
        return Caught(saboteur, {check.id: session.run(check) for check in plan.order})


def uncovered() -> set[str]:
    """Checks that no saboteur names, apart from those that cannot fail here."""
    named = {key for entry in all_saboteurs().values() for key in entry.caught_by}
    return set(all_checks()) - named - set(CANNOT_FAIL)


def campaign(
    console: Console, *, names: Sequence[str] = (), seed: int = 1, full: bool = False
) -> bool:
    """Face the saboteurs, print the matrix; return whether all were caught exactly."""
    known = all_saboteurs()
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"no saboteur {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    chosen = [known[name] for name in names or sorted(known)]
    console.print(_line("", dict.fromkeys(_GROUPS, "")), highlight=False, soft_wrap=True)
    sound = True
    for entry in chosen:
        caught = face(entry, full=full, seed=seed)
        console.print(_row(caught), highlight=False, soft_wrap=True)
        for what, ids in (("not caught by", caught.missed), ("also failed", caught.surprising)):
            if ids:
                sound = False
                console.print(f"    {what}: {', '.join(sorted(ids))}", highlight=False)
    open_checks = uncovered()
    if open_checks and not names:
        sound = False
        console.print(f"checks that no saboteur fails: {', '.join(sorted(open_checks))}")
    console.print(f"{len(chosen)} saboteurs, {'all caught' if sound else 'NOT ALL CAUGHT EXACTLY'}")
    return sound


def _row(caught: Caught) -> str:
    words = {}
    for group in _GROUPS:
        mine = [result for key, result in caught.results.items() if key.startswith(f"{group}-")]
        words[group] = _word(mine)
    return _line(caught.saboteur.name, words)


def _word(results: Collection[CheckResult]) -> str:
    order: Sequence[tuple[str, Callable[[CheckResult], bool]]] = (
        ("FAIL", lambda result: result.failed),
        ("PASS", lambda result: result.status is Status.PASS),
        ("NOT_SUP", lambda result: result.status is Status.NOT_SUPPORTED),
    )
    return next((word for word, test in order if any(map(test, results))), ".")


def _line(name: str, words: Mapping[str, str]) -> str:
    cells = [f"{(word or key):<8}" for key, word in words.items()]
    return f"{name:<26}" + "".join(cells).rstrip()
