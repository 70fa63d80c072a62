"""One megatron-core model per role: what it is made of, its heads, its weights from and to Hugging Face directories.

What lives here: shapes, layer spec, heads, weight layout, the role model with its optimizer, forward and backward passes.
What does not: which role runs when (stages/), where its memory is (offload/). May import: config, batch, algorithms, parallel.
"""
