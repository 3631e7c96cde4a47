"""Several processes: they find each other, select the same bits, and say who is missing."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dsa_jax.distributed import MissingProcess, Place, _host, _visit, join, place_of

WORKER = Path(__file__).parent / "distributed_worker.py"
SLURM = dict(SLURM_JOB_ID="4100", SLURM_NTASKS="16", SLURM_PROCID="9", SLURM_STEP_NODELIST="gpu[007-008,12]")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def run_processes(count: int, started: list[int]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    address = free_address()
    environment = os.environ | {
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(WORKER.parent), str(WORKER.parent.parent)]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, str(count), str(process)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in started
    ]
    try:
        outputs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, output) for worker, output in zip(workers, outputs, strict=True)]


def test_two_processes_select_the_bits_of_one():
    """Joined by Gloo, one CPU device each."""
    for code, output in run_processes(2, [0, 1]):
        assert code == 0 and "same bits" in output, output


def test_a_missing_process_is_named_and_nobody_hangs():
    [(code, output)] = run_processes(3, [1])
    assert code == 1
    assert "process 1 waited 3 s at localhost:" in output and "for process 0 of 3" in output, output


def meet(places: list[Place], timeout: float) -> dict[int, str]:
    """What the meeting tells each process: nothing, or who is missing."""
    import time

    said = {}

    def attend(place: Place) -> None:
        try:
            (_host if place.process_id == 0 else _visit)(place, time.monotonic() + timeout, timeout)
            said[place.process_id] = ""
        except MissingProcess as error:
            said[place.process_id] = str(error)

    threads = [threading.Thread(target=attend, args=(place,)) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return said


def test_meeting():
    address = free_address()
    assert meet([Place(address, 4, process) for process in (2, 0, 3, 1)], 20.0) == dict.fromkeys(range(4), "")
    told = meet([Place(address, 5, process) for process in (0, 2, 4)], 0.5)  # the same address again at once
    assert set(told) == {0, 2, 4}
    assert all("for process 1, 3 of 5" in words for words in told.values()), told


def test_a_stranger_is_no_process():
    place = Place(free_address(), 2, 0)
    host, _, port = place.coordinator.rpartition(":")

    def knock() -> None:
        for _ in range(100):
            try:
                with socket.create_connection((host, int(port)), timeout=1) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except OSError:
                threading.Event().wait(0.02)

    stranger = threading.Thread(target=knock)
    stranger.start()
    assert "for process 1 of 2" in meet([place], 0.5)[0]
    stranger.join()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (SLURM, Place("gpu007:61444", 16, 9)),
        (SLURM | dict(SLURM_STEP_TASKS_PER_NODE="8(x2)", SLURM_LOCALID="1"), Place("gpu007:61444", 16, 9, 1)),
        (SLURM | dict(SLURM_STEP_NODELIST="alpha,beta"), Place("alpha:61444", 16, 9)),
        (
            dict(COORDINATOR="dsa-0.dsa:8476", NUM_PROCESSES="4", JOB_COMPLETION_INDEX="3"),
            Place("dsa-0.dsa:8476", 4, 3),
        ),
    ],
    ids=["slurm", "slurm-gpu-a-task", "slurm-names", "kubernetes"],
)
def test_place_of(environment, place):
    assert place_of(environment) == place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("here:1", 0, 0), "num_processes must be at least 1, got 0"),
        (("here:1", 2, 2), r"process_id must be in 0\.\.1, got 2"),
        (("here", 2, 0), "coordinator must be 'host:port', got 'here'"),
        (("here:70000", 2, 0), "coordinator must be"),
    ],
    ids=["count", "id", "port", "port-range"],
)
def test_bad_places(arguments, message):
    with pytest.raises(ValueError, match=message):
        Place(*arguments)


def test_no_place():
    with pytest.raises(ValueError, match=r"environment must be SLURM's .* or a Job's"):
        place_of(dict(JOB_COMPLETION_INDEX="3"))
    with pytest.raises(ValueError, match="timeout must be positive, got 0"):
        join(Place("here:1", 1, 0), timeout=0.0)
