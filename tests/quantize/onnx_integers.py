"""The integers of every layer of an exported file, by onnxruntime's kernels."""

from __future__ import annotations

from typing import Any

import torch

from scalelab.quantize.sessions import Model, list_layers, load_graph, load_package, open_session


def read_integers(model: Model, images: torch.Tensor, *, is_optimized: bool = True) -> dict[str, torch.Tensor]:
    """The integers of every layer by name, and the logits: what `simulate` gives, by onnxruntime's kernels."""
    graph = load_graph(model)
    make_info = load_package("onnx.helper").make_tensor_value_info
    types = find_types(graph)
    outputs = {name: f"{name}/q" if f"{name}/q" in types else "logits" for name in list_layers(graph)}
    integers = [output for output in outputs.values() if output != "logits"]
    graph.graph.output.extend(make_info(output, types[output], None) for output in integers)
    session = open_session(graph.SerializeToString(), is_optimized=is_optimized)
    names = [*integers, "logits"]
    arrays = session.run(names, {"images": images.to(torch.float32).contiguous().numpy()})
    found = {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}
    return {name: found[output] for name, output in outputs.items()} | {"logits": found["logits"]}


def find_types(graph: Any) -> dict[str, int]:
    """The element type of every tensor of integers, by its name: that of the zero points, handed on."""
    constants = {constant.name: constant.data_type for constant in graph.graph.initializer}
    types: dict[str, int] = {}
    for node in graph.graph.node:
        if node.op_type in ("MaxPool", "Flatten", "Clip") and node.input[0] in types:
            types[node.output[0]] = types[node.input[0]]
        elif node.op_type == "QuantizeLinear":
            found = [constants[name] for name in node.input if name.startswith(("uint8/", "int8/"))]
            types[node.output[0]] = found[-1] if found else 0
    return types
