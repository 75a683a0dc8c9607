"""Homework 5, Part B, Q1 and Q2: histograms of the weights, and integer weights.

python HW5_PartB_1_weights.py
"""

# %% [markdown]
# ## Q1: the weights of every layer

# %%
import torch
from HW5_PartB_0_network import LAYERS, Net, measure_accuracy, train

LOW, HIGH = -128, 127


# %%
def show_histogram(values, title, bins=100):
    """A histogram of 100 bins by matplotlib; without it, one of 60 in a line of text, with its range."""
    values = values.detach().flatten()
    try:
        from matplotlib import pyplot
    except ImportError:
        share = (values.abs() <= 3 * values.std()).float().mean()
        print(f"{title}: {share:.1%} within 3 sigma = {3 * values.std():.3f}")
        counts = torch.histc(values, 60)
        bars = "".join(" ▁▂▃▄▅▆▇█"[int(8 * count / counts.max() + 0.999)] for count in counts)
        print(f"{values.min():8.3f} |{bars}| {values.max():.3f}")
        return
    pyplot.figure(figsize=(6, 4))
    pyplot.hist(values.numpy(), bins=bins)
    pyplot.title(title)
    pyplot.xlabel("Value")
    pyplot.ylabel("Count")
    pyplot.show()


if __name__ == "__main__":
    for name in LAYERS:
        show_histogram(getattr(train(bias=False), name).weight, f"{name} weights")

# %% [markdown]
# ## Q2: integer weights


# %%
def quantized_weights(weights):
    """The weights as integers from -128 to 127, and the scale that they were multiplied by."""
    largest = weights.abs().max()
    scale = (127.0 / largest).item() if largest > 0 else 1.0
    return torch.clamp((weights * scale).round(), LOW, HIGH), scale


def quantize_network_weights(net):
    """A copy with integer weights, and by how much its logits grow: without biases they only change their unit."""
    copy = Net(net.fc3.bias is not None)
    copy.load_state_dict(net.state_dict())
    product = 1.0
    for name in LAYERS:
        layer = getattr(copy, name)
        layer.weight.data, scale = quantized_weights(layer.weight.data)
        product *= scale
    return copy.eval(), product


if __name__ == "__main__":
    weights_only, _ = quantize_network_weights(train(bias=False))
    print(f"Accuracy with integer weights: {measure_accuracy(weights_only):.2%}")
