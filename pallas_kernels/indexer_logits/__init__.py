"""Index scores, the lightning indexer's logits:

    logits[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n]) inside [starts[m], ends[m]), -inf outside.

`hopper` is the Pallas Mosaic GPU kernel for sm_90, `portable` the Pallas-Triton one for everything else. Both see one
problem, `problem.Problem`, whether the keys lie in one array or in the pages of a cache.
"""
