"""The one table of tolerances. Index results have none: they are compared as bits."""

import numpy as np

LOGITS_COSINE = 5e-6  # 1 - cosine similarity with float64 on the same fp8 inputs
MLA_OUT = 1e-3  # bf16 sparse MLA output, absolute
MLA_COSINE = 7e-6
LSE = 1e-5
GOLDEN_LOGITS = 2e-5  # float32 tiny models against transformers
FLOAT32 = 2e-6  # float32 against float64, relative to the largest magnitude


def cosine_distance(got, want) -> float:
    """1 - cosine similarity in float64, over the entries that are finite in `want`; the others must match exactly."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    got, want = got[finite], want[finite]
    if not want.any():
        return float(np.abs(got).max(initial=0.0))
    return 1.0 - 2.0 * float((got * want).sum()) / float((got * got).sum() + (want * want).sum())
