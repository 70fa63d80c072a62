"""What fits where, and how long it takes, before anything is started: from settings and config.json files alone.

What lives here: machines, device and host memory by stage and owner, bytes moved, times, the search for layouts, pictures of all that.
What does not: the sizes themselves (offload/sizes.py, models/activations.py). May import: config, models, offload, medusa,
parallel and pipeline, of each the files without torch. Nothing here needs torch, weights or a device.
"""
