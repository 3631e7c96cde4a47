"""Joining the processes of a run over several machines, with an error that says who is missing.

`jax.distributed.initialize` aborts the process where another one does not come in time. So `join` has all of them meet
first, over one plain TCP connection each to the coordinator's address: who is not there by then is named, in every
process that is. Only then does jax begin, at the same address.
"""

import contextlib
import dataclasses
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping

import jax

from dsa_jax.checks import refuse, require

_RETRY_SECONDS = 0.1


class MissingProcess(RuntimeError):
    """Not every process of the run came in time."""


@dataclasses.dataclass(frozen=True)
class Place:
    """This process's place in a run.

    coordinator: "host:port" of process 0, a port that is free there.
    num_processes, process_id: how many there are, and which of 0..num_processes - 1 this is.
    local_device_id: the one device of the machine that is this process's, or None for all that it sees.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_id: int | None = None

    def __post_init__(self) -> None:
        require(self.num_processes >= 1, "num_processes", self.num_processes, "at least 1")
        require(
            0 <= self.process_id < self.num_processes, "process_id", self.process_id, f"in 0..{self.num_processes - 1}"
        )
        legal = re.fullmatch(r".+:\d{1,5}", self.coordinator) and int(self.coordinator.rpartition(":")[2]) < 65536
        require(bool(legal), "coordinator", repr(self.coordinator), "'host:port'")


def place_of(environment: Mapping[str, str]) -> Place:
    """This process's place by its environment variables.

    SLURM (`srun`): one process a task, the first node's task 0 is the coordinator; with several tasks a node each takes
    the device of its local number. Kubernetes (an Indexed Job with a headless service): COORDINATOR and NUM_PROCESSES,
    which the manifest sets, and JOB_COMPLETION_INDEX, which the Job does.
    Raises ValueError where the variables of neither are there.
    """
    if {"SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"} <= environment.keys():
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
        tasks = environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"])
        port = 61440 + int(environment["SLURM_JOB_ID"]) % 4096
        several = environment.get("SLURM_STEP_TASKS_PER_NODE", "1") != "1" and int(tasks) > 1
        local = int(environment["SLURM_LOCALID"]) if several and "SLURM_LOCALID" in environment else None
        return Place(f"{_first_node(nodes)}:{port}", int(tasks), int(environment["SLURM_PROCID"]), local)
    if {"COORDINATOR", "NUM_PROCESSES", "JOB_COMPLETION_INDEX"} <= environment.keys():
        index = int(environment["JOB_COMPLETION_INDEX"])
        return Place(environment["COORDINATOR"], int(environment["NUM_PROCESSES"]), index)
    refuse("environment", "neither", "SLURM's (SLURM_JOB_ID, ...) or a Job's (COORDINATOR, NUM_PROCESSES, ...)")


def join(place: Place, *, timeout: float = 300.0) -> None:
    """Joins the run; afterwards `jax.devices()` are those of all processes. Call it before anything else of jax.

    place: this process's.
    timeout: seconds to wait for the others.
    Raises MissingProcess, with the missing ones' numbers, after the timeout.
    """
    require(timeout > 0, "timeout", timeout, "positive")
    deadline = time.monotonic() + timeout
    if place.num_processes > 1:
        (_host if place.process_id == 0 else _visit)(place, deadline, timeout)
    jax.distributed.initialize(
        place.coordinator,
        place.num_processes,
        place.process_id,
        local_device_ids=None if place.local_device_id is None else [place.local_device_id],
        initialization_timeout=max(30, int(timeout)),
    )


def _host(place: Place, deadline: float, timeout: float) -> None:
    """Waits for every other process, and tells each of them who is missing: nobody, or the run is off."""
    visitors: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("", _address(place)[1])))
        for connection in _visitors(server, deadline):
            stack.enter_context(connection)
            with contextlib.suppress(ValueError, OSError):  # a stranger, or one that has given up
                connection.settimeout(_left(deadline))
                visitors[int(_receive(connection))] = connection
            if len(visitors) == place.num_processes - 1:
                break
        missing = sorted(set(range(1, place.num_processes)) - set(visitors))
        for connection in visitors.values():
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(missing).encode() + b"\n")
        if not missing:  # they leave first, so that the address is free at once
            for connection in visitors.values():
                with contextlib.suppress(OSError):
                    connection.recv(1)
    if missing:
        raise _missing(place, missing, timeout)


def _visitors(server: socket.socket, deadline: float) -> Iterator[socket.socket]:
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            yield server.accept()[0]
        except TimeoutError:
            return


def _visit(place: Place, deadline: float, timeout: float) -> None:
    """Reports to process 0 and waits for its answer."""
    while True:
        try:
            with socket.create_connection(_address(place), timeout=_left(deadline)) as connection:
                connection.sendall(f"{place.process_id}\n".encode())
                connection.settimeout(_left(deadline) + 5.0)  # it answers at the deadline
                missing = json.loads(_receive(connection))
            break
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                raise _missing(place, [0], timeout) from None
            time.sleep(_RETRY_SECONDS)
    if missing:
        raise _missing(place, missing, timeout)


def _receive(connection: socket.socket) -> str:
    """One line."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := connection.recv(4096)):
            raise ConnectionError("the other side has left")
        line += more
    return line.decode()


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.05)


def _address(place: Place) -> tuple[str, int]:
    host, _, port = place.coordinator.rpartition(":")
    return host, int(port)


def _missing(place: Place, missing: list[int], timeout: float) -> MissingProcess:
    names = ", ".join(map(str, missing))
    return MissingProcess(
        f"process {place.process_id} waited {timeout:g} s at {place.coordinator} for process {names} "
        f"of {place.num_processes}: is it running, and does that address reach process 0 from its machine?"
    )


def _first_node(nodes: str) -> str:
    """The first host of a SLURM node list: "n[003-007,12],m1" is n003."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    require(match is not None, "SLURM_STEP_NODELIST", repr(nodes), "a node list")
    assert match is not None
    return match[1] + (match[2] or "") + (match[3] or "")
