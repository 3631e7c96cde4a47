"""How a public function refuses bad input: one ValueError that names the argument, its value and the legal range."""

from typing import Any, NoReturn


def refuse(name: str, value: Any, legal: str) -> NoReturn:
    """Raises ValueError: "NAME must be LEGAL, got VALUE"."""
    raise ValueError(f"{name} must be {legal}, got {value}")


def require(ok: bool, name: str, value: Any, legal: str) -> None:
    """Raises unless `ok`, a Python bool: under jit only shapes, dtypes and static numbers can be checked."""
    if not ok:
        refuse(name, value, legal)


def require_shape(name: str, array: Any, shape: tuple[int | None, ...], axes: str) -> None:
    """Requires `array` to have `shape`, where None fits any length. The message spells it `axes`, e.g. "[M, H, D]"."""
    got = tuple(array.shape)
    fits = len(got) == len(shape) and all(want is None or want == have for want, have in zip(shape, got, strict=True))
    if not fits:
        wanted = "[" + ", ".join("any" if length is None else str(length) for length in shape) + "]"
        refuse(f"{name}'s shape", list(got), f"{axes} = {wanted}")


def require_dtype(name: str, array: Any, *dtypes: Any) -> None:
    """Requires `array.dtype` to be one of `dtypes`."""
    if not any(array.dtype == dtype for dtype in dtypes):
        refuse(f"{name}'s dtype", array.dtype, " or ".join(_dtype_name(dtype) for dtype in dtypes))


def _dtype_name(dtype: Any) -> str:
    return str(getattr(dtype, "__name__", dtype))
