"""What `bench tune` tries, by kernel: fields that differ from the heuristic config."""

CANDIDATES = {
    "sparse_mla.portable": [
        dict(block_h=heads, block_k=keys, num_warps=warps, num_stages=stages)
        for heads, warps in ((16, 4), (32, 4), (64, 4), (64, 8))
        for keys in (32, 64)
        for stages in (2, 3)
    ],
}
