"""The top-k kernels below the public function: their guesses and their fall-backs, what they lower to, GPU runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import simt_numpy
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import tuning
from pallas_kernels.target import target_of
from pallas_kernels.topk import hopper, portable
from pallas_kernels.topk.keys import LOWEST_KEY, NO_KEY, TOP_KEY, keys_of

KERNELS = {"hopper": hopper, "portable": portable}


def rows_for(n: int, k: int, seed: int = 0):
    """(scores, starts, ends) of one row per kind of data or range that has broken a top-k."""
    rng = np.random.default_rng(seed)
    one = int(np.float32(1).view(np.int32))
    steps = np.arange(n, dtype=np.int32)

    def normal():
        return rng.standard_normal(n).astype(np.float32)

    def with_some(value, share):
        return np.where(rng.random(n) < share, np.float32(value), normal())

    two_values, head = np.zeros(n), np.zeros(n)
    two_values[-(k // 2) :] = 1
    head[: max(k - 1, 1)] = 1
    peaks = -np.abs(normal()) - 5
    peaks[:: max(n // (4 * k), 1)] += 20  # where a sample of every (n / S)-th sees nothing else, or none
    front = normal() - 9
    front[: n // 8] += 20
    whole = [
        normal(),
        np.maximum(normal() - 1.28, 0),
        np.where(rng.random(n) < 0.5, -0.0, 0.0),
        np.full(n, 3.25),
        np.full(n, -1e-40),
        (one + steps).view(np.float32),
        (one + steps[::-1]).view(np.float32),
        (one + steps // 7).view(np.float32),
        np.sort(normal()),
        np.sort(normal())[::-1],
        rng.random(n) * 0.2 + 10,
        np.exp(4 * normal()),
        rng.integers(-4, 4, n),
        with_some(np.nan, 0.3),
        with_some(-np.nan, 0.999),
        with_some(np.nan, 1),
        with_some(np.inf, 0.2),
        with_some(-np.inf, 0.97),
        with_some(-np.inf, 1),
        two_values,
        head,
        peaks,
        front,
    ]
    ranges = [(0, 100), (37, 37 + k), (50, 50), (60, 50), (n // 3 + 1, n - 5), (n - k - 1, n), (-7, n + 9), (5, -3)]
    ranges += [(n + 5, n + 9)]
    scores = np.stack(whole + [normal() for _ in ranges]).astype(np.float32)
    starts = np.array([0] * len(whole) + [start for start, _ in ranges], np.int32)
    ends = np.array([n] * len(whole) + [end for _, end in ranges], np.int32)
    return jnp.asarray(scores), jnp.asarray(starts), jnp.asarray(ends)


def assert_exact(got, scores, k, starts, ends):
    np.testing.assert_array_equal(np.asarray(got), oracle.topk_indices(np.asarray(scores), k, starts, ends))


def test_keys_are_of_the_order_of_scores():
    scores = np.array([np.nan, -np.inf, np.finfo(np.float32).min, -1, -1e-45, -0.0, 0.0, 1e-45, 1, np.inf], np.float32)
    keys = np.asarray(keys_of(jnp.asarray(scores)))
    assert keys[0] == NO_KEY and keys[1] == LOWEST_KEY - 1 and keys[2] == LOWEST_KEY and keys[-1] == TOP_KEY
    assert np.all((keys[2:] > keys[1:-1]) == (scores[2:] > scores[1:-1]))


@pytest.mark.parametrize("n", [16, 17, 18, 34, 136])
def test_topk_adversarial_without_a_guess(n):
    scores, starts, ends = rows_for(n, 17)
    assert_exact(portable.topk_indices(scores, 17, starts, ends), scores, 17, starts, ends)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="default"),
        pytest.param({"samples": 16}, id="wild-guesses"),
        pytest.param({"capacity": 256, "programs": 3, "chunk": 64}, id="small-buffer-many-rows-a-program"),
    ],
)
def test_topk_adversarial_with_guesses(config):
    n, k = 1601, 200
    scores, starts, ends = rows_for(n, k)
    config = dataclasses.replace(portable.Config(chunk=512, capacity=512, samples=128), **config)
    got = portable.solve(scores, k, starts, ends, config, interpret=True)
    assert_exact(got, scores, k, starts, ends)


@pytest.mark.parametrize("k", [1, 17, 512, 2048, 2051, 4096, 16384])
@pytest.mark.parametrize("shape", [(1, 5), (3, 1001), (64, 8192), (4096, 16384), (1, 65536), (7, 1000003)])
def test_heuristic_configs_are_legal(shape, k):
    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    config = hopper.config_topk_indices(target_of("sm_90"), scores, k)
    hopper.require_legal(config, k)
    assert hopper._shared_bytes(config) <= target_of("sm_90").shared_memory
    config = portable.config_topk_indices(target_of("sm_80"), scores, k)
    assert config.capacity > min(k, shape[1]) and config.chunk <= 32768


def test_a_measured_entry_replaces_what_it_names(monkeypatch):
    entry = {"where": {"n": [1000, 2000], "kind": "a"}, "config": {"stages": 3}}
    monkeypatch.setattr(tuning, "table", lambda device: {"some.kernel": [entry]})
    heuristic, target = hopper.Config(samples=512), target_of("sm_90")
    assert tuning.tuned("some.kernel", target, heuristic, n=2000, kind="a") == hopper.Config(samples=512, stages=3)
    for call in ({"n": 2001, "kind": "a"}, {"n": 1500, "kind": "b"}):
        assert tuning.tuned("some.kernel", target, heuristic, **call) == heuristic
    assert tuning.tuned("another.kernel", target, heuristic, n=1500, kind="a") == heuristic


@pytest.mark.parametrize(
    ("name", "arch", "dtype", "reason"),
    [
        ("hopper", "sm_80", jnp.float32, "need sm_90"),
        ("hopper", "sm_90", jnp.bfloat16, "must be float32"),
        ("hopper", "sm_90", jnp.float32, None),
        ("portable", "sm_75", jnp.float32, "sm_80 or newer"),
        ("portable", "gfx942", jnp.bfloat16, "must be float32"),
        ("portable", "gfx942", jnp.float32, None),
    ],
)
def test_refusals(name, arch, dtype, reason):
    scores = jax.ShapeDtypeStruct((4, 1000), dtype)
    got = KERNELS[name].refuse_topk_indices(target_of(arch), scores, 17)
    assert (got is None) if reason is None else (reason in got)


DEVICE_KINDS = {
    "sm_80": "NVIDIA A100",
    "sm_90": "NVIDIA H100",
    "sm_120": "NVIDIA RTX PRO 6000",
    "gfx942": "gfx942",
    "gfx950": "gfx950",
}


def lowered(kernel, arch, shape, k):
    """The kernel's module for a device that is not there."""
    device = AbstractDevice(device_kind=DEVICE_KINDS[arch], num_cores=None, platform="gpu")
    scores = jax.ShapeDtypeStruct(shape, jnp.float32)
    bounds = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    call = jax.jit(lambda scores, starts, ends: kernel.topk_indices(scores, k, starts, ends, target=arch))
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("_",), abstract_device=device)):
        platform = "rocm" if arch.startswith("gfx") else "cuda"
        return call.trace(scores, bounds, bounds).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("arch", DEVICE_KINDS)
