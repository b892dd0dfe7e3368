from __future__ import annotations

import pytest

from kvtransport.errors import ConfigError
from kvtransport_conformance import profiles, refusals, registry
from kvtransport_conformance.flags import BY_KEY
from kvtransport_conformance.plan import make_plan
from kvtransport_conformance.registry import all_checks, check

CHECKS = all_checks()


def test_the_catalogue_is_whole():
    counts = {"REG": 12, "DSC": 10, "WR": 5, "RD": 6, "CMP": 10, "NTF": 10, "MD": 13, "ORD": 5,
              "CON": 10, "CAN": 6, "PD": 7, "TD": 8, "SEC": 8, "INT": 5, "DEV": 2, "PRF": 7,
              "KVX": 5}  # fmt: skip
    for group, count in counts.items():
        ids = [key for key in CHECKS if key.startswith(f"{group}-")]
        assert ids == [f"{group}-{number:02d}" for number in range(1, count + 1)]
    assert len(CHECKS) == sum(counts.values()) == 129
    assert sum(entry.first_release for entry in CHECKS.values()) == 59


@pytest.mark.parametrize("key", CHECKS)
def test_every_check_says_what_it_needs(key):
    entry = CHECKS[key]
    assert len(entry.text) > 20
    assert entry.text.endswith(".")
    assert set(entry.needs) <= {*BY_KEY, "op"}
    assert entry.timeout_s <= 300


def test_whatever_can_be_refused_has_a_probe():
    refusable = {flag.key for flag in BY_KEY.values() if flag.refusable}
    assert refusable <= set(refusals._PROBES)


def test_default_plan_holds_what_runs_on_host_memory():
    plan = make_plan(1)
    missing = set(CHECKS) - set(plan.checks)
    assert all(key.split("-")[0] in {"KVX", "DEV", "CON", "TD"} for key in missing)
    # What remains is for devices only, and said so by its profile.
    assert all(set(CHECKS[key].profiles) <= {"KVT-VLLM", "KVT-DEVICE"} for key in missing)


def test_order_follows_from_the_seed():
    first, second = ([entry.id for entry in make_plan(seed).order] for seed in (5, 5))
    other = [entry.id for entry in make_plan(6).order]
    assert first == second != other
    assert sorted(first) == sorted(other)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"profiles": ["KVT-NOPE"]}, "KVT-NOPE"),
        ({"ids": ["ZZZ-01"]}, "ZZZ-01"),
    ],
)
def test_unknown_names_are_refused(bad, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(1, **bad)


def test_a_broken_registration_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "_CHECKS", dict(registry._CHECKS))

    def silent(ctx): ...

    with pytest.raises(ValueError, match="docstring"):
        check("ABC-01", level="core", profiles=["KVT-BASE"])(silent)
    silent.__doc__ = "Says something."
    with pytest.raises(ValueError, match="must look like"):
        check("abc", level="core", profiles=["KVT-BASE"])(silent)
    with pytest.raises(ValueError, match="twice"):
        check("REG-01", level="core", profiles=["KVT-BASE"])(silent)
    with pytest.raises(ValueError, match="KVT-X"):
        check("ABC-01", level="core", profiles=["KVT-X"])(silent)
    assert profiles.PROFILES
