"""Random requests through one engine: every page returned, every text the one that its request writes alone.

Requests arrive at random steps, with prompts of 1 to --longest tokens that often begin in the same way, drawn or
greedy, some with stop tokens, some cancelled in the middle, over fewer pages than they would like to have. Each is then
served again by an engine that has nothing else to do and knows no prefix, and the texts are compared token by token:
float32 on a CPU, where a row has the same bits in every batch. Exit code 1 if anything differs.
"""

import argparse
import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from dsa_jax.batch import run_step
from dsa_jax.config import DsaConfig
from dsa_jax.engine import Engine
from dsa_jax.model import CausalLM
from dsa_jax.requests import Output
from dsa_jax.sampling import Sampling

_CANCELLED, _KNOWN_PREFIX, _DRAWN, _STOPS = 0.1, 0.5, 0.5, 0.3  # shares of the requests


@dataclasses.dataclass(frozen=True)
class Case:
    """A request: how it is added, the step it arrives in, and after how many steps it is cancelled, or None."""

    prompt: np.ndarray
    options: dict[str, Any]
    arrives: int
    patience: int | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What a soak found.

    wrong: ids whose texts are not what the request writes alone. lost_pages: pages that nobody gave back.
    programs: compiled by the two engines together. finishes: how many requests ended in which way.
    The rest: the engine's counts.
    """

    requests: int
    wrong: list[int]
    lost_pages: int
    programs: int
    finishes: dict[str, int]
    tokens: int
    steps: int
    prefilled: int
    reused: int
    preempted: int
    acceptance_length: float

    @property
    def ok(self) -> bool:
        return not self.wrong and self.lost_pages == 0


def cases(count: int, vocab: int, longest: int, new: int, drafts: int, rng: np.random.Generator) -> list[Case]:
    """Random requests, of prompt lengths uniform in their logarithm."""
    beginnings = [rng.integers(0, vocab, longest) for _ in range(8)]
    arrives, found = 0, []
    for _ in range(count):
        length = int(np.exp(rng.uniform(0, np.log(longest + 1))))
        prompt = rng.integers(0, vocab, length)
        if rng.random() < _KNOWN_PREFIX:
            shared = rng.integers(0, length + 1)
            prompt[:shared] = beginnings[rng.integers(len(beginnings))][:shared]
        drawn = Sampling(
            temperature=float(rng.uniform(0.5, 2.0)),
            top_k=int(rng.integers(0, 40)),
            top_p=float(rng.uniform(0.5, 1.0)),
            seed=int(rng.integers(2**32)),
        )
        options = dict(
            max_new_tokens=int(rng.integers(1, new + 1)),
            sampling=drawn if rng.random() < _DRAWN else Sampling(),
            stop_tokens=rng.integers(0, vocab, 8).tolist() if rng.random() < _STOPS else [],
            drafts=int(rng.integers(0, drafts + 1)),
        )
        arrives += int(rng.geometric(0.5)) - 1
        patience = int(rng.integers(0, 30)) if rng.random() < _CANCELLED else None
        found.append(Case(prompt.astype(np.int32), options, arrives, patience))
    return found


def _programs() -> int:
    """How many programs the engine's step was compiled to."""
    step: Any = run_step
    return step._cache_size()


def soak(
    new_engine: Callable[[], Engine], requests: list[Case], progress: Callable[[str, int], None] = lambda *_: None
) -> Report:
    """Serves the requests together, then each alone.

    new_engine: makes an engine, each time of the same shapes. progress: told the stage and how many are done.
    """
    before, engine = _programs(), new_engine()
    outputs = _together(engine, requests, progress)
    alone, wrong = new_engine(), []
    for id, (case, output) in enumerate(zip(requests, outputs, strict=True)):
        alone.pages.forget()
        own = alone.add(case.prompt, **(case.options | {"drafts": 0}))
        alone.run()
        want, got = alone.take(own).tokens, output.tokens
        same = np.array_equal(want[: len(got)], got) if output.finish == "cancelled" else np.array_equal(want, got)
        wrong += [] if same else [id]
        progress("alone", id + 1)
    stats = engine.stats
    return Report(
        requests=len(requests),
        wrong=wrong,
        lost_pages=engine.pages.num_pages - engine.pages.num_free,
        programs=_programs() - before,
        finishes=dict(Counter(str(output.finish) for output in outputs)),
        tokens=stats.produced,
        steps=stats.steps,
        prefilled=stats.prefilled,
        reused=stats.reused,
        preempted=stats.preempted,
        acceptance_length=round(stats.acceptance_length, 3),
    )


def _together(engine: Engine, requests: list[Case], progress: Callable[[str, int], None]) -> list[Output]:
    step, added, leaving = 0, 0, {}
    while added < len(requests) or engine.busy:
        while added < len(requests) and requests[added].arrives <= step:
            case = requests[added]
            id = engine.add(case.prompt, **case.options)
            assert id == added
            if case.patience is not None:
                leaving[id] = step + case.patience
            added += 1
        for id in [id for id, last in leaving.items() if last <= step]:
            del leaving[id]
            engine.cancel(id)
        engine.step()
        step += 1
        progress("together", added)
    return [engine.take(id) for id in range(len(requests))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="default: 2000")
    parser.add_argument("--longest", type=int, default=4000, metavar="N", help="prompt, up to 4000 (default)")
    parser.add_argument("--new", type=int, default=24, metavar="N", help="tokens to write at most (default: 24)")
    parser.add_argument("--drafts", type=int, default=2, metavar="N", help="0 to 5 (default: 2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def run(args: argparse.Namespace) -> int:
    config = DsaConfig.tiny(num_hidden_layers=3, index_topk=16)
    model = CausalLM(config, rngs=nnx.Rngs(0))
    new, page_size = args.new, 16
    shapes: dict[str, Any] = dict(
        max_requests=8,
        max_len=args.longest + new,
        page_size=page_size,
        num_pages=2 * (args.longest + new) // page_size,
        cache_dtype="float32",
        prefill_chunk=256,
        drafts=args.drafts,
    )
    rng = np.random.default_rng(args.seed)
    requests = cases(args.requests, config.vocab_size, args.longest, new, args.drafts, rng)
    begin, last = time.perf_counter(), 0.0

    def progress(stage: str, done: int) -> None:
        nonlocal last
        if time.perf_counter() - last > 30:
            last = time.perf_counter()
            print(f"{last - begin:6.0f} s  {stage}: {done} of {len(requests)}", flush=True)

    report = soak(lambda: Engine(model, **shapes), requests, progress)
    for name, value in dataclasses.asdict(report).items():
        print(f"{name}: {value}")
    print(f"{'ok' if report.ok else 'FAILED'} in {time.perf_counter() - begin:.0f} s")
    return 0 if report.ok else 1
