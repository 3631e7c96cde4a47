"""One of the two processes of test_striped.test_two_processes. Arguments: the coordinator's address, this one's rank."""

import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]), initialization_timeout=60)

import numpy as np
from index_cases import draw
from jax.sharding import PartitionSpec

from dsa_jax.striped import striped_select_topk
from dsa_jax.topk import select_topk

case = draw(0, 21, 300, heads=4)
mesh = jax.make_mesh((2,), ("tp",))
replicated = PartitionSpec()
select = jax.shard_map(
    lambda *x: striped_select_topk(*x, 32, axis_name="tp", stripe=4),
    mesh=mesh,
    in_specs=replicated,
    out_specs=replicated,
)
shared = [jax.make_array_from_process_local_data(jax.NamedSharding(mesh, replicated), np.asarray(x)) for x in case.args]
got = jax.jit(select)(*shared)
assert jax.process_count() == 2 and len(jax.local_devices()) == 1
np.testing.assert_array_equal(got.addressable_shards[0].data, select_topk(*case.args, 32))
print("same bits")
