"""A model of when an all-reduce takes as long as computing, from two numbers of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scalelab.analysis.estimate import Estimate
from scalelab.analysis.stats import estimate_ratio
from scalelab.studies.shared.arms import Arm


@dataclass(frozen=True, kw_only=True)
class BalanceModel:
    """What a step takes, in steps of one rank: F + c·b to compute b samples, a·(N − 1)/N for a ring all-reduce.

    The ring is of Patarasuk and Yuan (2009). F and c follow from one rank with the whole batch B and n ranks with B/n
    each, without the all-reduce; a from r on these n ranks.
    """

    batch: int
    num_ranks: int
    kept: float
    """Of one rank's step, what n ranks still compute."""
    balance: Estimate
    """r on n ranks."""

    @property
    def per_batch(self) -> float:
        """c·B: at most the whole step, as where ranks compute in less than 1/n of it."""
        return min(1.0, max(0.0, self.num_ranks * (1 - self.kept) / (self.num_ranks - 1)))

    @property
    def fixed(self) -> float:
        """F."""
        return 1 - self.per_batch

    def find_samples(self, balance: float) -> float:
        """The samples per rank below which the all-reduce among n ranks takes longer; 0: it never does."""
        spare = max(0.0, balance * self.kept - self.fixed)
        return 0.0 if not spare else self.batch * spare / self.per_batch if self.per_batch > 0 else math.inf

    def find_sending(self, balance: float) -> float:
        """a."""
        return balance * self.kept * self.num_ranks / (self.num_ranks - 1)

    def find_ranks(self, balance: float) -> float:
        """The ranks that share B at which both take as long; infinite where the all-reduce never does."""
        sending = self.find_sending(balance)
        return (self.per_batch + sending) / (sending - self.fixed) if sending > self.fixed else math.inf

    def predict(self, num_ranks: int) -> float:
        """r on so many ranks that share B."""
        computing = self.fixed + self.per_batch / num_ranks
        return self.find_sending(self.balance.value) * (num_ranks - 1) / num_ranks / computing


def make_model(one: Arm, arm: Arm, balance: Estimate) -> BalanceModel:
    kept = estimate_ratio(arm.comm_free, one.clean).value
    batch, ranks = arm.trial.batch_per_rank * arm.trial.num_ranks, arm.trial.num_ranks
    return BalanceModel(batch=batch, num_ranks=ranks, kept=kept, balance=balance)
