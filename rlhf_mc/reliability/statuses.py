"""The statuses that a rank ends with. torchrun itself ends with 1 whatever its ranks said, and names the first one's status."""

from __future__ import annotations

ERROR = 1  #: an exception; its traceback was printed
WRONG_SETTING = 2  #: a setting or a file is wrong; nothing was started
HUNG = 70  #: the watchdog saw no sign of life for too long (EX_SOFTWARE of sysexits.h)
STOPPED = 75  #: asked to stop, and left at a safe point; the same command goes on (EX_TEMPFAIL: try again)
FELLED = 143  #: another rank of this host is gone, and torchrun ended this one: 128 + SIGTERM
