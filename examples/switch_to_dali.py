"""Check, switch to DALI, check again: does the input hold this training back, and does DALI help?

    python examples/switch_to_dali.py --data photos

`photos` is a folder with one subfolder of images for each class. The transforms stay torchvision's;
only one argument of the loader changes.
"""

import argparse

import torch
from torch import nn
from torchvision import datasets
from torchvision import transforms as T

from dataloaders import DataLoader, check_bottleneck


def training_step(classes: int, device: str):
    """Return step(batch): one training step of a small convolutional network."""
    layers = [nn.Conv2d(3, 16, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16, classes)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: list[torch.Tensor]) -> None:
        images, targets = (part.to(device, non_blocking=True) for part in batch)
        loss = nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Check, switch to DALI, check again.")
    parser.add_argument("--data", required=True, help="folder with one subfolder for each class")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0, help="worker processes, before")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of a check")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    transform = T.Compose(
        [
            T.RandomResizedCrop(224),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = datasets.ImageFolder(args.data, transform)
    step = training_step(len(dataset.classes), args.device)

    stock = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers)
    before = check_bottleneck(stock, step, budget_s=args.seconds)
    print(before)
    if before.verdict == "step-bound":
        print("The step takes the time. No other input would make this training faster.")
        return

    dali = DataLoader(dataset, args.batch_size, shuffle=True, backend="dali", device=args.device)
    print(dali.explain())  # which transform runs where, and what stands in the way
    after = check_bottleneck(dali, step, budget_s=args.seconds)
    print(after)
    measured = [report.seconds_per_batch.get("real") for report in (before, after)]
    if None in measured:
        print("One of the checks had no time for a round of batches: raise --seconds.")
        return
    old, new = (interval.estimate for interval in measured)
    print(
        f"A batch took {old * 1e3:.1f} ms and takes {new * 1e3:.1f} ms: {old / new:.2f} x as fast."
    )


if __name__ == "__main__":
    main()
