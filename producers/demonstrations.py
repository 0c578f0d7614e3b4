"""Demonstrations: one line of JSON becomes token ids of which some are to be learnt. Pure: no file, no log.

| form | keys | what is learnt |
|---|---|---|
| chat | `messages`: [{"role": ..., "content": ...}, ...] | every assistant turn, with its end token |
| text | `prompt`, `completion` | the completion and an end token |
| ids | `tokens`, `loss_mask` (as many zeros and ones) | the tokens whose mask is 1 |

Each may have a `reward` (1 if left out). Chats are rendered by the model's own template and encoded piece by piece, as
episodes are: what the model is to say is one piece, what it is told another.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn, Protocol

from schemas.records import Role, Segment

FORMS = (("messages",), ("prompt", "completion"), ("tokens", "loss_mask"))
ROLES = ("system", "user", "assistant", "tool")
_SAID = "either messages, or prompt and completion, or tokens and loss_mask; and reward if it is not 1"
_KNOWN = ("messages", "prompt", "completion", "tokens", "loss_mask", "reward")


class ChatCodec(Protocol):
    """What is needed of a tokenizer (`producers.tokenizer.Tokenizer`)."""

    eos_ids: tuple[int, ...]
    end_id: int | None

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        """Ids of a text; raises ValueError for what has no id."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The text of a conversation."""
        ...


@dataclass(frozen=True, slots=True)
class Demonstration:
    """T tokens; those of SAMPLED segments are learnt."""

    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    reward: float = 1.0

    @property
    def num_learnt(self) -> int:
        """Tokens to be learnt."""
        return sum(segment.count for segment in self.segments if segment.role is Role.SAMPLED)


Pieces = list[tuple[Role, Sequence[int]]]


def read_demonstration(
    line: bytes, codec: ChatCodec, *, max_tokens: int, vocab_size: int, chat: bool = False, system: str = ""
) -> Demonstration:
    """The demonstration on a line. Raises ValueError, saying what is wrong and what is allowed.

    With `chat`, prompt and completion become a user's and an assistant's turn behind the `system` prompt, as they do in
    the policy's own episodes.
    """
    row = _row(line)
    form = _form(row)
    if chat and form[0] == "prompt":
        row, form = _as_chat(row, system), FORMS[0]
    readers: Mapping[str, Callable[[dict[str, Any], ChatCodec], Pieces]] = {
        "messages": _chat, "prompt": _text, "tokens": _ids,
    }  # fmt: skip
    pieces = readers[form[0]](row, codec)
    tokens = tuple(token for _, piece in pieces for token in piece)
    segments = tuple(
        Segment(role, sum(len(piece) for _, piece in run))
        for role, run in groupby((p for p in pieces if p[1]), key=lambda piece: piece[0])
    )
    if len(tokens) > max_tokens:
        raise ValueError(f"{len(tokens)} tokens; at most {max_tokens} are allowed (rollout.max_model_len)")
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"token id {wrong[0]}; the model has ids 0 to {vocab_size - 1}")
    if not segments or segments[0].role is Role.SAMPLED:
        raise ValueError("nothing stands before the first token to be learnt; a prompt of at least one token is needed")
    return Demonstration(tokens, segments, _reward(row))


