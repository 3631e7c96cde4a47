"""What the commands of the command line do. Each takes the parsed arguments and returns an exit code.

jax is imported inside the functions: its backend starts with the number of devices that was asked for.
"""

import argparse
import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_jax.checks import require

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from dsa_jax.config import DsaConfig
    from dsa_jax.context import Stripes
    from dsa_jax.generate import Progress
    from dsa_jax.tokenizer import Tokenizer

FAILED_CHECK, BAD_INPUT = 1, 2
VIRTUAL_DEVICES = 4  # of a CPU, where no number is given


def generate(arguments: argparse.Namespace) -> int:
    """`dsa-jax generate`."""
    config, tokenizer = _open(arguments.checkpoint)
    prompts = _read_prompts(arguments, tokenizer)

    from dsa_jax.checkpoint import load_model
    from dsa_jax.generate import check_request
    from dsa_jax.generate import generate as generate_tokens
    from dsa_jax.pages import parse_bytes

    options = dict(
        max_new_tokens=arguments.max_new_tokens,
        page_size=arguments.page_size,
        cache_dtype=arguments.cache_dtype,
        num_pages=arguments.pages,
        prefill_chunk=arguments.prefill_chunk,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        drafts=arguments.drafts,
    )
    check_request(config, prompts, **options)  # before the weights are read
    cache_bytes = None if arguments.cache_bytes is None else parse_bytes(arguments.cache_bytes)
    mesh = None if arguments.devices is None else _mesh(arguments.devices)
    with _status("reading the checkpoint"):
        model = load_model(
            arguments.checkpoint, dtype=arguments.dtype, latent_norm_eps=arguments.latent_norm_eps, mesh=mesh
        )
    begin, counts = time.perf_counter(), []
    with _progress() as progress:
        produced = generate_tokens(
            model,
            prompts,
            cache_bytes=cache_bytes,
            seed=arguments.seed,
            stop_tokens=arguments.stop_token,
            implementation=arguments.implementation,
            stripes=_stripes(mesh),
            progress=progress,
            report=counts.append,
            **options,
        )
    seconds = time.perf_counter() - begin
    for tokens in produced:
        print(tokenizer.decode(tokens))
    count, read = sum(map(len, produced)), sum(map(len, prompts))
    print(
        f"{read} tokens read, {count} written in {seconds:.1f} s with compilation: {count / seconds:.1f} tokens/s",
        file=sys.stderr,
    )
    if arguments.drafts:
        accepted = f"{counts[0].acceptance_length:.2f} tokens a step and prompt of at most {1 + arguments.drafts}"
        print(f"drafts: {accepted}, {counts[0].verified} times verified", file=sys.stderr)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """`dsa-jax check`."""
    config, tokenizer = _open(arguments.checkpoint)
    tokens = _check_tokens(arguments, config, tokenizer)

    from dsa_jax.cache_error import cache_errors
    from dsa_jax.checkpoint import Checkpoint, load_model
    from dsa_jax.context import Stripes
    from dsa_jax.engine import cache_dtype_of
    from dsa_jax.report import print_cache_errors, print_check
    from dsa_jax.verify import check as compare

    dtype = None if arguments.cache_dtype is None else cache_dtype_of(arguments.cache_dtype)
    mesh = _mesh(arguments.devices)
    options = dict(latent_norm_eps=arguments.latent_norm_eps)
    with _status("reading the checkpoint") as stage:
        model = load_model(arguments.checkpoint, dtype="float32", **options)
        report = compare(
            model,
            Checkpoint.open(arguments.checkpoint),
            tokens,
            stripes=Stripes(mesh, mesh.axis_names[0], min_rows=0),
            implementation=arguments.implementation,
            stage=stage,
            **options,
        )
    print_check(report)
    if dtype is not None:
        errors = cache_errors(model, tokens, dtype, against="float32", implementation=arguments.implementation)
        print_cache_errors(errors, f"{arguments.cache_dtype} caches against float32 ones")
    return 0 if report.ok else FAILED_CHECK


def _check_tokens(arguments: argparse.Namespace, config: "DsaConfig", tokenizer: "Tokenizer") -> "np.ndarray":
    import numpy as np

    if arguments.prompt or arguments.prompt_file:
        prompts = _read_prompts(arguments, tokenizer)
        require(len(prompts) == 1, "the number of prompts", len(prompts), "1")
        tokens = prompts[0] if arguments.tokens is None else prompts[0][: arguments.tokens]
    else:
        count = (
            min(8 * config.index_topk, config.max_position_embeddings) if arguments.tokens is None else arguments.tokens
        )
        require(count >= 1, "--tokens", count, "at least 1")
        tokens = np.random.default_rng(0).integers(0, config.vocab_size, count)
    limit = config.max_position_embeddings
    require(len(tokens) <= limit, "the number of tokens", len(tokens), f"at most max_position_embeddings = {limit}")
    return tokens


def explain(arguments: argparse.Namespace) -> int:
    """`dsa-jax explain`."""
    from dsa_jax.calls import model_calls
    from dsa_jax.config import DsaConfig
    from dsa_jax.dispatch import explain as explain_call
    from dsa_jax.report import print_explanations

    calls = model_calls(getattr(DsaConfig, arguments.preset)())
    for op in arguments.op:
        require(
            op in {call.op for call in calls},
            "OP",
            repr(op),
            "one of " + ", ".join(sorted({call.op for call in calls})),
        )
    wanted = [call for call in calls if not arguments.op or call.op in arguments.op]
    for device in arguments.device or [None]:
        rows = [(call, explain_call(call.op, *call.arguments, device=device, **call.options)) for call in wanted]
        print_explanations(arguments.preset, rows)
    return 0


