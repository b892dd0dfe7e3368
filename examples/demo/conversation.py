"""What is said in the demo: a long system prompt and four short questions.

The system prompt is the handbook of an invented railway, about 1,600 tokens for
SmolLM2, so that computing it again costs something.
"""

from __future__ import annotations

from dataclasses import dataclass

Message = dict[str, str]

_STOPS = (
    "Aldermoor", "Birchgate", "Cobble Quay", "Dunmere", "Eastern Locks", "Fennel Hill",
    "Grey Harbour", "Hollow Bridge", "Ivy Mill", "Juniper Flats", "Kestrel Point", "Lantern Bay",
    "Mossley Junction", "Northern Weir", "Old Quarry", "Pilgrim's Rest", "Quillon Abbey",
    "Rookery Lane", "Saltmarsh", "Tamarind Road", "Underhill", "Vesper Cross", "Willow Dock",
    "Yarrow Heath",
)  # fmt: skip
_SIGHTS = (
    "a lighthouse that is open on Sundays",
    "a market hall with a glass roof",
    "a botanical garden with a fern house",
    "a boatyard where visitors may watch",
    "a clock museum in the former depot",
    "a walking path along the old canal",
)
_BEFORE = (
    "You are a helpful assistant at a railway information desk. "
    "Here is what you know about the stops.\n\n"
)
_AFTER = "\n\nUse what you know to help travellers. Answer politely in one or two short sentences."


def system_prompt() -> str:
    """The handbook; the same text in every run."""
    return _BEFORE + "\n".join(_stop(number) for number in range(1, len(_STOPS) + 1)) + _AFTER


def _stop(number: int) -> str:
    name = _STOPS[number - 1]
    return (
        f"{name}: stop {number}, {number * 7 - 4} minutes from the terminus, "
        f"opened in {1872 + number * 3}. {2 + number % 3} platforms, "
        f"{'ticket office' if number % 2 else 'ticket machines only'}. "
        f"Nearby: {_SIGHTS[number % len(_SIGHTS)]}. "
        f"The volunteers of {name} keep the station garden and meet on the "
        f"{('first', 'second', 'third')[number % 3]} Saturday of the month."
    )


QUESTIONS = (
    "Hello! Who are you, and what can you help me with?",
    "Where can I see boats near the railway?",
    "Can I bring my bicycle on the train?",
    "Please give me three tips for a day trip by train.",
)
EDITED = 1
"""Index of the question that the edited turn changes in the history."""
EDITED_QUESTION = "Where can I see gardens near the railway?"
LAST_QUESTION = "Thank you! Is there anything else that I should see?"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the demo, before it is asked."""

    title: str
    question: str
    edits_history: bool = False


TURNS = (
    *(Turn(f"turn {number}", text) for number, text in enumerate(QUESTIONS, 1)),
    Turn("edited", LAST_QUESTION, edits_history=True),
)


def edited(history: list[Message]) -> list[Message]:
    """The history with one earlier question replaced, answers as they were."""
    changed = [dict(message) for message in history]
    changed[1 + 2 * EDITED]["content"] = EDITED_QUESTION
    return changed
