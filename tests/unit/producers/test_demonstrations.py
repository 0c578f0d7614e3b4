"""Lines of demonstrations: what becomes of each form, and what is said of a line that is none."""

from __future__ import annotations

import doctest
import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.demonstrations import Demonstration, lines_of, read_demonstration
from producers.tokenizer import Tokenizer
from schemas.records import Role, Segment
from support.models import model_folder

END = 1


class Letters:
    """One id per character: 2 and above, 1 is the end; `|` in a chat is an end token, as a template writes it."""

    eos_ids: tuple[int, ...] = (END,)
    end_id: int | None = END

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        if "?" in text:
            raise ValueError("no token for '?'")
        return [END if letter == "|" else ord(letter) for letter in text]

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        said = "".join(f"{m['role'][0]}:{m['content']}|\n" for m in messages)
        return said + ("a:" if answer else "")


def read(row: object, **changes: Any) -> Demonstration:
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    return read_demonstration(line, Letters(), **{"max_tokens": 99, "vocab_size": 200} | changes)


def learnt(found: Demonstration) -> str:
    """The tokens to be learnt, as text; the end as `|`."""
    roles = [segment.role for segment in found.segments for _ in range(segment.count)]
    assert len(roles) == len(found.tokens)
    return "".join("|" if t == END else chr(t) for t, r in zip(found.tokens, roles, strict=True) if r is Role.SAMPLED)


def text(found: Demonstration) -> str:
    return "".join("|" if token == END else chr(token) for token in found.tokens)


def test_a_completion_is_learnt_with_its_end() -> None:
    found = read({"prompt": "31>", "completion": "13", "id": 7})
    assert text(found) == "31>13|" and learnt(found) == "13|" and found.reward == 1.0
    assert found.segments == (Segment(Role.PROMPT, 3), Segment(Role.SAMPLED, 3)) and found.num_learnt == 3


def test_an_end_that_is_there_is_not_doubled_and_without_an_end_token_there_is_none() -> None:
    assert learnt(read({"prompt": "31>", "completion": "13|"})) == "13|"
    endless = Letters()
    endless.end_id, endless.eos_ids = None, ()
    line = b'{"prompt": "a", "completion": "b"}'
    assert read_demonstration(line, endless, max_tokens=9, vocab_size=200).tokens == (ord("a"), ord("b"))


def test_a_reward_is_taken_from_the_line() -> None:
    assert read({"prompt": "a", "completion": "b", "reward": -2}).reward == -2.0


CHAT = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A1"},
    {"role": "tool", "content": "T"},
    {"role": "assistant", "content": "A2"},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": "A3"},
    {"role": "user", "content": "left out"},
]


def test_of_a_chat_the_assistants_turns_are_learnt_each_with_its_end() -> None:
    found = read({"messages": CHAT})
    assert text(found) == "s:S|\nu:U|\na:A1|\nt:T|\na:A2|\nu:V|\na:A3|"
    assert learnt(found) == "A1|A2|A3|"
    roles = [segment.role for segment in found.segments]
    sampled = Role.SAMPLED
    assert roles == [Role.PROMPT, sampled, Role.TOOL, sampled, Role.OBSERVATION, sampled]


