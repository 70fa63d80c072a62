"""Answers for the tiny task: right, careless, and wrong in the ways of an undertrained model.

A reward model that has seen only one way of being wrong is fooled by the others, and PPO finds them; so all are mixed.
"""

from __future__ import annotations

import random

Digits = tuple[int, ...]
SHIFT = 2


def shifted(digits: Digits) -> Digits:
    """The right answer: every digit raised by SHIFT, going round from 9 to 0."""
    return tuple((digit + SHIFT) % 10 for digit in digits)


def shifted_carelessly(digits: Digits) -> Digits:
    """The careless answer: what should go round stops at 9."""
    return tuple(min(digit + SHIFT, 9) for digit in digits)


def replace_digit(answer: Digits, rng: random.Random) -> Digits:
    """One digit becomes another, near it as often as not, as where a model is unsure."""
    i = rng.randrange(len(answer))
    near = [digit for digit in (answer[i] - 1, answer[i] + 1) if 0 <= digit <= 9]
    other = [digit for digit in range(10) if digit != answer[i]]
    return (*answer[:i], rng.choice(rng.choice([near, other])), *answer[i + 1 :])


def swap_neighbours(answer: Digits, rng: random.Random) -> Digits:
    """Two neighbours change places."""
    i = rng.randrange(max(len(answer) - 1, 1))
    return (*answer[:i], *answer[i : i + 2][::-1], *answer[i + 2 :])


def drop_digit(answer: Digits, rng: random.Random) -> Digits:
    """One digit is missing; never the only one."""
    i = rng.randrange(len(answer))
    return (*answer[:i], *answer[i + 1 :]) or answer


def double_digit(answer: Digits, rng: random.Random) -> Digits:
    """One digit comes twice."""
    i = rng.randrange(len(answer))
    return (*answer[: i + 1], *answer[i:])


def invent(answer: Digits, rng: random.Random) -> Digits:
    """Any digits, of any length up to twice the right one."""
    return tuple(rng.randrange(10) for _ in range(rng.randint(1, 2 * len(answer))))


SINGLE_ERRORS = (replace_digit, replace_digit, swap_neighbours, drop_digit, double_digit)
SHARES = {"careless": 0.2, "partly careless": 0.2, "single errors": 0.5, "invented": 0.1}


def wrong_answer(digits: Digits, rng: random.Random) -> Digits:
    """A wrong answer to `digits`: careless, careless at some places, with one to three single errors, or all invented."""
    right, careless = shifted(digits), shifted_carelessly(digits)
    wrong = right
    while wrong == right:
        match rng.choices(list(SHARES), list(SHARES.values()))[0]:
            case "careless":
                wrong = careless
            case "partly careless":
                wrong = tuple(rng.choice(pair) for pair in zip(right, careless, strict=True))
            case "single errors":
                for _ in range(rng.choice((1, 1, 2, 3))):
                    wrong = rng.choice(SINGLE_ERRORS)(wrong, rng)
            case "invented":
                wrong = invent(right, rng)
    return wrong
