"""Whose models there are, and which directories they start from. Pure; no torch."""

from __future__ import annotations

from enum import Enum

from rlhf_mc.config import Settings


class Role(str, Enum):
    """Whose model it is."""

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward_model"
    MEDUSA = "medusa"


#: Roles with a value head; the others' answers are words.
VALUE_ROLES = (Role.CRITIC, Role.REWARD)
#: Roles that PPO trains, where it has them.
TRAINED_ROLES = (Role.ACTOR, Role.CRITIC)


def role_paths(settings: Settings) -> dict[Role, str]:
    """The Hugging Face directory that each role of this run starts from. The critic, where there is one, starts from the reward model unless named.

    A directory comes first under the role whose key names it, so that what is wrong with it is said of that key.
    """
    paths = {
        Role.ACTOR: settings.actor.path,
        Role.REWARD: settings.reward_model.path,
        Role.CRITIC: settings.critic.path or settings.reward_model.path,
        Role.REFERENCE: settings.reference.path or settings.actor.path,
    }
    needed = {"update": {Role.ACTOR, Role.CRITIC}, "heads": {Role.ACTOR}}.get(settings.trainer.mode, set(Role))
    if not settings.has_critic:
        needed = needed - {Role.CRITIC}
    return {role: path for role, path in paths.items() if path is not None and role in needed}