def test_portable_lowers(arch):
    assert "__gpu$xla.gpu.triton" in lowered(portable, arch, (3, 1001), 17)


@pytest.mark.parametrize(("shape", "k"), [((3, 1001), 17), ((1, 65536), 2048)], ids=["ragged", "cluster"])
def test_hopper_lowers(shape, k):
    assert "mosaic_gpu" in lowered(hopper, "sm_90", shape, k)


EMULATED = [
    ((8191, 2048), {"samples": 1024}, 5, 1.0),
    ((3001, 300), {"stages": 3, "neighbours": 8}, 40, 1.0),
    ((16384, 300), {"columns_per_thread": 28, "neighbours": 32}, 40, 1.0),
    ((12001, 300), {"columns_per_thread": 44, "parts": 2}, 40, 1.0),
    ((12000, 301), {"columns_per_thread": 12, "stages": 4, "parts": 4}, 3, 1.0),
    ((10000, 900), {}, 4, 30.0),
    ((8191, 1900), {"columns_per_thread": 28}, 4, 0.3),
    ((6001, 300), {"stages": 3}, 4, 30.0),
    ((12001, 300), {"parts": 2}, 4, 3.0),
    ((17, 17), {}, 40, 1.0),
    ((4, 17), {}, 3, 1.0),
    ((16384, 2048), {"samples": 1024, "stages": 1, "columns_per_thread": 44, "capacity": 3072}, 3, 1.0),
    ((16384, 300), {"stages": 1, "parts": 4}, 40, 1.0),
    ((8191, 2048), {"samples": 1024, "threads": 256, "columns_per_thread": 12}, 5, 1.0),
    ((12001, 300), {"parts": 2, "threads": 256, "columns_per_thread": 12, "samples": 1024}, 40, 1.0),
    ((12001, 300), {"parts": 2, "threads": 512, "columns_per_thread": 4, "samples": 2048, "capacity": 2048}, 40, 1.0),
]


