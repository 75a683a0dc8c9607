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
    (
        "analysis/link.py",
        "if abs(ratio - 1) > MISFIT",
        "Gt -> GtE",
    ): "differs only where a fitted ratio is a quarter off to the last bit",
    **{
        (
            "analysis/link.py",
            "start = np.array([targets[0], targets[-1] - log_sizes[-1]])",
            edit,
        ): "the search begins elsewhere and ends at the same line"
        for edit in ("0 -> 1", "1 -> 2", "without USub")
    },
    (
        "analysis/link.py",
        "num_calls[line.payload_bytes] = max(num_calls.get(line.payload_bytes, 0), line.num_calls)",
        "0 -> 1",
    ): "a timing has one call at least",
    (
        "analysis/link.py",
        "return grouped, max((found[-1].trial.round for found in grouped.values()), default=0)",
        "0 -> 1",
    ): "without a configuration, no round is numbered",
    (
        "analysis/batch_limits.py",
        "return max(1, math.floor(FIRST_SHARE * (largest or 0)))",
        "0 -> 1",
    ): "half a sample is rounded down to none, and one is the least",
    (
        "analysis/batch_limits.py",
        "return None if failed == 1 else max(1, (failed or 0) // 4) if hint else 1",
        "0 -> 1",
    ): "where nothing ran, something has failed",
    (
        "analysis/batch_limits.py",
        "if likely > REACH * line.lever:",
        "Gt -> GtE",
    ): "where both are equal, what is taken is no further than either",
    (
        "analysis/rounds.py",
        "for _ in range(30):",
        "30 -> 31",
    ): "halves an interval of a billionth once more",
    (
        "analysis/rounds.py",
        "if len(data) <= MOST_LISTED:",
        "LtE -> Lt",
    ): "searching finds the same averages as listing",
    **{
        (
            "analysis/rounds.py",
            "rounding = 2 * float(np.spacing(np.abs(data).max()))",
            edit,
        ): "a few bits more are still less than what two averages differ by"
        for edit in ("2 -> 3", "2 -> 3.0")
    },
    (
        "analysis/rounds.py",
        "half = between[rows] // 2",
        "2 -> 3",
    ): "another limit between the same ones: the same average after more steps",
    **{
        (
            "analysis/rounds.py",
            "return float(values[order[np.searchsorted(total, total[-1] / 2)]])",
            edit,
        ): "another limit between the same ones: the same average after more steps"
        for edit in ("2 -> 3", "2 -> 3.0")
    },
    (
        "analysis/rounds.py",
        "while int((between := up_to - below).sum()) > FEW_PAIRS:",
        "Gt -> GtE",
    ): "so many pairs are listed, or narrowed down once more",
    **{
        ("analysis/rounds.py", line, edit): "how many results are remembered"
        for line, edit in (("@lru_cache(maxsize=256)", "256 -> 257"), ("@lru_cache(maxsize=32)", "32 -> 33"))
    },
    (
        "analysis/stats.py",
        "if len(lengths) == 1 and 0 not in lengths and len(every) > FEW_ROUNDS:",
        "Gt -> GtE",
    ): "two ways to the same medians",
    **{
        (
            "analysis/quality.py",
            "if len(values) < 2 or np.ptp(values) == 0:",
            edit,
        ): "of four values and fewer, no order is rarer than chance"
        for edit in ("2 -> 3", "2 -> 3.0", "Lt -> LtE")
    },
    **{
        ("analysis/stats.py", line, "Gt -> GtE"): "a single round has the same value, and no interval, either way"
        for line in ("if len(above) > 1:", "if len(longer) > 1:")
    },
    (
        "analysis/quality.py",
        "if len(values) > MOST_PAIRED:",
        "Gt -> GtE",
    ): "as many parts as values: each is its own median",
    **{
        (
            "analysis/memory_sharding.py",
            "self.events += [MemoryEvent(self.now, -1, address) for address in mark.gradients]",
            edit,
        ): "a release is any number below 0"
        for edit in ("1 -> 2", "1 -> 1.5")
    },
    **{
        (
            "analysis/memory_sharding.py",
            'if self.phase != "optimizer" or event.num_bytes < 0:',
            edit,
        ): "a share of nothing is nothing"
        for edit in ("Lt -> LtE", "0 -> 1")
    },
    **{
        (
            "analysis/memory_sharding.py",
            "self.num_made += 1",
            edit,
        ): "addresses only have to differ"
        for edit in ("1 -> 2", "1 -> 1.5")
    },
    (
        "analysis/batch_limits.py",
        "room, slope = limit_bytes - peak, max(line.sample_bytes, 0.0)",
        "0.0 -> 1.0",
    ): "a byte a sample and none lead equally far: noise is more",
    **{
        ("predict/calibration.py", "RATES = (1e3, 1e18)", edit): "what is found lies far from both ends"
        for edit in ("1000.0 -> 1001.0", "1000.0 -> 1500.0", "1e+18 -> 1e+18", "1e+18 -> 1.5e+18")
    },
    **{
        ("predict/calibration.py", "memory_bytes=1.0,", edit): "what was measured fits: that is not asked"
        for edit in ("1.0 -> 2.0", "1.0 -> 1.5")
    },
    **{
        ("predict/calibration.py", "peaks={dtype: 1.0},", edit): "the fitted peak takes its place"
        for edit in ("1.0 -> 2.0", "1.0 -> 1.5")
    },
    **{
        (
            "predict/calibration.py",
            "tile = MOST_TILE if miss(top) < 0 else math.expm1(float(optimize.brentq(miss, 0.0, top, xtol=1e-4)))",
            edit,
        ): "to the last bit, and how closely a root is searched, far below what any figure shows"
        for edit in ("Lt -> LtE", "0.0001 -> 0.00015000000000000001")
    },
    (
        "predict/scaled_job.py",
        "return float(optimize.brentq(lambda value: miss(**values, **{name: value}), low, 1.0, xtol=1e-6))",
        "1e-06 -> 1.5e-06",
    ): "how closely a root is searched, far below what any figure shows",
    (
        "predict/scaled_job.py",
        "if miss() < 0:",
        "Lt -> LtE",
    ): "differs only where two ranks took to the last bit what was predicted; both fits are then the same",
    ("predict/network_model.py", "@lru_cache(maxsize=256)", "256 -> 257"): "how many results are remembered",
    ("predict/scaled_job.py", "@lru_cache(maxsize=32)", "32 -> 33"): "how many results are remembered",
    (
        "predict/calibration.py",
        "if len(rank.steps) > 1 and miss(0.0) < 0:",
        "Lt -> LtE",
    ): "differs only where the pass of few samples takes to the last bit what no tile gives",
    (
        "predict/network_model.py",
        "if not self.is_gloo or self.cores is None or per_node <= self.cores:",
        "LtE -> Lt",
    ): "ranks with a core each wait for nothing",
    **{
        (
            "records/environment.py",
            "done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)",
            edit,
        ): "how long a tool that does not answer is waited for"
        for edit in ("10 -> 11", "10 -> 15.0")
    },
    **{
        (
            "trace/rank_time.py",
            'thread = np.searchsorted(threads, records["lane"][own]) * (len(own) + 1)',
            edit,
        ): "more room between threads than their places need"
        for edit in ("1 -> 2", "1 -> 1.5")
    },
    (
        "trace/stragglers.py",
        'return hash((kind, group.payload_bytes[row] if kind != "all_to_all" else None, len(group.ranks), is_up)) >> 2',
        "2 -> 3",
    ): "one of 62 bits of a hash less",
    **{
        (
            "trace/stragglers.py",
            "what = 2 * np.repeat([_describe(group, row) for group, _, row in rows], counts) + is_sent",
            edit,
        ): "hashes are far apart: what is sent still has a number of its own"
        for edit in ("2 -> 3", "Add -> Sub")
    },
}
"""(module, its line, the edit) -> why no test can notice."""
