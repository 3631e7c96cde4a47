"""Barriers in shared memory at which a warp arrives once, and the copies that they wait for.

With Pallas' own every thread arrives: 64 times for a copy and 128 times for the return of a tile.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels import simt
from pallas_kernels.simt import SCALAR, Pointer, as_value, scalar

_REF = plgpu.RefType()


def barriers(count: int) -> Any:
    """The type of `count` barriers in shared memory."""
    return plgpu.SMEM((2 * count,), jnp.int32)


def start(*counts: tuple[int, int]) -> Callable[..., None]:
    """-> f(*refs), for one warpgroup: makes the barriers of each reference ready.

    counts: of each reference how many, and how many arrivals complete a phase of one.
    Whoever uses them must have synchronized with this warpgroup since.
    """

    @plgpu.inline_mgpu(arg_types=(_REF,) * len(counts))
    def run(_, *refs):
        with simt.when((simt.thread() & (simt.THREADS - 1)).equals(0)):
            for ref, (number, arrivals) in zip(refs, counts, strict=True):
                for i in range(number):
                    simt.init_barrier(Pointer.to(ref).at(2 * i), arrivals)
        simt.publish_barriers()
        simt.warpgroup_barrier()

    return run


@plgpu.inline_mgpu(arg_types=(_REF, SCALAR, SCALAR))
def wait(_, ref, slot, turn):
    """Waits until the barrier of a slot has completed its phase number `turn`, from 0 on; -1 is always over."""
    text = """{ .reg .pred p;
        again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1, 10000000; @!p bra again; }"""
    simt.ptx(text, _address(ref, slot), scalar(turn) & 1)


@plgpu.inline_mgpu(arg_types=(_REF, SCALAR))
def arrive(_, ref, slot):
    """One arrival of each warp that comes here.

    It does not wait for loads from shared memory that are under way, volatile or not, and while wgmma keeps that memory
    busy they are under way for long. To give memory back, come here after the results of what was read are stored.
    """
    simt.warp_barrier()
    _elected("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", ref, slot)


def expect(size: int) -> Callable[..., None]:
    """-> f(ref, slot), for one warp: arrives, and lets the barrier wait for copies of `size` bytes."""

    @plgpu.inline_mgpu(arg_types=(_REF, SCALAR))
    def run(_, ref, slot):
        _elected(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};", ref, slot)

    return run


def copy(
    lengths: Sequence[int | None],
    *,
    swizzle: int | None = None,
    order: tuple[int, ...] | None = None,
    is_read_once: bool = False,
) -> Callable[..., None]:
    """-> f(source, target, ref, slot, *begins), for one warp: copies a box of an array to shared memory.

    lengths: of the box, None for an axis that it has one of and the target has not.
    begins: of the box, one an axis. ref, slot: the barrier that waits for it.
    swizzle: bytes of the target's rows. order: of the array's axes in the target, which takes the swizzle too.
    is_read_once: the L2 cache then gives up these lines before any other.
    """
    transforms = (plgpu.SwizzleTransform(swizzle),) if swizzle else ()
    types = (_REF, plgpu.RefType(transforms), _REF, SCALAR, *(SCALAR for _ in lengths))

    @plgpu.inline_mgpu(arg_types=types)
    def run(context, source, target, ref, slot, *begins):
        at = [arith.index_cast(ir.IndexType.get(), scalar(begin).ir) for begin in begins]
        pointer = llvm.inttoptr(llvm.PointerType.get(address_space=3), _address(ref, slot).ir)
        context.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_slice=tuple(
                begin if length is None else mgpu.ds(begin, length) for begin, length in zip(at, lengths, strict=True)
            ),
            gmem_transform=mgpu.TransposeTransform(order) if order else (),
            barrier=utils.BarrierRef(pointer, as_value(0).ir, as_value(0).ir, 1),  # its phases are our own
            swizzle=swizzle,
            arrive=False,
            predicate=nvvm.elect_sync(),
        )
        if is_read_once:
            _hint("evict_first")

    return run


def _hint(priority: str) -> None:
    """Gives the copy that was just written a cache policy, for which `async_copy` has no option.

    One that this jax writes in other words than as this operation goes without.
    """
    plain = list(ir.InsertionPoint.current.block.operations)[-1]
    if not isinstance(plain, nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp):
        return
    nvvm.cp_async_bulk_tensor_shared_cluster_global(
        plain.dstMem,
        plain.tmaDescriptor,
        list(plain.coordinates),
        plain.mbar,
        [],
        l2_cache_hint=simt.policy(priority).ir,
        predicate=plain.predicate,
    )
    plain.operation.erase()


def _elected(text: str, ref, slot) -> None:
    """The statement in one thread of the warp, $0 the address of a barrier."""
    simt.ptx(f"{{ .reg .pred p; elect.sync _|p, -1; @p {text} }}", _address(ref, slot), collective=True)


def _address(ref, slot):
    return Pointer.to(ref).shared() + (scalar(slot) << 3)
