"""Observations to tokens: plain or through a chat template; what was sampled is never encoded again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.environment import Observation
from producers.prompting import ChatPrompts, PlainPrompts, make_prompts
from producers.tokenizer import Tokenizer
from schemas.records import Role
from support.models import ALPHABET, model_folder

Messages = Sequence[dict[str, str]]
END = "¶"


def marks(messages: Messages) -> str:
    """A template that only appends, in the manner of ChatML."""
    told = "".join(f"[{m['role']}]{m['content']}{END}\n" for m in messages)
    return told + "[assistant]"


def trims(messages: Messages) -> str:
    """Another that trims what was said."""
    return "".join(f"[{m['role']}]{m['content'].strip()}{END}" for m in messages) + "[assistant]"


def forgets(messages: Messages) -> str:
    """One that shows the last message alone."""
    return f"[{messages[-1]['role']}]{messages[-1]['content']}{END}[assistant]"


class CharCodec:
    """One id per character; the id of END ends a generation."""

    def __init__(self, template: Callable[[Messages], str] = marks) -> None:
        self.chat = template
        self.encoded: list[str] = []

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        self.encoded.append(text)
        return [0] * first + [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def end_text(self, token: int) -> str:
        return END if token == ord(END) else ""


def test_plain_text_is_encoded_as_it_is_and_begins_once() -> None:
    codec = CharCodec()
    prompts = make_prompts(codec, chat=False, system="")
    assert isinstance(prompts, PlainPrompts)
    assert prompts.tokens(Observation(text="ab"), []) == [0, 97, 98]
    assert prompts.tokens(Observation(text="c", role=Role.TOOL), [0, 97, 98, 5]) == [99]


@pytest.mark.parametrize("template", [marks, trims])
@given(
    answers=st.lists(st.tuples(st.text(" abc¶", max_size=5), st.booleans()), max_size=3),
    system=st.sampled_from(["", "be brief"]),
)
def test_every_prompt_is_the_tokens_so_far_and_what_the_template_adds(
    template: Callable[[Messages], str], answers: list[tuple[str, bool]], system: str
) -> None:
    codec = CharCodec(template)
    prompts = make_prompts(codec, chat=True, system=system)
    so_far = list(prompts.tokens(Observation(text="3+4?"), []))
    told: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    told.append({"role": "user", "content": "3+4?"})
    assert codec.decode(so_far) == template(told)
    for text, ends in answers:
        sampled = [ord(character) for character in text + END * ends]
        so_far += sampled or [1]
        new = list(prompts.tokens(Observation(text="7", role=Role.TOOL), so_far))
        after = template([{"role": "tool", "content": "7"}])
        close = template([]).removesuffix("[assistant]")
        ended = so_far[-1] == ord(END)
        gap = "\n" if template is marks else ""
        assert codec.decode(new) == ("" if ended else END) + gap + close + after
        assert all(text not in one or len(text) < 2 for one in codec.encoded[-1:]), "what was sampled is not encoded"
        so_far += new


def test_a_template_that_rewrites_the_conversation_is_refused_where_it_does() -> None:
    prompts = ChatPrompts(CharCodec(forgets))
    so_far = [*prompts.tokens(Observation(text="first"), []), ord("x"), ord(END)]
    with pytest.raises(ValueError, match=r"rewrites the conversation: from character 6 on it was 'first"):
        prompts.tokens(Observation(text="second"), so_far)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("role", [Role.SAMPLED, Role.UNKNOWN])
def test_roles_that_would_be_trained_on_are_refused(chat: bool, role: Role) -> None:
    with pytest.raises(ValueError, match="allowed: observation, prompt, tool"):
        make_prompts(CharCodec(), chat, "").tokens(Observation(text="a", role=role), [])


@pytest.mark.model
def test_with_a_real_tokenizer_and_its_template(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder(), tmp_path / "copy"))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role[0:1] | replace('u','1') | replace('t','2') | replace('a', '3') }}="
        "{{ m.content }}<eos>,{% endfor %}3="
    )
    codec = Tokenizer(folder)
    assert codec.end_text(codec.eos_ids[0]) == "<eos>" and codec.end_text(5) == ""
    assert set("123=,") <= set(ALPHABET)
    prompts = ChatPrompts(codec)
    first = prompts.tokens(Observation(text="7"), [])
    assert codec.decode(first) == "1=7<eos>,3="
    new = prompts.tokens(Observation(text="8", role=Role.TOOL), [*first, *codec.encode("9"), codec.eos_ids[0]])
    assert codec.decode(new) == ",2=8<eos>,3="
    cut = ChatPrompts(codec)
    cut.tokens(Observation(text="7"), [])
    assert codec.decode(cut.tokens(Observation(text="8"), [*first, 5])) == "<eos>,1=8<eos>,3="
