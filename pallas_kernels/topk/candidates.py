"""What `bench tune` tries, by kernel: fields that differ from the heuristic config."""

import itertools

CANDIDATES = {
    "topk.hopper": [
        dict(columns_per_thread=columns, samples=samples, neighbours=neighbours, stages=stages)
        for columns, samples, neighbours, stages in itertools.product((20, 28), (1024, 2048), (8, 16, 32), (2, 4))
    ],
    "topk.portable": [
        dict(chunk=chunk, num_warps=warps)  # programs take scratch memory, which callers count on
        for chunk, warps in itertools.product((1024, 2048, 4096), (2, 4, 8))
    ],
}
