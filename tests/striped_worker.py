"""One of the two processes of test_striped.test_two_processes. Arguments: the coordinator's address, this rank."""

import sys

import jax
import numpy as np
from index_cases import draw
from jax.sharding import PartitionSpec

from dsa_jax.striped import striped_select_topk
from dsa_jax.topk import select_topk


def main(address: str, rank: int) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=rank, initialization_timeout=60)
    assert jax.process_count() == 2 and len(jax.local_devices()) == 1
    case, mesh, replicated = draw(0, 21, 300, heads=4), jax.make_mesh((2,), ("tp",)), PartitionSpec()
    select = jax.shard_map(
        lambda *x: striped_select_topk(*x, 32, axis_name="tp", stripe=4),
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
    main(sys.argv[1], int(sys.argv[2]))
