"""What the demo's numbers say, as sentences that can be false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from run import Result

_EXPECTED_SPEEDUP = 1.5


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement; ``required`` ones decide the exit code."""

    text: str
    holds: bool
    required: bool = True


def speedup(results: Sequence[Result]) -> float:
    """Time to first token without reuse over that with reuse, turns 2 to 4 together."""
    later = [each for each in results[1:] if not each.turn.edits_history]
    return sum(each.off.ttft_s for each in later) / sum(each.on.ttft_s for each in later)


def findings(results: Sequence[Result]) -> list[Finding]:
    """Judge a complete run."""
    later = [each for each in results[1:] if not each.turn.edits_history]
    (changed,) = (each for each in results if each.turn.edits_history)
    different = [each.turn.title for each in results if not each.same]
    ratio = speedup(results)
    pulled = changed.on.tokens("pulled")
    return [
        Finding(
            "same answers" if not different else f"DIFFERENT ANSWERS in {', '.join(different)}",
            not different,
        ),
        Finding(
            "history was pulled back from the decode engine on turns 2 to 4",
            all(each.on.tokens("pulled") > 0 for each in later),
        ),
        Finding(
            f"after the edit only what had not changed was reused: {pulled:,} tokens pulled, "
            f"{changed.unchanged_tokens:,} unchanged",
            0 < pulled <= changed.unchanged_tokens,
        ),
        Finding(
            f"time to first token of turns 2 to 4 is {ratio:.1f}x lower with reuse "
            f"(expected: {_EXPECTED_SPEEDUP}x or more)",
            ratio >= _EXPECTED_SPEEDUP,
            required=False,
        ),
    ]
