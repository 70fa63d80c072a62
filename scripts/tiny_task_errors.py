"""Wrong answers for the tiny task, with errors of the kinds that an undertrained model makes.

A reward model that has seen only one kind is fooled by the others, and PPO finds them; so all are mixed, one to three
at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Digits = tuple[int, ...]
Answer = list[int]


def swap_neighbours(answer: Answer, rng: random.Random) -> Answer:
    """Two neighbours change places."""
    i = rng.randrange(max(len(answer) - 1, 1))
    return [*answer[:i], *answer[i : i + 2][::-1], *answer[i + 2 :]]


def replace_digit(answer: Answer, rng: random.Random) -> Answer:
    """One digit becomes another, near it as often as not, as where a model is unsure."""
    i = rng.randrange(len(answer))
    near = [digit for digit in (answer[i] - 1, answer[i] + 1) if 0 <= digit <= 9]
    other = [digit for digit in range(10) if digit != answer[i]]
    return [*answer[:i], rng.choice(rng.choice([near, other])), *answer[i + 1 :]]


def drop_digit(answer: Answer, rng: random.Random) -> Answer:
    """One digit is missing; never the only one."""
    i = rng.randrange(len(answer))
    return [*answer[:i], *answer[i + 1 :]] or answer


def double_digit(answer: Answer, rng: random.Random) -> Answer:
    """One digit comes twice."""
    i = rng.randrange(len(answer))
    return [*answer[: i + 1], *answer[i:]]


def double_and_drop(answer: Answer, rng: random.Random) -> Answer:
    """One digit too many of one kind, one too few of another: the length is right."""
    return drop_digit(double_digit(answer, rng), rng)


def shuffle(answer: Answer, rng: random.Random) -> Answer:
    """The right digits in any order."""
    return rng.sample(answer, len(answer))


def invent(answer: Answer, rng: random.Random) -> Answer:
    """Any digits, of any length up to twice the right one."""
    return [rng.randrange(10) for _ in range(rng.randint(1, 2 * len(answer)))]


ERRORS = (swap_neighbours, replace_digit, drop_digit, double_digit, double_and_drop)
WHOLE_ANSWER_ERRORS = (shuffle, invent)
WHOLE_ANSWER_SHARE = 0.1


def with_errors(digits: Digits, solve: Callable[[Digits], Digits], rng: random.Random) -> Digits:
    """A wrong answer to `digits`.

    Nine in ten have one to three single errors; half of these solve a misread prompt, so that the answer looks right in
    itself and only the comparison with the prompt tells. One in ten is wrong as a whole.
    """
    right = solve(digits)
    wrong = right
    while wrong == right:
        if rng.random() < WHOLE_ANSWER_SHARE:
            wrong = tuple(rng.choice(WHOLE_ANSWER_ERRORS)(list(right), rng))
        elif rng.random() < 0.5:
            wrong = solve(_damage(digits, rng))
        else:
            wrong = _damage(right, rng)
    return wrong


def _damage(digits: Digits, rng: random.Random) -> Digits:
    answer = list(digits)
    for _ in range(rng.choice((1, 1, 2, 3))):
        answer = rng.choice(ERRORS)(answer, rng)
    return tuple(answer)
