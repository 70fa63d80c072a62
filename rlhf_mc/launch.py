"""How each of the programs starts and ends, alike on every rank: settings checked first, then the world, then the work.

Nothing heavy is imported until the settings hold, so that a typing error costs a second. A wrong setting ends every rank
with exit status 2 and its message; another error is printed with its traceback and the rank, and ends with status 1. Others: statuses.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mc.config import ConfigError, Program, Settings
from rlhf_mc.recipe import check_files, load_settings, to_yaml
from rlhf_mc.reliability.statuses import ERROR, STOPPED, WRONG_SETTING
from rlhf_mc.reliability.stopping import Stopped

if TYPE_CHECKING:
    from rlhf_mc.plan.machine import Machine

_PR_SET_PDEATHSIG = 1
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_SECONDS_OF_THE_FIRST_RANK = 3.0
_RANK = os.environ.get("RANK", "0")  # of the job; the environment says later which rank of its side this is


def _die_with_parent() -> None:
    """Asks Linux to end this rank when torchrun dies: a killed torchrun otherwise leaves its workers behind.

    SIGKILL, for SIGTERM only asks a run to stop.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def quiet_libraries() -> None:
    """Silences what libraries say on every rank and no user can act on; start names the optimizer and norm in use instead."""
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*", module="megatron.*")
    warnings.filterwarnings("ignore", message="If you are using transformer_engine", module="megatron.*")
    warnings.filterwarnings("ignore", message="full scope is deprecated", module="megatron.*")
    warnings.filterwarnings("ignore", message=".*is deprecated. Please use `torch.distributed", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf", category=UserWarning)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _checked_settings(program: Program, argv: list[str] | None) -> Settings | None:
    """The settings, or None where the command line only asked to see or check them. Raises ConfigError."""
    settings, command = load_settings(argv, program)
    if command.print_config:
        print(to_yaml(settings))
        return None
    settings.check(program, int(os.environ.get("WORLD_SIZE", "1")))
    check_files(settings, program)
    refuse_foreign_apex()
    if command.dry_run:
        print(to_yaml(settings))
        if program == "train":
            _show_plan(settings)
        print(f"rlhf_mc: {program}: settings and files are in order")
        return None
    return settings


def _show_plan(settings: Settings) -> None:
    """Prints, on the first rank, what the run would take of this machine. Raises ConfigError on every rank that sees that it does not fit."""
    from rlhf_mc.plan.case import Case
    from rlhf_mc.plan.picture import picture
    from rlhf_mc.plan.plan import Plan

    plan = Plan.of(Case.of(settings, _this_machine(settings)))
    if os.environ.get("RANK", "0") == "0":
        print(picture(plan))
    plan.refuse_shortages()


def _this_machine(settings: Settings) -> Machine:
    """As many nodes like this one as torchrun started, and what its host can give. Where a GPU is asked for that is not here: an H100."""
    from rlhf_mc.offload.planned import available_host_bytes
    from rlhf_mc.plan.machine import DEVICES, GIB, Machine

    num_ranks, host_gib = int(os.environ.get("WORLD_SIZE", "1")), available_host_bytes() / GIB
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    device = settings.trainer.device
    if device == "cuda" or (device == "auto" and _NVIDIA_GPUS.is_dir()):
        name, memory_gib = _this_device() if _NVIDIA_GPUS.is_dir() else ("h100", None)
        return Machine.of(next((key for key in DEVICES if key in name.lower()), "h100"), num_ranks, host_gib, memory_gib, per_node)
    return Machine.cpu(num_ranks, per_node, available_host_bytes())


def _this_device() -> tuple[str, float]:
    """Name and GiB of this rank's GPU."""
    import torch

    found = torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0")))
    return found.name, found.total_memory / 2**30


def refuse_foreign_apex() -> None:
    """Raises ConfigError where `apex` is the web toolkit that PyPI has under this name: megatron-core looks for NVIDIA's there.

    The package is looked at, not imported.
    """
    spec = importlib.util.find_spec("apex")
    if spec is None or spec.origin is None:  # not there, or a mere folder on the path
        return
    if not (Path(spec.origin).parent / "optimizers").is_dir():
        raise ConfigError(
            f"the installed package apex ({spec.origin}) is not NVIDIA's, which megatron-core would take it for: pip uninstall apex"
        )


def use_share_of_cores() -> None:
    """Threads of this rank: its share of the host's cores, unless OMP_NUM_THREADS says otherwise on purpose."""
    import torch

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))


def run_program(program: Program, work: Callable[[Settings], None], argv: list[str] | None = None) -> None:
    """Runs `work`, which joins the world when its data are read, with the command line's settings; ends the process with its status."""
    _die_with_parent()
    quiet_libraries()
    try:
        settings = _checked_settings(program, argv)
        if settings is None:
            sys.exit(0)
        use_share_of_cores()
        work(settings)
    except ConfigError as error:
        _end(f"rlhf_mc: {program}: {error}", WRONG_SETTING)
    except Stopped:
        sys.stdout.flush()
        os._exit(STOPPED)
    except Exception as error:
        end_with(error, program)
    from rlhf_mc.parallel.world import leave_world

    leave_world()


def end_with(error: Exception, program: Program = "train") -> None:
    """Prints the traceback with the rank, and ends the process. From any thread."""
    trace = "".join(traceback.format_exception(error))
    _end(f"rlhf_mc: {program}: error on rank {_RANK}:\n{trace}", ERROR)


def _end(message: str, status: int) -> None:
    """Prints and leaves at once. Not sys.exit: other ranks may be waiting in a collective that will not come, and
    tearing down a process group then waits for them; torchrun ends them when this rank is gone.

    What is wrong on all ranks is read once: the first rank of a host speaks first, and torchrun ends the others meanwhile.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_SECONDS_OF_THE_FIRST_RANK)
    with suppress(OSError):  # the log may be on the disk that is full
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(status)
