"""The built-in reward functions on texts whose reward is known."""

import importlib.util

import pytest

from rlhf_mc.config import ConfigError, RewardFunction
from rlhf_mc.rewards import builtin
from rlhf_mc.rewards.interface import RewardSample
from rlhf_mc.rewards.pool import RewardPool


def sample(response: str = "", row: dict | None = None, num_tokens: int = 0) -> RewardSample:
    return RewardSample("prompt", response, [1], [0] * num_tokens, row or {})


def test_exact_match_ignores_only_the_space_around():
    assert builtin.exact_match(sample(" 42\n", {"answer": 42})) == 1.0
    assert builtin.exact_match(sample("4 2", {"answer": "42"})) == 0.0
    assert builtin.exact_match(sample("paris", {"answer": "Paris"})) == 0.0
    assert builtin.exact_match(sample("paris", {"answer": "Paris"}), ignore_case=True) == 1.0
    verls = {"reward_model": {"ground_truth": "7"}}
    assert builtin.exact_match(sample("7", verls), answer_field="reward_model.ground_truth") == 1.0


@pytest.mark.parametrize("row", [{"question": "?"}, {"answer": {"value": 1}, "question": "?"}])
def test_an_absent_field_names_those_there_are(row):
    with pytest.raises(KeyError, match="no field 'answer.text'; its fields are .*question"):
        builtin.exact_match(sample("x", row), answer_field="answer.text")


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("So it is #### 1,000", 1.0),
        ("#### 5 no, #### 1000.0", 1.0),
        ("#### 1000.", 1.0),
        ("#### 1001", 0.1),
        ("1000", 0.0),
        ("#### 1000 or rather #### 2", 0.1),
    ],
)
def test_final_answer_reads_verls_rows(response, expected):
    assert builtin.final_answer(sample(response, {"reward_model": {"ground_truth": "1000"}}), format_score=0.1) == expected


def test_final_answer_takes_the_first_group_of_a_pattern_of_its_own():
    boxed = r"\\boxed\{((\w)+)\}"
    assert builtin.final_answer(sample(r"\boxed{Blue}", {"answer": "blue"}), "answer", boxed, ignore_case=True) == 1.0
    assert builtin.final_answer(sample(r"\boxed{Blue}", {"answer": "blue"}), "answer", boxed) == 0.0


def test_regex_match():
    assert builtin.regex_match(sample("<think>a\nb</think> c"), r"<think>.*</think>") == 1.0
    assert builtin.regex_match(sample("<think>a\nb</think> c"), r"<think>.*</think>", whole=True) == 0.0


def test_keywords_are_whole_words():
    assert builtin.keywords(sample("The Cat sat."), ["cat", "dog"]) == 0.5
    assert builtin.keywords(sample("concatenate", {"keywords": ["cat"]})) == 0.0
    with pytest.raises(ValueError, match="no keywords"):
        builtin.keywords(sample("x"), [])


def test_target_length():
    assert [builtin.target_length(sample(num_tokens=n), 10) for n in (10, 5, 12, 0, 40)] == [0.0, -0.5, -0.2, -1.0, -1.0]


def test_length_penalty_is_the_papers():
    assert [builtin.length_penalty(sample(num_tokens=n), 20, 10) for n in (0, 10, 15, 20, 30)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match=r"free_tokens \(20\)"):
        builtin.length_penalty(sample(), 20, 20)


def test_plain_words_prefers_plain_words():
    plain = "The sun is a star. It is hot. We see it by day."
    learned = "Astrophysical considerations necessitate characterising thermonuclear phenomena within stellar interiors."
    middle = "The middle of our planet's daylight star has extremely elevated temperatures."
    assert builtin.plain_words(sample(plain)) == 0.0
    assert builtin.plain_words(sample(learned)) == -1.0
    assert -1.0 < builtin.plain_words(sample(middle)) < 0.0
    assert builtin.plain_words(sample("...")) == -1.0
    # 8 words, 1 sentence, 40 letters: 4.71 * 5 + 0.5 * 8 - 21.43 = 6.12
    assert builtin.plain_words(sample(" ".join(["words"] * 8))) == pytest.approx(-0.012)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="the package is installed")
def test_reasoning_gym_absent_is_said_at_start():
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        RewardPool([RewardFunction(path="rlhf_mc.rewards.reasoning_gym:verify")])


def test_reasoning_gym_scores_its_own_tasks():
    gym = pytest.importorskip("reasoning_gym")
    entries = list(gym.create_dataset("basic_arithmetic", seed=1, size=4))
    function = RewardFunction(path="rlhf_mc.rewards.reasoning_gym:verify", arguments={"answer_tag": "answer"})
    with RewardPool([function]) as pool:
        right = pool.score([sample(f"It is <answer> {entry['answer']} </answer>", entry) for entry in entries])
        wrong = pool.score([sample("<answer>wrong</answer>", entry) for entry in entries])
        untagged = pool.score([sample(entry["answer"], entry) for entry in entries])
    assert right.functions[0].values == [1.0] * 4
    assert max(wrong.functions[0].values) < 0.5 and untagged.functions[0].values == [0.0] * 4
