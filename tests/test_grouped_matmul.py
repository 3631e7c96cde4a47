"""Rows times the matrix of their group, every implementation against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_jax.dispatch import op_named
from dsa_jax.grouped import grouped_matmul
from pallas_kernels.grouped_matmul import portable
from pallas_kernels.target import target_of

# Group sizes, inner and outer width: empty groups, single rows, more than a tile, odd widths.
CASES = {
    "odd": ((3, 0, 1, 40, 0), 33, 50),
    "even": ((0, 17, 0, 15), 64, 128),
    "one group": ((5,), 16, 16),
    "none": ((0, 0), 16, 16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", op_named("grouped_matmul").implementations())
@pytest.mark.parametrize("case", CASES)
def test_rows_meet_the_matrix_of_their_group(case, implementation):
    sizes, inner, columns = CASES[case]
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (sum(sizes), inner), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (len(sizes), columns, inner), jnp.bfloat16)
    out = jax.jit(lambda *args: grouped_matmul(*args, implementation=implementation))(x, weight, jnp.array(sizes))
    matrices = np.repeat(np.asarray(weight, np.float64), sizes, axis=0)
    want = np.einsum("ni,noi->no", np.asarray(x, np.float64), matrices)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-2, atol=2e-2)


def test_tiles_cover_every_row_once_and_mix_no_groups():
    sizes = np.array([3, 0, 129, 128, 0, 1, 300])
    tiles = sizes.sum() // 128 + len(sizes)
    group, first, last = (np.asarray(x) for x in portable._tiles(jnp.asarray(sizes), int(tiles), 128))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    seen = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True) if a < b])
    np.testing.assert_array_equal(np.sort(seen), np.arange(sizes.sum()))
    for owner, a, b in zip(group, first, last, strict=True):
        assert a >= b or set(owners[a:b]) == {owner}


@pytest.mark.parametrize("rows", [256, 65536])
def test_tiles_fit_the_groups(rows):
    x, weight = jax.ShapeDtypeStruct((rows, 6144), jnp.bfloat16), jax.ShapeDtypeStruct((256, 4096, 6144), jnp.bfloat16)
    config = portable.config_grouped_matmul(target_of("sm_90"), x, weight, None)
    assert config.block_rows == {256: 16, 65536: 128}[rows]


def test_bad_arguments_are_refused(as_user):
    x, weight, sizes = jnp.zeros((4, 8)), jnp.zeros((2, 3, 8)), jnp.array([1, 3])
    with pytest.raises(ValueError, match="weight's shape must be"):
        grouped_matmul(x, weight[:, :, :5], sizes)
    with pytest.raises(ValueError, match="group_sizes's shape must be"):
        grouped_matmul(x, weight, sizes[:1])
    with pytest.raises(ValueError, match="weight's dtype must be"):
        grouped_matmul(x, weight.astype(jnp.bfloat16), sizes)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        grouped_matmul(x, weight, sizes, implementation="portable")
