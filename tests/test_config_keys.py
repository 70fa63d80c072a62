"""Every key has a meaning and a type in words, and the reference page shows what the records say."""

from dataclasses import MISSING
from pathlib import Path

import pytest

from rlhf_mc.config import Settings
from rlhf_mc.config_keys import all_keys, all_sections, describe_keys, type_at, type_name

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.name)
def test_key_says_what_it_means_in_one_line(key):
    assert 3 < len(key.meaning) < 90
    assert "|" not in key.meaning + key.type  # would end the cell of the table


def test_page_is_current():
    command = "python -m rlhf_mc.config_keys > docs/configuration.md"
    assert PAGE.read_text() == describe_keys(), f"config.py changed; run: {command}"


def test_names_are_unique_and_lead_to_the_value():
    names = [key.name for key in all_keys()]
    assert len(names) == len(set(names)) > 100
    for key in all_keys():
        if ".N." in key.name:
            continue
        value = Settings()
        for part in key.name.split("."):
            value = getattr(value, part)
        assert value == key.default


@pytest.mark.parametrize(
    "name, words, default",
    [
        ("actor.optim.lr", "float", 1e-6),
        ("critic.optim.lr", "float", 1e-5),  # its section's default, not the record's
        ("actor.path", "str or null", None),
        ("algorithm.kl.use", "one of reward, loss, none", "reward"),
        ("data.train", "list of str", []),
        ("reward.functions", "list of mapping", []),
        ("reward.functions.N.path", "str", MISSING),
        ("reward.functions.N.weight", "float", 1.0),
        ("reward.functions.N.arguments", "mapping", {}),
    ],
)
def test_type_and_default(name, words, default):
    (key,) = [key for key in all_keys() if key.name == name]
    assert (key.type, key.default) == (words, default)


def test_sections_hold_keys_and_keys_are_no_sections():
    assert {"actor", "actor.optim", "algorithm.kl", "reward.functions.N"} <= set(all_sections())
    assert not set(all_sections()) & {key.name for key in all_keys() if not key.name.startswith("reward.functions")}


@pytest.mark.parametrize(
    "path, words",
    [
        (("actor",), "mapping"),
        (("actor", "optim", "lr"), "float"),
        (("reward", "functions", 3, "weight"), "float"),
        (("reward", "functions", "3", "weight"), "float"),
        (("data", "train", 0), "str"),
        (("reward", "functions", "0", "arguments", "any", "thing"), "Any"),
    ],
)
def test_type_at(path, words):
    assert type_name(type_at(path)) == words


@pytest.mark.parametrize("name", ["", "actr", "actor.lr", "actor.path.x", "data.train.x", "reward.functions.weight", "actor."])
def test_no_such_key(name):
    with pytest.raises(KeyError):
        type_at(name.split("."))
