"""Pictures of results: time by shape and implementation, and time by stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The same thing has the same colour in every picture.
_COLOURS = {
    "hopper": "#1b6e53",
    "portable": "#6db58f",
    "xla": "#b9c4cc",
    "einsum": "#93a1ad",
    "lax.top_k": "#93a1ad",
    "torch.topk": "#e0a458",
    "deep_gemm": "#3a6ea5",
    "deep_gemm + torch.topk": "#3a6ea5",
    "flash_mla": "#3a6ea5",
}
# In the order in which a layer runs them.
STAGES = {
    "projections": "#8a8a3f",
    "cache": "#c06c54",
    "indexer": "#1b6e53",
    "top-k": "#6db58f",
    "attention": "#3a6ea5",
    "MoE": "#b9c4cc",
    "rest": "#555555",
}
_OTHERS = ("#7b5ea7", "#a23b72", "#c06c54", "#4f7c8a", "#8a8a3f", "#555555")


def draw_bars(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One group of bars a shape, one bar an implementation that has a time, with its quartiles; logarithmic.

    path: its ending chooses the format.
    """
    timed = [row for row in rows if "us" in row]
    if not timed:
        raise ValueError("nothing was timed, so there is nothing to draw")
    cases = list(dict.fromkeys(row["case"] for row in timed))
    names = list(dict.fromkeys(row["implementation"] for row in timed))
    height = 0.8 / len(names)
    figure, axis = _figure(9, 1.2 + 0.24 * len(cases) * (len(names) + 0.6))
    for number, (name, colour) in enumerate(zip(names, colours(names), strict=True)):
        own = [row for row in timed if row["implementation"] == name]
        places = [cases.index(row["case"]) + (number + 0.5) * height - 0.4 for row in own]
        times = [row["us"] for row in own]
        spread = [[row["us"] - row["low_us"] for row in own], [row["high_us"] - row["us"] for row in own]]
        axis.barh(places, times, height * 0.92, xerr=spread, color=colour, label=name, error_kw={"lw": 0.8})
        for place, row in zip(places, own, strict=True):
            axis.annotate(_us(row["us"]), (row["high_us"], place), (3, 0), "data", "offset points", va="center", size=7)
    floors = {row["case"]: row["floor_us"] for row in timed if row.get("floor_us")}
    for number, case in enumerate(cases):
        if case in floors:
            axis.plot([floors[case]] * 2, [number - 0.42, number + 0.42], color="black", lw=1.2, ls=":")
    axis.set(xscale="log", xlabel="microseconds (dotted: the floor)", title=title, ylim=(len(cases) - 0.5, -0.5))
    axis.set_yticks(range(len(cases)), cases)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    axis.margins(x=0.12)
    _save(figure, path)


def draw_stages(path: Path, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """One stacked bar a step: milliseconds by stage. rows: {"case", "stages": {name: us}}."""
    found = {name for row in rows for name in row["stages"]}
    names = [name for name in STAGES if name in found] + sorted(found - set(STAGES))
    figure, axis = _figure(9, 1.4 + 0.34 * len(rows))
    left = [0.0] * len(rows)
    for name, colour in zip(names, colours(names), strict=True):
        shares = [row["stages"].get(name, 0.0) / sum(row["stages"].values()) for row in rows]
        axis.barh(range(len(rows)), shares, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    for number, row in enumerate(rows):
        axis.annotate(_us(row["us"]), (1, number), (4, 0), "data", "offset points", va="center", size=8)
    axis.set(xlabel="share of the kernels' time (right: the step's)", title=title, xlim=(0, 1))
    axis.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axis.invert_yaxis()
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.1, 1))
    _save(figure, path)


def colours(names: Sequence[str]) -> list[str]:
    """A colour for every name: its own where it has one."""
    own = _COLOURS | STAGES
    spare = iter(_OTHERS * (1 + len(names) // len(_OTHERS)))
    return [own[name] if name in own else next(spare) for name in names]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    # SVG with no random names in it: the same results give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "bench", "font.size": 9, "axes.spines.top": False})
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(width, height), layout="constrained")
    axis.spines["right"].set_visible(False)
    return figure, axis


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _us(us: float) -> str:
    return f"{us:.1f} us" if us < 100 else f"{us:.0f} us" if us < 1e4 else f"{us / 1e3:.1f} ms"
