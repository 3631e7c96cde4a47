"""What attention kernels share that take their softmax in base 2."""

import math
from typing import Any

import jax.numpy as jnp

LOG2E = math.log2(math.e)


def positively_scaled(q: Any, sm_scale: float) -> tuple[Any, float]:
    """Queries and a positive scale with the same logits, for a kernel that takes its maxima before it scales."""
    if sm_scale > 0:
        return q, sm_scale
    return q * jnp.asarray(-1 if sm_scale < 0 else 0, q.dtype), abs(sm_scale) or 1.0
