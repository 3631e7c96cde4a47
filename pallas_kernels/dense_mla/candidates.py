"""What `bench tune` tries, by kernel: fields that differ from the heuristic config."""

CANDIDATES = {
    "dense_mla.portable": [
        dict(block_rows=rows, block_keys=keys, num_warps=warps, num_stages=stages)
        for rows, warps in ((64, 4), (64, 8), (128, 8), (128, 16))
        for keys in (32, 64)
        for stages in (2, 3)
    ],
}