def test_ids_and_mask_are_taken_as_they_are() -> None:
    found = read({"tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 1], "reward": 0.5})
    assert found.tokens == (5, 6, 7, 8, 9) and found.reward == 0.5
    assert [(s.role.value, s.count) for s in found.segments] == [
        ("prompt", 1), ("sampled", 1), ("observation", 1), ("sampled", 2),
    ]  # fmt: skip


@given(bits=st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_the_mask_of_ids_comes_back_from_the_segments(bits: list[int]) -> None:
    mask = [0, *bits, 1]
    found = read({"tokens": list(range(len(mask))), "loss_mask": mask})
    assert [int(s.role is Role.SAMPLED) for s in found.segments for _ in range(s.count)] == mask


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b"{", "not a line of JSON"),
        (b'{"prompt": "\xff"}', "not a line of JSON"),
        (b'{"prompt": "a", "completion": "b", "reward": NaN}', "NaN is not JSON"),
        ([1], "expected an object with either messages, or prompt and completion, .* got list"),
        ({}, "got none of these"),
        ({"prompt": "a"}, "got prompt"),
        ({"prompt": "a", "completion": "b", "messages": []}, "got messages, prompt, completion"),
        ({"prompt": "a", "completion": "b", "rewrad": 2}, "the key 'rewrad': did you mean 'reward'"),
        ({"prompt": "a", "completion": "b", "reward": True}, "reward is True; a finite number"),
        ({"prompt": "a", "completion": "b", "reward": "1"}, "reward is '1'"),
        ({"prompt": "a", "completion": ""}, "completion is ''; a text of at least one character"),
        ({"prompt": 3, "completion": "b"}, "prompt is 3; a text"),
        ({"prompt": "a?", "completion": "b"}, r"no token for '\?'"),
        ({"prompt": "a" * 99, "completion": "b"}, "101 tokens; at most 99 are allowed"),
        ({"prompt": "é", "completion": "b"}, "token id 233; the model has ids 0 to 199"),
        ({"tokens": [5, -1], "loss_mask": [0, 1]}, "token id -1"),
        ({"tokens": [5, 6.0], "loss_mask": [0, 1]}, "tokens must be a list of whole numbers"),
        ({"tokens": [5, True], "loss_mask": [0, 1]}, "tokens must be a list of whole numbers"),
        ({"tokens": [5, 6], "loss_mask": [1]}, "2 tokens and a loss_mask of 1"),
        ({"tokens": [5, 6], "loss_mask": [0, 2]}, "one 0 or 1 for each token"),
        ({"tokens": [5, 6], "loss_mask": [0, 0]}, "nothing would be learnt"),
        ({"tokens": [5, 6], "loss_mask": [1, 1]}, "nothing stands before the first token"),
        ({"messages": "hi"}, "messages must be a list of objects"),
        ({"messages": [{"role": "user", "content": "U"}]}, "no assistant turn"),
        ({"messages": [{"role": "bot", "content": "U"}]}, "message 1: role is 'bot'; allowed: system, user"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1: content is None; a text"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(row: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(row)


def test_where_episodes_are_chats_a_completion_is_a_turn_of_one() -> None:
    found = read({"prompt": "U", "completion": "A", "reward": 3}, chat=True, system="S")
    assert text(found) == "s:S|\nu:U|\na:A|" and learnt(found) == "A|" and found.reward == 3.0
    assert text(read({"prompt": "U", "completion": "A"}, chat=True)) == "u:U|\na:A|"
    assert read({"tokens": [5, 6], "loss_mask": [0, 1]}, chat=True).tokens == (5, 6)
    with pytest.raises(ValueError, match="message 2: content is 7"):
        read({"prompt": "U", "completion": 7}, chat=True)


class Forgetful(Letters):
    """Shortens an earlier assistant turn once another follows, as templates that strip reasoning do."""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        kept = [m if m["role"] != "assistant" or i == last else {**m, "content": "-"} for i, m in enumerate(messages)]
        return super().chat(kept, answer=answer)


class Picky(Letters):
    """A template that refuses."""

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        raise RuntimeError("roles must alternate")


@pytest.mark.parametrize(
    ("codec", "said"), [(Forgetful(), "renders what precedes message 5 in another way"), (Picky(), "must alternate")]
)
def test_a_template_that_cannot_be_taken_apart_is_refused(codec: Letters, said: str) -> None:
    line = json.dumps({"messages": CHAT}).encode()
    with pytest.raises(ValueError, match=said):
        read_demonstration(line, codec, max_tokens=99, vocab_size=200)


def test_lines_keep_their_numbers() -> None:
    assert list(lines_of(b"\n a \r\n\n b")) == [(2, b" a \r"), (4, b" b")]


@pytest.mark.model
def test_a_models_own_template_and_tokens(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder(), tmp_path / "copy"))
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% else %}>{% endif %}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer(folder)
    rows = [{"role": "user", "content": "31"}, {"role": "assistant", "content": "13"}]
    line = json.dumps({"messages": rows * 2}).encode()
    found = read_demonstration(line, tokenizer, max_tokens=99, vocab_size=26)
    (three, one, more) = tokenizer.encode("31>")
    assert found.tokens == (three, one, more, one, three, 1) * 2
    assert [s.count for s in found.segments] == [3, 3, 3, 3] and tokenizer.end_id == 1
    text_line = json.dumps({"prompt": "31>", "completion": "13"}).encode()
    assert read_demonstration(text_line, tokenizer, max_tokens=99, vocab_size=26).tokens == found.tokens[:6]


def test_doctests() -> None:
    result = doctest.testmod(importlib.import_module("producers.demonstrations"))
    assert result.attempted and not result.failed
