"""What the other tests here rely on: the random model's answers on a plain engine."""

from __future__ import annotations

QUESTION = "Which of the two came first, and how would anybody know? " * 4


def tokens(answer):
    return answer["choices"][0]["token_ids"]


def test_an_answer_depends_on_every_token_of_its_history(reference):
    changed = "w" + QUESTION[1:]
    assert tokens(reference.complete(QUESTION)) == tokens(reference.complete(QUESTION))
    assert tokens(reference.complete(QUESTION)) != tokens(reference.complete(changed))


def test_an_answer_is_printable_and_has_its_full_length(reference):
    answer = reference.complete(QUESTION, max_tokens=64)
    text = answer["choices"][0]["text"]
    assert len(text) == len(tokens(answer)) == 64
    assert text.replace("\n", " ").isprintable()


def test_a_chat_answer_repeated_in_history_gives_the_same_tokens(reference):
    history = [{"role": "user", "content": QUESTION}]
    answer = reference.chat(history, max_tokens=32)
    said = answer["choices"][0]["message"]["content"]
    prompt = f"<|user|>{QUESTION}<|end|><|assistant|>"
    assert tokens(answer) == list(said.encode())
    assert tokens(answer) == tokens(reference.complete(prompt, max_tokens=32))


def test_metrics_count_what_was_asked(reference):
    before = reference.metrics("vllm:")["vllm:prompt_tokens_total"]
    reference.complete(QUESTION, max_tokens=1)
    after = reference.metrics("vllm:")["vllm:prompt_tokens_total"]
    assert after - before == len(QUESTION)
