"""The command line: what it prints, its exit codes, and one clear line for each bad input."""

import io
import json
import shutil

import golden_data as golden
import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from dsa_jax import picture, verify
from dsa_jax.calls import model_calls
from dsa_jax.checkpoint import Checkpoint, load_model, model_tensors, save_checkpoint
from dsa_jax.cli import PRESETS, main
from dsa_jax.config import DsaConfig
from dsa_jax.dispatch import explain
from dsa_jax.model import CausalLM
from dsa_jax.report import print_check
from dsa_jax.tokenizer import ByteTokenizer, load_tokenizer

TINY = str(golden.FOLDER / "tiny_glm52")
pytestmark = pytest.mark.usefixtures("as_user")
jax.devices()  # the backend has started: no command changes the number of its devices


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit:  # argparse
        code = exit.code
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """A checkpoint of one layer and the multi-token prediction layer: quick to compile."""
    config = DsaConfig.tiny(num_hidden_layers=1, index_topk=12)
    path = tmp_path_factory.mktemp("one_layer")
    save_checkpoint(path, config, model_tensors(CausalLM(config, rngs=nnx.Rngs(0))))
    return path


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"    {name} " in out for name in ("generate", "check", "explain", "select", "demo"))


@pytest.mark.parametrize("name", ["generate", "check", "explain", "select", "demo"])
def test_help_of_a_command(capsys, name):
    code, out, _ = run(capsys, name, "--help")
    assert code == 0 and f"usage: dsa-jax {name}" in out


