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

STORE_ADDRESS = "10.77.0.3"
"""A second address of the first machine, for a server of both."""

_NO_CARD = "02:00:00:00:00:01"
"""The hardware address of no network card."""


class Machines(NamedTuple):
    """The two machines, with a process on each."""

    places: tuple[Place, Place]
    processes: tuple[Process, Process]

    @property
    def are_apart(self) -> bool:
        """Whether neither sees the other's memory. False where namespaces are forbidden."""
        return self.places[0].pid is not None

    @property
    def of_store(self) -> Place:
        """The place of a server that both reach."""
        near = self.places[0]
        return near._replace(address=STORE_ADDRESS if self.are_apart else near.address)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Let nothing from the second machine reach the server, and so wait in vain. The machines
        still reach each other. Only if they are apart."""
        there = f"{STORE_ADDRESS} dev {CABLE[1]}"
        self.places[1].run(f"ip neigh replace {there} lladdr {_NO_CARD} nud permanent")
        yield
        self.places[1].run(f"ip neigh del {there}")

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
        if places[0].pid is not None:
            places[0].run(f"ip address add {STORE_ADDRESS}/24 dev {CABLE[0]}")
        processes = []
        for place, end in zip(places, CABLE, strict=True):
            # Ranks do not end by themselves, since they wait for the other machine.
            env = {"VLLM_HOST_IP": place.address, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1"}
            if place.pid is not None:
                env["GLOO_SOCKET_IFNAME"] = end
            process = Process(folder / f"{end}.log", env, place.prefix)
            processes.append(stack.enter_context(process))
        yield Machines(places, (processes[0], processes[1]))
