"""Mutants that are equivalent to the original, beside those that `mutants.py` sees by itself."""

EXPLAINED: dict[tuple[str, str, str], str] = {
    (
        "launch/ranks/placement.py",
        "num_host_cores = placements[0].num_host_cores",
        "0 -> 1",
    ): "all ranks of a host have its number of cores, and those that share one are two",
    (
        "predict/transformer_shape.py",
        "unit = HEAD_WIDTH * 8 if guess >= 8 * HEAD_WIDTH * 4 else HEAD_WIDTH",
        "GtE -> Gt",
    ): "differs only where a root that was found by iteration is 4096 to the last bit",
    (
        "predict/transformer_shape.py",
        "num_layers = max(2, step * round(layers / step))",
        "2 -> 3",
    ): "the fewest parameters that are accepted make 4 layers",
    (
        "predict/transformer_shape.py",
        "num_layers = max(2, step * round(layers / step))",
        "2 -> 3.0",
    ): "the fewest parameters that are accepted make 4 layers",
    **{
        (
            "predict/network_model.py",
            "return float(integrate.quad(density, -8, 12, limit=200)[0])",
            edit,
        ): "beyond both ends the density is below 1e-14; the integral needs fewer pieces than its limit"
        for edit in ("8 -> 9", "8 -> 12.0", "12 -> 13", "12 -> 18.0", "200 -> 201", "200 -> 300.0")
    },
    (
        "predict/scaled_job.py",
        "if mesh.num_data_ranks == 1:",
        "1 -> 1.5",
    ): "units of a single shard send nothing, and add nothing to the pass",
    (
        "predict/scaled_job.py",
        "if miss(link_factor=LEAST_FACTOR) <= 0:",
        "LtE -> Lt",
    ): "differs only where two ranks took to the last bit what the fastest link gives; both fits are then the same",
    (
        "predict/calibration.py",
        "return with_peak(float(optimize.brentq(miss, low, high, xtol=1e-6)))",
        "1e-06 -> 1.5e-06",
    ): "how closely a root is searched, far below what any figure shows",
    (
        "predict/calibration.py",
        "if miss(high) > 0:",
        "Gt -> GtE",
    ): "differs only where a step takes to the last bit what a device of 1e18 operations a second needs",
    (
        "quantize/eager_kernels.py",
        "packed: torch.Tensor = torch.ops.onednn.qconv_prepack(weight, multiplier, 1.0, zero_point, *window,"
        " [batch, *shape])",
        "1.0 -> 2.0",
    ): "packing reads the zero point of the images, not their scale, which is an argument of the convolution",
    (
        "quantize/eager_kernels.py",
        "packed = pack_weight(ones, multiplier, sources[1].zero_point, window, (*shape, 1, 1) if is_flat else shape)",
        "1 -> 2",
    ): "weights packed for another size of images are packed again by the kernel, which takes longer",
    (
        "quantize/lab/chain.py",
        "weight = (one.weight.to(torch.int16) + ZERO).to(torch.uint8)",
        "Add -> Sub",
    ): "in one byte, adding 128 is subtracting 128",
    (
        "quantize/diagnosis.py",
        "return int(((logits == logits.amax(dim=1, keepdim=True)).sum(dim=1) > 1).sum())",
        "1 -> 1.5",
    ): "counts are compared",
    **{
        (
            "trace/files/pieces.py",
            "for reach in (PIECE_BYTES // 128, PIECE_BYTES // 8):",
            edit,
        ): "the last breaks are taken, however far back they are looked for: a wider look takes longer"
        for edit in ("FloorDiv -> Mult", "128 -> 129", "8 -> 9")
    },
    (
        "trace/pairing.py",
        "return Pairing(by_order.pairs, 1.0, by_order.count_agreeing(tolerance) / max(1, len(by_order.rest)))",
        "1 -> 1.5",
    ): "a list of one is paired before",
    (
        "trace/attribution.py",
        "low, width = int(row.min()), int(row.max()) - int(row.min()) + 1",
        "1 -> 1.5",
    ): "codes have more room than they need, and stay apart",
    (
        "trace/files/pieces.py",
        'close = text.rindex(b"]", 0, place) + 1',
        "0 -> 1",
    ): "what closes a list is not the first byte",
    (
        "trace/merged.py",
        "low = np.array([one or 0 for one in starts], dtype=np.int64)",
        "0 -> 1",
    ): "an event without a time is written without one",
    (
        "trace/windows.py",
        "while place >= 0 and self._reach[place] > time:",
        "Gt -> GtE",
    ): "says only when to stop looking: a step that ends then is not open",
    (
        "trace/rank_time.py",
        "place = thread + np.searchsorted(np.sort(end), end) + 1",
        "1 -> 1.5",
    ): "places keep their order, and stay apart from those of the next thread",
    (
        "predict/extrapolate.py",
        "if ranks > last:",
        "Gt -> GtE",
    ): "the last size is known, and answered before",
    (
        "trace/files/reader.py",
        "if len(complete) < len(events):",
        "Lt -> LtE",
    ): "where all events are complete, there is nothing else to read",
    (
        "trace/windows.py",
        "block = max(256, 2 * self._piece_records // len(self._pieces))",
        "FloorDiv -> Mult",
    ): "the same records in fewer reads",
    **{
        (
            "trace/job_trace.py",
            "missing = list(islice((rank for rank in range(sizes[0]) if rank not in known), 9))",
            edit,
        ): "eight are listed: one more says that there are more, and so do several"
        for edit in ("9 -> 10", "9 -> 13.5")
    },
    (
        "trace/alignment.py",
        "if (np.diff(values) > 0).all():",
        "0 -> 1",
    ): "of an increasing list, the search that follows finds all places too",
    (
        "trace/linking.py",
        "if all(call.start_ns <= run.start_ns and _may_agree(run, call) for run, call in pairs):",
        "LtE -> Lt",
    ): "the search that follows finds the calls that begin with their run as well",
    (
        "trace/stragglers.py",
        "return np.asarray(self.role * len(self.index) + self.index)",
        "Add -> Sub",
    ): "every role and index still has a number of its own",
    (
        "trace/stragglers.py",
        "kind, is_up = group.kinds[row], group.sender == min(group.ranks)",
        "Eq -> NotEq",
    ): "tells the two ways of a transfer apart, whichever is called up",
    (
        "trace/rank_time.py",
        "place = thread + np.searchsorted(np.sort(end), end) + 1",
        "1 -> 2",
    ): "places keep their order, and stay apart from those of the next thread",
    (
        "trace/merged.py",
        'return gzip.open(path, "wb", compresslevel=3) if is_compressed else path.open("wb")'
        "  # type: ignore[return-value]",
        "3 -> 4",
    ): "the same content in fewer bytes",
    (
        "trace/files/events.py",
        "values[~is_usable] = 0.0",
        "0.0 -> 1.0",
    ): "any number will do: what is not usable is left out",
    (
        "trace/idle.py",
        "np.add.at(self.count, bins, 1)",
        "1 -> 2",
    ): "only a quantile is read, which is the same if everything counts twice",
    (
        "trace/operators.py",
        "if step.start <= window.end and step.end > window.start:",
        "And -> Or",
    ): "of a step outside the window nothing is added, which takes longer",
    (
        "trace/attribution.py",
        'operator = _pick(operators.records["name"], operators.find(calls), -1)',
        "1 -> 1.5",
    ): "becomes an integer, which is -1",
    (
        "trace/attribution.py",
        'launched = [self._launched.get(number, (-1, -1)) for number in kernels["correlation"].tolist()]',
        "1 -> 1.5",
    ): "becomes an integer, which is -1",
    **{
        (
            "trace/pairing.py",
            "gaps = np.diff(best.right.ends, prepend=best.right.ends[0] - 1, append=best.right.ends[-1] + 1)",
            edit,
        ): "a tenth of a nanosecond or two is less than three tolerances, whatever its sign"
        for edit in ("Add -> Sub", "Sub -> Add", "1 -> 2", "1 -> 1.5")
    },
}
"""(module, its line, the edit) -> why no test can notice."""