def edited_config(**fields):
    """A copy of the tiny checkpoint with other fields in its config.json."""

    def make(folder):
        path = folder / "edited"
        shutil.copytree(TINY, path)
        config = json.loads((path / "config.json").read_text()) | fields
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def written(name: str, content: bytes):
    def make(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def broken_tokenizer(folder):
    path = edited_config()(folder)
    (path / "tokenizer.json").write_text("{}")
    return path


GENERATE = ("generate", TINY, "--prompt", "x")
BAD = {
    "no_command": ((), "the following arguments are required: COMMAND"),
    "unknown_command": (("train",), "invalid choice: 'train'"),
    "unknown_option": ((*GENERATE, "--beams", "4"), "unrecognized arguments: --beams 4"),
    "no_prompt": (("generate", TINY), "one of the arguments --prompt --prompt-file is required"),
    "not_a_number": ((*GENERATE, "--seed", "x"), "argument --seed: invalid int value: 'x'"),
    "no_checkpoint": (("generate", "nowhere", "--prompt", "x"), "path must be a directory that holds a config.json"),
    "check_no_checkpoint": (("check", "nowhere"), "path must be a directory that holds a config.json, got 'nowhere'"),
    "unknown_model_type": (("generate", edited_config(model_type="llama"), "--prompt", "x"), "model_type must be"),
    "unknown_scoring": (("check", edited_config(scoring_func="softmax")), "scoring_func must be"),
    "unknown_indexer_type": (("check", edited_config(indexer_types=["whole"] * 8)), "indexer_types"),
    "config_not_json": (("check", lambda folder: written("config.json", b"{")(folder).parent), "is not JSON"),
    "tensor_shape": (("generate", edited_config(hidden_size=32), "--prompt", "x"), "model."),
    "broken_tokenizer": (("generate", broken_tokenizer, "--prompt", "x"), "tokenizer.json is not a tokenizer"),
    "bytes_do_not_fit": (
        ("generate", edited_config(vocab_size=255), "--prompt", "x"),
        "vocab_size must be at least 256",
    ),
    "no_prompt_file": (("generate", TINY, "--prompt-file", "nowhere.txt"), "nowhere.txt: No such file or directory"),
    "empty_prompt": (("generate", TINY, "--prompt", ""), "--prompt 1 must be at least one token, got none"),
    "empty_file": (("generate", TINY, "--prompt-file", written("a", b"")), "must be at least one token, got none"),
    "too_long": (("generate", TINY, "--prompt", "x" * 200), "at most max_position_embeddings = 256, got 200 + 64"),
    "drafts": ((*GENERATE, "--drafts", "6"), "drafts must be in 0..5, got 6"),
    "cache_bytes": ((*GENERATE, "--cache-bytes", "many"), "the number of bytes must be a number and nothing, B, KB"),
    "two_budgets": ((*GENERATE, "--cache-bytes", "1GB", "--pages", "9"), "not allowed with argument"),
    "top_p": ((*GENERATE, "--top-p", "0"), "top_p must be more than 0 and at most 1, got 0.0"),
    "full_cache": ((*GENERATE, "--pages", "1"), "num_pages must be at least 2 for 1 prompts of 1 tokens"),
    "no_new_tokens": ((*GENERATE, "--max-new-tokens", "0"), "max_new_tokens must be at least 1, got 0"),
    "page_size": ((*GENERATE, "--page-size", "0"), "page_size must be at least 1, got 0"),
    "prefill_chunk": ((*GENERATE, "--prefill-chunk", "-1"), "prefill_chunk must be at least 1, got -1"),
    "cache_dtype": ((*GENERATE, "--cache-dtype", "int4"), "cache_dtype must be 'float32' or"),
    "temperature": ((*GENERATE, "--temperature", "-1"), "temperature must be at least 0 and finite, got -1.0"),
    "dtype": ((*GENERATE, "--dtype", "int8"), "dtype must be float32, bfloat16 or None, got 'int8'"),
    "devices": ((*GENERATE, "--devices", "0"), "--devices must be at least 1, got 0"),
    "too_many_devices": ((*GENERATE, "--devices", "99"), "--devices must be at most 8"),
    "check_too_few": (
        ("check", TINY, "--tokens", "12"),
        "the number of tokens must be more than index_topk = 12, got 12",
    ),
    "check_too_many": (("check", TINY, "--tokens", "257"), "at most max_position_embeddings = 256, got 257"),
    "check_two": (("check", TINY, "--prompt", "a", "--prompt", "b"), "the number of prompts must be 1, got 2"),
    "select_short": (("select", TINY, "--prompt", "x", "-o", "x.png"), "must be more than index_topk = 12"),
    "select_layer": (
        ("select", TINY, "--prompt", "x" * 20, "-o", "x.png", "--layers", "8"),
        "layers must be in 0..7, got 8",
    ),
    "explain_op": (("explain", "softmax"), "OP must be one of dense_mla"),
    "explain_preset": (("explain", "--preset", "gpt"), "invalid choice: 'gpt'"),
    "demo_checkpoint": (("demo", "--checkpoint", "nowhere"), "path must be a directory that holds a config.json"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line(arguments, message, capsys, tmp_path):
    code, out, err = run(capsys, *(a(tmp_path) if callable(a) else a for a in arguments))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1 and err.startswith("dsa-jax")


def test_interrupt_is_quiet(capsys, monkeypatch):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(DsaConfig, "from_pretrained", interrupted)
    assert run(capsys, "generate", TINY, "--prompt", "x") == (130, "", "")


def test_device_failure_is_one_line(capsys, monkeypatch):
    def fails(path):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nwhile allocating")

    monkeypatch.setattr(DsaConfig, "from_pretrained", fails)
    code, _, err = run(capsys, "generate", TINY, "--prompt", "x")
    assert (code, err) == (1, "dsa-jax: RESOURCE_EXHAUSTED: out of memory while allocating\n")


def test_generate_prints_a_text_a_prompt(capsys, one_layer, tmp_path):
    files = [written("a", b"a prompt that is longer than twelve")(tmp_path), written("b", b"\xff\xfe")(tmp_path)]
    options = ("--max-new-tokens", "3", "--page-size", "16", "--cache-dtype", "float32")
    arguments = ("generate", one_layer, "--prompt-file", files[0], "--prompt-file", files[1], *options)
    code, out, err = run(capsys, *arguments)
    assert code == 0 and out.endswith("\n")
    assert "37 tokens read, 6 written in" in err and "tokens/s" in err
    assert run(capsys, *arguments, "--devices", "2")[1] == out
    code, drafted, err = run(capsys, *arguments, "--drafts", "2", "--cache-bytes", "1MiB")
    assert (code, drafted) == (0, out) and "tokens a step and prompt of at most 3" in err


def test_check_passes_and_reports_every_layer(capsys, one_layer):
    code, out, _ = run(capsys, "check", one_layer, "--tokens", "60", "--devices", "3", "--cache-dtype", "float8_e4m3fn")
    assert code == 0, out
    assert "float8_e4m3fn caches against float32 ones" in out
    assert "60 tokens, float32, striped over 3 devices" in out and "in tolerance" in out
    assert (
        "not striped" in out
        and out.count("same bits") == 1
        and " mtp " in out
        and "prefill and decode over paged caches" in out
    )


def test_check_fails_on_other_weights(one_layer):
    """A model that is not its checkpoint's: out of tolerance, and rows with other keys that are no near-ties."""
    model, tokens = load_model(one_layer), np.arange(60)
    tensors = dict(Checkpoint.open(one_layer))
    right = verify.check(model, tensors, tokens, decode_steps=2)
    assert right.ok
    print_check(right, page := Console(width=120, file=io.StringIO()))
    assert "in tolerance" in page.file.getvalue() and "striped" not in page.file.getvalue()
    keys = tensors["model.layers.0.self_attn.indexer.wk.weight"]
    spoiled = verify.check(
        model, tensors | {"model.layers.0.self_attn.indexer.wk.weight": -keys}, tokens, decode_steps=0
    )
    assert not spoiled.ok
    assert spoiled.layers[0].rows_differ > 20 and spoiled.layers[0].near_ties < spoiled.layers[0].rows_differ
    values = tensors["model.layers.0.mlp.down_proj.weight"]
    spoiled = verify.check(
        model, tensors | {"model.layers.0.mlp.down_proj.weight": 1.001 * values}, tokens, decode_steps=0
    )
    assert not spoiled.ok and spoiled.layers[0].rows_differ == 0 and spoiled.same_keys


def test_near_tie_rule():
    scores = np.array([3.0, 1.0, 1.0 + 1e-6, 2.0, -1.0], np.float32)
    assert verify._is_tie(scores, np.array([0, 1, 3]), np.array([0, 2, 3]))
    assert not verify._is_tie(scores, np.array([0, 1, 3]), np.array([0, 3, 4]))
    assert not verify._is_tie(scores, np.array([0, 1, -1]), np.array([0, 2, 3]))
    assert not verify._is_tie(scores[:2], np.array([0, 2]), np.array([0, 1]))


def test_explain_tells_what_runs_and_why_not_the_rest(capsys):
    code, out, _ = run(
        capsys, "explain", "--device", "sm_90", "--device", "cpu", "--preset", "deepseek_v32", "sparse_mla"
    )
    assert code == 0
    assert "deepseek_v32 on sm_90" in out and "deepseek_v32 on cpu" in out
    assert "sparse_mla" in out and "dense_mla" not in out and "hopper" in out


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("device", ["sm_80", "sm_90", "gfx942", "gfx950", "cpu"])
def test_every_call_of_a_model_can_be_explained(preset, device):
    for call in model_calls(getattr(DsaConfig, preset)()):
        explanation = explain(call.op, *call.arguments, device=device, **call.options)
        assert explanation.implementation
        assert device != "cpu" or set(explanation.implementation.split(" + ")) == {"xla"}


def test_select_writes_a_png(capsys, one_layer, tmp_path):
    prompt, png = (
        written("a", b"sixty bytes of text, of which each row keeps at most twelve.")(tmp_path),
        tmp_path / "p" / "kept.png",
    )
    code, out, _ = run(capsys, "select", one_layer, "--prompt-file", prompt, "-o", png, "--prefill-chunk", "16")
    assert (code, out) == (0, f"wrote {png}\n")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_kept_share_counts_visible_pairs():
    indices = np.array([[0, -1], [0, 1], [0, 2], [1, 3]])
    share, edges = picture.kept_share(indices, 2)
    np.testing.assert_array_equal(edges, [0, 2, 4])
    np.testing.assert_array_equal(share, [[1.0, np.nan], [2 / 4, 2 / 3]])
    share, _ = picture.kept_share(indices, 4)
    np.testing.assert_array_equal(np.argwhere(share == 1.0), [[0, 0], [1, 0], [1, 1], [2, 0], [2, 2], [3, 1], [3, 3]])


def test_panels_name_who_shares():
    types = ("full", "full", "shared", "shared", "full", "shared")
    assert picture.panels(types) == [(0,), (1, 2, 3), (4, 5)]
    assert picture.panels(types, [3]) == [(1, 2, 3)]
    assert [picture._title(panel) for panel in picture.panels(types)] == [
        "layer 0",
        "layer 1, shared by 2 to 3",
        "layer 4, shared by 5",
    ]


def test_bytes_round_trip():
    tokenizer = ByteTokenizer(256)
    assert tokenizer.encode("aé").tolist() == [97, 195, 169]
    assert tokenizer.decode(np.array([97, 195, 169, 255])) == "aé\ufffd"


def test_tokenizer_json_is_used(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, 3)
    assert tokenizer.name == "tokenizer.json"
    assert tokenizer.encode("hello there world").tolist() == [0, 2, 1]
    assert tokenizer.decode(np.array([1, 0])) == "world hello"
