"""What all pictures share: one colour for each role, sizes, and how a figure becomes a file."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

#: Okabe and Ito's colours, which people with any colour vision tell apart (jfly.uni-koeln.de/color).
COLORS = {
    "actor": "#0072B2",
    "critic": "#D55E00",
    "reference": "#009E73",
    "reward_model": "#CC79A7",
    "medusa": "#E69F00",
    "engine": "#56B4E9",
}
#: Without a role, or against a white ground.
GREY, DARK, LIGHT = "#999999", "#333333", "#dddddd"
#: For what has no role, in this order.
OTHERS = (*COLORS.values(), GREY, "#000000")
FONT_POINTS = 8

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "font.size": FONT_POINTS,
        "axes.titlesize": FONT_POINTS + 1,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": GREY,
        "legend.frameon": False,
        "legend.fontsize": FONT_POINTS,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "svg.fonttype": "none",  # text stays text: small, and found by a search
        "svg.hashsalt": "rlhf_mc",  # the same run gives the same bytes
    }
)


def color_of(role: str) -> str:
    """Of a role, or of the engine; grey for what is none."""
    return COLORS.get(role, GREY)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure in the format that its name ends with, in place of what is there; first aside, so that a file is always whole.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial")
    kind = path.suffix.removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else {}
    figure.savefig(aside, format=kind, dpi=144, metadata=metadata)
    os.replace(aside, path)
