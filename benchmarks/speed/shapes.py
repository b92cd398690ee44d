"""Shapes of convolutions for which kernels are timed and compiled: ResNet20, ResNet18, CNNs with many clients."""

from __future__ import annotations

Layer = tuple[int, int, int, int, int, int]  # channels in and out, stride, height; clients and images of each
NETWORKS: dict[str, list[Layer]] = {
    "resnet20": [
        (3, 16, 1, 32, 10, 32),
        (16, 16, 1, 32, 10, 32),
        (16, 32, 2, 32, 10, 32),
        (32, 32, 1, 16, 10, 32),
        (32, 64, 2, 16, 10, 32),
        (64, 64, 1, 8, 10, 32),
    ],
    "resnet18": [
        (64, 128, 2, 32, 10, 32),
        (128, 128, 1, 16, 10, 32),
        (128, 256, 2, 16, 10, 32),
        (256, 256, 1, 8, 10, 32),
        (256, 512, 2, 8, 10, 32),
        (512, 512, 1, 4, 10, 32),
    ],
    "cnn-gn": [(3, 16, 1, 32, 500, 50), (16, 32, 1, 16, 500, 50), (32, 64, 1, 8, 500, 50)],
    "cnn-gn-5": [(3, 16, 1, 32, 5000, 5), (16, 32, 1, 16, 5000, 5), (32, 64, 1, 8, 5000, 5)],
    "cnn": [(1, 16, 1, 28, 500, 60), (16, 32, 1, 14, 500, 60)],
}
