"""Every way to serve the tiny GLM-5.2, as JSON: {way: texts}. A process of its own, whose compiler does not optimise.

Ten programs of eight layers are to be compiled and few steps to be run.
"""

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"

import jax
import numpy as np
from golden_data import FOLDER
from jax.sharding import Mesh
from serving_cases import prompt, serve, texts

from dsa_jax.checkpoint import load_model
from dsa_jax.context import Stripes
from dsa_jax.engine import Engine

NEW, DRAFTS = 10, 5
PROMPTS = [prompt(length, seed=6) for length in (5, 40, 97)]
SHAPES = dict(max_requests=3, max_len=128, page_size=8, num_pages=40, cache_dtype="float32", prefill_chunk=64)


def ways() -> dict[str, list]:
    model = load_model(FOLDER / "tiny_glm52")

    def engine(**options):
        return Engine(model, **(SHAPES | options))

    def together(engine, **options):
        return texts(serve(engine, PROMPTS, **(dict(max_new_tokens=NEW) | options)))

    found = {"alone": [text for start in PROMPTS for text in texts(serve(engine(), [start], max_new_tokens=NEW))]}
    found["batched"] = together(engine())
    found |= {f"chunks of {rows}": together(engine(request_chunk=rows)) for rows in (1, 5, 64)}
    warm = engine()
    together(warm)
    found["prefix reuse"] = together(warm)
    assert warm.stats.reused == 0 + 32 + 96
    found["after cancelling neighbours"] = _beside_cancelled(engine())
    speculating = engine(drafts=DRAFTS)
    for drafts in range(1, DRAFTS + 1):
        speculating.pages.forget()
        found[f"{drafts} drafts"] = together(speculating, drafts=drafts)
    found["drafts and prefix reuse"] = together(speculating)
    print(f"acceptance length {speculating.stats.acceptance_length:.2f}", file=sys.stderr)
    striped = engine(stripes=Stripes(Mesh(np.array(jax.devices()), ("tp",)), "tp", stripe=4))
    found["striped over 4 devices"] = together(striped)
    return found


def _beside_cancelled(engine) -> list:
    """Each prompt beside two others, which are cancelled while it decodes."""
    found = []
    for start in PROMPTS:
        others = [engine.add(prompt(length, seed=7), max_new_tokens=NEW) for length in (60, 30)]
        own = engine.add(start, max_new_tokens=NEW)
        while engine.output(own).tokens.size < 3:
            engine.step()
        for other in others:
            engine.cancel(other)
        engine.run()
        found += texts([engine.take(own)])
    return found


if __name__ == "__main__":
    print(json.dumps(ways()))
