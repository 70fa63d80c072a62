"""Rule-based rewards: the function interface, the pool of killable processes, the built-in functions, and the mix.

The reward model does not live here (models/ and stages/ run it); KL and advantages are in algorithms/.
May import config and batch only. Nothing that a worker process imports (interface, protocol, worker, builtin) imports
torch or pydantic, so that a worker starts in a tenth of a second.
"""
