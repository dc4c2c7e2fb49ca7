"""Train a small convolutional network on a folder of images, one subfolder for each class.

    python examples/train_images.py --data photos --epochs 2
    dataloaders check examples/train_images.py -- --data photos

Plain torch and torchvision: only the import of DataLoader comes from this package.
"""

import argparse

import torch
from torch import nn
from torchvision import datasets
from torchvision import transforms as T

from dataloaders import DataLoader


def small_cnn(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64, 128):
        layers += [
            nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small CNN on a folder of images.")
    parser.add_argument("--data", required=True, help="folder with one subfolder for each class")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0, help="worker processes")
    parser.add_argument("--prefetch", type=int, default=2, help="batches ahead for each worker")
    parser.add_argument("--no-pin", action="store_true", help="no pinned memory with a GPU")
    parser.add_argument("--threads", type=int, help="threads of a step on the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)

    transform = T.Compose(
        [
            T.RandomResizedCrop(128),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    dataset = datasets.ImageFolder(args.data, transform)
    loader = DataLoader(
        dataset,
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=len(dataset) > args.batch_size,
        num_workers=args.workers,
        prefetch_factor=args.prefetch if args.workers else None,
        persistent_workers=args.workers > 0,
        pin_memory=args.device.startswith("cuda") and not args.no_pin,
    )
    model = small_cnn(len(dataset.classes)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        correct = torch.zeros((), device=args.device)
        seen = 0
        for images, labels in loader:
            images = images.to(args.device, non_blocking=True)
            labels = labels.to(args.device, non_blocking=True)
            scores = model(images)
            loss = loss_of(scores, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (scores.argmax(1) == labels).sum()
            seen += len(labels)
        print(f"epoch {epoch + 1}: {correct.item() / seen:.1%} of {seen} images right")


if __name__ == "__main__":
    main()
