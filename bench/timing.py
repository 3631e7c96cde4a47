"""How long a call takes: on a GPU by the device's own clock with nothing of the call left in the L2 cache, else by the
host's.

On a GPU every repeat reads more memory than the L2 cache holds and then runs the call; had it written, the call would
pay for writing those lines back. The profiler reports when each kernel began and ended; the time of a call is from its
first kernel's beginning to its last one's end, gaps between them included, the host's time before the first excluded:
it launches while the reading still goes on. Kernels of other libraries in the process are reported the same way, so
peers are timed by the same clock.
"""

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

_FLUSH_BYTES = 512 * 2**20  # several times any L2, and long enough for the host to launch the call meanwhile
_FLUSH_SECONDS = 1e-4
_BUDGET_SECONDS = 0.15  # of device time a measurement takes, within the limits on the repeats
_MIN_REPEATS, _MAX_REPEATS = 5, 31


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of `repeats`, and the quartiles around it. clock: "device" or "wall"."""

    us: float
    low_us: float
    high_us: float
    repeats: int
    clock: str

    @classmethod
    def of(cls, seconds: list[float], clock: str) -> "Timing":
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(1e6 * middle, 1e6 * low, 1e6 * high, len(seconds), clock)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel's run on the device. name: the kernel's; hlo: the HLO instruction it belongs to, "" where unknown."""

    name: str
    hlo: str
    module: str
    begin_ns: float
    end_ns: float


def measure(
    call: Callable[[], Any],
    *,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    flush: Callable[[], Any] | None = None,
    repeats: int | None = None,
) -> Timing:
    """Times `call()`, which must have run before, so that nothing is left to compile.

    wait: blocks until what `call` returned is there.
    flush: fills the L2 cache on the stream that `call` uses with exactly one kernel; None for jax's stream.
    repeats: None for as many as the budget of time allows.
    """
    seconds = _wall(call, wait)
    if repeats is None:
        repeats = int(min(max(_BUDGET_SECONDS / (seconds + _FLUSH_SECONDS), _MIN_REPEATS), _MAX_REPEATS))
    if jax.default_backend() == "cpu":
        return Timing.of([_wall(call, wait) for _ in range(repeats)], "wall")
    flush = flush_l2 if flush is None else flush
    wait(flush())
    launches = _launches(lambda: (flush(), call())[1], wait, repeats)
    return Timing.of([(max(k.end_ns for k in run) - run[0].begin_ns) / 1e9 for run in launches], "device")


def measure_in_turn(calls: Sequence[Callable[[], Any]], *, repeats: int) -> list[Timing]:
    """Times calls that must have run before, one after the other and that `repeats` times: a drift meets all alike."""
    if jax.default_backend() == "cpu":
        runs = [[_wall(call, jax.block_until_ready) for call in calls] for _ in range(repeats)]
        return [Timing.of(list(seconds), "wall") for seconds in zip(*runs, strict=True)]
    jax.block_until_ready(flush_l2())

    def burst():
        out = None
        for _ in range(repeats):
            for call in calls:
                flush_l2()
                out = call()
        return out

    launches = _between_flushes(kernels_of(burst))
    assert len(launches) == repeats * len(calls), f"{len(launches)} launches of {len(calls)} calls {repeats} times"
    seconds = [(max(k.end_ns for k in run) - run[0].begin_ns) / 1e9 for run in launches]
    return [Timing.of(seconds[i :: len(calls)], "device") for i in range(len(calls))]


def _between_flushes(kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """The kernels after each flush of jax's."""
    launches: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.module == f"jit_{_read.__name__}":
            launches.append([])
        else:
            launches[-1].append(kernel)
    return launches


def flush_l2() -> jax.Array:
    """Reads more memory than the L2 cache holds, in one kernel on jax's stream."""
    return _flush(_scratch())


def kernels_of(call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready) -> list[Kernel]:
    """Every kernel and copy that runs on the device during `call()`, in the order of their beginnings."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            wait(call())
        (file,) = Path(folder).rglob("*.xplane.pb")
        return sorted(_device_events(jax.profiler.ProfileData.from_file(str(file))), key=lambda kernel: kernel.begin_ns)


def _launches(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int) -> list[list[Kernel]]:
    """The kernels of each of `repeats` calls, without the first of each, which is the flush."""

    def burst():
        out = None
        for _ in range(repeats):
            out = call()
        return out

    kernels = kernels_of(burst, wait)
    each, rest = divmod(len(kernels), repeats)
    assert rest == 0 and each > 1, f"{len(kernels)} kernels in {repeats} calls"
    return [kernels[i * each + 1 : (i + 1) * each] for i in range(repeats)]


def _device_events(profile: jax.profiler.ProfileData) -> Iterator[Kernel]:
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    stats = {key: value for key, value in event.stats if key in ("hlo_op", "hlo_module")}
                    hlo, module = (str(stats.get(key, "")) for key in ("hlo_op", "hlo_module"))
                    yield Kernel(event.name, hlo, module, event.start_ns, event.start_ns + event.duration_ns)


def _wall(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    begin = time.perf_counter()
    wait(call())
    return time.perf_counter() - begin


@functools.cache
def _scratch() -> jax.Array:
    return jnp.zeros((_FLUSH_BYTES // 4096, 1024), jnp.float32)


def _read(buffer: jax.Array) -> jax.Array:
    return jnp.max(buffer, axis=1)


_flush = jax.jit(_read)
