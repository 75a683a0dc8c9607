"""The conclusions of two reports and of a lab, each confirmed or not with the numbers of the run and a reason.

Those of the other assignments are in `test_recipes`, with the same check.
"""

from __future__ import annotations

import pytest

from scalelab.report.document import Document
from tests.recipes.conftest import check_answers

ANSWERS = {
    "P1.single": (
        r"^ 2 epochs took 1\.8\d+ ± \S+ s without a process group \(published: 16\.38 s for 10 epochs\)",
        r"With 512 samples \(published 2048\) in batches of 32 .*; 10 epochs would take 9\.1\d ± \S+ s",
    ),
    "P2.mapping": (r"^ Not tested: .* mpi4py, which did not run here\. Under torchrun every rank discovers its rank",),
    "P2.affinity": (
        r"Their CPU masks are 0x1, 0x2, 0x4, 0x8: no two ranks share a core, so contention for cores is prevented",
        r"4 ranks on 1 host",
    ),
    "P2.speedup": (
        r"^ 4 ranks are 1\.\d+ ± \S+ times as fast as one device, efficiency 2\d\.?\d* ± \S+ %",
        r"published: 16\.38 s over 4\.50 s: 3\.64, over 4\.61 s: 3\.55",
    ),
    "P2.portable": (
        r"^ Yes, by what each needs: Get_rank and Split_type exist under every MPI",
        r"Only Split_type counts the ranks that share a node: RANK % device_count gives devices 3, 0, 1, 2",
    ),
    "P3.d_model": (
        r"^ Yes: every layer of nn\.Transformer has width d_model and none maps features to it",
        r"features = 128, features = 256: invalid .*published: 'feature number must equal d_model'",
        r"With d_model raised to the features, 64, 128, 256 run\. It is a shape error, not a lack of memory",
    ),
    "P3.baseline": (r"^ 5 epochs take 1\.68\d* ± \S+ s and a rank's peak is 3\.77 MB \(published: 2\.37 s",),
    "P4.ratio": (
        r"communication takes 5\.00 ± 0\.00 times as long as inside one \(published: 97 times\)",
        r"profiles hold 22 calls and 16, so 97x is 70x per call: 24x by the links, 2\.9x by waiting or another",
    ),
    "P4.inside": (
        r"^ Not negligible: 10 ± 0 % of the busy time",
        r"below 5 % we call it negligible, which the published share is not",
    ),
    "P4.between": (
        r"50 ± 0 % of the busy time over 100 Mbit/s between two emulated nodes",
        r"Of the 20\.0 ± 0\.0 ms that a step communicates, 5 ± 0 % is waiting",
    ),
    "P5.profiler": (
        r"^ Unresolved: the interval of their ratio includes 1",
        r"The whole run took 1\.8\d+ ± \S+ s with the profiler, 1\.8\d+ ± \S+ s without",
        r"published: 20\.68 s / 16\.38 s = 1\.26",
    ),
    "P6.storage": (
        r"^ Not here: 0 % for HDF5 \(22\.0 MB instead of 22\.0 MB\) and 0 % for \.npz",
        r"byte by byte, gzip finds repetition only in the sign and exponent bits",
    ),
    "P6.slow": (
        r"1\.00 ± 0\.0\d times memory's step \(published: 59\.90 / 3\.08 = 19\.4\)",
        r"each sample inflates 128 times its bytes",
    ),
    "P7.memory": (
        r"^ Not in every case\. Peak of torch's allocator against float32: bfloat16 cast 0, 0, 0 % less",
        r"Autocast keeps these in float32 and adds 16-bit copies of the weights",
    ),
    "P7.times": (
        r"float16 autocast 1\.0\d ± \S+, .*\(published 1\.21, 1\.15\): no difference",
        r"bfloat16 autocast 1\.0\d ± \S+, .*\(published 1\.16, 1\.14\)",
    ),
    "P8.throughput": (r"at d_model 128 in float32 \(published 200–384 at 1024\) and .* \(published 340–370 at 4096\)",),
    "P8.quadratic": (
        r"^ It does not follow\. From d_model 128 \(float32\) to 256 \(bfloat16\) the width grows 2×, its square 4×",
        r"the data type changed at the same time",
    ),
    "P8.crash": (r"^ No: by forecast, d_model 4096 in float32 peaks at 22\.6 GB", r"16 GB .* within the 40 GB"),
    "P9.rejected": (r"^ No job of 2 nodes was submitted: .* \(published: qsub was rejected by the queue\)",),
    "Q1.shape": (r"^ Centred: yes, all 2 layers \(mean within 0\.2 σ of zero", r"excess kurtosis within ± 0\.5"),
    "Q1.outliers": (r"^ Yes: all weights lie within ± 4\.00, and beyond 3σ lie 0 % in conv1", r"1\.3 × 3σ in conv1"),
    "Q1.symmetric": (r"^ Yes: the shorter side reaches 100 % of the longer one in conv1", r"fixed by its largest"),
    "Q2.range": (
        r"^ The total range, which clamps no weight: against float, the accuracy changes by −0\.50 points",
        r"by −2\.00 points \(.* over 8 seeds\) with 3σ",
    ),
    "Q2.tolerates": (
        r"^ Yes, it loses less than 1 point\.",
        r"Correct, of 200 images: 100 in float, 99 with int8 weights\. Rounding moves a weight by at most 1/254",
    ),
    "Q3.before": (r"^ Centred: yes, all 2 layers", r"conv1, conv2 have too few numbers to judge"),
    "Q3.after": (r"non-negative in conv1, conv2, as ReLU sets negative numbers to 0", r"few activations use the upper"),
    "Q4.drop": (
        r"^ A drop, not small \(limit: 2 points\): −14\.50 points .* \(K = 255 as in the published code",
        r"255 with a clamp at 127 cuts off the upper half of the range, 127 only rounds",
    ),
    "Q5.bias": (
        r"^ Yes\. Scaling the bias changes the accuracy by \+19\.50 points",
        r"The bias decides 312 of 1,600 images\. Correct, of 200 images: 100 in float, 60 with an unscaled bias",
        r"an unscaled bias vanishes beside them",
    ),
}
"""What played answers have: a link makes communication five times as long, data types and formats change nothing."""


@pytest.mark.parametrize("name", ["polaris", "quantization"])
def test_every_conclusion_is_judged_with_its_numbers_and_its_reason(documents: dict[str, Document], name: str) -> None:
    check_answers(documents[name], name, ANSWERS)
