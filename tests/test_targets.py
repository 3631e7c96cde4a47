"""The gate's cheap part: what every kernel needs of every architecture, as lowered here, and the gate's own working.

`make targets` compiles for real, in a quarter of an hour, with packages too large to bring to every test run: Triton
alone is a download of 248 MB, and XLA's CUDA compiler with NVIDIA's assembler is more.
"""

import dataclasses
import functools
import importlib.util
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import bench.targets as targets
import dsa_jax
from bench import tune
from bench.gate import cases, judge, lowering, report, worker, xla
from bench.gate.resources import read_ptxas
from dsa_jax import dispatch
from pallas_kernels import tuning
from pallas_kernels.dense_mla import portable as dense
from pallas_kernels.grouped_matmul import candidates as expert_candidates
from pallas_kernels.indexer_logits import candidates as indexer_candidates
from pallas_kernels.indexer_logits import portable as indexer
from pallas_kernels.sparse_mla import config as mla_config
from pallas_kernels.sparse_mla.widen import attended
from pallas_kernels.stored import CUSTOM_CALL
from pallas_kernels.target import target_of
from pallas_kernels.topk import candidates as topk_candidates
from pallas_kernels.topk import hopper as topk_hopper

ROOT = Path(dsa_jax.__file__).parents[1]
KERNEL_OPS = [op for op in dispatch._OPS.values() if len(op.implementations()) > 1 and isinstance(op, dispatch.Op)]


@functools.cache
def programs(arch):
    return worker.programs(arch)


def test_every_kernel_is_in_the_gate_and_its_table():
    compiled = {(p.case.call.op, p.implementation) for arch in cases.ARCHS for p in programs(arch)}
    kernels = {(op.name, name) for op in KERNEL_OPS for name in op.implementations() if name != "xla"}
    assert compiled == kernels, "bench/gate/cases.py holds no call of a kernel"
    table = (ROOT / "docs" / "targets.md").read_text("utf-8")
    missing = [kernel for kernel in kernels if f"| {' '.join(kernel)} |" not in table]
    assert missing == [], "run `make targets`"


def test_the_table_is_what_the_numbers_say():
    results = json.loads((ROOT / "bench" / "results" / "targets.json").read_text())
    assert tuple(results) == cases.ARCHS
    assert (ROOT / "docs" / "targets.md").read_text("utf-8") == report.render(results)
    held = [p["complaints"] for checks in results.values() for check in checks.values() for p in check["programs"]]
    assert len(held) > 100 and not any(held)


def test_measured_tables_belong_to_devices_of_the_gate():
    known = {re.sub(r"[^a-z0-9]+", "_", name.lower()) for names in cases.DEVICES.values() for name in names}
    assert {path.stem for path in tuning._FOLDER.glob("*.json")} <= known


def asked_of(target):
    """What the kernels ask of the tables over the gate's calls: (kernel, what it asked, the case)."""
    for case in cases.cases():
        for implementation in case.op.implementations():
            if implementation in cases.KERNELS and case.refusal(implementation, target) is None:
                with tuning.trying({}) as trial:
                    case.config(implementation, target)
                for kernel, asked in trial.asked.items():
                    yield kernel, asked, case


def with_cores(target, name):
    return dataclasses.replace(target, name=name, num_cores=132)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_candidates_are_other_configs_that_fit(arch):
    seen = set()
    for kernel, asked, case in asked_of(with_cores(target_of(arch), "a device without a table")):
        query = case.call.arguments[0]
        for fields in tune.candidates(kernel, asked, target_of(arch)):
            config = dataclasses.replace(asked.heuristic, **fields)
            assert config != asked.heuristic, (kernel, fields)
            check_fits(kernel, config, query, asked.call, target_of(arch))
            seen.add(kernel)
    hopper = {"topk.hopper", "indexer_logits.hopper", "paged_indexer_logits.hopper", "grouped_matmul.portable"}
    portable = {"topk", "indexer_logits", "paged_indexer_logits", "sparse_mla", "dense_mla"}
    assert seen >= (hopper if arch == "sm_90" else set()) | {f"{op}.portable" for op in portable}


