"""Train with Lightning: this script does not know about this package, and can be checked too.

dataloaders check examples/train_lightning.py -- --data photos
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision import transforms as T


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.model = models.resnet18(num_classes=classes)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet-18 on a folder of images.")
    parser.add_argument("--data", required=True, help="folder with one subfolder for each class")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    transform = T.Compose([T.RandomResizedCrop(128), T.RandomHorizontalFlip(), T.ToTensor()])
    dataset = datasets.ImageFolder(args.data, transform)
    loader = DataLoader(dataset, batch_size=32, shuffle=True, num_workers=args.workers)
    trainer = lightning.Trainer(
        max_epochs=args.epochs, logger=False, enable_checkpointing=False, accelerator="auto"
    )
    trainer.fit(Classifier(len(dataset.classes)), loader)


if __name__ == "__main__":
    main()
