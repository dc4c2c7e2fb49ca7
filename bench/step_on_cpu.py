"""A training script whose step computes on the CPU with torch's threads; ends by saying its rate.

    python bench/step_on_cpu.py --load-ms 3 --workers 2 --threads 1 --seconds 4

Loading a sample is a known amount of CPU work in one thread; the step is a small convolutional
network. The last line is samples per second, of all steps after the first second.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Burns(Dataset[torch.Tensor]):
    def __init__(self, seconds: float, side: int) -> None:
        self.seconds, self.side = seconds, side

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + self.seconds
        while time.thread_time() < end:
            pass
        return torch.full((3, self.side, self.side), float(index % 7))


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, width in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, width, 3, stride=2), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-ms", type=float, required=True, help="CPU time of a sample")
    parser.add_argument("--side", type=int, default=128, help="pixels")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args(words)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dataset = Burns(args.load_ms / 1e3, args.side)
    loader = DataLoader(dataset, args.batch_size, num_workers=args.workers)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps, began, counted = 0, time.perf_counter(), 0.0
    for images in loader:
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        now = time.perf_counter()
        if not counted:
            counted = now if now - began >= args.warm_up else 0.0
            continue
        steps += 1
        if now - counted >= args.seconds:
            print(steps * args.batch_size / (now - counted))
            break


def fork_for_each_line() -> None:
    """Run the script with each line of stdin as its arguments, in forks that have imported torch.

    This process itself computes nothing: OpenMP's threads are each fork's own.
    """
    gc.collect()
    gc.freeze()  # else a collection copies what the fork shares
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            main(line.split())
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"this failed: {line}")


if __name__ == "__main__":
    main()
