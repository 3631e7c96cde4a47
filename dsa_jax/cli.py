"""The command line: `dsa-jax generate | check | explain | select | demo | bench`.

Bad input is one line on standard error and exit code 2; a check that fails, or a device that does, is exit code 1.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from dsa_jax import commands

BAD_INPUT, FAILED, INTERRUPTED = commands.BAD_INPUT, 1, 130
PRESETS = ("glm5", "glm5_1", "glm5_2", "glm5_3", "deepseek_v32")  # constructors of DsaConfig


class Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:  # which has a parser for each of its programs
        return commands.bench(argv[1:])
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, NotImplementedError, OSError) as error:
        return _complain(error, BAD_INPUT)
    except (RuntimeError, MemoryError) as error:  # jax: no such backend, out of memory
        return _complain(error, FAILED)


def _complain(error: BaseException, code: int) -> int:
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        message = " ".join(str(error).split()) or type(error).__name__
    print(f"dsa-jax: {message}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="dsa-jax", description="DeepSeek Sparse Attention: GLM-5.x and DeepSeek-V3.2 checkpoints.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(subparsers)
    _add_check(subparsers)
    _add_explain(subparsers)
    _add_select(subparsers)
    _add_demo(subparsers)
    subparsers.add_parser("bench", help="check and measure, in a checkout of the project: the same as python -m bench")
    return parser


def _add_generate(subparsers) -> None:
    command = _add(subparsers, "generate", commands.generate, "continue one or more prompts")
    _add_checkpoint(command)
    _add_prompts(command, required=True)
    command.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens to produce (default: 64)")
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token (default)"
    )
    command.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K likeliest (default: all)")
    command.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw among the likeliest that reach P (default: all)"
    )
    command.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws at a temperature (default: 0)")
    command.add_argument(
        "--stop-token", type=int, action="append", metavar="ID", help="ends a text; default: the model's own"
    )
    command.add_argument(
        "--page-size", type=int, default=64, metavar="N", help="tokens a cache page holds (default: 64)"
    )
    budget = command.add_mutually_exclusive_group()
    budget.add_argument("--pages", type=int, metavar="N", help="pages of every layer's cache (default: what is needed)")
    budget.add_argument(
        "--cache-bytes", metavar="SIZE", help="of all caches, as in 40GiB; prompts that do not fit wait for others"
    )
    command.add_argument(
        "--drafts", type=int, default=0, metavar="N", help="tokens to draft in a step, 0 (default) to 5: the same text"
    )
    command.add_argument(
        "--cache-dtype", default="bfloat16", metavar="TYPE", help="float32, bfloat16 (default), float8_e4m3fn"
    )
    command.add_argument(
        "--prefill-chunk", type=int, default=2048, metavar="N", help="rows of a prefill step (default: 2048)"
    )
    command.add_argument(
        "--dtype", metavar="TYPE", help="of weights and activations: float32 or bfloat16 (default: as stored)"
    )
    _add_devices(command, "spread weights and selection over N devices")
    _add_implementation(command)


def _add_check(subparsers) -> None:
    command = _add(
        subparsers, "check", commands.check, "compare reference, sparse path and striped sparse path, layer by layer"
    )
    _add_checkpoint(command)
    _add_prompts(command, required=False)
    command.add_argument(
        "--tokens", type=int, metavar="N", help="random tokens without a prompt (default: 8 * index_topk)"
    )
    command.add_argument(
        "--cache-dtype", metavar="TYPE", help="also tell what caches of bfloat16 or float8_e4m3fn cost, layer by layer"
    )
    _add_devices(command, "stripe over N devices (default: all; on a CPU: 4 virtual ones)")
    _add_implementation(command)


def _add_explain(subparsers) -> None:
    command = _add(subparsers, "explain", commands.explain, "tell what runs on a device, and why the rest does not")
    command.add_argument("op", nargs="*", metavar="OP", help="public functions (default: all)")
    command.add_argument(
        "--device", action="append", metavar="ARCH", help="sm_80, sm_90, gfx942, cpu, ...; default: this one"
    )
    command.add_argument(
        "--preset", choices=PRESETS, default="glm5_2", help="whose shapes to ask for (default: glm5_2)"
    )


def _add_select(subparsers) -> None:
    command = _add(subparsers, "select", commands.select, "draw which positions every layer kept")
    _add_checkpoint(command)
    _add_prompts(command, required=True)
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the PNG to write")
    command.add_argument("--layers", type=int, nargs="+", metavar="N", help="layers to draw (default: all)")
    command.add_argument(
        "--prefill-chunk", type=int, default=2048, metavar="N", help="rows of a prefill step (default: 2048)"
    )
    _add_devices(command, "spread weights and selection over N devices")
    _add_implementation(command)


def _add_demo(subparsers) -> None:
    command = _add(
        subparsers, "demo", commands.demo, "prefill, decode, check and draw a 16K text on four virtual devices"
    )
    command.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="default: tests/golden/tiny_glm52 of this project"
    )
    command.add_argument("--output", type=Path, default=Path("build/demo"), metavar="DIR", help="default: build/demo")


def _add(subparsers, name: str, function: Callable[[argparse.Namespace], int], summary: str) -> Parser:
    command = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    command.set_defaults(command=function)
    return command


def _add_checkpoint(command: Parser) -> None:
    command.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="a Hugging Face directory")
    command.add_argument(
        "--latent-norm-eps", type=float, metavar="E", help="1e-6 as transformers has it; default: rms_norm_eps"
    )


def _add_prompts(command: Parser, *, required: bool) -> None:
    group = command.add_mutually_exclusive_group(required=required)
    group.add_argument("--prompt", action="append", metavar="TEXT", help="may be given more than once")
    group.add_argument("--prompt-file", action="append", type=Path, metavar="FILE", help="may be given more than once")


def _add_devices(command: Parser, summary: str) -> None:
    command.add_argument("--devices", type=int, metavar="N", help=summary)


def _add_implementation(command: Parser) -> None:
    command.add_argument(
        "--implementation", metavar="NAME", help="hopper, portable or xla (default: the best that runs)"
    )
