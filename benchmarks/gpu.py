"""What codecs and exchanges cost on a GPU.

    python -m benchmarks.gpu

Codecs code a bucket of 100 MB of float32, beside a copy of it on the device. Then 1 and 2 ranks,
which share the GPU, sum 64 MB of zeros and train the MLP of 40 MB and a model of 500 parameters of
4 KB, beside DistributedDataParallel over NCCL where it runs; they sum buckets of several sizes,
many in a row, beside NCCL called as it is, whose difference is what the engine costs, of the whole
and of the time until the host has given them; and a trace of steps tells where the host waited for
the GPU.
Prints tables, and keeps them and the figures in benchmarks/results/, by the name of the device:
nothing is written there but what a run has measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bagua.common.config import nccl_shares_gpu
from bagua.common.nccl import FIRST_THAT_SHARES, nccl_version
from benchmarks.measure import interleaved
from benchmarks.models import ManyParameters, mlp, step
from benchmarks.ranks import on_ranks

if TYPE_CHECKING:
    from benchmarks.raw_nccl import RawNccl  # begins MPI

RESULTS = Path(__file__).parent / "results"
COUNT = 25 << 20  # float32: 100 MB
WIRES = 8  # that are added up
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
CODECS = ("raw", "fp16", "bf16", "minmax_u8", "minmax_u4", "fp8_e4m3", "sign1", "topk")


def device_seconds(run: Callable[[], None], times: int = 7, launches: int = 20) -> float:
    """The median time of a run on the device, of many that follow each other without a gap.

    All are launched while the device sleeps, so none waits for its launch.
    """
    seconds = []
    for number in range(1 + times):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # 10 ms
        before.record()
        for _ in range(launches):
            run()
        after.record()
        after.synchronize()
        if number:
            seconds.append(before.elapsed_time(after) * 1e-3 / launches)
    return statistics.median(seconds)


def kernels() -> dict[str, Any]:
    """Seconds, and the bytes that must be read and written at least."""
    from bagua.common.core import core

    values, other = torch.randn(COUNT, device="cuda"), torch.empty(COUNT, device="cuda")
    nbytes = 4 * COUNT
    figures = {
        "copy": {"seconds": device_seconds(lambda: other.copy_(values)), "bytes": 2 * nbytes}
    }
    for name in CODECS:
        coding = core.Coding(name)
        wire = torch.zeros(coding.wire_nbytes(COUNT), dtype=torch.uint8, device="cuda")
        part = COUNT // WIRES  # of which every rank has sent its wire
        nbytes_of_part = coding.wire_nbytes(part)
        stride = -(-nbytes_of_part // 4) * 4  # a wire begins at a multiple of 4 bytes
        rows = torch.zeros(WIRES, stride, dtype=torch.uint8, device="cuda")
        said = [row[:nbytes_of_part] for row in rows]
        for one in said:
            coding.encode(values[:part], one)
        runs = {
            "encode": (partial(coding.encode, values, wire), nbytes + len(wire)),
            "decode": (partial(coding.decode, wire, other), nbytes + len(wire)),
            "average": (
                partial(coding.average, said, wire, other[:part]),
                (WIRES + 1) * nbytes_of_part + 4 * part,
            ),
        }
        for what, (run, touched) in runs.items():
            figures[f"{name} {what}"] = {"seconds": device_seconds(run), "bytes": touched}
    return figures


def table_of_kernels(figures: dict[str, Any]) -> str:
    speed = figures["copy"]["bytes"] / figures["copy"]["seconds"]
    lines = [f"{'':<20}{'time':>12}{'bandwidth':>14}{'floor':>12}   time / floor"]
    for name, figure in figures.items():
        seconds, floor = figure["seconds"], figure["bytes"] / speed
        lines.append(
            f"{name:<20}{seconds * 1e6:>9.1f} us{figure['bytes'] / seconds * 1e-12:>9.2f} TB/s"
            f"{floor * 1e6:>9.1f} us{seconds / floor:>11.2f} x"
        )
    lines.append("floor: the bytes that must be touched, at the speed of the copy")
    return "\n".join(lines)


def table_of_exchanges(ranks: int, figures: dict[str, Any]) -> str:
    found = figures["waits of a step"]
    lines = [f"{ranks} ranks" if ranks > 1 else "1 rank"]
    for what, figure in figures.items():
        if figure is not found:
            line = f"{what:<38}{figure['median_s'] * 1e3:>9.3f} ms"
            given = f"   given within {figure['host_s'] * 1e6:.1f} us" if "host_s" in figure else ""
            lines.append(line + given)
    lines.append(f"the host waits in a step: {found or 'never'}")
    return "\n".join(lines)


def exchanges() -> dict[str, Any]:
    """On every rank."""
    import bagua.torch as bagua
    from benchmarks.raw_nccl import RawNccl

    bagua.init(allow_shared_gpu=True)
    torch.cuda.set_device(bagua.local_rank() % torch.cuda.device_count())
    tensor, inputs = torch.zeros(16 << 20, device="cuda"), torch.randn(64, 784, device="cuda")
    runs: dict[str, Callable[[], Any]] = {
        "allreduce 64 MB": lambda: bagua.allreduce_(tensor, name="large", op=bagua.Sum)
    }
    raw = RawNccl() if can_use(nccl_version(), bagua.size()) else None
    if raw:
        runs["allreduce 64 MB, nccl"] = raw.sum(tensor)
    has_ddp = begin_ddp(bagua.size())
    for what, make in (("step", mlp), ("step of 500 gradients", ManyParameters)):
        torch.manual_seed(0)
        model = make().cuda()
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = bagua.DistributedOptimizer(sgd, model.named_parameters())
        runs[what] = partial(step, model, optimizer, inputs)
        model = make().cuda()
        sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
        runs[f"{what}, alone"] = partial(step, model, sgd, inputs)
        if has_ddp:
            ddp = torch.nn.parallel.DistributedDataParallel(make().cuda())
            sgd = torch.optim.SGD(ddp.parameters(), lr=1e-3)
            runs[f"{what}, ddp"] = partial(step, ddp, sgd, inputs)

    def finished(run: Callable[[], Any]) -> None:
        run()
        torch.cuda.synchronize()

    timed = {name: partial(finished, run) for name, run in runs.items()}
    # Ranks that share a GPU have it in turns of milliseconds, and wait for each other in all.
    patient = bagua.size() > torch.cuda.device_count()
    turn = {"rounds": 2, "turn": 2} if patient else {"rounds": 10, "turn": 5}
    figures: dict[str, Any] = interleaved(timed, meet=bagua.barrier, **turn)
    figures |= buckets(raw, count=50, **turn)
    figures["waits of a step"] = waits(runs["step"])
    return figures


def buckets(
    raw: RawNccl | None, count: int, rounds: int, turn: int, device: str = "cuda"
) -> dict[str, Any]:
    """So many sums in a row, for which the program's stream waits, as for gradients: for each of
    them, or together for all.

    Also what the host takes to give them to the device, which may be at other work meanwhile.
    """
    import bagua.torch as bagua

    runs: dict[str, Callable[[], None]] = {}
    given: dict[str, list[float]] = {}

    def add(what: str, give: Callable[[], Any]) -> None:
        def run() -> None:
            start = time.perf_counter()
            give()
            given[what].append(time.perf_counter() - start)
            if device == "cuda":
                torch.cuda.synchronize()

        runs[what], given[what] = run, []

    for nbytes in (64 << 10, 1 << 20, 25 << 20):
        what = f"bucket {nbytes >> 10} KB"
        many = [Bucket(f"{what}, {number}", nbytes, device) for number in range(count)]
        add(what, lambda many=many: [one.launch().wait() for one in many])
        add(
            f"{what}, together",
            lambda many=many: [handle.wait() for handle in [one.launch() for one in many]],
        )
        if raw:
            sums = [raw.sum(one.values) for one in many]
            add(f"{what}, nccl", lambda sums=sums: [one() for one in sums])
    figures = interleaved(runs, rounds, bagua.barrier, turn)
    for what, figure in figures.items():
        figure |= {key: figure[key] / count for key in ("median_s", "min_s")}
        figure["host_s"] = statistics.median(given[what]) / count
    for what in [what for what in figures if raw and not what.endswith("nccl")]:
        alone = figures[f"{what.removesuffix(', together')}, nccl"]
        over = {key: figures[what][key] - alone[key] for key in ("median_s", "host_s")}
        figures[f"{what}, engine"] = over
    return figures


class Bucket:
    """Sums up values as an optimizer's buckets do."""

    def __init__(self, name: str, nbytes: int, device: str) -> None:
        from bagua.common.core import core
        from bagua.common.kinds import ReduceOp, Urgency
        from bagua.torch.arrays import arena_of

        arena, self.values, _ = arena_of(
            torch.zeros(1, device=device),
            torch.float32,
            name=name,
            counts=[nbytes // 4],
            op=ReduceOp.Sum,
            prescale=1.0,
            postscale=1.0,
            set=0,
            priority=0,
            codec="",
            exact_in_nodes=False,
            kept=0,
        )
        self.launch = partial(core.launch, arena, Urgency.NOW, [])


# Calls of CUDA in which the host waits for the device.
WAITS = ("Synchronize", "cudaMemcpy", "cudaMemset", "cudaMalloc", "cudaFree", "cudaHostRegister")


def waits(run: Callable[[], None], steps: int = 5) -> dict[str, int]:
    """How often which of them was made in so many steps, by any thread."""
    run()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        with torch.profiler.record_function("steps"):
            for _ in range(steps):
                run()
        torch.cuda.synchronize()
    return waits_in([(e.name, e.time_range.start, e.time_range.end) for e in profile.events()])


def waits_in(events: list[tuple[str, float, float]]) -> dict[str, int]:
    """Of events (name, begin, end), those that wait and begin between those called "steps"."""
    (span,) = [(begin, end) for name, begin, end in events if name == "steps"][:1]
    found: dict[str, int] = {}
    for name, begin, _ in events:
        waits = any(wait in name for wait in WAITS) and "Async" not in name
        if waits and name.startswith("cu") and span[0] <= begin <= span[1]:
            found[name] = found.get(name, 0) + 1
    return found


def can_use(version: tuple[int, ...], size: int) -> bool:
    """Whether so many ranks here can use this NCCL, which may have to be told that they share."""
    shares = nccl_shares_gpu() and version >= FIRST_THAT_SHARES
    return bool(version) and (size <= torch.cuda.device_count() or shares)


def begin_ddp(size: int) -> bool:
    """Over torch's NCCL, where that can be used."""
    from mpi4py import MPI

    has_nccl = torch.distributed.is_nccl_available()
    if not can_use(torch.cuda.nccl.version() if has_nccl else (), size):
        return False
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(MPI.COMM_WORLD.bcast(29000 + os.getpid() % 1000))
    rank = MPI.COMM_WORLD.rank
    torch.distributed.init_process_group("nccl", rank=rank, world_size=size)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here, so there is nothing to measure")
        return 1
    if options.as_rank:
        figures = exchanges()
        import bagua.torch

        if bagua.torch.rank() == 0:
            options.as_rank.write_text(json.dumps(figures))
        return 0
    name = torch.cuda.get_device_name()
    results: dict[str, Any] = {
        "device": name,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl_version())),
        "date": time.strftime("%Y-%m-%d"),
        "kernels": kernels(),
    }
    about = f"{name}, torch {results['torch']}, NCCL {results['nccl']}, {results['date']}"
    tables = [about, table_of_kernels(results["kernels"])]
    print(*tables, sep="\n\n")
    path = RESULTS / f"{name.replace(' ', '-').lower()}.json"
    RESULTS.mkdir(exist_ok=True)
    if torch.cuda.device_count() < 2:
        for variable, value in SHARING.items():
            os.environ.setdefault(variable, value)
    for ranks in (1, 2):
        output = path.with_suffix(f".{ranks}")
        if on_ranks(ranks, "benchmarks.gpu", "--as-rank", str(output)) != 0:
            return 1
        results[f"{ranks} ranks"] = figures = json.loads(output.read_text())
        output.unlink()
        tables.append(table_of_exchanges(ranks, figures))
        print(f"\n{tables[-1]}")
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".txt").write_text("\n\n".join(tables) + "\n")
    print(f"\nwritten: {path}, and the tables beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
