"""One profile for the property tests here: the same examples on every run, and no time limit on a busy machine."""

from hypothesis import settings

settings.register_profile("rlhf_mc", deadline=None, derandomize=True)
settings.load_profile("rlhf_mc")
