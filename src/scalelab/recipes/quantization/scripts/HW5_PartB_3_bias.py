"""Homework 5, Part B, Q5: a network with a bias on its last layer, in integers.

python HW5_PartB_3_bias.py
"""

# %% [markdown]
# ## Q5: integer biases
#
# A bias is added to sums that are n_w times the scale of the layer's input too large, so it is multiplied by the same.
# Beside integer weights without that factor, it vanishes.

# %%
import torch
from HW5_PartB_0_network import measure_accuracy, train
from HW5_PartB_1_weights import quantize_network_weights
from HW5_PartB_2_activations import IntegerNet


# %%
def quantized_bias(bias, n_w, n_initial_input, ns):
    """The bias in the unit of the sums that it is added to, as int32."""
    scale = n_initial_input
    for weight_scale, output_scale in ns:
        scale = scale * weight_scale * output_scale
    return torch.clamp((bias.double() * scale * n_w).round(), min=-(2**31), max=2**31 - 1)


def quantize_with_bias(net, peak):
    """All in integers: the bias of the last layer has the scales of all layers before it, and its weights' own."""
    integers = IntegerNet(net, peak)
    n_w, _ = integers.ns[-1]
    integers.biases["fc3"] = quantized_bias(net.fc3.bias.data, n_w, integers.input_scale, integers.ns[:-1])
    return integers


if __name__ == "__main__":
    biased = train(bias=True)
    print(f"Accuracy of the float network with a bias: {measure_accuracy(biased):.2%}")
    raw, product = quantize_network_weights(biased)
    print(f"Accuracy with integer weights and the bias unscaled: {measure_accuracy(raw):.2%}")
    raw.fc3.bias.data = biased.fc3.bias.data * product
    print(f"Accuracy with integer weights and the bias scaled: {measure_accuracy(raw):.2%}")
    for peak in (127, 255):
        integers = quantize_with_bias(biased, peak)
        print(f"Accuracy with everything in integers, peak {peak}: {measure_accuracy(integers):.2%}")
    n_w, n_out = (integers := quantize_with_bias(biased, 127)).ns[-1]
    print(f"fc3: weight scale {n_w:.4f}, output scale {n_out:.6g}, input scale {integers.input_scale:.4f}")
    print(f"fc3 bias as int32: {integers.biases['fc3'].int().tolist()}")
