"""calculator: a sum to work out with a tool; the model may ask a calculator, reads its answer, and must give its own.

A small environment of several turns, to show how one is made and to try tools with. A message that begins with `?` is a
call: the calculator works out what stands behind it and answers in the role TOOL. Any other message is the answer.
Endless: item i is drawn from (seed, i). A session is a pure function of its item and its acts, so it can be rebuilt.
"""

from __future__ import annotations

import ast
import operator
import random
import time
from collections.abc import Callable, Mapping

from producers.environment import Observation, Verdict
from schemas.errors import SettingError
from schemas.records import Role, Status
from schemas.seeds import derive_seed

CALL = "?"
_MAX_CHARS = 64
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def work_out(expression: str) -> int:
    """The value of an expression of whole numbers, +, -, * and parentheses. Raises ValueError for anything else.

    >>> work_out("3 * (4 + 5) - 1")
    26
    >>> work_out("2 ** 99")
    Traceback (most recent call last):
    ...
    ValueError: only whole numbers, +, -, * and parentheses
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"at most {_MAX_CHARS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("no expression") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("only whole numbers, +, -, * and parentheses")


class CalculatorSession:
    """One expression, up to `max_calls` calls, one answer."""

    def __init__(self, prompt: str, expected: int, *, max_calls: int, tool_s: float, reply: str) -> None:
        self.expected = expected
        self.done = False
        self._next = Observation(text=prompt)
        self._max_calls, self._tool_s, self._reply = max_calls, tool_s, reply
        self._calls = self._useless = 0
        self._answer: str | None = None
        self._truncated = False

    def observe(self) -> Observation:
        """The expression; later what the calculator said."""
        return self._next

    def act(self, text: str, truncated: bool) -> None:
        """A call, which takes the calculator `tool_s` seconds, or the answer."""
        if not text.startswith(CALL) or truncated:
            self._answer, self._truncated, self.done = text, truncated, True
            return
        self._calls += 1
        if self._calls > self._max_calls:
            self.done = True
            return
        time.sleep(self._tool_s)
        try:
            result = str(work_out(text.removeprefix(CALL)))
        except ValueError:
            self._useless += 1
            result = CALL
        self._next = Observation(text=self._reply.format(result=result), role=Role.TOOL)

    def verdict(self) -> Verdict:
        """1 for the right number and nothing else; an episode that only calls is an invalid action and earns 0."""
        parts = {"calls": float(self._calls), "useless_calls": float(self._useless)}
        if self._answer is None:
            said = f"{self._calls} calls and no answer; {self._max_calls} are allowed"
            return Verdict(status=Status.INVALID_ACTION, reward=0.0, parts=parts, error=said)
        right = self._answer.strip() == str(self.expected)
        return Verdict(status=Status.TRUNCATED if self._truncated else Status.OK, reward=float(right), parts=parts)


class Calculator:
    """The environment; `calculator` makes it."""

    num_items: int | None = None
    rebuildable = True

    def __init__(
        self, seed: int, *, terms: int, largest: int, template: str, max_calls: int, tool_s: float, reply: str
    ) -> None:
        self.seed, self.terms, self.largest, self.template = seed, terms, largest, template
        self.max_calls, self.tool_s, self.reply = max_calls, tool_s, reply

    def payload(self, item: int) -> str:
        """Empty: item and seed are enough."""
        return ""

    def open(self, item: int, payload: str, seed: int) -> CalculatorSession:
        """The session of one item; the session's own seed changes nothing."""
        draw = random.Random(derive_seed(self.seed, "calculator", item))
        expression = str(draw.randint(0, self.largest))
        for _ in range(self.terms - 1):
            expression += draw.choice("+-*") + str(draw.randint(0, self.largest))
        return CalculatorSession(
            self.template.format(expression=expression),
            work_out(expression),
            max_calls=self.max_calls,
            tool_s=self.tool_s,
            reply=self.reply,
        )


_TEMPLATE = (
    "Work out {expression}. To use the calculator, write ? and an expression, and nothing else. "
    "Otherwise write the result as one number, and nothing else.\n"
)


def calculator(
    seed: int,
    *,
    terms: int = 3,
    largest: int = 99,
    template: str = _TEMPLATE,
    reply: str = "\n{result}\n",
    max_calls: int = 4,
    tool_s: float = 0.0,
) -> Calculator:
    """`terms` numbers of 0 to `largest` joined by +, - and *; `max_calls` calls of the tool, `tool_s` seconds each.

    template: the prompt, over {expression}. reply: what the model reads after a call, over {result}, which is `?` where the
    calculator cannot work it out.

    >>> session = calculator(0, terms=2, largest=9, template="{expression}=").open(0, "", 0)
    >>> session.observe().text
    '9-5='
    >>> session.act("?9-5", truncated=False)
    >>> session.observe().role.value, session.observe().text
    ('tool', '\\n4\\n')
    >>> session.act("4", truncated=False)
    >>> session.done, session.verdict().reward
    (True, 1.0)
    """
    if not 1 <= terms <= 8 or not 1 <= largest < 10**6:
        raise SettingError(
            f"environment 'calculator': terms is {terms} and largest is {largest}; allowed: terms 1 to 8, largest 1 to 999999"
        )
    if max_calls < 0 or tool_s < 0:
        raise SettingError(
            f"environment 'calculator': max_calls is {max_calls} and tool_s is {tool_s}; both must be 0 or more"
        )
    for name, text, hole in (("template", template, "expression"), ("reply", reply, "result")):
        try:
            text.format(**{hole: ""})
        except (KeyError, ValueError, IndexError) as error:
            raise SettingError(f"environment 'calculator': {name} is {text!r}; it may hold {{{hole}}} alone") from error
    return Calculator(
        seed, terms=terms, largest=largest, template=template, max_calls=max_calls, tool_s=tool_s, reply=reply
    )
