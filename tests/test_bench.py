"""The bench: it checks before it times, records, compares, tunes and reports. Times on a CPU mean nothing here."""

import ast
import dataclasses
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import compare, layer, plots, record, report, shapes, tune
from bench.__main__ import main, programs
from bench.case import length, short
from bench.ops.topk import Topk
from bench.peers import Peer, Unavailable
from bench.timing import Kernel, Timing
from dsa_jax import DsaConfig, cli, commands
from dsa_jax.dispatch import op_named
from pallas_kernels import tuning
from pallas_kernels.target import target_of

ROOT = Path(__file__).parent.parent
TINY = "rows=3,columns=40,k=4"


# The others run below, or check as these do.
@pytest.mark.parametrize(
    "program", ["paged_indexer_logits", "select_topk", "sparse_mla", "paged_sparse_mla", "dense_mla"]
)
def test_an_op_passes_its_check(program, capsys):
    assert cli.main(["bench", program, "--check", "--no-baselines"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == len(shapes.TINY[program]) and all(
        line.endswith("xla                    right") for line in lines
    )


def test_times_are_recorded_drawn_and_compared(tmp_path, capsys):
    file, picture = tmp_path / "a.json", tmp_path / "a.svg"
    assert main(["topk", "--shape", TINY, "--peers", "--json", str(file), "--plot", str(picture)]) == 0
    found = record.read(file)
    assert {"device", "versions", "commit", "date", "rates"} <= set(found) and found["versions"][
        "jax"
    ] == jax.__version__
    by_name = {row["implementation"]: row for row in found["rows"]}
    for name in ("xla", "lax.top_k"):
        assert 0 < by_name[name]["low_us"] <= by_name[name]["us"] <= by_name[name]["high_us"]
    assert by_name["flashinfer"]["skipped"] == "needs a GPU" and picture.read_text().startswith("<?xml")
    assert main(["compare", str(file), str(file)]) == 0
    by_name["xla"] |= {name: 10 * by_name["xla"][name] for name in ("us", "low_us", "high_us")}
    slower = tmp_path / "b.json"
    slower.write_text(json.dumps(found))
    assert main(["compare", str(file), str(slower)]) == 1
    assert "10.000  SLOWER" in capsys.readouterr().out
    slower.write_text(json.dumps(found | {"device": "another"}))
    assert main(["compare", str(file), str(slower)]) == 2


def test_a_wrong_implementation_gets_no_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Topk, "call", lambda case, name: lambda scores: jnp.zeros((case.rows, case.k), jnp.int32))
    file = tmp_path / "wrong.json"
    assert main(["topk", "--shape", TINY, "--no-baselines", "--json", str(file)]) == 1
    (row,) = record.read(file)["rows"]
    assert row["WRONG"] == "other columns than the rule's" and "us" not in row
    assert "WRONG, not timed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topk", "--shape", "rows=3"], "--shape must name columns too"),
        (["topk", "--shape", "rows=3,columns=4,heads=2"], "--shape's names must be among"),
        (["topk", "--shape", "rows=3,columns=4,scores=odd"], "--shape's scores must be one of normal, relu"),
        (["topk", "--seq", "8q"], "a length must be a whole number"),
        (["topk", "--implementation", "cuda"], "--implementation must be one of"),
        (["layer", "--cache", "int4"], "--cache must be among bf16, e4m3"),
        (["compare", "nowhere.json", "nowhere.json"], "nowhere.json"),
        (["nonsense"], "there is no program"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_needs_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(commands, "__file__", str(tmp_path / "dsa_jax" / "commands.py"))
    assert cli.main(["bench", "topk"]) == 2
    assert "needs a checkout" in capsys.readouterr().err


def test_every_program_has_its_parts():
    assert {"topk", "layer", "compare", "report", "tune"} <= set(programs())
    for name, summary in programs().items():
        assert summary.endswith(".") or ";" in summary, name
    for file in ("op", "layer", "compare", "report", "tune"):
        tree = ast.parse((ROOT / "bench" / f"{file}.py").read_text("utf-8"))
        assert {"add_arguments", "run"} <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_lengths_and_quartiles():
    assert (length("64k"), length("1M"), length("1700")) == (65536, 1 << 20, 1700)
    assert (short(65536), short(1700)) == ("64K", "1700")
    assert Timing.of([3e-6, 1e-6, 2e-6, 5e-6, 4e-6], "wall") == Timing(3.0, 2.0, 4.0, 5, "wall")


@pytest.mark.parametrize("shapes_of", ["anchors", *shapes.PRESETS])
def test_cases_have_names_work_and_bytes_of_their_own(shapes_of):
    for program in shapes.TINY:
        kind, preset = ("anchors", "glm5_2") if shapes_of == "anchors" else ("model", shapes_of)
        cases = shapes.cases(program, shapes=kind, preset=preset, seqs=[8192, 65536], custom=[])
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.bytes > 0 and (case.flops > 0) == (case.unit is not None)
            assert op_named(case.op) and case.floor_us({"copy": 1e12, "bf16": 1e12, "fp8": 1e12}) > 0
            assert case.floor_us({}) is None


def test_a_row_that_lost_its_time_fails_and_noise_does_not():
    row = {
        "op": "o",
        "case": "c",
        "implementation": "hopper",
        "kind": "ours",
        "us": 10.0,
        "low_us": 9.0,
        "high_us": 13.0,
    }
    noisy = row | {"us": 12.0, "low_us": 11.0}
    peer = row | {"implementation": "peer", "kind": "peer"}

    def verdicts(after, **options):
        return [pair.failed for pair in compare.compare([row, peer], after, threshold=0.1, **options)]

    assert verdicts([noisy, peer], everything=True) == [False, False]
    assert verdicts([noisy | {"low_us": 14.0, "us": 15.0}], everything=False) == [True]
    assert verdicts([row | {"us": 20.0, "low_us": 20.0}, peer], everything=True) == [True, False]
    assert verdicts([peer], everything=True) == [True, False]


def test_peers_say_why_they_do_not_run(monkeypatch):
    def refuse(module, case, inputs):
        raise Unavailable("too small")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(Unavailable, match="is not installed"):
        Peer("peer", "no_such_module", refuse).load()


def test_tuned_entries_hold_around_what_was_measured():
    finding = tune.Finding("k", "c", {"m": 64, "n": 8192, "kv": "bfloat16"}, {"stages": 3}, 10.0, 8.0)
    found = tune.entries([finding, dataclasses.replace(finding, call={**finding.call, "n": 16384}, fields={})])
    assert found == [{"where": {"m": [45, 90], "n": [5792, 11585], "kv": "bfloat16"}, "config": {"stages": 3}}]
    assert json.loads(tune.text_of({"k": found, "empty": []})) == {"k": found}
    with tuning.trying({"k": {"k": 5}}) as trial:
        config = tuning.tuned("k", target_of("sm_90"), Topk(rows=1, columns=2), n=3)
    assert config.k == 5 and trial.calls == {"k": {"n": 3}}
    assert tuning.tuned("k", target_of("sm_90"), config, n=3) is config


def test_candidates_name_fields_of_their_kernels_config():
    for folder in ("topk", "indexer_logits", "sparse_mla", "dense_mla"):
        module = __import__(f"pallas_kernels.{folder}.candidates", fromlist=["CANDIDATES"])
        for kernel, candidates in module.CANDIDATES.items():
            implementation = __import__(f"pallas_kernels.{folder}.{kernel.split('.')[1]}", fromlist=["Config"])
            config = getattr(implementation, "Config", None) or implementation.PortableConfig
            assert set().union(*candidates) <= {field.name for field in dataclasses.fields(config)}, kernel


def test_a_layer_decodes(capsys):
    assert main(["layer", "--prefill", "none", "--decode", "40", "--batch", "2", "--cache", "bf16"]) == 0
    out = capsys.readouterr().out
    assert "layers full + shared" in out and "decode 2 x 40 bf16" in out


def test_layer_steps_cover_the_prompt_in_equal_chunks():
    args = types.SimpleNamespace(
        prefill="1k,51k", decode="1700", batch="1,32", cache="bf16", chunk="8k", dense_up_to="1k", implementation=None
    )
    steps = {step.name: step for step in layer._steps(args, DsaConfig.glm5_2())}
    assert list(steps) == [
        "prefill 1K bf16 dense", "prefill 1K bf16", "prefill 51K bf16", "decode 1 x 1700 bf16", "decode 32 x 1700 bf16",
    ]  # fmt: skip
    step = steps["prefill 51K bf16"]
    ends = step.calls
    assert ends[0] == step.rows <= 8192 and ends[-1] == step.length and max(np.diff(ends)) <= step.rows


def test_kernels_find_their_stage_and_layer():
    hlo = """
      %fusion.1 = bf16[4]{0} fusion(%p), metadata={op_name="jit(f)/layer_0/mla_projections/dot_general"}
      ROOT %topk.2 = s32[4]{0} custom-call(%q), metadata={op_name="jit(f)/layer_1/indexer/topk_indices/pallas_call"}
      %plain.3 = s32[] constant(0)
    """
    places = layer.instruction_places(hlo)
    assert layer.place_of(Kernel("nvjet", "fusion.1", "jit_f", 0, 1), places) == ("projections", 0)
    assert layer.place_of(Kernel("kernel", "topk.2", "jit_f", 0, 1), places) == ("top-k", 1)
    assert layer.place_of(Kernel("kernel", "other", "jit_f", 0, 1), places) == ("rest", None)


def test_a_report_writes_between_its_marks(tmp_path):
    row = {"op": "topk_indices", "case": "1 x 2", "implementation": "hopper", "kind": "ours", "us": 4.0, "low_us": 3.9}
    row |= {"high_us": 4.2, "tflops": 0.0, "gbytes": 9.0, "floor_us": 1.0}
    peer = row | {"implementation": "torch.topk", "kind": "baseline", "us": 8.0, "low_us": 7.9, "high_us": 8.1}
    record.write(tmp_path / "topk.json", "topk", [row, peer], rates={"copy": 4.2e12})
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- results: topk -->\nold\n<!-- end of results -->\nafter\n")
    arguments = ["report", "--results", str(tmp_path), "--docs", str(tmp_path)]
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0 and main([*arguments, "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end of results -->\nafter\n") and "old" not in text
    assert "| 1 x 2 | hopper | 4.0 | 3.9 to 4.2 |  | 9 | 25 % | 8.0 (2.00x) |" in text
    first = (tmp_path / "plots" / "topk.svg").read_bytes()
    plots.draw_bars(tmp_path / "again.svg", "topk on cpu", [row, peer])
    assert first == (tmp_path / "again.svg").read_bytes()


def test_the_tables_of_the_docs_are_the_committed_results(capsys):
    assert report.run(types.SimpleNamespace(results=record.RESULTS, docs=ROOT / "docs", check=True)) == 0
