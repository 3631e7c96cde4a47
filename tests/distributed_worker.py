"""One process of tests/test_distributed.py. Arguments: the coordinator's address, the number of processes, this one."""

import sys

import jax
import numpy as np
from index_cases import draw
from jax.sharding import PartitionSpec

from dsa_jax.distributed import MissingProcess, Place, join
from dsa_jax.striped import striped_select_topk
from dsa_jax.topk import select_topk


def main(address: str, count: int, process: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        join(Place(address, count, process), timeout=60 if count == 2 else 3)
    except MissingProcess as error:
        sys.exit(f"dsa-jax: {error}")
    assert jax.process_count() == count and len(jax.local_devices()) == 1
    case, mesh, replicated = draw(0, 21, 300, heads=4), jax.make_mesh((count,), ("tp",)), PartitionSpec()
    select = jax.shard_map(
        lambda *x: striped_select_topk(*x, 32, axis_name="tp", stripe=4, combine="all_gather"),
        mesh=mesh,
        in_specs=replicated,
        out_specs=replicated,
    )
    sharding = jax.NamedSharding(mesh, replicated)
    shared = [jax.make_array_from_process_local_data(sharding, np.asarray(x)) for x in case.args]
    got = jax.jit(select)(*shared)
    np.testing.assert_array_equal(got.addressable_shards[0].data, select_topk(*case.args, 32))
    print("same bits")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
