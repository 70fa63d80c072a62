"""Who talks to whom: process groups, the two grids, packing, and what is computed across ranks.

What lives here: the job and its two sides, the world, grids, what a sequence costs, micro-batches, packed attention,
vocabulary-parallel log-probs, exchanges.
What does not: models (models/), memory (offload/). May import: config, batch, algorithms.
"""