@pytest.mark.parametrize(("shape", "config", "blocks", "aim"), EMULATED)
def test_hopper_emulated(shape, config, blocks, aim):
    """The threads' code by numpy. aim: what the guesses are made worse by: rows overflow, or have to be read again."""
    n, k = shape
    fields = {"columns_per_thread": 20, "stages": 2, "samples": 512, "neighbours": 4, "parts": 1}
    fields["capacity"] = max(-(-(k + k // 2) // 512) * 512, 1024)
    scores, starts, ends = (np.ascontiguousarray(x[n % 2 :: 2]) for x in rows_for(n, k))
    out = np.full((len(scores), k), -7, np.int32)

    def run(hopper_block, hopper_row):
        problem = hopper_block.Problem(rows=len(scores), length=n, k=k, blocks=blocks, **fields | config)
        first_aim = hopper_row.Row.aim
        hopper_row.Row.aim = lambda row: first_aim(row) * aim
        names = {"scores": scores, "starts": starts, "ends": ends, "out": out}
        arrays = [simt_numpy.Array(name, x.reshape(-1)) for name, x in names.items()]
        for block in range(min(blocks, len(scores))):
            part = simt_numpy.start(problem.parts, problem.threads)
            shared = [simt_numpy.Array.shared(name, *cut) for name, cut in hopper_block.shared_arrays(problem).items()]
            memory = hopper_block.Memory(**{array.name: array.pointer() for array in [*arrays, *shared]})
            hopper_row.write_topk(problem, memory, simt_numpy.as_value(block), part)

    simt_numpy.emulate(["pallas_kernels.topk.hopper_block", "pallas_kernels.topk.hopper_row"], run)
    assert_exact(out, scores, k, starts, ends)


HOPPER_CONFIGS = [
    ((1001, 17), {"threads": 128, "blocks": 5}),
    ((4, 17), {}),
    ((17, 17), {}),
    ((2049, 2048), {}),
    ((8191, 2051), {"threads": 128, "columns_per_thread": 20, "stages": 2, "blocks": 3, "neighbours": 4}),
    ((16384, 2048), {"parts": 4}),
    ((20001, 1000), {"threads": 128, "stages": 3}),
    ((20000, 512), {"threads": 128, "blocks": 7, "capacity": 1024, "samples": 512}),
    ((30001, 2), {"parts": 2}),
    ((65537, 2048), {"columns_per_thread": 60}),
    ((70001, 4096), {"parts": 4, "blocks": 6}),
    ((65536, 2048), {"parts": 8, "threads": 256}),
    ((16384, 2048), {"threads": 128, "stages": 1}),
    ((9000, 2048), {"threads": 256, "columns_per_thread": 36, "stages": 1}),
    ((131072, 2048), {"threads": 512, "columns_per_thread": 12, "parts": 2}),
    ((33333, 16384), {}),
    ((1000003, 2048), {}),
]


@pytest.mark.needs_gpu
@pytest.mark.parametrize(("shape", "config"), HOPPER_CONFIGS)
def test_hopper_adversarial(shape, config):
    n, k = shape
    scores, starts, ends = rows_for(n, k)
    config = dataclasses.replace(hopper.config_topk_indices(target_of(), scores, k), **config)
    got = [np.asarray(hopper.solve(scores, k, starts, ends, config)) for _ in range(20)]
    assert_exact(got[0], scores, k, starts, ends)
    assert all(np.array_equal(got[0], other) for other in got[1:])


@pytest.mark.needs_gpu
@pytest.mark.parametrize("name", KERNELS)
def test_a_row_alone_is_as_in_its_batch(name):
    n, k = 20001, 2048
    scores, starts, ends = rows_for(n, k)
    together = np.asarray(KERNELS[name].topk_indices(scores, k, starts, ends))
    for row in range(0, len(scores), 5):
        one = slice(row, row + 1)
        alone = KERNELS[name].topk_indices(scores[one], k, starts[one], ends[one])
        np.testing.assert_array_equal(np.asarray(alone), together[one])


@pytest.mark.needs_gpu
@pytest.mark.parametrize("name", KERNELS)
def test_offsets_beyond_32_bits(name):
    n, k = 1 << 20, 2048
    scores = jax.random.normal(jax.random.key(0), (2100, n), jnp.float32)
    rows = np.array([0, 1023, 1024, 2047, 2048, 2099])
    bounds = jnp.zeros(len(scores), jnp.int32), jnp.full(len(scores), n, jnp.int32)
    got = np.asarray(KERNELS[name].topk_indices(scores, k, *bounds))[rows]
    np.testing.assert_array_equal(got, oracle.topk_indices(np.asarray(scores[rows]), k))
