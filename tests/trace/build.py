"""Traces as Kineto writes them, built event by event: what a GPU would have recorded, where there is none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

HOST_PID = 4242
Microseconds = float | int


class TraceBuilder:
    """Collects events, writes one rank's file."""

    def __init__(self, rank: int = 0, num_ranks: int = 2, backend: str = "nccl") -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.backend = backend
        self.events: list[Any] = []
        self.base_ns = 0
        self._num_ids = 0

    @property
    def header(self) -> dict[str, Any]:
        ranks = list(range(self.num_ranks))
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": self.num_ranks, "ranks": ranks}
        group["backend_config"] = "cuda:nccl" if self.backend == "nccl" else f"cpu:{self.backend},cuda:{self.backend}"
        return {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.rank, "name": "A GPU"}] if self.backend == "nccl" else [],
            "distributedInfo": {
                "backend": self.backend,
                "rank": self.rank,
                "world_size": self.num_ranks,
                "pg_count": 1,
                "pg_config": [group],
            },
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self.base_ns,
        }

    def event(self, event: Any) -> Self:
        """Anything, as it is."""
        self.events.append(event)
        return self

    def kernel(
        self,
        name: str,
        start_us: Microseconds,
        dur_us: Microseconds,
        stream: int = 7,
        correlation: int | None = None,
        **args: Any,
    ) -> Self:
        """A kernel on a stream; `args` with blanks in their names go by `**{"Collective name": …}`."""
        return self._on_device("kernel", name, start_us, dur_us, stream, correlation, args)

    def copy(
        self,
        name: str = "Memcpy HtoD (Pinned -> Device)",
        start_us: Microseconds = 0,
        dur_us: Microseconds = 0,
        stream: int = 7,
        correlation: int | None = None,
        **args: Any,
    ) -> Self:
        """A copy of memory, or a fill of it where the name says so."""
        category = "gpu_memset" if name.lower().startswith("memset") else "gpu_memcpy"
        return self._on_device(category, name, start_us, dur_us, stream, correlation, {"bytes": 1024, **args})

    def collective(
        self,
        collective: str,
        start_us: Microseconds,
        dur_us: Microseconds,
        *,
        in_elements: int = 1024,
        out_elements: int = 1024,
        dtype: str = "Float",
        stream: int = 20,
        correlation: int | None = None,
        name: str = "",
        **args: Any,
    ) -> Self:
        """NCCL's kernel with the record that torch puts on it."""
        record = {
            "Collective name": collective,
            "In msg nelems": in_elements,
            "Out msg nelems": out_elements,
            "Group size": self.num_ranks,
            "dtype": dtype,
            "In split size": "[]",
            "Out split size": "[]",
            "Process Group Name": "0",
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.num_ranks))),
        }
        kernel = name or f"ncclDevKernel_{collective.strip('_')}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        return self.kernel(kernel, start_us, dur_us, stream, correlation, **(record | args))

    def launch(
        self, name: str, start_us: Microseconds, dur_us: Microseconds, correlation: int, tid: int = 1, **args: Any
    ) -> Self:
        """A call of the device's library, `cudaLaunchKernel` for one."""
        category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        found = {"External id": correlation, "cbid": 211, "correlation": correlation} | args
        return self._complete(category, name, HOST_PID, tid, start_us, dur_us, found)

    def flow(self, correlation: int, host_us: Microseconds, device_us: Microseconds, tid: int = 1) -> Self:
        """The arrow from a launch to its kernel."""
        arrow = {"id": correlation, "cat": "ac2g", "name": "ac2g"}
        self.events.append({"ph": "s", "pid": HOST_PID, "tid": tid, "ts": host_us, **arrow})
        self.events.append({"ph": "f", "pid": self.rank, "tid": 7, "ts": device_us, "bp": "e", **arrow})
        return self

    def operator(self, name: str, start_us: Microseconds, dur_us: Microseconds, tid: int = 1, **args: Any) -> Self:
        """An operator on a thread of the host."""
        self._num_ids += 1
        found = {"External id": self._num_ids, "Record function id": 0, "Ev Idx": len(self.events)} | args
        return self._complete("cpu_op", name, HOST_PID, tid, start_us, dur_us, found)

    def annotation(self, name: str, start_us: Microseconds, dur_us: Microseconds, tid: int = 1, **args: Any) -> Self:
        """A range that the program named: gloo's collectives, steps."""
        found = {"External id": 1, "Record function id": 0, "Ev Idx": len(self.events)} | args
        return self._complete("user_annotation", name, HOST_PID, tid, start_us, dur_us, found)

    def device_annotation(
        self, name: str, start_us: Microseconds, dur_us: Microseconds, stream: int = 7, **args: Any
    ) -> Self:
        """The same range as a stream saw it."""
        found = {"External id": 1} | args
        return self._complete("gpu_user_annotation", name, self.rank, stream, start_us, dur_us, found)

    def step(self, number: int, start_us: Microseconds, dur_us: Microseconds, tid: int = 1) -> Self:
        return self.annotation(f"ProfilerStep#{number}", start_us, dur_us, tid)

    def _on_device(
        self,
        category: str,
        name: str,
        start_us: Microseconds,
        dur_us: Microseconds,
        stream: int,
        correlation: int | None,
        args: Mapping[str, Any],
    ) -> Self:
        self._num_ids += 1
        number = 100_000 + self._num_ids if correlation is None else correlation
        found = {"External id": number, "queued": 0, "device": self.rank, "context": 1, "stream": stream}
        found |= {"correlation": number, **args}
        return self._complete(category, name, self.rank, stream, start_us, dur_us, found)

    def _complete(
        self,
        category: str,
        name: str,
        pid: int,
        tid: int,
        start_us: Microseconds,
        dur_us: Microseconds,
        args: Mapping[str, Any],
    ) -> Self:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": dur_us}
        self.events.append(event | {"args": dict(args)})
        return self

    @property
    def text(self) -> str:
        """The file: header first and an event per line, as Kineto has it."""
        header = json.dumps(self.header, indent=2).removesuffix("\n}")
        events = ",\n".join("  " + json.dumps(event) for event in self.events)
        return f'{header},\n  "traceEvents": [\n{events}\n],\n  "traceName": "trace.json"\n}}\n'

    def write(self, path: Path, gz: bool = False) -> Path:
        """The path that was written; `gz` compresses, whatever the name."""
        data = self.text.encode()
        path.write_bytes(gzip.compress(data, compresslevel=1) if gz else data)
        return path
