"""Two machines (`tests.servers.namespaces`) that run one engine together, as vLLM's `mp` executor
does with `--nnodes 2`: each runs half of the ranks, and the first also the scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.real_vllm.harness import START_SECONDS, STOP_SECONDS, Engine, Process, arguments_of
from tests.servers.namespaces import CABLE, Place, two_places
from tests.servers.process import free_ports


class Machines(NamedTuple):
    """The two machines, with a process on each."""

    places: tuple[Place, Place]
    processes: tuple[Process, Process]

    @property
    def are_apart(self) -> bool:
        """Whether neither sees the other's memory. False where namespaces are forbidden."""
        return self.places[0].pid is not None

    @contextmanager
    def engine(self, model: Path, connector: dict[str, Any], **split: Any) -> Iterator[Engine]:
        """Run a fresh engine for the block, with the same connector on both machines."""
        (port,) = free_ports(1)
        options = split | {
            "distributed_executor_backend": "mp",
            "nnodes": 2,
            "master_addr": self.places[0].address,
            "master_port": port,
        }
        first, other = self.processes
        try:
            joining = arguments_of(model, node_rank=1, **options)
            other.send("join", engine=joining, connector=connector)
            with first.engine(model, connector, node_rank=0, **options) as engine:
                other.receive(START_SECONDS)
                yield engine
                other.send("stop")  # vLLM gives ranks some seconds on each machine, now at once
            other.receive(STOP_SECONDS)
        except BaseException:
            other.kill()  # its state is unknown
            raise


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    """Run a process on each of two machines; their logs go into `folder`."""
    with ExitStack() as stack:
        places = stack.enter_context(two_places(are_machines=True))
        processes = []
        for place, end in zip(places, CABLE, strict=True):
            env = {"VLLM_HOST_IP": place.address}
            if place.pid is not None:
                env["GLOO_SOCKET_IFNAME"] = end
            process = Process(folder / f"{end}.log", env, place.prefix)
            processes.append(stack.enter_context(process))
        yield Machines(places, (processes[0], processes[1]))
