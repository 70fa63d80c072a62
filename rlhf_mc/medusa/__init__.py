"""Draft heads on the actor (arXiv:2401.10774): the heads, their loss and training, their files, and how many tokens to draft.

What does not live here: the engine that drafts and checks (pipeline/), when the heads train (stages/).
May import: config, batch, algorithms, parallel, models.
"""
