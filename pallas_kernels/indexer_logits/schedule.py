"""Who scores which tile: an equal share of the tiles that matter for every block of a persistent kernel.

Queries come in groups and keys in tiles. A group visits the tiles between its lowest start and its highest end and
leaves the others unseen. Both kinds of tile are numbered through, group after group, and every block gets an equal run
of either numbering. All of it is computed on the device: lengths need not be known to the host.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

_VISITS, _FILLS = 0, 4  # where a block's two shares begin in its row of `shares`


class Share(NamedTuple):
    """A block's run of tile numbers [begin, end), and the groups it crosses: `count` from `first` on."""

    begin: Any
    end: Any
    first: Any
    count: Any


class Walk(NamedTuple):
    """The part of a share that lies in one group: steps [begin, end), counted from the share's own beginning.

    offset: tile minus step. gap_at, gap: tiles from gap_at on lie `gap` further.
    """

    begin: Any
    end: Any
    offset: Any
    gap_at: Any
    gap: Any

    def tile(self, step):
        tile = self.offset + step
        return tile if self.gap is None else tile + jnp.where(tile >= self.gap_at, self.gap, 0)


class Schedule(NamedTuple):
    """The schedule as arrays, or as references to them inside a kernel.

    shares: i32 [blocks, 8], a block's share of the visits and of the fills.
    prefix: i32 [groups + 1, 2], visited and unseen tiles before each group.
    bounds: i32 [groups, 3], a group's first tile, how many it visits, and the end of its highest query.
    """

    shares: Any
    prefix: Any
    bounds: Any

    def visits(self, block) -> Share:
        return self._share(block, _VISITS)

    def fills(self, block) -> Share:
        return self._share(block, _FILLS)

    def visited(self, group, share: Share) -> Walk:
        """The tiles of `share` that `group` visits."""
        begin, end = self._steps(group, share, 0)
        return Walk(begin, end, self.bounds[group, 0] - (self.prefix[group, 0] - share.begin), None, None)

    def unseen(self, group, share: Share) -> Walk:
        """The tiles of `share` that no query of `group` sees."""
        begin, end = self._steps(group, share, 1)
        first, count = self.bounds[group, 0], self.bounds[group, 1]
        return Walk(begin, end, share.begin - self.prefix[group, 1], first, count)

    def _share(self, block, at: int) -> Share:
        return Share(*(self.shares[block, at + i] for i in range(4)))

    def _steps(self, group, share: Share, kind: int):
        before, after = self.prefix[group, kind] - share.begin, self.prefix[group + 1, kind] - share.begin
        return jnp.maximum(before, 0), jnp.minimum(after, share.end - share.begin)


def schedule(
    starts: Int[Array, "B Q"],
    ends: Int[Array, "B Q"],
    *,
    group: int,
    keys: int,
    columns: int,
    blocks: int,
    group_cost: int = 0,
) -> Schedule:
    """The schedule of B requests of Q queries in groups of `group`, over tiles of `keys` of `columns` keys.

    group_cost: what taking up a group costs, in tiles. Shares are equal in tiles visited plus that.
    """
    missing = -starts.shape[1] % group
    starts, ends = (jnp.pad(x, ((0, 0), (0, missing))).reshape(-1, group) for x in (starts, ends))
    sees = starts < ends
    low = jnp.where(sees, starts, columns).min(axis=1)
    high = jnp.where(sees, ends, 0).max(axis=1)
    visited = jnp.maximum(pl.cdiv(high, keys) - low // keys, 0)
    first = jnp.minimum(low // keys, pl.cdiv(columns, keys))
    counts = jnp.stack([visited, pl.cdiv(columns, keys) - visited], axis=1)
    prefix = jnp.pad(jnp.cumsum(counts, axis=0, dtype=jnp.int32), ((1, 0), (0, 0)))
    shares = jnp.concatenate([_shares(prefix[:, 0], blocks, group_cost), _shares(prefix[:, 1], blocks, 0)], axis=1)
    return Schedule(shares, prefix, jnp.stack([first, visited, high], axis=1).astype(jnp.int32))


def _shares(prefix: jax.Array, blocks: int, group_cost: int) -> jax.Array:
    """[blocks, 4]: begin, end, first group, number of groups of each block's share of prefix[-1] tiles."""
    taken_up = jnp.pad(jnp.cumsum(prefix[1:] > prefix[:-1], dtype=jnp.int32), (1, 0))
    cost = prefix + group_cost * taken_up
    block = jnp.arange(blocks + 1, dtype=jnp.int32)
    share, rest = cost[-1] // blocks, cost[-1] % blocks
    edge = block * share + jnp.minimum(block, rest)
    group = _group_of(cost, edge)
    into_group = jnp.maximum(edge - cost[group] - group_cost, 0)
    tile = jnp.minimum(prefix[group] + into_group, prefix[group + 1])
    begin, end = tile[:-1], tile[1:]
    first, last = (_group_of(prefix, number) for number in (begin, end - 1))
    return jnp.stack([begin, end, first, jnp.where(begin < end, last - first + 1, 0)], axis=1)


def _group_of(prefix: jax.Array, number: jax.Array) -> jax.Array:
    """The group whose [prefix[group], prefix[group + 1]) holds `number`, the last one for any number beyond."""
    before = (prefix[None, 1:] <= number[:, None]).sum(axis=1, dtype=jnp.int32)
    return jnp.minimum(before, prefix.shape[0] - 2)
