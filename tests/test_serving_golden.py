"""The tiny GLM-5.2's greedy text is one: alone, batched, chunked, reused, drafted, striped, beside the cancelled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "serving_worker.py"


@pytest.mark.slow
def test_one_text_whatever_the_way():
    path = os.pathsep.join([str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, WORKER], env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    ways = json.loads(done.stdout)
    assert len(ways) == 14
    alone = ways.pop("alone")
    assert [len(text) for text in alone] == [10, 10, 10] and len(set(map(tuple, alone))) == 3
    assert {way: texts for way, texts in ways.items() if texts != alone} == {}
