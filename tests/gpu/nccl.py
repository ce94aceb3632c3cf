"""DDP over NCCL, one process per GPU and at most two: `python -m tests.gpu.nccl FOLDER cuda` is one of them.

On a CPU there are two processes with gloo, which tests the check itself.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from tests.gpu.checks import Place, Row
from tests.gpu.loops import scratch

STEPS = 24
EVERY = 4
WIDTH = 64


def ranks(place: Place) -> Iterator[Row]:
    """DDP with and without watching: equal losses, equal numbers of collectives, and complete merged tables."""
    size = min(2, torch.cuda.device_count()) if place.cuda else 2
    with scratch() as folder:
        failed = _start(place, folder, size)
        if failed:
            yield Row("ranks", "every process ends well", failed, "FAIL")
            return
        truth = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
        run = load_run(folder / "run")
        run.validate(full=True)
        wrong = []
        for rank, one in enumerate(truth):
            bare, watched = one["bare"], one["watched"]
            if bare["losses"] != watched["losses"]:
                wrong.append(f"losses of rank {rank} differ")
            if bare["collectives"] != watched["collectives"]:
                wrong.append(f"{watched['collectives']} collectives of rank {rank} instead of {bare['collectives']}")
            if watched["scales"] != run.steps[run.steps["rank"] == rank].loss_scale.tolist():
                wrong.append(f"loss scales of rank {rank} differ")
        if run.steps[["step", "rank"]].to_numpy().tolist() != [[s, r] for s in range(STEPS) for r in range(size)]:
            wrong.append(f"{len(run.steps)} rows of steps instead of {STEPS * size}")
        sampled = run.tensors(kind="weight_grad").groupby(["step", "rank"]).size()
        if len(sampled) != len(range(0, STEPS, EVERY)) * size or sampled.nunique() != 1:
            wrong.append(f"{len(sampled)} samples of gradients")
        norms = run.steps.groupby("step")["grad_norm"].nunique()
        if (norms > 1).any():
            wrong.append("ranks have different norms of the same gradients")
    backend = "nccl" if place.cuda else "gloo"
    yield Row(
        f"{size} rank{'s' if size > 1 else ''} over {backend}, fp16",
        "losses and collectives equal, merged tables complete",
        "; ".join(wrong)
        or f"{STEPS} steps of {size} ranks, {truth[0]['bare']['collectives']} collectives with and without",
        "FAIL" if wrong else "pass",
    )


def _start(place: Place, folder: Path, size: int) -> str:
    """Train in this many processes; returns an error message, or an empty one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    if not place.cuda and sys.platform == "linux":
        where["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, "-m", "tests.gpu.nccl", str(folder), place.device.type]
    processes = []
    for rank in range(size):
        with (folder / f"{rank}.log").open("wb") as log:
            environment = os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            if process.wait(timeout=max(1.0, place.left_s)):
                last = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()[-1:]
                return f"rank {rank} ended with {process.returncode}: {''.join(last)}"
    except subprocess.TimeoutExpired:
        return "not over in time"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return ""


def _train(device: torch.device, into: Path | None) -> dict[str, object]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)).to(device)
    shared = nn.parallel.DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(shared.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16, growth_interval=6)
    recorder = watch(shared, optimizer, scaler=scaler, into=into, every=EVERY) if into is not None else None
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    draw = torch.Generator().manual_seed(rank)
    losses, scales = [], []
    for _ in range(STEPS):
        x = torch.randn(32, WIDTH, generator=draw).to(device)
        y = torch.randint(0, 10, (32,), generator=draw).to(device)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = nn.functional.cross_entropy(shared(x), y)
        scaler.scale(loss).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    return {"losses": losses, "scales": scales, "collectives": group._get_sequence_number_for_group() - before}


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    truth = {"bare": _train(device, None), "watched": _train(device, folder / "run")}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(truth))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