def check_fits(kernel, config, query, call, target):
    if kernel == "topk.hopper":
        topk_hopper.require_legal(config, call["k"])
        assert topk_candidates.hopper_fits(target, config)
    elif kernel.endswith("indexer_logits.hopper"):
        assert indexer_candidates.hopper_fits(config, **call)
    elif kernel.endswith("indexer_logits.portable"):
        assert indexer.shared_bytes(target, query, config) <= target.shared_memory
    elif kernel == "sparse_mla.portable":
        dtypes = jnp.dtype(call["q"]), jnp.dtype(call["kv"])
        assert mla_config.shared_bytes(target, config, call["value"], call["tail"], *dtypes) <= target.shared_memory
    elif kernel == "dense_mla.portable":
        assert dense.shared_bytes(target, config, call["width"], call["value"]) <= target.shared_memory
    elif kernel == "grouped_matmul.portable":
        assert expert_candidates.shared_bytes(config) <= target.shared_memory


SHIPPED = [name for names in cases.DEVICES.values() for name in names if tuning.table(name)]


@pytest.mark.parametrize("device", SHIPPED)
def test_every_entry_of_a_shipped_table_is_a_config_that_the_gate_compiles(device):
    """The gate compiles each config that dispatch chooses for its calls on a device with a table."""
    (arch,) = (arch for arch, names in cases.DEVICES.items() if device in names)
    target, reached = with_cores(target_of(arch), device), set()
    for kernel, (heuristic, call), case in asked_of(target):
        for number, entry in enumerate(tuning.table(device).get(kernel, [])):
            assert set(entry["where"]) <= set(call), (kernel, entry)
            config = dataclasses.replace(heuristic, **entry["config"])
            if all(tuning._fits(call[name], wanted) for name, wanted in entry["where"].items()):
                check_fits(kernel, config, case.call.arguments[0], call, target)
                reached.add((kernel, number))
                assert tuning.tuned(kernel, target, heuristic, **call) == config
                plain = tuning.tuned(kernel, target_of(arch), heuristic, **call)
                assert plain == heuristic, "a table is for its own device alone"
    entries = {
        (kernel, n) for kernel, rows in tuning.table(device).items() for n, row in enumerate(rows) if row["config"]
    }
    assert entries <= reached, "bench/gate/cases.py has no call for an entry"


@pytest.mark.parametrize("arch", cases.ARCHS)
def test_tiles_fit(arch):
    """The bounds on shared memory by which dispatch refuses, over every call of the published models."""
    bounded = 0
    for case, implementation, target in cases.runnable(arch):
        if implementation != "portable" or case.call.op.endswith("topk_indices"):  # those take 32 KiB at most
            continue
        config, query = case.config(implementation, target), case.call.arguments[0]
        if case.call.op.endswith("sparse_mla"):
            kv = case.call.arguments[1]
            if case.call.op == "sparse_mla":
                kv = jax.eval_shape(attended, kv, case.call.arguments[2])
            needed = mla_config.shared_bytes(target, config, 512, 64, query.dtype, kv.nope.dtype)
        elif case.call.op.endswith("indexer_logits"):
            needed = indexer.shared_bytes(target, query, config)
        elif case.call.op == "dense_mla":
            needed = dense.shared_bytes(target, config, query.shape[-1], case.call.arguments[2].shape[-1])
        else:
            continue
        assert needed <= target.shared_memory, (case.name, config)
        bounded += 1
    assert bounded >= 30


def test_explain_tells_what_does_not_fit():
    rows, heads = 64, 512  # four dots' worth of heads
    shape = jax.ShapeDtypeStruct
    bound, weights = shape((rows,), jnp.int32), shape((rows, heads), jnp.float32)
    q, k = shape((rows, heads, 128), jnp.bfloat16), shape((8192, 128), jnp.bfloat16)
    call = ("indexer_logits", q, k, weights, bound, bound)
    told = dsa_jax.explain(*call, device="sm_120")
    assert told.implementation == "xla"
    assert re.search(
        r"tiles take \d{6} bytes of shared memory, a block of sm_120 has 101376", told.refusals["portable"]
    )
    assert dsa_jax.explain(*call, device="sm_80").implementation == "portable"


