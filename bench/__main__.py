"""`python -m bench PROGRAM`: measurements that check what they time.

A program is a module of this folder with `add_arguments(parser)` and `run(args)`, whose docstring's first line is its
help; `run` returns an exit code or None. A benchmark of an op is one program for all ops. Exit codes: 0, 1 for a failed
check, 2 for bad input.
"""

import argparse
import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parent
_OPS = (
    "topk",
    "indexer_logits",
    "paged_indexer_logits",
    "select_topk",
    "sparse_mla",
    "paged_sparse_mla",
    "dense_mla",
    "grouped_matmul",
)
# Those whose file is not there are not listed.
_MODULES = {name: "op" for name in _OPS} | {
    name: name
    for name in ("layer", "stripes", "multi_gpu", "generation", "soak", "targets", "tune", "compare", "report")
}

_PEERS = """An op's --peers times other people's kernels too, those that are installed: `pip install .[peers]` brings
DeepGEMM and torch, which need nvcc; FlashMLA is built from its source; docs/performance.md says more."""


def main(argv: Sequence[str] | None = None, prog: str = "python -m bench") -> int:
    """Runs one program and returns its exit code. Imports that program alone."""
    argv = sys.argv[1:] if argv is None else list(argv)
    name = argv[0].replace("-", "_") if argv else ""
    if name not in programs():
        wanted_help = name in ("", "__help", "_h")
        listing = "\n".join(f"  {', '.join(names)}\n      {summary}" for summary, names in _by_summary().items())
        text = f"usage: {prog} PROGRAM [OPTIONS], {prog} PROGRAM --help\n\n{listing}\n\n{_PEERS}"
        print(text if wanted_help else f"{prog}: there is no program {argv[0]!r}\n{text}", file=sys.stderr)
        return 0 if wanted_help and name else 2
    args = parser_of(name, prog).parse_args(argv[1:])
    try:
        return _module(name).run(args) or 0
    except (ValueError, NotImplementedError, OSError) as error:
        print(f"{prog} {name}: {error}", file=sys.stderr)
        return 2


def parser_of(name: str, prog: str) -> argparse.ArgumentParser:
    """What reads the options of a program that is there."""
    module = _module(name)
    parser = argparse.ArgumentParser(prog=f"{prog} {name}", description=(module.__doc__ or "").partition("\n\n")[0])
    parser.set_defaults(program=name)
    module.add_arguments(parser)
    return parser


def programs() -> dict[str, str]:
    """The programs that are there, with what each does."""
    files = {name: _FOLDER / f"{module}.py" for name, module in _MODULES.items()}
    return {name: _summary(file) for name, file in files.items() if file.exists()}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"bench.{_MODULES[name]}")


def _by_summary() -> dict[str, list[str]]:
    """Programs that do the same to different ops stand together."""
    groups: dict[str, list[str]] = {}
    for name, summary in programs().items():
        groups.setdefault(summary, []).append(name)
    return groups


def _summary(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
