"""What a benchmark of one op on one shape is made of."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

LOGITS_COSINE = 5e-6  # 1 - cosine similarity with float64 above which index scores are wrong
MLA_COSINE = 7e-6  # and attention outputs
LSE = 1e-5  # of a log-sum-exp, relative and absolute


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one op. Subclasses say what the fields mean.

    op: the public function's name, and the program's.
    unit: the matrix rate that bounds the op, "fp8" or "bf16", or None where it multiplies nothing.
    """

    op: ClassVar[str]
    unit: ClassVar[str | None]

    @property
    def name(self) -> str:
        """Unique among the cases of an op: what `bench compare` matches rows by."""
        raise NotImplementedError

    @property
    def flops(self) -> int:
        """Operations the matrix unit cannot do without, a multiply-add counted as two."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes to move: every input that is needed read once, every output written once."""
        raise NotImplementedError

    def inputs(self) -> tuple[Any, ...]:
        """Random arguments of `call(...)`, the same in every run."""
        raise NotImplementedError

    def call(self, implementation: str) -> Callable[..., Any]:
        """The public function of `inputs()` through a named implementation."""
        raise NotImplementedError

    def baselines(self) -> dict[str, Callable[..., Any] | str]:
        """What anyone would write in jax, by name; a string says why it cannot run on this shape."""
        return {}

    def sample(self, out: Any, inputs: tuple[Any, ...]) -> Any:
        """The small part of an output, and of what it was made from, that is checked; traced and run on the device."""
        raise NotImplementedError

    def error(self, sample: Any, *, ours: bool) -> str | None:
        """What is wrong with a sample in numpy, or None. Peers and baselines are not held to our order and our -inf."""
        raise NotImplementedError

    def floor_us(self, rates: dict[str, float]) -> float | None:
        """The time of the operations or of the bytes at the device's measured rates, whichever is longer."""
        if not rates:
            return None
        matrix = self.flops / rates[self.unit] if self.unit else 0.0
        return 1e6 * max(matrix, self.bytes / rates["copy"])


def length(text: str) -> int:
    """ "64k" is 65536 and "1m" a million odd. Raises ValueError for anything but a positive whole number."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdigit() or int(digits) == 0:
        raise ValueError(f"a length must be a whole number such as 4096, 64k or 1m, got {text!r}")
    return int(digits) * scale


def short(number: int) -> str:
    """65536 is "64K"; numbers that are no multiple of 1024 stay as they are."""
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else str(number)


def cosine_error(got: Any, want: np.ndarray, limit: float) -> str | None:
    """What `got` is wrong by against float64, over the entries that are finite there."""
    got = np.asarray(got).astype(np.float64)
    finite = np.isfinite(want)
    got, want = got[finite], want[finite]
    distance = 1.0 - 2.0 * float((got * want).sum()) / max(float((got * got).sum() + (want * want).sum()), 1e-300)
    return None if distance < limit else f"1 - cosine similarity with float64 is {distance:.2g}, above {limit:.0e}"


def sampled(count: int, samples: int) -> np.ndarray:
    """Up to `samples` of 0..count-1, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, samples).astype(int))


def quick_key(seed: int) -> jax.Array:
    """A key of the generator that makes tens of gigabytes of weights in a second."""
    return jax.random.key(seed, impl="unsafe_rbg")


def e4m3(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Normal numbers rounded to e4m3."""
    return jax.random.normal(key, shape, jnp.bfloat16).astype(jnp.float8_e4m3fn)
