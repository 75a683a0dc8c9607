"""Homework 5, Part B: a small CNN in int8, by hand: weights, activations, biases.

python HW5_PartB.py
DATA=digits python HW5_PartB.py
"""

# %% [markdown]
# # Homework 5, Part B: a small CNN in int8
#
# Train a float network, then quantize its weights (Q2), its activations (Q4) and its biases (Q5) by hand. A scale is a
# factor: the integer is the number times its scale, rounded and clamped.
#
# `DATA=cifar10` (the default) reads the binary version of CIFAR-10 from `./data`; `DATA=digits` takes the digits of
# scikit-learn, enlarged to the same shape, which need no download.

# %%
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

DATA = os.environ.get("DATA", "cifar10")
EPOCHS = int(os.environ.get("EPOCHS", 2))
CALIBRATION = 400  # training images that set the scales of activations
LOW, HIGH = -128, 127


# %%
def load_images(split):
    """Images in [-1, 1] of 3 x 32 x 32, and their classes."""
    if DATA == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        counts = [np.cumsum(digits.target == label) for label in range(10)]
        number = np.array([counts[label][i] for i, label in enumerate(digits.target)])
        wanted = (number % 5 == 0) == (split == "test")  # every fifth image of a class is a test image
        images = np.rint(digits.images[wanted] * 255 / 16)[:, None].repeat(3, 1).repeat(4, 2).repeat(4, 3)
        labels = digits.target[wanted]
    else:
        files = sorted(Path("data").rglob("data_batch_*.bin" if split == "train" else "test_batch.bin"))
        if not files:
            raise SystemExit("no CIFAR-10 below ./data: unpack its binary version there, or use DATA=digits")
        rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
        images, labels = rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]
    return torch.from_numpy(images.astype(np.float32)).div(255).sub(0.5).div(0.5), torch.from_numpy(
        labels.astype(np.int64)
    )


class Net(nn.Module):
    """Two convolutions with pooling, three dense layers; a bias on the last layer or none at all."""

    def __init__(self, bias):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5, bias=False), nn.Conv2d(6, 16, 5, bias=False)
        self.fc1, self.fc2 = nn.Linear(400, 120, bias=False), nn.Linear(120, 84, bias=False)
        self.fc3 = nn.Linear(84, 10, bias=bias)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def train(bias):
    torch.manual_seed(0)
    net = Net(bias)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    for epoch in range(EPOCHS):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
        for chosen in torch.from_numpy(generator.permutation(len(train_labels))).split(4):
            if len(chosen) < 4:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(net(train_images[chosen]), train_labels[chosen])
            loss.backward()
            optimizer.step()
    return net.eval()


def measure_accuracy(net):
    with torch.no_grad():
        right = [
            (net(images).argmax(1) == labels).sum().item()
            for images, labels in zip(test_images.split(250), test_labels.split(250), strict=True)
        ]
    return sum(right) / len(test_labels)


train_images, train_labels = load_images("train")
test_images, test_labels = load_images("test")
net = train(bias=False)
print(f"{DATA}: {len(train_labels)} training and {len(test_labels)} test images")
print(f"Accuracy of the float network: {measure_accuracy(net):.2%}")

# %% [markdown]
# ## Q1: the weights of every layer


# %%
def show_histogram(values, title, bins=100):
    """A histogram of 100 bins by matplotlib; without it, its range and how much lies within three deviations."""
    values = values.detach().flatten()
    try:
        from matplotlib import pyplot
    except ImportError:
        share = (values.abs() <= 3 * values.std()).float().mean()
        print(f"{title}: {values.min():.3f} to {values.max():.3f}, {share:.1%} within 3 sigma = {3 * values.std():.3f}")
        return
    pyplot.figure(figsize=(6, 4))
    pyplot.hist(values.numpy(), bins=bins)
    pyplot.title(title)
    pyplot.xlabel("Value")
    pyplot.ylabel("Count")
    pyplot.show()


LAYERS = ["conv1", "conv2", "fc1", "fc2", "fc3"]
for name in LAYERS:
    show_histogram(getattr(net, name).weight, f"{name} weights")

# %% [markdown]
# ## Q2: integer weights


# %%
def quantized_weights(weights):
    """The weights as integers from -128 to 127, and the scale that they were multiplied by."""
    largest = weights.abs().max()
    scale = (127.0 / largest).item() if largest > 0 else 1.0
    return torch.clamp((weights * scale).round(), LOW, HIGH), scale


def quantize_network_weights(net):
    """A copy with integer weights. Without biases its logits are those of the float network times a constant."""
    copy = Net(net.fc3.bias is not None)
    copy.load_state_dict(net.state_dict())
    product = 1.0
    for name in LAYERS:
        layer = getattr(copy, name)
        layer.weight.data, layer.weight_scale = quantized_weights(layer.weight.data)
        product *= layer.weight_scale
    return copy.eval(), product


