"""Top-k of score rows: every shape is checked against the rule in numpy on a sample of rows, then timed.

The floor of a shape is its bytes, every score read once and every index written once, at the machine's copy rate.
Times are of the kernels alone, as the device reports them. Inputs rotate over more memory than the L2 cache holds.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels.target import target_of
from pallas_kernels.topk import hopper, portable

COPY_BYTES = 4.3e12  # H200: a device-to-device copy, bytes read plus bytes written
_ROTATED_BYTES = 300e6
_CHECKED_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """rows of columns scores. scores: "normal", or "relu": max(normal - 1.5, 0), whose k-th score ties with most.

    peer_us: sglang's fast_topk on an H200, microseconds, where known.
    """

    rows: int
    columns: int
    scores: str = "normal"
    peer_us: float | None = None
    k: int = 2048

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.columns} k={self.k} {self.scores}"

    @property
    def bytes(self) -> int:
        return 4 * self.rows * (self.columns + self.k)

    def inputs(self) -> list[jax.Array]:
        """Different arrays, together larger than the L2 cache."""
        copies = max(2, min(24, int(_ROTATED_BYTES / (4 * self.rows * self.columns)) + 1))
        keys = jax.random.split(jax.random.key(self.rows + self.columns), copies)
        arrays = [jax.random.normal(key, (self.rows, self.columns), jnp.float32) for key in keys]
        return [jnp.maximum(x - 1.5, 0) for x in arrays] if self.scores == "relu" else arrays


CASES = (
    Case(1, 65536, peer_us=39.2),
    Case(64, 8192, peer_us=13.1),
    Case(64, 65536, peer_us=41.8),
    Case(64, 131072, peer_us=76.2),
    Case(1024, 16384, peer_us=125),
    Case(1024, 65536),
    Case(1024, 131072, peer_us=734),
    Case(4096, 16384, peer_us=462),
    Case(4096, 16384, "relu"),
    Case(4096, 65536, peer_us=1222),
    Case(4096, 65536, "relu"),
)


def _lax_top_k(scores, k, starts, ends):
    del starts, ends
    return jnp.sort(lax.top_k(scores, k)[1], axis=1)


KERNELS: dict[str, Callable[..., jax.Array]] = {
    "hopper": hopper.topk_indices,
    "portable": portable.topk_indices,
    "lax.top_k": _lax_top_k,
}
_REFUSALS = {"hopper": hopper.refuse_topk_indices, "portable": portable.refuse_topk_indices}


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement, of which the check has passed. floor: the fraction of the floor reached."""

    case: str
    implementation: str
    us: float
    gbytes: float
    floor: float
    peer: float | None

    def __str__(self) -> str:
        peer = f"{self.peer:5.2f}x peer" if self.peer else ""
        return (
            f"{self.case:32} {self.implementation:9} {self.us:9.1f} us {self.gbytes:6.0f} GB/s "
            f"{100 * self.floor:4.0f} % of floor {peer}"
        )


def run(cases: Iterable[Case] = CASES, implementations: Iterable[str] = ("hopper", "portable")) -> Iterator[Row]:
    """Checks, then times. A kernel that refuses a shape is left out; one that is wrong raises."""
    for case in cases:
        arrays = case.inputs()
        for name in implementations:
            refuse = _REFUSALS.get(name)
            if refuse is None or refuse(target_of(), arrays[0], case.k) is None:
                yield measure(case, name, arrays)


def measure(case: Case, name: str, arrays: list[jax.Array]) -> Row:
    """Checks and times one implementation on one case. Raises AssertionError, and times nothing, if it is wrong."""
    starts, ends = jnp.zeros(case.rows, jnp.int32), jnp.full(case.rows, case.columns, jnp.int32)
    kernel = KERNELS[name]
    # All of the arrays in one program: no host time between the launches.
    call = jax.jit(lambda arrays, starts, ends: [kernel(x, case.k, starts, ends) for x in arrays])
    call = call.lower(arrays, starts, ends).compile()
    checked = np.asarray(call(arrays, starts, ends)[0][:_CHECKED_ROWS])
    assert np.array_equal(checked, _rule(np.asarray(arrays[0][:_CHECKED_ROWS]), case.k)), f"{case.name} {name} is wrong"
    seconds = _kernel_seconds(call, (arrays, starts, ends), len(arrays))
    return Row(
        case=case.name,
        implementation=name,
        us=1e6 * seconds,
        gbytes=case.bytes / seconds / 1e9,
        floor=case.bytes / COPY_BYTES / seconds,
        peer=case.peer_us / (1e6 * seconds) if case.peer_us else None,
    )


def _kernel_seconds(call: Callable, args: tuple, launches: int) -> float:
    """The median over the launches in `call` of the sum of their kernels' durations."""
    _, kernels = profiler.measure(call, aggregate=False)(*args)
    milliseconds = [duration for _, duration in kernels]
    each, rest = divmod(len(milliseconds), launches)
    assert rest == 0, f"{len(milliseconds)} kernels in {launches} launches"
    return statistics.median(sum(milliseconds[i * each : (i + 1) * each]) for i in range(launches)) / 1e3


def _rule(scores: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1).astype(np.int32)
