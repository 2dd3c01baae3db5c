"""Inner steps that are private for each episode: sampled, clipped and noised gradients (DP-SGD).

In every step each episode of the node enters by a secret coin of rate ``sample_rate``.  An episode
that enters gives the gradient of the loss over ``batch`` of its own windows, clipped to
``clip_norm``; the sum of them gets noise of ``noise_multiplier * clip_norm`` per coordinate and is
divided by the number of episodes that is expected to enter.

The action head's gradient is in that vector too.  The head never leaves its node, but the shared
gradients of later steps depend on it, and one trained without noise would carry an episode past
the clipping.  For the same reason head and moments may be kept from round to round: they are made
of noised gradients only.  The guarantee is about the episodes of this node towards everyone who
sees what it releases.  It is not about the node as a whole, and not about what the node keeps
beside its state: its files, its log and its own view of the losses.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from lensemble_node.worker.training import protect
from lensemble_node.worker.training.inner_loop import Learner
from lensemble_node.worker.training.noise import SecretNoise


class EpisodeLearner(Learner):
    """A ``Learner`` whose steps are noised; give it fresh ``noise`` before each run."""

    noise: SecretNoise
    _last_loss = 0.0

    def gradient(self, sketch: torch.Tensor) -> float:
        terms, episodes = self.workload.privacy, self.windows.episodes
        total = np.zeros(sum(view.size for view in self.gradients), dtype=np.float64)
        losses = []
        for episode in np.flatnonzero(self.noise.coins(episodes, terms.sample_rate)):
            value, clipped = self._of_episode(int(episode), sketch)
            total += clipped
            losses.append(value)
        total += terms.noise_multiplier * terms.clip_norm * self.noise.gaussian(total.size)
        total /= terms.sample_rate * episodes
        cut = self.gradients[0].size
        self.follow(*(part.astype(np.float32) for part in (total[:cut], total[cut:])))
        finite = [value for value in losses if math.isfinite(value)]
        if finite:
            self._last_loss = float(np.mean(finite))
        return self._last_loss

    def _of_episode(self, episode: int, sketch: torch.Tensor) -> tuple[float, NDArray[np.float32]]:
        """Loss and clipped gradient; zero where there is no window, or nothing finite."""
        windows = self.windows.of_episode(episode)
        if not windows:
            return math.nan, np.zeros(1, dtype=np.float32)
        chosen = self.noise.numbers(len(windows), self.workload.inner.batch) + windows.start
        value = self.backward(chosen, sketch)
        whole = np.concatenate(self.gradients)
        if not np.isfinite(whole).all():
            # Ending here would tell that this episode was among them.
            return math.nan, np.zeros(1, dtype=np.float32)
        protect.clip(whole, self.workload.privacy.clip_norm)
        return value, whole
