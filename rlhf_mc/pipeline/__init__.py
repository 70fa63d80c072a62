"""Generate and score as a pipeline: the engine, and who generates what.

What lives here: the engine (engine.py and what it plugs into vllm), here or on ranks of its own; dealing prompts, and bringing
responses home.
What does not: weights between layouts (parallel/), scoring (stages/). May import: config, batch, algorithms, parallel,
models, offload, medusa.
"""
