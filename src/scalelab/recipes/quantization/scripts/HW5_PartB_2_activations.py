"""Homework 5, Part B, Q3 and Q4: histograms of the activations, and integer activations.

python HW5_PartB_2_activations.py
"""

# %% [markdown]
# ## Q3: the activations of every layer, before and after ReLU

# %%
import torch
from HW5_PartB_0_network import LAYERS, load_images, measure_accuracy, train
from HW5_PartB_1_weights import HIGH, LOW, quantized_weights, show_histogram
from torch.nn import functional as F

CALIBRATION = 400  # training images that set the scales of activations


# %%
def collect_activations(net):
    """Outputs of every layer on the calibration images, by forward hooks."""
    images = load_images("train")[0][:CALIBRATION]
    found, handles = {"input": images}, []
    for name in LAYERS:

        def keep(_module, _inputs, output, name=name):
            found[name] = output.detach()

        handles.append(getattr(net, name).register_forward_hook(keep))
    with torch.no_grad():
        net(images)
    for handle in handles:
        handle.remove()
    return found


if __name__ == "__main__":
    activations = collect_activations(train(bias=False))
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
def quantize_activations(outputs, n_w, n_initial_input, ns, peak):
    """The factor that brings a layer's sums to `peak` at their largest."""
    scale = n_initial_input
    for weight_scale, output_scale in ns:
        scale = scale * weight_scale * output_scale
    return peak / (outputs.abs().max().item() * scale * n_w)


class IntegerNet:
    """The forward pass in integers: rounded and clamped after every layer."""

    def __init__(self, net, peak):
        self.weights, self.biases, self.ns = {}, {}, []
        seen = collect_activations(net)
        self.input_scale = peak / seen["input"].abs().max().item()
        for name in LAYERS:
            self.weights[name], n_w = quantized_weights(getattr(net, name).weight.data)
            output = seen[name] if name == "fc3" else seen[name].relu()
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


if __name__ == "__main__":
    for peak in (127, 255):
        integers = IntegerNet(train(bias=False), peak)
        print(f"Accuracy with integer weights and activations, peak {peak}: {measure_accuracy(integers):.2%}")
    for name, (n_w, n_out) in zip(LAYERS, IntegerNet(train(bias=False), 127).ns, strict=True):
        print(f"{name}: weight scale {n_w:.4f}, output scale {n_out:.6g}")
