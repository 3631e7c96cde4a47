"""The bench: it checks before it times, records, compares, tunes and reports. Times on a CPU mean nothing here."""

import ast
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import compare, layer, plots, record, report, shapes, timing, trace, tune
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
    "program", ["paged_indexer_logits", "select_topk", "sparse_mla", "paged_sparse_mla", "dense_mla", "grouped_matmul"]
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


def test_calls_in_turn_are_told_apart_by_the_flushes():
    def kernel(module, begin):
        return Kernel("k", "", module, begin, begin + 1)

    names = ["jit__read", "jit_a", "jit_a", "jit__read", "jit_b", "jit__read", "jit_a", "jit_a", "jit__read", "jit_b"]
    runs = timing._between_flushes([kernel(name, begin) for begin, name in enumerate(names)])
    assert [[k.begin_ns for k in run] for run in runs] == [[1, 2], [4], [6, 7], [9]]


@pytest.mark.parametrize("shapes_of", ["anchors", *cli.PRESETS])
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


def finding(case, call, times):
    """times: the heuristic's, then {"stages": 3}'s and so on, in either burst."""
    trials = [({}, times[0])] + [({"stages": 3 + i}, us) for i, us in enumerate(times[1:])]
    timing = {us: Timing(us, us - 0.01, us + 0.01, 5, "device") for us in times}
    return tune.Finding("k", case, call, [tune.Trial(fields, timing[us], timing[us]) for fields, us in trials])


def test_tuned_entries_hold_around_what_was_measured():
    found = tune.entries(
        [
            finding("a", {"m": 64, "n": 8192, "heads": 64, "kv": "bfloat16"}, [10.0, 8.0, 9.0]),
            finding("b", {"m": 64, "n": 16384, "heads": 64, "kv": "bfloat16"}, [10.0, 9.9]),
        ],
        gain=0.02,
    )
    first, second = found
    where = {"m": [45, 90], "n": [5792, 11585], "heads": [64, 64], "kv": "bfloat16"}
    assert first == {"where": where, "config": {"stages": 3}, "best_other": {"stages": 3}, "us": {"a": [10.0, 8.0]}}
    assert second["config"] == {} and second["best_other"] == {"stages": 3} and second["us"] == {"b": [10.0, 9.9]}
    assert json.loads(tune.text_of({"k": found, "empty": []})) == {"k": found}


def test_a_config_must_win_on_every_shape_that_asks_alike():
    def winner(*times):
        return tune.entries([finding(str(i), {"heads": 64}, us) for i, us in enumerate(times)], gain=0.02)[0]["config"]

    assert winner([10.0, 9.0, 8.0], [20.0, 18.0, 17.0]) == {"stages": 4}
    assert winner([10.0, 9.0, 8.0], [20.0, 18.0, 21.0]) == {"stages": 3}  # the better one on both
    assert winner([10.0, 5.0], [20.0, 20.1]) == {}
    assert winner([10.0, 9.0, 8.0], [20.0, 18.0]) == {"stages": 3}  # the other ran on one of them alone


def test_configs_can_be_tried():
    with tuning.trying({"k": {"k": 5}}) as trial:
        config = tuning.tuned("k", target_of("sm_90"), Topk(rows=1, columns=2), n=3)
    assert config.k == 5 and trial.asked == {"k": (Topk(rows=1, columns=2), {"n": 3})}
    assert tuning.tuned("k", target_of("sm_90"), config, n=3) is config


def test_tune_measures_what_is_right_and_records_it(monkeypatch, tmp_path, capsys):
    """On a CPU, interpreted: the second config gives a wrong answer, the last is none."""
    tried = [{"chunk": 64}, {"chunk": 128}, {"pieces": 0}]
    monkeypatch.setattr(tune, "candidates", lambda kernel, asked, target: tried)
    complaint, turns = tune._Right.complaint, iter(range(9))
    monkeypatch.setattr(
        tune._Right, "complaint", lambda self, out: "wrong" if next(turns) == 1 else complaint(self, out)
    )
    file = tmp_path / "table.json"
    arguments = ["tune", "topk", "--shape", TINY, "--implementation", "portable", "--output", str(file)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "{'pieces': 0}: TypeError" in out and '{"chunk": 64}: WRONG: wrong' in out
    (entry,) = json.loads(file.read_text())["topk.portable"]
    assert entry["where"] == {"m": [2, 4], "n": [28, 56], "k": [4, 4]} and list(entry["us"]) == ["3 x 40 k=4"]
    assert entry["best_other"] == {"chunk": 128}
    assert main(["tune", "nonsense"]) == 2


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


def test_kernels_find_their_stage_and_layer(tmp_path):
    hlo = """
      %fusion.1 = bf16[4]{0} fusion(%p), metadata={op_name="jit(f)/layer_0/mla_projections/dot_general"}
      ROOT %topk.2 = s32[4]{0} custom-call(%q), metadata={op_name="jit(f)/layer_1/indexer/topk_indices/pallas_call"}
      %plain.3 = s32[] constant(0)
%gemm.4_computation (parameter_0.2: bf16[8]) -> f32[8,1,6144] {
  %parameter_0.2 = bf16[8]{0} parameter(0)
  %convert.5 = f32[8]{0} convert(%parameter_0.2), metadata={op_name="jit(f)/layer_0/o_proj/dot_general"}
}
ENTRY %main.9 (p: bf16[8]) -> bf16[8] {
  %gemm.4 = f32[8]{0} fusion(%p), kind=kCustom, calls=%gemm.4_computation, metadata={scheduling_name="gemm.4"}
}
    """
    places = layer.instruction_places(hlo)
    assert places["gemm.4"] == "jit(f)/layer_0/o_proj/dot_general" and places["plain.3"] == ""
    runs = [
        layer.placed(Kernel(name, instruction, "jit_f", begin, begin + 2000), places)
        for name, instruction, begin in (("nvjet", "fusion.1", 7000), ("kernel", "topk.2", 9000), ("copy", "x", 12000))
    ]
    assert [(run.stage, run.layer) for run in runs] == [("projections", 0), ("top-k", 1), ("rest", None)]
    trace.write(tmp_path / "t.json", {"decode": runs, "nothing": []})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [
        "decode", "projections", "top-k", "rest", "nothing",
    ]  # fmt: skip
    assert [(event["cat"], event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
        ("projections", 0, 0.0, 2.0), ("top-k", 1, 2.0, 2.0), ("rest", 2, 5.0, 2.0),
    ]  # fmt: skip


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
