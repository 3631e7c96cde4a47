"""A picture of which positions every layer kept: keys to the right, queries downwards, one panel a selection."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Array, Int

from dsa_jax.checks import require
from dsa_jax.generate import Chunk

MAX_BINS = 256  # cells along an axis: at 16K tokens a cell is 64 x 64 positions


Layers = tuple[int, ...]  # a layer that selects, then those that share its selection


class Kept:
    """Collects the positions that the prefill of one prompt kept, step by step: give it to `Run.prefill`."""

    def __init__(self, layers: Sequence[int], index_topk: int):
        self._steps: dict[int, list[np.ndarray]] = {layer: [] for layer in layers}
        self._index_topk = index_topk

    def __call__(self, step: Chunk, indices: tuple[Array | None, ...]) -> None:
        for layer, steps in self._steps.items():
            kept = indices[layer]
            steps.append(self._everything(step) if kept is None else np.asarray(kept[: step.num_rows]))

    def layer(self, layer: int) -> Int[np.ndarray, "T K"]:
        """The positions of every row so far, -1 for none."""
        return np.concatenate(self._steps[layer])

    def _everything(self, step: Chunk) -> np.ndarray:
        """A dense step: every row keeps all that it sees."""
        column = np.arange(self._index_topk)[None]
        return np.where(column <= step.positions[: step.num_rows, None], column, -1)


def panels(indexer_types: Sequence[str], layers: Sequence[int] | None = None) -> list[Layers]:
    """The selections that `layers` (None: all) attend to, each with every layer that has it.

    indexer_types: "full" or "shared" for each layer. Raises ValueError for a layer that is not there.
    """
    count = len(indexer_types)
    for layer in layers or ():
        require(0 <= layer < count, "layers", layer, f"in 0..{count - 1}")
    groups: list[list[int]] = []
    for layer, kind in enumerate(indexer_types):
        groups += [[]] if kind == "full" else []
        groups[-1].append(layer)
    return [tuple(group) for group in groups if layers is None or set(group) & set(layers)]


def kept_share(indices: Int[np.ndarray, "T K"], bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The share of the visible (query, key) pairs of every cell that was kept: [bins, bins], NaN where none is visible.

    Also returns the borders of the cells, bins + 1 positions from 0 to T.
    """
    length = indices.shape[0]
    edges = np.linspace(0, length, bins + 1).round().astype(np.int64)
    cell = np.searchsorted(edges, np.arange(length), side="right") - 1
    rows, lanes = np.nonzero(indices >= 0)
    flat = cell[rows] * bins + cell[indices[rows, lanes]]
    kept = np.bincount(flat, minlength=bins * bins).reshape(bins, bins)
    # Row q sees keys 0..q: of each cell of keys, those from its first to q.
    seen = np.clip(np.arange(length)[:, None] + 1 - edges[None, :-1], 0, np.diff(edges)[None])
    visible = np.add.reduceat(seen, edges[:-1], axis=0)
    return np.where(visible > 0, kept / np.maximum(visible, 1), np.nan), edges


def draw_selection(
    path: str | Path, kept: Mapping[Layers, Int[np.ndarray, "T K"]], *, title: str, caption: str
) -> Path:
    """Writes a PNG with a panel for each selection, and returns its path.

    kept: positions that every row of every selection kept, -1 for none; all of the same length.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colors, pyplot

    length = next(iter(kept.values())).shape[0]
    shares = [kept_share(indices, min(length, MAX_BINS)) for indices in kept.values()]
    floor = min(float(share[share > 0].min(initial=1.0)) for share, _ in shares)
    norm = colors.LogNorm(max(floor, 1e-4), 1.0)
    columns = min(len(kept), 2 if len(kept) <= 4 else 4)
    rows = -(-len(kept) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.6 * columns + 1.2, 5.4 * rows + 1.4), squeeze=False, layout="constrained"
    )
    images = []
    for axis, layers, (share, edges) in zip(axes.flat, kept, shares, strict=False):
        images.append(_draw_panel(axis, share, edges, norm))
        axis.set_title(_title(layers), fontsize=11)
    for axis in axes.flat[len(kept) :]:
        axis.set_visible(False)
    bar = figure.colorbar(images[0], ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("share of a cell's visible keys that were kept (log scale; white: none)")
    figure.suptitle(title, fontsize=15)
    figure.supxlabel(caption, fontsize=10)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
    return Path(path)


def _draw_panel(axis, share: np.ndarray, edges: np.ndarray, norm):
    length = int(edges[-1])
    axis.set_facecolor("#e6e6e6")  # the future, which no row sees
    seen = np.where(share == 0.0, np.nan, share)
    axis.fill([0, length, 0], [0, length, length], color="white", linewidth=0)
    image = axis.imshow(
        np.ma.masked_invalid(seen),
        extent=(0, length, length, 0),
        cmap="magma_r",
        norm=norm,
        interpolation="nearest",
        aspect="equal",
        zorder=2,
    )
    axis.set(xlim=(0, length), ylim=(length, 0), xlabel="key position", ylabel="query position")
    axis.text(0.97, 0.96, "future", transform=axis.transAxes, ha="right", va="top", color="#808080", fontsize=9)
    return image


def _title(layers: Layers) -> str:
    first, last = layers[0], layers[-1]
    if first == last:
        return f"layer {first}"
    return f"layer {first}, shared by {first + 1}" + (f" to {last}" if last > first + 1 else "")
