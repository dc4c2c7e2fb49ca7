"""Call the bottleneck check from Python: the step is a function.

python examples/check_in_code.py
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from dataloaders import DataLoader, check_bottleneck


def main() -> None:
    data = TensorDataset(torch.randn(20_000, 128), torch.randint(0, 10, (20_000,)))
    loader = DataLoader(data, batch_size=256, shuffle=True)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: list[torch.Tensor]) -> None:
        features, labels = batch
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    report = check_bottleneck(loader, step, budget_s=5.0)
    print(report)
    if report.speedup_bound is not None:  # None: too little could be measured
        print("a perfect input would gain a factor of", format(report.speedup_bound, ".2f"))


if __name__ == "__main__":
    main()