def lines_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, line) of every line of a file that is not blank; numbers begin at 1.

    >>> list(lines_of(b"a\\n\\nb"))
    [(1, b'a'), (3, b'b')]
    """
    return ((number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip())


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # broken UTF-8 is one too
        raise ValueError(f"not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with {_SAID}; got {type(row).__name__}")
    for key in row:
        near = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=0.8)
        if near and key not in _KNOWN:  # other keys are the user's own
            raise ValueError(f"the key {key!r}: did you mean {near[0]!r}? Keys that are read: {', '.join(_KNOWN)}")
    return row


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _form(row: Mapping[str, Any]) -> tuple[str, ...]:
    found = [form for form in FORMS if any(key in row for key in form)]
    if len(found) != 1 or any(key not in row for key in found[0]):
        got = ", ".join(key for key in _KNOWN if key in row) or "none of these"
        raise ValueError(f"expected {_SAID}; got {got}")
    return found[0]


def _reward(row: Mapping[str, Any]) -> float:
    reward = row.get("reward", 1.0)
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise ValueError(f"reward is {reward!r}; a finite number is wanted, or leave it out for 1")
    return float(reward)


def _text(row: dict[str, Any], codec: ChatCodec) -> Pieces:
    for key in ("prompt", "completion"):
        if not isinstance(row[key], str) or not row[key]:
            raise ValueError(f"{key} is {row[key]!r}; a text of at least one character is wanted")
    prompt, said = codec.encode(row["prompt"]), codec.encode(row["completion"], first=False)
    return [(Role.PROMPT, prompt), (Role.SAMPLED, _ended(said, codec))]


def _as_chat(row: dict[str, Any], system: str) -> dict[str, Any]:
    head = [{"role": "system", "content": system}] if system else []
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return {**row, "messages": [*head, *turns]}


def _ended(said: Sequence[int], codec: ChatCodec) -> Sequence[int]:
    """What is said, with an end token behind it."""
    if codec.end_id is None or (said and said[-1] in codec.eos_ids):
        return said
    return [*said, codec.end_id]


def _ids(row: dict[str, Any], codec: ChatCodec) -> Pieces:
    tokens, mask = row["tokens"], row["loss_mask"]
    for key, values in (("tokens", tokens), ("loss_mask", mask)):
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ValueError(f"{key} must be a list of whole numbers")
    if len(tokens) != len(mask) or set(mask) - {0, 1}:
        raise ValueError(f"{len(tokens)} tokens and a loss_mask of {len(mask)}; one 0 or 1 for each token is wanted")
    if 1 not in mask:
        raise ValueError("loss_mask has no 1: nothing would be learnt")
    roles, seen = [], False
    for bit in mask:
        seen |= bool(bit)
        roles.append(Role.SAMPLED if bit else Role.OBSERVATION if seen else Role.PROMPT)
    return [(role, (token,)) for role, token in zip(roles, tokens, strict=True)]


def _chat(row: dict[str, Any], codec: ChatCodec) -> Pieces:
    """What stands behind the last assistant turn is left out: nothing is learnt from it."""
    messages = row["messages"]
    _check_messages(messages)
    pieces: Pieces = []
    done, since = "", 0
    rest: tuple[int, ...] = ()
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        told, said = _turn(messages, at, done, codec)
        tools = at > since and all(other["role"] == "tool" for other in messages[since:at])
        role = Role.PROMPT if not pieces else Role.TOOL if tools else Role.OBSERVATION
        ids = codec.encode(said, first=False)
        ends = [place + 1 for place, token in enumerate(ids) if token in codec.eos_ids]
        cut = ends[-1] if ends else len(ids)
        pieces.append((role, [*rest, *codec.encode(told, first=False)]))
        pieces.append((Role.SAMPLED, _ended(ids[:cut], codec)))
        done, rest, since = done + told + said, tuple(ids[cut:]), at + 1
    return pieces


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError('messages must be a list of objects such as {"role": "user", "content": "..."}')
    for number, message in enumerate(messages, start=1):
        if message.get("role") not in ROLES:
            raise ValueError(f"message {number}: role is {message.get('role')!r}; allowed: {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {number}: content is {message.get('content')!r}; a text is wanted")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages hold no assistant turn: nothing would be learnt")


def _turn(messages: Sequence[Mapping[str, Any]], at: int, done: str, codec: ChatCodec) -> tuple[str, str]:
    """What was told before the assistant turn `at`, behind the text `done`, and what was said in it."""
    try:
        before, after = codec.chat(messages[:at]), codec.chat(messages[: at + 1], answer=False)
    except Exception as error:  # the edge to the model's own template, which may raise anything
        raise ValueError(f"the chat template does not take these messages ({error})") from error
    if not before.startswith(done) or not after.startswith(before):
        raise ValueError(
            f"the chat template renders what precedes message {at + 1} in another way once it is there, so its tokens "
            "cannot be told apart: give this line as tokens and loss_mask"
        )
    return before[len(done) :], after[len(before) :]
