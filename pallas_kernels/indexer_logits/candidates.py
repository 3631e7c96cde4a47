"""What `bench tune` tries, by kernel: fields that differ from the heuristic config."""

_HOPPER = [dict(stages=stages, doubled_of_four=doubled) for stages in (8, 12) for doubled in (1, 2, 3)]
_PORTABLE = [dict(block_keys=keys, num_stages=stages) for keys in (64, 128, 256) for stages in (2, 3, 4)]

CANDIDATES = {
    f"{op}.{name}": fields
    for op in ("indexer_logits", "paged_indexer_logits")
    for name, fields in (("hopper", _HOPPER), ("portable", _PORTABLE))
}
