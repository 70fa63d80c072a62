"""A model out of a checkpoint, as a Hugging Face directory, by one process on a CPU:

    python -m rlhf_mc.export_checkpoint --checkpoint runs/x/checkpoints/000020 --to DIR [--role actor|critic|medusa] [--source DIR]

What the checkpoint does not hold (config.json, tokenizer) comes from the directory that the run started the role from, or from
--source where that has moved. The reward model and the reference never change, so no checkpoint holds them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_mc.config import ConfigError
from rlhf_mc.launch import quiet_libraries
from rlhf_mc.reliability.statuses import WRONG_SETTING


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ends with status 2 and a message where there is nothing to export."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_mc.export_checkpoint", description="A model out of a checkpoint.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a directory such as checkpoints/000020")
    parser.add_argument("--to", type=Path, required=True, help="the directory to write; one that is there is replaced")
    parser.add_argument("--role", choices=["actor", "critic", "medusa"], default="actor")
    parser.add_argument("--source", help="where the model is now that the role started from; default: where it was")
    arguments = parser.parse_args(argv)
    quiet_libraries()
    # Imported here, after the command line was understood: megatron-core takes seconds.
    from rlhf_mc.checkpoint.export import export
    from rlhf_mc.checkpoint.snapshot import DamagedError
    from rlhf_mc.models.role import Role

    try:
        export(arguments.checkpoint, arguments.to, Role(arguments.role), arguments.source)
    except (ConfigError, DamagedError) as error:
        print(f"rlhf_mc: export: {error}", file=sys.stderr)
        sys.exit(WRONG_SETTING)
    print(f"{arguments.role} of {arguments.checkpoint} is in {arguments.to}")


if __name__ == "__main__":
    main()