weights_only, _ = quantize_network_weights(net)
print(f"Accuracy with integer weights: {measure_accuracy(weights_only):.2%}")

# %% [markdown]
# ## Q3: the activations of every layer, before and after ReLU


# %%
def collect_activations(net):
    """Outputs of every layer on the calibration images, by forward hooks."""
    found, handles = {"input": train_images[:CALIBRATION]}, []
    for name in LAYERS:

        def keep(_module, _inputs, output, name=name):
            found[name] = output.detach()

        handles.append(getattr(net, name).register_forward_hook(keep))
    with torch.no_grad():
        net(train_images[:CALIBRATION])
    for handle in handles:
        handle.remove()
    return found


activations = collect_activations(net)
for name in LAYERS:
    show_histogram(activations[name], f"{name} before ReLU" if name != "fc3" else "fc3 (logits)")
    if name != "fc3":
        show_histogram(activations[name].relu(), f"{name} after ReLU")

# %% [markdown]
# ## Q4: integer activations
#
# The largest activation becomes `peak`. With 127 nothing that was seen is clamped; with 255 and the clamp at 127
# everything above half of the largest one saturates.


# %%
def quantize_initial_input(pixels, peak):
    return peak / pixels.abs().max().item()


def quantize_activations(outputs, n_w, n_initial_input, ns, peak):
    """The factor that brings a layer's sums to `peak` at their largest."""
    scale = n_initial_input
    for weight_scale, output_scale in ns:
        scale = scale * weight_scale * output_scale
    return peak / (outputs.abs().max().item() * scale * n_w)


def quantized_bias(bias, n_w, n_initial_input, ns):
    """The bias in the units of the sums that it is added to, as int32."""
    scale = n_initial_input
    for weight_scale, output_scale in ns:
        scale = scale * weight_scale * output_scale
    return torch.clamp((bias.double() * scale * n_w).round(), min=-(2**31), max=2**31 - 1)


class IntegerNet:
    """The forward pass in integers: rounded and clamped after every layer."""

    def __init__(self, net, peak):
        self.weights, self.biases, self.ns = {}, {}, []
        seen = collect_activations(net)
        self.input_scale = quantize_initial_input(seen["input"], peak)
        for name in LAYERS:
            layer, output = getattr(net, name), seen[name] if name == "fc3" else seen[name].relu()
            self.weights[name], n_w = quantized_weights(layer.weight.data)
            if layer.bias is not None:
                self.biases[name] = quantized_bias(layer.bias.data, n_w, self.input_scale, self.ns)
            self.ns.append((n_w, quantize_activations(output, n_w, self.input_scale, self.ns, peak)))

    def apply(self, name, x):
        """One layer: exact integer sums, then one scale, rounding and clamping."""
        weight, bias = self.weights[name].double(), self.biases.get(name)
        sums = F.conv2d(x.double(), weight) if weight.dim() == 4 else F.linear(x.double(), weight, bias)
        return torch.clamp((sums.float() * self.ns[LAYERS.index(name)][1]).round(), LOW, HIGH)

    def __call__(self, images):
        x = torch.clamp((images * self.input_scale).round(), LOW, HIGH)
        x = F.max_pool2d(F.relu(self.apply("conv1", x)), 2)
        x = F.max_pool2d(F.relu(self.apply("conv2", x)), 2).flatten(1)
        x = F.relu(self.apply("fc2", F.relu(self.apply("fc1", x))))
        return self.apply("fc3", x)


for peak in (127, 255):
    integers = IntegerNet(net, peak)
    print(f"Accuracy with integer weights and activations, peak {peak}: {measure_accuracy(integers):.2%}")
for name, (n_w, n_out) in zip(LAYERS, IntegerNet(net, 127).ns, strict=True):
    print(f"{name}: weight scale {n_w:.4f}, output scale {n_out:.6g}")

# %% [markdown]
# ## Q5: integer biases
#
# A bias is added to sums that are n_w times the scale of the layer's input too large, so it is multiplied by the same.
# Beside integer weights without that factor, it vanishes.

# %%
biased = train(bias=True)
print(f"Accuracy of the float network with a bias: {measure_accuracy(biased):.2%}")
raw, product = quantize_network_weights(biased)
print(f"Accuracy with integer weights and the bias unscaled: {measure_accuracy(raw):.2%}")
raw.fc3.bias.data = biased.fc3.bias.data * product
print(f"Accuracy with integer weights and the bias scaled: {measure_accuracy(raw):.2%}")
for peak in (127, 255):
    integers = IntegerNet(biased, peak)
    print(f"Accuracy with everything in integers, peak {peak}: {measure_accuracy(integers):.2%}")
print(f"fc3 bias as int32: {IntegerNet(biased, 127).biases['fc3'].int().tolist()}")
