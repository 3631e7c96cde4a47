"""Every example runs and prints what it promises."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "own_flax_model": r"logits \(2, 50, 100\)\ncausal True\nkeys a row keeps 16",
    "plain_parameters": r"an example \(48, 64\)\nsame as the model True\nother parameters, other logits True",
    "export_decode_step": r"bytes \d+\nsame as the model True\nnext tokens \(2,\)",
    "orbax_checkpoint": "same weights True",
}
NEEDED = {"export_decode_step": "flatbuffers", "orbax_checkpoint": "orbax.checkpoint"}


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example(name, capsys):
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert re.fullmatch(PRINTED[name], capsys.readouterr().out.strip())
