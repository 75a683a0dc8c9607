"""The conclusions of two reports and of a lab, each confirmed or not with the numbers of the run and a reason.

Those of the other assignments are in `test_recipes`, with the same check.
"""

from __future__ import annotations

import pytest

from scalelab.report.document import Document
from tests.recipes.conftest import check_answers

ANSWERS = {
    "P2.mapping": (r"every rank discovers its rank",),
    "P2.affinity": (
        r"Their CPU masks are 0x1, 0x2, 0x4, 0x8: no two ranks share a core, so contention for cores is prevented",
        r"4 ranks on 1 host",
    ),
    "P2.portable": (
        r"^ Yes, by what each needs: Get_rank and Split_type belong to MPI, so they exist under every MPI",
        r"The variables of PALS take two lines and no package, and exist on systems with PALS only",
    ),
    "P3.d_model": (
        r"^ Yes: nn\.Transformer has no layer that maps features to d_model",
        r"features = 128, features = 256: invalid .*published: 'feature number must equal d_model'",
        r"With d_model raised to the features, 64, 128, 256 run\. It is a shape error, not a lack of memory",
    ),
    "P4.inside": (r"^ Not negligible: 10 ± 0 % of what runs", r"The published 14\.40 % of the GPU's time is above"),
    "P4.between": (
        r"50 ± 0 % of what runs in a profiled step over 100 Mbit/s between two emulated nodes",
        r"19\.0 ± 0\.0 ms are transfer and 1\.00 ± 0\.00 ms waiting per step",
    ),
    "P5.profiler": (
        r"1 step of waiting and 3 under the profiler \(1 of warm-up, 2 recorded\)",
        r"1\.4\d+ ± \S+ s with the profiler and 1\.4\d+ ± \S+ s without, 1\.00 ± 0\.0\d times as long",
        r"from the published times: 1\.26",
    ),
    "P6.storage": (
        r"^ Not here: 0 % for HDF5 \(22\.0 MB instead of 22\.0 MB\) and 0 % for \.npz",
        r"random float32: their mantissas do not compress",
    ),
    "P6.slow": (
        r"1\.00 ± 0\.0\d times memory's step \(published: 20x; 59\.90 / 3\.08 = 19\.4\)",
        r"each read inflates 128 times the sample's bytes",
    ),
    "P7.memory": (
        r"^ Not in every case\. What torch's allocator holds at its peak, against float32: bfloat16 cast 0 % less at"
        r" length 20",
        r"autocast keeps parameters, gradients and moments in float32",
    ),
    "P8.quadratic": (
        r"^ It does not follow\. From d_model 128 \(float32\) to 256 \(bfloat16\) the width grows 2×, its square 4×",
        r"the data type changed at the same time",
    ),
    "P8.crash": (r"^ No: the forecast peak of d_model 4096 in float32 is 22\.6 GB", r"16 GB, and they have 40 GB"),
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
        r"Right of 200 images: 100 in float, 99 with int8 weights\. Rounding moves a weight by at most 1/254",
    ),
    "Q3.before": (r"^ Centred: yes, all 2 layers", r"Mean, kurtosis and distance by layer: conv1 mean 0\.00 σ"),
    "Q3.after": (r"non-negative in conv1, conv2, as ReLU sets negative numbers to 0", r"few activations use the upper"),
    "Q4.drop": (
        r"^ A drop, not small: −14\.50 points .* \(K = 255 as in the published code, which gave −0\.93",
        r"255 with a clamp at 127 cuts off the upper half of the range, 127 only rounds",
    ),
    "Q5.bias": (
        r"^ Yes\. Scaling the bias changes the accuracy by \+19\.50 points",
        r"The bias decides 312 of 1,600 images\. Right of 200 images: 100 in float, 60 bias unscaled, 99 scaled",
        r"an unscaled bias vanishes beside them",
    ),
}
"""What played answers have: a link makes communication five times as long, data types and formats change nothing."""


@pytest.mark.parametrize("name", ["polaris", "quantization"])
def test_every_conclusion_is_judged_with_its_numbers_and_its_reason(documents: dict[str, Document], name: str) -> None:
    check_answers(documents[name], name, ANSWERS)
