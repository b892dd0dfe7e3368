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
_RULES = (
    "Answer in one or two short, friendly sentences.",
    "Name stops exactly as the list below names them.",
    "If a traveller asks for something that the list does not say, tell them to ask the staff.",
    "Trains run every twenty minutes from six in the morning until eleven at night.",
    "Bicycles travel free outside the rush hours; dogs travel free at any time.",
)


def system_prompt() -> str:
    """The handbook; the same text in every run."""
    lines = ["You are the information desk of the Harbour and Hills Railway.", *_RULES, ""]
    for number, stop in enumerate(_STOPS, 1):
        lines.append(
            f"Stop {number} is {stop}, {number * 7 - 4} minutes from the terminus, opened in "
            f"{1872 + number * 3}. It has {2 + number % 3} platforms and "
            f"{'a ticket office' if number % 2 else 'ticket machines only'}. Nearby is "
            f"{_SIGHTS[number % len(_SIGHTS)]}. The station garden is kept by the volunteers of "
            f"{stop}, who meet on the {('first', 'second', 'third')[number % 3]} Saturday of the "
            "month."
        )
    return "\n".join(lines)


QUESTIONS = (
    "Hello! Which stop should I visit if I like boats?",
    "How long does the train take to get there from the terminus?",
    "Can I bring my bicycle and my dog?",
    "Thank you. Please sum up my plan for the day.",
)
EDITED = 1
"""Index of the question that the edited turn changes in the history."""
EDITED_QUESTION = "And which stop is best for somebody who likes gardens?"
LAST_QUESTION = "Is there a ticket office at that stop?"


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
