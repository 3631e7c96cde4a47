"""Every Python block of the README and of docs/ runs as pasted, in a fresh interpreter at the project's root."""

import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_jax
from bench import __main__ as bench
from dsa_jax import cli

ROOT = Path(__file__).parent.parent
# What the blocks of a page print, in order.
PRINTED = {
    "README.md": {
        "jit": r"\(64, 8, 64\) \(64, 8\)",
        "striped": r"True",
        "model": r"\(1, 57, 256\)",
        "generate": r"\[array\(\[.*\], dtype=int32\), array\(\[.*\], dtype=int32\)\]",
    },
    "docs/portable.md": {"stored": r"topk_indices \(64, 1, 1\) \(\(64, 2048\), 'int32'\)"},
    "docs/api.md": {"explain": r"hopper hopper is preferred"},
    "docs/porting.md": {"bytes": r"True True"},
    "docs/distributed.md": {"mesh": r"\(1, 40, 256\) \('tp', None\) 2"},
    "docs/serving.md": {"engine": r"96 length True", "speculation": r"True True"},
}

# A user's environment: not the eight devices that this suite asks for. What takes time is compilation.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": str(ROOT),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


BLOCKS = [
    pytest.param(block, printed, id=name)
    for page, prints in PRINTED.items()
    for block, (name, printed) in zip(blocks(page), prints.items(), strict=True)
]


def test_every_page_with_blocks_is_listed():
    pages = {f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")} | {"README.md"}
    assert {page for page in pages if blocks(page)} == set(PRINTED)


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text("utf-8")
    assert [name for name in dsa_jax.__all__ if not re.search(rf"`{name}\b", text)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("block", "printed"), BLOCKS)
def test_block_runs_as_pasted(block, printed):
    command = [sys.executable, "-W", "error", "-c", block]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(printed, done.stdout.strip()), done.stdout


def commands():
    """What the pages tell to type: lines set off as code, and commands within a line that are whole."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text("utf-8")
        lines = re.findall(r"^    ((?:python -m bench|dsa-jax) .*)$", text, re.MULTILINE)
        lines += re.findall(r"`((?:python -m bench|dsa-jax bench|dsa-jax \w+ CHECKPOINT) [^`]+)`", text)
        for line in lines:
            words = re.sub(r" N\b", " 2", line.replace("\n", " "))
            if not re.search(r" (PROGRAM|COMMAND)\b", words):
                yield shlex.split(words, comments=True)


COMMANDS = {" ".join(words): words for words in commands()}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_command_is_one_that_the_program_reads(words):
    if "bench" not in words:
        assert cli._parser().parse_args(words[1:])
        return
    name, *rest = words[words.index("bench") + 1 :] or ["topk"]  # none lists the programs
    assert name in bench.programs() and bench.parser_of(name, "bench").parse_args(rest)


def test_there_are_commands():
    assert len(COMMANDS) > 15


def test_the_program_for_several_machines_runs(tmp_path):
    """As one process of a Job, with the tiny checkpoint in place of the large one."""
    page = (ROOT / "docs/distributed.md").read_text("utf-8")
    (program,) = re.findall(r"cat > run.py <<'END'\n(.*?)END\n", page, re.DOTALL)
    assert "/models/glm-5.2" in program and "range(1000)" in program
    program = program.replace("/models/glm-5.2", "tests/golden/tiny_glm5").replace("range(1000)", "range(40)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {"COORDINATOR": f"127.0.0.1:{port}", "NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"}
    manifest = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]
    assert all(name in manifest for name in values)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=ENVIRONMENT | values, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[array\(\[.*dtype=int32\)\]$", done.stdout.strip(), re.DOTALL)


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text("utf-8")
    named = re.findall(r"`((?:dsa_jax|pallas_kernels|tests)/[\w/.]*)`", text) + re.findall(r"\]\(([\w/.]+)\)", text)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []
