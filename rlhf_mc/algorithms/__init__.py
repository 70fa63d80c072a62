"""The mathematics of PPO as pure functions on flat tensors: advantages, KL, losses, learning rates, sampling mismatch.

No process groups, no models, no files: whoever calls has already brought the numbers of its tokens together.
May import: config, batch.
"""
