"""Convolutional networks for images: what an image costs, and how fast such networks were measured to train."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NETWORKS", "Convolution"]


@dataclass(frozen=True)
class Convolution:
    """What memory and time of a convolutional network depend on, besides its parameters.

    Args:
        name: Of the network.
        parameters: Number of parameters.
        layers: Layers that have weights.
        multiply_adds: For one image, forward.
        activations: Values that its convolutions put out for one image.
        pixels: Height and width of that image.
        images_per_s: Measured in training, in fp32 on one P100 with batches of 64.
    """

    name: str
    parameters: int
    layers: int
    multiply_adds: float
    activations: float
    pixels: int
    images_per_s: float

    @property
    def flops(self) -> float:
        """Operations for an image, forward and backward: two for each multiply-add, three times."""
        return 6.0 * self.multiply_adds

    @property
    def flops_per_s(self) -> float:
        """Operations a second on the P100 that it was measured on.

        Above the device's own speed for VGG, whose 3 x 3 convolutions are computed with fewer multiplications than
        are counted (Winograd's algorithm, arXiv 1509.09308).
        """
        return self.flops * self.images_per_s

    def kept(self, value: int) -> float:
        """Bytes that one image keeps for the backward: what each convolution puts out, and what comes of it after.

        Args:
            value: Bytes of a value.
        """
        return 2.0 * self.activations * value


def _network(
    name: str, parameters: int, layers: int, giga: float, mega: float, images_per_s: float, *, pixels: int = 224
) -> Convolution:
    return Convolution(name, parameters, layers, giga * 1e9, mega * 1e6, pixels, images_per_s)


_RESNET50 = _network("resnet50", 25_557_032, 50, 4.1, 11.1, 219)
_RESNET152 = _network("resnet152", 60_192_808, 152, 11.6, 22.6, 91.8)
_BETWEEN = (_RESNET50.flops_per_s + _RESNET152.flops_per_s) / 2 / (6 * 7.8e9)
"""ResNet-101 wasn't measured there: it is taken to reach the mean operations a second of its neighbours."""

NETWORKS: tuple[Convolution, ...] = (
    _RESNET50,
    _network("resnet101", 44_549_160, 101, 7.8, 16.2, _BETWEEN),
    _RESNET152,
    _network("inception-v3", 23_834_568, 48, 5.7, 9.0, 142, pixels=299),
    _network("vgg16", 138_357_544, 16, 15.5, 13.6, 154),
)
"""ResNet (arXiv 1512.03385), Inception V3 (arXiv 1512.00567), VGG (arXiv 1409.1556).

Parameters, multiply-adds and activations as the model cards of timm have them. Images a second: TensorFlow's
benchmarks of May 2017, one P100 of a DGX-1, synthetic data (tensorflow.org/performance/benchmarks).
"""
