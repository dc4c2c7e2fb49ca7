"""torchvision's transforms as one DALI graph, fed from the user's own dataset."""
