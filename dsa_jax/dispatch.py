"""What runs where, and why: the implementations of every op, best first.

An op has a plain jnp implementation, "xla", that runs everywhere, and may have kernels: "hopper" (Pallas Mosaic GPU,
sm_90) and "portable" (Pallas through Triton: sm_80 and newer, gfx942, gfx950; interpreted on a CPU). A kernel module
`pallas_kernels.<folder>.<name>` offers for each op it implements

    <op>(*args, **options)                        the kernel, with the public function's arguments
    refuse_<op>(target, *args, **options)         why it cannot run there, as one clause, or None if it can;
                                                  reads shapes, dtypes and static options only
    config_<op>(target, *args, **options)         the frozen config it would run with (optional, for `explain`)
    <op>_<form>(...)                              the kernel in another form (optional), which has its caller in dsa_jax
"""

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax

from dsa_jax.checks import refuse
from dsa_jax.varying import call_untyped
from pallas_kernels.target import Target, target_of

NAMES = ("hopper", "portable", "xla")

_OPS: dict[str, "Op | Composite"] = {}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would run for a call, and why the other implementations would not.

    op: the op's name.
    target: the device it was asked for.
    implementation: the name of what runs.
    config: the kernel's config, or None.
    refusals: for every other implementation, why it does not run.
    parts: the ops that a composite calls, each explained; empty for an op.
    """

    op: str
    target: Target
    implementation: str
    config: Any
    refusals: dict[str, str]
    parts: tuple["Explanation", ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op} on {self.target.name} ({self.target.arch}): {self.implementation}"]
        if self.config is not None:
            lines.append(f"  config: {self.config}")
        if self.parts:
            lines += [f"  {line}" for part in self.parts for line in str(part).splitlines()]
        else:
            lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        return "\n".join(lines)


class Op:
    """One public function's implementations. Calling it runs the named one, or the best that the device takes."""

    def __init__(self, name: str, *, xla: Callable[..., Any], kernels: dict[str, str] | None = None):
        """
        name: the public function's name.
        xla: the plain jnp implementation.
        kernels: module path by implementation name, for those that exist.
        """
        self.name = name
        self._xla = xla
        self._kernels = dict(kernels or {})
        _OPS[name] = self

    def __call__(self, implementation: str | None, *args: Any, **options: Any) -> Any:
        """Runs the named implementation, or raises NotImplementedError with the reason; None takes the best."""
        return self.run(self.resolve(implementation, *args, **options), *args, **options)

    def resolve(self, implementation: str | None, *args: Any, device: Any = None, **options: Any) -> str:
        """The name of what runs for a call; jax.ShapeDtypeStruct will do for arrays. Raises as `__call__` does."""
        if implementation == "xla":
            return "xla"
        target = target_of(device) if device is not None else target_of_arrays(args)
        if implementation is None:
            return self._best(target, args, options)[0]
        self._require_name(implementation)
        reason = self._refusal(implementation, target, args, options)
        if reason is not None:
            raise NotImplementedError(f"{self.name}: {implementation} cannot run on {target.name}: {reason}")
        return implementation

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        """Runs the implementation that `resolve` named, under the op's name in a profile."""
        with jax.named_scope(self.name):
            return call_untyped(self._run(name), *args, **options)

    def run_form(self, form: str, name: str, otherwise: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Runs the kernel that `resolve` named in another form, or otherwise(*args, **options) where it has none."""
        own = None if name == "xla" else getattr(self.kernel(name), f"{self.name}_{form}", None)
        if own is None:
            return otherwise(*args, **options)
        with jax.named_scope(self.name):
            return call_untyped(own, *args, **options)

    def explain(self, *args: Any, device: Any = None, **options: Any) -> Explanation:
        target = target_of(device) if device is not None else target_of_arrays(args)
        chosen, refusals = self._best(target, args, options)
        config = None
        if chosen != "xla":
            describe = getattr(self.kernel(chosen), f"config_{self.name}", None)
            config = describe(target, *args, **options) if describe else None
        for name in NAMES[NAMES.index(chosen) + 1 :]:
            reason = self._refusal(name, target, args, options)
            refusals[name] = reason or f"{chosen} is preferred"
        return Explanation(self.name, target, chosen, config, refusals)

    def implementations(self) -> tuple[str, ...]:
        """The names that exist for this op, best first."""
        return tuple(name for name in NAMES if name == "xla" or name in self._kernels)

    def _best(self, target: Target, args: tuple, options: dict) -> tuple[str, dict[str, str]]:
        refusals = {}
        for name in NAMES[:-1]:
            reason = self._refusal(name, target, args, options)
            if reason is None and target.platform == "cpu":
                reason = "kernels are only interpreted on a CPU, which is slow; name it to have that"
            if reason is None:
                return name, refusals
            refusals[name] = reason
        return "xla", refusals

    def _refusal(self, name: str, target: Target, args: tuple, options: dict) -> str | None:
        if name == "xla":
            return None
        if name not in self._kernels:
            return f"{self.name} has no {name} kernel"
        return getattr(self.kernel(name), f"refuse_{self.name}")(target, *args, **options)

    def _run(self, name: str) -> Callable[..., Any]:
        return self._xla if name == "xla" else getattr(self.kernel(name), self.name)

    def kernel(self, name: str) -> ModuleType:
        """The module of the kernel that is called `name`."""
        return importlib.import_module(self._kernels[name])

    def _require_name(self, implementation: str) -> None:
        if implementation not in NAMES:
            refuse("implementation", repr(implementation), "None or one of " + ", ".join(map(repr, NAMES)))


class Composite:
    """A public function made of ops: it has no implementation of its own and passes the caller's choice on to them."""

    def __init__(
        self, name: str, *, ops: tuple[Op, ...], parts: Callable[..., tuple[Any, tuple[tuple[Op, tuple, dict], ...]]]
    ):
        """
        name: the public function's name.
        ops: the ops it calls.
        parts: takes the public function's arguments; returns how the work is cut up, and each op with the arguments
            (shapes for arrays) and options it is called with.
        """
        self.name = name
        self._ops = ops
        self._parts = parts
        _OPS[name] = self

    def resolve(self, implementation: str | None, *args: Any, **options: Any) -> tuple[Any, tuple[str, ...]]:
        """How the work is cut up, and the name of what runs for each op."""
        target = target_of_arrays(args)
        config, parts = self._parts(*args, **options)
        return config, tuple(op.resolve(implementation, *a, device=target, **o) for op, a, o in parts)

    def explain(self, *args: Any, device: Any = None, **options: Any) -> Explanation:
        target = target_of(device) if device is not None else target_of_arrays(args)
        config, parts = self._parts(*args, **options)
        explained = tuple(op.explain(*a, device=target, **o) for op, a, o in parts)
        names = " + ".join(dict.fromkeys(part.implementation for part in explained))
        refusals = {f"{name} for {part.op}": reason for part in explained for name, reason in part.refusals.items()}
        return Explanation(self.name, target, names, config, refusals, explained)

    def implementations(self) -> tuple[str, ...]:
        """The names that exist for every one of its ops, best first."""
        return tuple(name for name in NAMES if all(name in op.implementations() for op in self._ops))


def explain(op: str, *args: Any, device: Any = None, **options: Any) -> Explanation:
    """Tells what would run for `op(*args, **options)`, with which config, and why the other implementations would not.

    op: a public function's name, e.g. "sparse_mla".
    args, options: the call's arguments; jax.ShapeDtypeStruct will do for arrays.
    device: a jax device, an architecture's name such as "sm_90", or None for the device the arrays are on.
    Raises ValueError for an unknown op.
    """
    if op not in _OPS:
        refuse("op", repr(op), "one of " + ", ".join(sorted(_OPS)))
    return _OPS[op].explain(*args, device=device, **options)


def op_named(name: str) -> "Op | Composite":
    """The op of a public function, for tests and benches that go over all its implementations."""
    return _OPS[name]


def target_of_arrays(args: Any) -> Target:
    """The device that holds the arrays; under jit, where they have none, the default device."""
    for leaf in jax.tree.leaves(args):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            return target_of(next(iter(leaf.devices())))
    return target_of()
