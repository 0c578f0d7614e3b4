"""How an observation becomes tokens: as plain text, or as messages through the model's chat template.

Token in, token out: of a later turn only what is new is encoded, and appended behind the tokens so far. A chat template
that would change anything before it is refused, for the sampled tokens would have to be encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from producers.environment import Observation
from schemas.records import Role

READ = frozenset({Role.PROMPT, Role.TOOL, Role.OBSERVATION})
"""Roles that an environment may give to what it says; what it says is never trained on."""
_CHAT_ROLES = {Role.PROMPT: "user", Role.OBSERVATION: "user", Role.TOOL: "tool"}
_ANSWER = "offsetrl0answer"
"""Stands for each answer of the model when the template is filled in: letters that no template changes or trims."""


class TextCodec(Protocol):
    """What an episode needs of a tokenizer (`producers.tokenizer.Tokenizer`)."""

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        """Ids of a text; `first` adds what a model expects before a prompt. Raises ValueError for what has no id."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of sampled ids, without one closing end token."""
        ...


class ChatCodec(TextCodec, Protocol):
    """What chats need besides."""

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The conversation's text by the model's template, up to where the model goes on."""
        ...

    def end_text(self, token: int) -> str:
        """Text of an id that ends a generation; empty for any other id."""
        ...


class Prompts(Protocol):
    """Turns the observations of one episode into tokens."""

    def tokens(self, observation: Observation, so_far: Sequence[int]) -> Sequence[int]:
        """What is new, to be appended to the tokens so far. Raises ValueError for what cannot be told so."""
        ...


class PlainPrompts:
    """An observation's text and nothing else."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def tokens(self, observation: Observation, so_far: Sequence[int]) -> Sequence[int]:
        """The text's ids; before the first of them what the model expects there."""
        check_role(observation)
        return self._codec.encode(observation.text, first=not so_far)


class ChatPrompts:
    """Messages of one episode's conversation: prompts and observations are the user's, tools' answers the tool's."""

    def __init__(self, codec: ChatCodec, system: str = "") -> None:
        self._codec = codec
        self._messages = [{"role": "system", "content": system}] if system else []
        self._text = ""

    def tokens(self, observation: Observation, so_far: Sequence[int]) -> Sequence[int]:
        """What the template adds behind the model's last answer: the end of that message, the new one, the next one's head.

        Answers stand in the template as a placeholder, so what the model wrote is neither decoded nor encoded for this.
        """
        check_role(observation)
        if so_far:
            self._messages.append({"role": "assistant", "content": _ANSWER})
        self._messages.append({"role": _CHAT_ROLES[observation.role], "content": observation.text})
        before = self._text + _ANSWER if so_far else ""
        self._text = self._codec.chat(self._messages)
        if not self._text.startswith(before):
            raise ValueError(_rewritten(before, self._text))
        new = self._text[len(before) :]
        if so_far:  # the end of the message was sampled already, unless the answer was cut
            new = new.removeprefix(self._codec.end_text(so_far[-1]))
        return self._codec.encode(new, first=False)


def check_role(observation: Observation) -> None:
    """Raise ValueError for a role that would make the environment's text look like the model's."""
    if observation.role not in READ:
        raise ValueError(f"an observation has the role {observation.role!r}; allowed: {', '.join(sorted(READ))}")


def _rewritten(before: str, now: str) -> str:
    at = next((at for at, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    return (
        f"the chat template rewrites the conversation: from character {at} on it was {before[at : at + 40]!r} and is "
        f"now {now[at : at + 40]!r}; sampled tokens would have to be encoded again, which is refused. Use a template "
        "that only appends, or set rollout.chat = false"
    )


def make_prompts(codec: ChatCodec, chat: bool, system: str) -> Prompts:
    """The prompts of one episode, as the settings `chat` and `system_prompt` say."""
    return ChatPrompts(codec, system) if chat else PlainPrompts(codec)