def select(arguments: argparse.Namespace) -> int:
    """`dsa-jax select`."""
    config, tokenizer = _open(arguments.checkpoint)
    prompts = _read_prompts(arguments, tokenizer)
    require(len(prompts) == 1, "the number of prompts", len(prompts), "1")

    from dsa_jax.checkpoint import load_model
    from dsa_jax.generate import Run, check_request
    from dsa_jax.picture import Kept, draw_selection, panels

    check_request(config, prompts, max_new_tokens=1, prefill_chunk=arguments.prefill_chunk)
    least = f"more than index_topk = {config.index_topk}: up to there every position is kept"
    require(len(prompts[0]) > config.index_topk, "the prompt's length", len(prompts[0]), least)
    drawn = panels(config.indexer_types, arguments.layers)
    mesh = None if arguments.devices is None else _mesh(arguments.devices)
    with _status("reading the checkpoint"):
        model = load_model(arguments.checkpoint, latent_norm_eps=arguments.latent_norm_eps, mesh=mesh)
    run = Run(
        model,
        [len(prompts[0])],
        page_size=64,
        cache_dtype=str(model.model.embed_tokens.weight[...].dtype),
        num_pages=None,
        options=model.options(implementation=arguments.implementation, stripes=_stripes(mesh)),
    )
    kept = Kept([panel[0] for panel in drawn], config.index_topk)
    with _progress() as progress:
        run.prefill(prompts, arguments.prefill_chunk, progress, kept)
    written = draw_selection(
        arguments.output,
        {panel: kept.layer(panel[0]) for panel in drawn},
        title=f"Positions kept by {arguments.checkpoint.resolve().name}",
        caption=f"{len(prompts[0])} tokens; each query keeps at most {config.index_topk} of the positions it sees",
    )
    print(f"wrote {written}")
    return 0


def demo(arguments: argparse.Namespace) -> int:
    """`dsa-jax demo`."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    mesh = _mesh(VIRTUAL_DEVICES)
    from dsa_jax.demo import find_checkpoint, run_demo
    from dsa_jax.report import print_demo

    checkpoint = find_checkpoint() if arguments.checkpoint is None else arguments.checkpoint
    with _progress() as progress:
        result = run_demo(checkpoint, arguments.output, mesh, progress)
    print_demo(result)
    return 0 if result.ok else FAILED_CHECK


def bench(argv: list[str]) -> int:
    """`dsa-jax bench`: the programs of bench/, which is no part of the installed package."""
    root = Path(__file__).parents[1]
    if not (root / "bench" / "__main__.py").exists():
        print(f"dsa-jax bench: needs a checkout of the project, and there is no bench beside {root}", file=sys.stderr)
        return BAD_INPUT
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    main = importlib.import_module("bench.__main__").main
    return main(argv, prog="dsa-jax bench")


def _open(checkpoint: Path) -> "tuple[DsaConfig, Tokenizer]":
    from dsa_jax.config import DsaConfig
    from dsa_jax.tokenizer import load_tokenizer

    config = DsaConfig.from_pretrained(checkpoint)
    return config, load_tokenizer(checkpoint, config.vocab_size)


def _read_prompts(arguments: argparse.Namespace, tokenizer: "Tokenizer") -> "list[np.ndarray]":
    """The prompts' tokens, none of them empty."""
    if arguments.prompt:
        named = {f"--prompt {number}": text for number, text in enumerate(arguments.prompt, 1)}
    else:
        named = {str(file): file.read_text("utf-8", errors="surrogateescape") for file in arguments.prompt_file}
    prompts = []
    for name, text in named.items():
        prompts.append(tokenizer.encode(text))
        require(len(prompts[-1]) > 0, name, "none", "at least one token")
    return prompts


def _mesh(count: int | None) -> "Mesh":
    """A mesh of `count` devices, virtual ones on a CPU. None: all devices, of a CPU VIRTUAL_DEVICES."""
    require(count is None or count >= 1, "--devices", count, "at least 1")
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from dsa_jax.model import TENSOR_AXIS

    with contextlib.suppress(RuntimeError):  # a running backend keeps the devices that it has
        jax.config.update("jax_num_cpu_devices", count or VIRTUAL_DEVICES)
    devices = jax.devices()
    count = count or len(devices)
    require(count <= len(devices), "--devices", count, f"at most {len(devices)}, the devices there are")
    return Mesh(np.asarray(devices[:count]), (TENSOR_AXIS,))


def _stripes(mesh: "Mesh | None") -> "Stripes | None":
    from dsa_jax.context import Stripes

    return None if mesh is None else Stripes(mesh, mesh.axis_names[0])


@contextlib.contextmanager
def _status(message: str) -> Generator[Callable[[str], None], None, None]:
    """A spinner on standard error; call what it yields to change its words."""
    from rich.console import Console

    with Console(stderr=True).status(message) as status:
        yield status.update


@contextlib.contextmanager
def _progress() -> "Generator[Progress, None, None]":
    """Bars on standard error, one a stage, gone when done; yields what `generate` calls with (stage, done, total)."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (*Bars.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)

        yield update