@pytest.mark.parametrize("arch", cases.ARCHS)
def test_lowered_products_can_be_matrix_instructions(arch):
    """One program a portable kernel: its call is the right one, its products have types and shapes of the matrix unit.

    Hopper kernels take seconds to lower; their own tests do that, and ask for their instructions themselves.
    """
    portable = [p for p in reversed(programs(arch)) if p.implementation == "portable"]
    for (op, dtype), program in {(p.case.call.op, p.case.dtype): p for p in portable}.items():
        function, shapes = program.case.function("portable", program.target)
        lowered = lowering.lower(function, arch, *shapes)
        assert set(lowering.custom_calls(lowered)) == {CUSTOM_CALL}, op
        for kernel in lowering.triton_kernels(lowered):
            products = [line for line in kernel.ir.splitlines() if " tt.dot " in line]
            assert bool(products) == bool(judge.wanted_instruction(arch, dtype, kernel.name)), kernel.name
            for line in products:
                check_product(arch, dtype, kernel, line)


def check_product(arch, dtype, kernel, line):
    rows, inner, left, columns, right = re.search(
        r"tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x(\w+)>", line
    ).groups()
    assert left == right, line
    assert min(int(rows), int(inner), int(columns)) >= 16, line
    native = target_of(arch).native_fp8 == "e4m3fn"
    assert left == {"bfloat16": "bf16", "float8_e4m3fn": "f8E4M3FN" if native else "f16"}[dtype], line
    if arch == "sm_90" and left == "f8E4M3FN":  # or Triton widens it to f16
        assert int(re.search(r"maxNumImpreciseAcc = (\d+)", line)[1]) >= 32
        assert int(rows) >= 64 and kernel.num_warps % 4 == 0


def test_spills_are_counted_once():
    """Whether or not ptxas warns of them first."""
    warning = (
        "ptxas warning : Registers are spilled to local memory in function 'f', 28 bytes spill stores, 26 bytes ..."
    )
    report = "16 bytes stack frame, 28 bytes spill stores, 26 bytes spill loads\nptxas info : Used 128 registers"
    for text in (report, f"{warning}\n{report}"):
        assert read_ptxas(text, "", 0).spills == 28


def test_complaints():
    program = dict(op="indexer_logits", dtype="float8_e4m3fn")
    good = dict(kernel="indexer_logits", registers=90, spills=0, shared=65536, matrix={"v_mfma_f32_32x32x8_f16": 64})
    assert judge.complaints("gfx942", program, good) == []
    bad = good | dict(spills=2800, shared=65537, matrix={"v_mfma_f32_32x32x8_bf16": 64})
    assert len(judge.complaints("gfx942", program, bad)) == 3
    assert judge.wanted_instruction("sm_80", "bfloat16", "sparse_mla_merge") is None


_WORKER = """
import json, os, sys, time
skip = int(sys.argv[-1])
for number in range(skip, 4):
    told = dict(number=number, op="topk_indices", implementation="portable", config={}, calls=["-"], dtype="")
    print(json.dumps(told), flush=True)
    if number == 1:
        sys.exit("LLVM ERROR: no such conversion")
    if number == 2:
        time.sleep(60)
    print(json.dumps(dict(number=number, kernels=[])), flush=True)
"""


def test_a_compiler_that_dies_or_hangs_is_reported_and_the_rest_is_checked():
    told = []
    found = targets.check_target("wheel", "sm_80", 2.0, told.append, worker=(sys.executable, "-c", _WORKER))
    assert [bool(program["complaints"]) for program in found] == [False, True, True, False]
    assert "no such conversion" in found[1]["failure"] and "more than 2 s" in found[2]["failure"]
    assert len(told) == 4


def test_what_is_missing_is_named(monkeypatch):
    assert "ROCm" in targets.skipped("xla", "gfx942")
    monkeypatch.setattr(xla, "_SITE", ROOT)
    assert re.search(r"from jax 0\.11\.2 on|plugin is not installed", targets.skipped("xla", "sm_80"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton" in targets.skipped("wheel", "sm_80")
