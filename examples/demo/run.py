"""The same conversation twice, turn by turn: without reuse and with it.

Both go through the same engines.  Each has its own ``cache_salt``, so neither
finds the other's KV in any cache; which one asks first alternates.  Each
carries its own answers in its history.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from chat import Answer, Chat
from conversation import TURNS, Message, Turn, edited, system_prompt

from kvtransport_vllm.launch import Engine
from kvtransport_vllm.launch.http import post_json

MODES = ("off", "on")


@dataclass(frozen=True, slots=True)
class Result:
    """One turn of both conversations."""

    turn: Turn
    off: Answer
    on: Answer
    unchanged_tokens: int
    """Prompt tokens that equal the last prompt and answer from the beginning on."""

    @property
    def same(self) -> bool:
        return self.off.text == self.on.text

    @property
    def speedup(self) -> float:
        return self.off.ttft_s / self.on.ttft_s


def run(chat: Chat, prompts: Prompts) -> Iterator[Result]:
    """Ask every turn in both ways; yields each as soon as both have answered."""
    histories: dict[str, list[Message]] = {
        mode: [{"role": "system", "content": system_prompt()}] for mode in MODES
    }
    held: list[int] = []
    for number, turn in enumerate(TURNS):
        answers: dict[str, Answer] = {}
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            history = histories[mode]
            if turn.edits_history:
                history = histories[mode] = edited(history)
            history.append({"role": "user", "content": turn.question})
            answers[mode] = chat.ask(history, conversation=f"demo-{mode}", reuse=mode == "on")
        prompt = prompts.tokens(histories["on"])
        common = common_prefix(prompt, held)
        for mode in MODES:
            histories[mode].append({"role": "assistant", "content": answers[mode].text})
        held = prompts.tokens(histories["on"], closed=True)
        yield Result(turn, answers["off"], answers["on"], common)


class Prompts:
    """Lets an engine render chats into tokens, to count what stays the same."""

    def __init__(self, engine: Engine) -> None:
        self._port = engine.port

    def tokens(self, messages: list[Message], *, closed: bool = False) -> list[int]:
        """Token ids of the prompt; ``closed`` leaves out the cue for a next answer."""
        body = {"model": "model", "messages": messages, "add_generation_prompt": not closed}
        return list(post_json(self._port, "/tokenize", body)["tokens"])


def common_prefix(left: list[int], right: list[int]) -> int:
    """How many tokens two sequences share from their beginning."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
