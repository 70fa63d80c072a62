"""What the cluster is doing now: start, serve, sync_weights, make_experience, dump, replay, train, evaluate, export; upstream, sft, reward_model, heads.

What does not live here: maths (algorithms/), models (models/), memory (offload/), the engine (pipeline/).
May import everything but rlhf_mc.train.
"""
